"""The only printer of the command line: tables, JSON, lines, progress, questions, errors and exit codes.

Data goes to standard output, talk to standard error. On a terminal data is a table; anywhere else, and with
`--json`, it is one JSON value a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, Protocol

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

#: What to do about an error, by its code. Every code has one: a test sees to it.
NEXT_STEPS: Final[dict[str, str]] = {
    "unreachable": (
        "start a server with `streams serve`, or name another one with --url or `streams context use`"
    ),
    "answer_lost": (
        "look whether it happened (`streams tail BOX`), or repeat an append with the same --idempotency-key"
    ),
    "not_an_answer": "check the address with `streams context show`; it must be that of a streams server",
    "closed": "start the command again",
    "moved": "start the command again; the map of shards has changed",
    "invalid_request": "change what the message names; --help shows what is expected",
    "batch_too_large": "send fewer records at a time (--batch-records)",
    "record_too_large": (
        "make the record smaller, or raise the cap of the box or STREAMS_MAX_RECORD_BYTES of the server"
    ),
    "unauthorized": "give a key with --key, STREAMS_KEY or `streams context add --key`",
    "forbidden": "use a key with the scope that the message names",
    "box_not_found": "`streams ls` lists the boxes; `streams box create NAME` makes one",
    "router_not_found": "`streams router ls` lists the routers",
    "group_not_found": "`streams group ls BOX` lists the groups; `streams group commit` makes one",
    "not_found": "check the name or the seq; a record may have been deleted",
    "method_not_allowed": "client and server may be of different versions; compare with `streams status`",
    "not_acceptable": "client and server may be of different versions; compare with `streams status`",
    "router_cycle": "drop one of the routers in the cycle, or add the router with --allow-cycle",
    "box_exists_incompatible": "that setting cannot change; make another box, or drop this one first",
    "box_not_empty": "leave out --if-empty, or trim the box first",
    "not_a_queue": "queues are made with `streams box create NAME --type queue`",
    "seq_mismatch": "somebody else was faster; read again (`streams box show BOX`) and decide anew",
    "fencing_token_mismatch": "another writer has taken over; stop, or take the fence back",
    "payload_too_large": "send less at a time, or raise STREAMS_MAX_BODY_BYTES on the server",
    "unsupported_media_type": "client and server may be of different versions; compare with `streams status`",
    "box_full": "trim the box, raise its cap (`streams box edit`), or let it discard old records",
    "throttled": "wait and repeat; `detail.limit`, if there is one, names a setting of the server",
    "disk_full": "delete records or boxes, or free space on the server's disk; writes go on by themselves",
    "internal": "look for the request in the server's log, and report it",
    "not_ready": "wait until the server has replayed its log; `streams status` shows how far it is",
    "shutting_down": "wait until the server is started again",
    "shard_unavailable": "wait a moment and repeat; `streams doctor` shows which shard is away",
    "cold_store_unavailable": "check the object store that STREAMS_COLD_DIR names; nothing is lost",
    "writer_conflict": "use another writer, or take it over: txnReset=true in Spark",
    "records_lost": "add --skip-gaps to go on without them; the message says which they are",
    "partial_commit": "run the same again; what is missing is added and nothing is doubled",
    "job_refused": "change what the message names; --help shows what is expected",
    "java_not_found": "pip install 'streams-server[spark]' brings a Java, or set JAVA_HOME",
    "spark_not_installed": "pip install 'streams-server[spark]'",
    "basin_not_found": "make it with the S2 API; `streams ls` lists streams as boxes",
    "stream_not_found": "make it with the S2 API; `streams ls` lists streams as boxes",
    "basin_deletion_pending": "wait until it is gone, or use another name",
    "stream_deletion_pending": "wait until it is gone, or use another name",
    "access_token_not_found": "list the tokens with the S2 API",
    "resource_already_exists": "use another name, or what is there",
    "cipher_mismatch": "read it with the S2 API and the key that its records were closed with",
    "position_unwritten": "wait until something is written there, or begin earlier",
    "data_damaged": "see the server's log for the file, then `streams verify`",
}


class Refusal(click.ClickException):
    """What was asked cannot be done as asked; the message says what to change."""

    exit_code = EXIT_REFUSED

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"streams: {line}", err=True, file=file)


class Occupied(Refusal):
    """Somebody or something is in the way for now; the message says what to do, or to repeat it."""

    exit_code = EXIT_BUSY


class Nothing(Refusal):
    """There is nothing to show."""

    exit_code = EXIT_NOTHING


# -- talk


def warn(message: str) -> None:
    click.echo(f"streams: warning: {message}", err=True)


def tell(message: str) -> None:
    click.echo(f"streams: {message}", err=True)


def note(message: str) -> None:
    """For the person at the terminal; a script is told by the exit code and the data."""
    if sys.stderr.isatty():
        click.echo(message, err=True)


def confirm(question: str, *, yes: bool) -> None:
    """Asks before something is gone for ever. Where nobody can answer, `--yes` must have been given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refusal(f"{question}\nthis cannot be undone; add --yes to do it without being asked")
    try:
        if click.confirm(f"{question} This cannot be undone.", err=True):
            return
    except click.Abort:
        click.echo(err=True)  # Ctrl-C and Ctrl-D leave the question standing
        raise
    raise Refusal("nothing was done")


