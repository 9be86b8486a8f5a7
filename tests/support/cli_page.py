"""Writes `docs/reference/cli.md` to standard output, from the commands themselves: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from streams.cli import cli
from streams.cli.verbs import examples_of

_HEAD = """# The command line

<!-- Written by `make docs` from the commands themselves. Do not edit. -->

Data goes to standard output, messages to standard error. On a terminal, data is a table; in a pipe, and with
`--json`, it is one JSON value per line. Destructive commands ask for confirmation, or take `--yes`.

| exit code | |
|---|---|
| 0 | success |
| 1 | a bug in streams, or `streams doctor` found a problem |
| 2 | refused: change the command; nothing happened |
| 3 | busy: retry later; nothing happened |
| 4 | uncertain: it may have happened |
| 5 | nothing to show |
| 6 | damaged data |
| 130 | interrupted with Ctrl-C |

The server is the first of these that is set: `--url`, `--context`, `STREAMS_URL`, `STREAMS_CONTEXT`, the
current context, `http://127.0.0.1:4000`. The API key comes from `--key`, `STREAMS_KEY` or the context.
"""


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its full name. Groups and hidden aliases are left out."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None, "every listed command exists"
            yield from commands(child, f"{name} {each}")
    elif not command.hidden:
        yield name, command


def page() -> str:
    parts = [_HEAD]
    for name, command in commands(cli, "streams"):
        parts.append(f"## {name}\n")
        parts.append(_text(command) + "\n")
        context = click.Context(command, info_name=name)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        parts.append(f"```\n{usage}\n```\n")
        rows = [param.get_help_record(context) for param in command.params]
        options = [row for row in rows if row is not None and "--help" not in row[0]]
        if options and name != "streams serve":
            parts.append("| option | |\n|---|---|")
            parts.extend(f"| `{_cell(option)}` | {_cell(text)} |" for option, text in options)
            parts.append("")
        elif options:
            parts.append("Options are the [settings](settings.md), and `--json`.\n")
        if examples_of(command):
            parts.append("```sh\n" + "\n".join(examples_of(command)) + "\n```\n")
    return "\n".join(parts)


def _text(command: click.Command) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
