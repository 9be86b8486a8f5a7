"""`streams config`: every setting with its value and the origin of that value; also the reference page."""

from __future__ import annotations

import os

import click

from streams.cli import output
from streams.cli.suggestions import VerbGroup
from streams.cli.verbs import example
from streams.config import SETTINGS, ConfigError, check_may_serve, describe, load, origins, unknown_variables


def settings_page() -> str:
    """Return the text of `docs/reference/settings.md`."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `make docs` from streams/config/table.py. Do not edit. -->",
        "",
        "Each setting is an environment variable and a flag of `streams serve`; the flag wins.",
        "`streams config` shows the current values. With a bad value the server does not start, and names "
        "the",
        "setting. The server warns about variables that start with `STREAMS_` and are not listed here. An",
        "empty value counts as not set.",
        "",
        "Sizes are in bytes, or have a unit: `64KiB`, `1.5MiB`, `1GB`. Times are in milliseconds, or have a",
        "unit: `250ms`, `5s`.",
        "",
        "| variable | flag | default | legal values | meaning |",
        "|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        cells = (
            f"`{setting.variable}`",
            f"`{setting.flag}`",
            f"`{setting.shown_default()}`",
            setting.legal(),
            setting.help,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


@click.group("config", cls=VerbGroup, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the reference page of all settings instead.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, markdown: bool) -> None:
    """Show the settings that a server started here would have."""
    if ctx.invoked_subcommand is not None:
        return
    if markdown:
        output.print_text(settings_page().removesuffix("\n"))
        return
    _show(as_json)


@example("streams config show", "STREAMS_PORT=5000 streams config show --json")
@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(as_json: bool) -> None:
    """List every setting with its value and the origin of that value."""
    _show(as_json)


@example("STREAMS_SHARDS=2 streams config check")
@command.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(as_json: bool) -> None:
    """Check whether a server would start with the current settings. Exit code 2 if not."""
    try:
        check_may_serve(load(os.environ))
    except ConfigError as error:
        raise output.Refusal(str(error)) from error
    warnings = list(unknown_variables(os.environ))
    for warning in warnings:
        output.warn(warning)
    output.show_facts({"settings": "good", "warnings": len(warnings)}, as_json=as_json)


def _show(as_json: bool) -> None:
    try:
        config, where = load(os.environ), origins(os.environ)
    except ConfigError as error:
        raise output.Refusal(str(error)) from error
    for warning in unknown_variables(os.environ):
        output.warn(warning)
    rows = describe(config, where)
    output.show_rows(("variable", "value", "default", "from", "help"), rows, as_json=as_json)