def report(error: Exception) -> int:
    """Show an error nobody handled, and return the exit code of its family."""
    for family, code in ((Refused, EXIT_REFUSED), (Busy, EXIT_BUSY), (Uncertain, EXIT_UNCERTAIN)):
        if isinstance(error, family):
            _show_error(error)
            return code
    if isinstance(error, StreamsError) and error.code in ("not_an_answer", "closed"):
        _show_error(error)
        return EXIT_REFUSED
    if isinstance(error, OSError):  # of this machine: a folder that is not there, a disk that is full
        _forget_unwritten()
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"streams: {where}{error.strerror or error}", err=True)
        return EXIT_REFUSED
    import traceback

    traceback.print_exception(error)
    click.echo(
        f"streams: this is a bug in streams {__version__}; please report it with the lines above", err=True
    )
    return EXIT_BUG


def _show_error(error: StreamsError) -> None:
    click.echo(f"streams: {error.message} ({error.code})", err=True)
    step = NEXT_STEPS.get(error.code)
    if step is not None:
        click.echo(f"streams: next: {step}", err=True)


def _forget_unwritten() -> None:
    """What standard output does not take now it will not take at the exit either, where Python would say so
    in its own words."""
    try:
        sys.stdout.flush()
    except OSError:
        give_up_quietly()


