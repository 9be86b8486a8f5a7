"""`streams context`: names for servers, so that commands need no `--url`."""

from __future__ import annotations

from typing import Any

import click

from streams.cli import output
from streams.cli.contexts_file import LOCAL, Contexts, ServerContext, load, save
from streams.cli.suggestions import VerbGroup
from streams.cli.verbs import example, yes_option


@click.group("context", cls=VerbGroup)
def command() -> None:
    """Give servers names, and choose the one that commands talk to."""


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON lines, also on a terminal.")


@example("streams context ls")
@command.command("ls")
@_json
def ls(as_json: bool) -> None:
    """List all contexts."""
    contexts = load()
    rows = [_row(contexts, name) for name in contexts.by_name]
    output.show_rows(("name", "url", "key", "in_use"), rows, as_json=as_json)


def _row(contexts: Contexts, name: str) -> dict[str, Any]:
    """Return the fields to show. The key itself is never shown."""
    context = contexts.by_name[name]
    key = "(set)" if context.key else ""
    return {"name": name, "url": context.url, "key": key, "in_use": name == contexts.current}


@example(
    "streams context add staging http://127.0.0.1:4000",
    "streams context add prod https://streams.example --key s3cret",
)
@command.command("add")
@click.argument("name")
@click.argument("url")
@click.option("--key", default="", help="API key; stored in a file that only you can read.")
@click.option("--use", is_flag=True, help="Make it the current context.")
@_json
def add(name: str, url: str, key: str, use: bool, as_json: bool) -> None:
    """Add a context for the server at URL, or replace the context of this name."""
    if not url.startswith(("http://", "https://")):
        raise output.Refusal(f"the URL {url!r} must start with http:// or https://")
    contexts = load()
    contexts.by_name[name] = ServerContext(url.rstrip("/"), key)
    if use:
        contexts.current = name
    save(contexts)
    if contexts.current != name:
        output.note(f"make it the current context with `streams context use {name}`")
    output.show_facts(_row(contexts, name), as_json=as_json)


@example("streams context use local")
@command.command("use")
@click.argument("name")
@_json
def use(name: str, as_json: bool) -> None:
    """Make this server the current context."""
    contexts = load()
    if name not in contexts.by_name:
        raise output.Refusal(
            f"there is no context {name!r}; the existing ones are {', '.join(contexts.by_name)}"
        )
    contexts.current = name
    save(contexts)
    output.show_facts(_row(contexts, name), as_json=as_json)


@example("streams context show")
@command.command("show")
@_json
def show(as_json: bool) -> None:
    """Show the current context: the server that commands talk to."""
    contexts = load()
    output.show_facts(_row(contexts, contexts.current), as_json=as_json)


@example("streams context rm staging --yes")
@command.command("rm")
@click.argument("name")
@yes_option
@_json
def rm(name: str, yes: bool, as_json: bool) -> None:
    """Delete a context. The server itself is not changed."""
    contexts = load()
    if name == LOCAL:
        raise output.Refusal(f"the context {LOCAL!r} is built in and cannot be deleted")
    if name not in contexts.by_name:
        raise output.Refusal(f"there is no context {name!r}; `streams context ls` lists them")
    output.confirm(f"Delete the context {name} ({contexts.by_name[name].url}) and its key?", yes=yes)
    del contexts.by_name[name]
    if contexts.current == name:
        contexts.current = LOCAL
    save(contexts)
    output.show_facts({"name": name, "deleted": True}, as_json=as_json)
