"""Writes `docs/reference/cli.md` to standard output, from the commands themselves: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from streams.cli import cli
from streams.cli.verbs import examples_of

_HEAD = """# The command line

<!-- Written by `make docs` from the commands themselves. Do not edit. -->

Data goes to standard output, talk to standard error. On a terminal data is a table; in a pipe, and with
`--json`, it is one JSON value a line. Destructive verbs ask, or take `--yes`.

| exit code | |
|---|---|
| 0 | done |
| 1 | a bug in streams |
| 2 | refused: change the request; nothing happened |
| 3 | busy: try again later; nothing happened |
| 4 | uncertain: it may have happened |
| 5 | nothing to show |
| 6 | data is damaged |
| 130 | interrupted with Ctrl-C |

Which server: `--url`, else `--context`, else `STREAMS_URL`, else `STREAMS_CONTEXT`, else the context in use,
else `http://127.0.0.1:4000`. A key comes from `--key`, `STREAMS_KEY` or the context.
"""


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by the words it is called with."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None, "what is listed is there"
            yield from commands(found, f"{name} {each}")
    else:
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
