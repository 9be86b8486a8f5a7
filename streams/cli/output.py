"""The only printer of the command line: tables, JSON, errors and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any, Final

import click

from streams import __version__
from streams.protocol.errors import Busy, Refused, StreamsError, Uncertain

EXIT_DONE: Final = 0
EXIT_BUG: Final = 1
EXIT_REFUSED: Final = 2
EXIT_BUSY: Final = 3
EXIT_UNCERTAIN: Final = 4
EXIT_NOTHING: Final = 5
EXIT_DAMAGED: Final = 6
EXIT_INTERRUPTED: Final = 130


class Refusal(click.ClickException):
    """What was asked cannot be done as asked; the message says what to change."""

    exit_code = EXIT_REFUSED

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"streams: {line}", err=True, file=file)


def warn(message: str) -> None:
    click.echo(f"streams: warning: {message}", err=True)


def report(error: Exception) -> int:
    """Show an error nobody handled, and return the exit code of its family."""
    for family, code in ((Refused, EXIT_REFUSED), (Busy, EXIT_BUSY), (Uncertain, EXIT_UNCERTAIN)):
        if isinstance(error, family):
            click.echo(f"streams: {_message(error)}", err=True)
            return code
    import traceback

    traceback.print_exception(error)
    click.echo(
        f"streams: this is a bug in streams {__version__}; please report it with the lines above", err=True
    )
    return EXIT_BUG


def _message(error: StreamsError) -> str:
    return f"{error.message} ({error.code})"


def size(count: int) -> str:
    """A number of bytes for a person."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"


def moment(ms: int) -> str:
    """A time for a person, in the zone of this machine."""
    from datetime import datetime

    return datetime.fromtimestamp(ms / 1000).astimezone().isoformat(sep=" ", timespec="seconds")


def print_json(value: object) -> None:
    import orjson

    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Fitted to a terminal by rich; elsewhere one line a row, columns padded, good for grep."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(*headings, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console(markup=False).print(table)
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())