def give_up_quietly() -> int:
    """Whoever read our output is gone, as `head` is when it has enough. What is still buffered goes
    nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


# -- data


def is_for_people(as_json: bool) -> bool:
    return not as_json and sys.stdout.isatty()


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


def print_line(value: object) -> None:
    """One value as one line of JSON."""
    import msgspec

    write_lines([msgspec.json.encode(value)])


def write_lines(lines: Iterable[bytes]) -> None:
    """Lines as they are, flushed: a pipe sees them at once."""
    out = sys.stdout.buffer
    out.write(b"".join([line + b"\n" for line in lines]))
    out.flush()


def print_text(text: str) -> None:
    click.echo(text)


def show_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, as_json: bool) -> int:
    """A table of these columns on a terminal; elsewhere each row whole, one a line. How many there were."""
    count = 0
    if not is_for_people(as_json):
        for row in rows:
            print_line(row)
            count += 1
        return count
    shown = [[_cell(column, row.get(column)) for column in columns] for row in rows]
    if shown:
        print_table(columns, shown)
    return len(shown)


def show_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """One thing: its facts below each other on a terminal, one line of JSON elsewhere."""
    if not is_for_people(as_json):
        print_line(facts)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for inner, of_it in value.items():
                table.add_row(f"{name}.{inner}", _cell(inner, of_it))
        else:
            table.add_row(name, _cell(name, value))
    Console(markup=False).print(table)


def show_result(text: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """What was done: a sentence on a terminal, its facts as one line of JSON elsewhere."""
    if is_for_people(as_json):
        click.echo(text)
    else:
        print_line(facts)


def _cell(name: str, value: object) -> str:
    """A value for a person, who can read a time and a size."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if name == "ts" or name.endswith(("_ts", "$ts", "deadline", "taken_ms")):
            return moment(value)
        if name.endswith("bytes"):
            return size(value)
        return str(value) if name == "generation" else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, str):
        return value
    import msgspec

    return msgspec.json.encode(value).decode()


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, is_talk: bool = False) -> None:
    """Fitted to a terminal by rich; elsewhere one line a row, columns padded, good for grep."""
    if (sys.stderr if is_talk else sys.stdout).isatty():
        from rich.console import Console

        Console(markup=False, highlight=False, stderr=is_talk).print(_table(headings, rows))
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip(), err=is_talk)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading, cells in zip(headings, zip(*rows, strict=True), strict=True):
        are_numbers = all(cell == "-" or (cell[:1].isdigit() and ":" not in cell) for cell in cells)
        table.add_column(heading, justify="right" if are_numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


# -- records


def as_line(json: Any) -> bytes:
    """JSON on one line. A line break in it is white space: inside a string it is escaped."""
    line = bytes(json)
    return line.replace(b"\n", b" ").replace(b"\r", b" ") if b"\n" in line or b"\r" in line else line


class RecordPrinter:
    """Records as they come: the JSON of each on a line of its own; for people, lines under a heading."""

    def __init__(self, *, as_json: bool, data_only: bool, with_box: bool = False) -> None:
        self._is_table = is_for_people(as_json) and not data_only
        self._data_only = data_only
        self._with_box = with_box
        self._widths = {"box": 3, "seq": 3, "tag": 3}
        self._has_heading = False

    def __call__(self, records: Sequence[bytes], box: str = "") -> None:
        """Prints records as the server wrote them."""
        if not self._is_table:
            write_lines([self._line(record, box) for record in records])
        elif records:
            self._print_rows(records, box)

    def _line(self, record: bytes, box: str) -> bytes:
        from streams.client.answers import DataOf, decode

        if self._data_only:
            return as_line(decode(record, DataOf).data)
        line = as_line(record)
        return b'{"box":"%b",%b' % (box.encode(), line[1:]) if self._with_box else line

    def _print_rows(self, records: Sequence[bytes], box: str) -> None:
        from streams.client.answers import RawRecord, decode

        found = [decode(record, RawRecord) for record in records]
        wanted = {"box": box, "seq": str(found[-1].seq)}
        for name, text in (*wanted.items(), *(("tag", record.tag or "") for record in found)):
            self._widths[name] = min(max(self._widths[name], len(text)), 32)
        if not self._has_heading:
            self._has_heading = True
            click.echo(_paint(self._columns("box", "seq", "time", "tag") + "data", bold=True))
        for record in found:
            front = self._columns(box, str(record.seq), moment(record.ts)[:19], record.tag or "")
            more = "".join(
                f"  {name} {value}"
                for name, value in (("node", record.node), ("meta", _json(record.meta)))
                if value
            )
            data = _printable(bytes(record.data).decode(errors="replace"))
            click.echo(_paint(_printable(front), dim=True) + data + _paint(_printable(more), dim=True))

    def _columns(self, box: str, seq: str, time: str, tag: str) -> str:
        name = f"{box:{self._widths['box']}}  " if self._with_box else ""
        return f"{name}{seq:>{self._widths['seq']}}  {time:19}  {tag:{self._widths['tag']}}  "


def _json(value: Mapping[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(value).decode() if value else ""


def _printable(text: str) -> str:
    """What others wrote must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)


def _paint(text: str, **style: bool) -> str:
    is_plain = not text or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, **style)


# -- what moves


class Progress(Protocol):
    def __call__(self, done: int) -> None: ...


@contextmanager
def progress(title: str, total: int | None, *, beside: IO[Any] | None = None) -> Iterator[Progress]:
    """A bar on standard error, if that is a terminal: `step(done)` says how far it is. There is none when
    `beside`, what is read or written meanwhile, is a terminal too: they would write over each other."""
    if not sys.stderr.isatty() or (beside is not None and beside.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


class Screen(Protocol):
    def __call__(self, headings: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None: ...


@contextmanager
def screen(*, as_json: bool) -> Iterator[Screen]:
    """A table that is drawn again in place on a terminal; elsewhere a line of JSON for each row of each
    drawing."""
    if not is_for_people(as_json):
        yield lambda headings, rows: write_lines(_encoded(rows))
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(markup=False), auto_refresh=False, screen=True) as live:

        def draw(headings: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
            cells = [[_cell(heading, row.get(heading)) for heading in headings] for row in rows]
            live.update(_table(headings, cells), refresh=True)

        yield draw


def _encoded(rows: Sequence[Mapping[str, Any]]) -> list[bytes]:
    import msgspec

    return [msgspec.json.encode(row) for row in rows]
