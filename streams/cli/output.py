"""The only printer of the command line: tables, JSON, lines, progress, questions, errors and exit codes.

Data goes to standard output, messages to standard error. On a terminal, data is a table. Elsewhere, and with
`--json`, it is one JSON value per line.
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

#: Error code -> next step for the user. A test checks that every code has one.
NEXT_STEPS: Final[dict[str, str]] = {
    "unreachable": (
        "start a server with `streams serve`, or choose another server with --url or `streams context use`"
    ),
    "answer_lost": (
        "check whether it happened (`streams tail BOX`), or repeat the append with the same --idempotency-key"
    ),
    "not_an_answer": "check the URL with `streams context show`; it must be the URL of a streams server",
    "closed": "run the command again",
    "moved": "run the command again; the placement of boxes on shards has changed",
    "invalid_request": "correct the field or option that the message names; see --help",
    "batch_too_large": "send fewer records per append (--batch-records)",
    "record_too_large": (
        "send a smaller record, or raise the cap of the box or STREAMS_MAX_RECORD_BYTES of the server"
    ),
    "unauthorized": "pass an API key with --key, STREAMS_KEY or `streams context add --key`",
    "forbidden": "use a key with the scope that the message names; `streams whoami` shows yours",
    "box_not_found": "list the boxes with `streams ls`, or create one with `streams box create NAME`",
    "router_not_found": "list the routers with `streams router ls`",
    "schedule_not_found": "list the schedules with `streams schedule ls`",
    "group_not_found": "list the groups with `streams group ls BOX`, or create one: `streams group commit`",
    "not_found": "check the name or the seq; the record may have been deleted",
    "method_not_allowed": "compare the versions of client and server with `streams doctor`",
    "not_acceptable": "compare the versions of client and server with `streams doctor`",
    "router_cycle": "delete one of the routers in the cycle, or add this one with --allow-cycle",
    "box_exists_incompatible": "this setting cannot change; create another box, or delete this one first",
    "box_not_empty": "leave out --if-empty, or trim the box first",
    "lease_lost": "claim the jobs again: another worker may have them, or they are done",
    "not_a_queue": "create a queue with `streams box create NAME --type queue`",
    "seq_mismatch": "another writer appended first; check with `streams box show BOX`, then retry",
    "fencing_token_mismatch": "another writer fenced the box; stop writing, or fence it with your own token",
    "payload_too_large": "send less data per request, or raise STREAMS_MAX_BODY_BYTES on the server",
    "unsupported_media_type": "compare the versions of client and server with `streams doctor`",
    "box_full": "trim the box, or change its cap or `discard` with `streams box edit`",
    "throttled": "retry later; `detail.limit`, if present, names the setting of the server to raise",
    "disk_full": "delete records or boxes, or free space on the server's disk; then appends work again",
    "internal": "find the request id in the server's log, and report the bug",
    "not_ready": "wait until the server has replayed its log; `streams status` shows its progress",
    "shutting_down": "wait until the server has restarted, then repeat the command",
    "shard_unavailable": "retry in a moment; `streams doctor` shows which shard is down",
    "cold_store_unavailable": "check the object store in STREAMS_COLD_DIR; no data is lost",
    "writer_conflict": "use another writer name, or take the name over (in Spark: txnReset=true)",
    "records_lost": "add --skip-gaps to continue without the records that the message names",
    "partial_commit": "run the command again; it adds only the missing rows",
    "job_refused": "correct the option that the message names; see --help",
    "java_not_found": "run pip install 'streams-server[spark]', which includes Java, or set JAVA_HOME",
    "spark_not_installed": "run pip install 'streams-server[spark]'",
    "basin_not_found": "create the basin with the S2 API; `streams ls` lists S2 streams as boxes",
    "stream_not_found": "create the stream with the S2 API; `streams ls` lists S2 streams as boxes",
    "basin_deletion_pending": "wait until the deletion has finished, or use another name",
    "stream_deletion_pending": "wait until the deletion has finished, or use another name",
    "access_token_not_found": "list the access tokens with the S2 API",
    "resource_already_exists": "use another name, or use the existing one",
    "cipher_mismatch": "read the stream with the S2 API and the key that encrypted its records",
    "position_unwritten": "wait until a record is written there, or start at an earlier position",
    "data_damaged": "find the damaged file in the server's log, then run `streams verify`",
}


class Refusal(click.ClickException):
    """The command cannot do this; the message says what to change."""

    exit_code = EXIT_REFUSED

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"streams: {line}", err=True, file=file)


class BusyRefusal(Refusal):
    """The command cannot do this now; the message says what to do before a retry."""

    exit_code = EXIT_BUSY


class Nothing(Refusal):
    """There is nothing to show."""

    exit_code = EXIT_NOTHING


# -- messages


def warn(message: str) -> None:
    click.echo(f"streams: warning: {message}", err=True)


def inform(message: str) -> None:
    click.echo(f"streams: {message}", err=True)


def note(message: str) -> None:
    """Print a hint for a person at a terminal. Scripts use the exit code and the data."""
    if sys.stderr.isatty():
        click.echo(message, err=True)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before an act that cannot be undone. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refusal(f"{question}\nthis cannot be undone; add --yes to confirm")
    try:
        if click.confirm(f"{question} This cannot be undone.", err=True):
            return
    except click.Abort:
        click.echo(err=True)  # Ctrl-C and Ctrl-D leave the cursor on the line of the question
        raise
    raise Refusal("cancelled; nothing was changed")


def report(error: Exception) -> int:
    """Show an unhandled error, and return the exit code of its family."""
    for family, code in ((Refused, EXIT_REFUSED), (Busy, EXIT_BUSY), (Uncertain, EXIT_UNCERTAIN)):
        if isinstance(error, family):
            _show_error(error)
            return code
    if isinstance(error, StreamsError) and error.code in ("not_an_answer", "closed"):
        _show_error(error)
        return EXIT_REFUSED
    if isinstance(error, OSError):  # of this machine: a missing folder, a full disk
        _discard_unwritten()
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"streams: {where}{error.strerror or error}", err=True)
        return EXIT_REFUSED
    import traceback

    traceback.print_exception(error)
    click.echo(f"streams: this is a bug in streams {__version__}; report it with the lines above", err=True)
    return EXIT_BUG


def _show_error(error: StreamsError) -> None:
    click.echo(f"streams: {error.message} ({error.code})", err=True)
    step = NEXT_STEPS.get(error.code)
    if step is not None:
        click.echo(f"streams: next: {step}", err=True)


def _discard_unwritten() -> None:
    """Discard buffered output that cannot be written, so that Python does not report it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def discard_output() -> int:
    """Discard the buffered output after its reader (for example `head`) has exited."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


# -- data


def is_for_people(as_json: bool) -> bool:
    return not as_json and sys.stdout.isatty()


def size(count: int) -> str:
    """Format a number of bytes for a person."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"


def moment(ms: int) -> str:
    """Format a time for a person, in the time zone of this machine."""
    from datetime import datetime

    return datetime.fromtimestamp(ms / 1000).astimezone().isoformat(sep=" ", timespec="seconds")


def print_line(value: object) -> None:
    """Print one value as one line of JSON."""
    import msgspec

    write_lines([msgspec.json.encode(value)])


def write_lines(lines: Iterable[bytes]) -> None:
    """Write lines unchanged and flush, so that a pipe gets them at once."""
    out = sys.stdout.buffer
    out.write(b"".join([line + b"\n" for line in lines]))
    out.flush()


def print_text(text: str) -> None:
    click.echo(text)


def show_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, as_json: bool) -> int:
    """Print rows as a table on a terminal, else as JSON lines with all fields. Return their count."""
    count = 0
    if not is_for_people(as_json):
        for row in rows:
            print_line(row)
            count += 1
        return count
    cells = [[_cell(column, row.get(column)) for column in columns] for row in rows]
    if cells:
        print_table(columns, cells)
    return len(cells)


def show_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the fields of one thing: one per line on a terminal, one line of JSON elsewhere."""
    if not is_for_people(as_json):
        print_line(facts)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for inner, inner_value in value.items():
                table.add_row(f"{name}.{inner}", _cell(inner, inner_value))
        else:
            table.add_row(name, _cell(name, value))
    Console(markup=False).print(table)


def show_result(text: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a result: a sentence on a terminal, its facts as one line of JSON elsewhere."""
    if is_for_people(as_json):
        click.echo(text)
    else:
        print_line(facts)


def _cell(name: str, value: object) -> str:
    """Format a value for a person: times, sizes and numbers by the name of their field."""
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


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, to_stderr: bool = False) -> None:
    """Print a table: fitted to a terminal by rich; elsewhere one padded line per row, for grep."""
    if (sys.stderr if to_stderr else sys.stdout).isatty():
        from rich.console import Console

        Console(markup=False, highlight=False, stderr=to_stderr).print(_table(headings, rows))
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip(), err=to_stderr)


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
    """Return JSON on one line. Raw line breaks in JSON are white space: inside strings they are escaped."""
    line = bytes(json)
    return line.replace(b"\n", b" ").replace(b"\r", b" ") if b"\n" in line or b"\r" in line else line


class RecordPrinter:
    """Prints records as they arrive: one line of JSON each; on a terminal, columns under a heading."""

    def __init__(self, *, as_json: bool, data_only: bool, with_box: bool = False) -> None:
        self._is_table = is_for_people(as_json) and not data_only
        self._data_only = data_only
        self._with_box = with_box
        self._widths = {"box": 3, "seq": 3, "tag": 3}
        self._has_heading = False

    def __call__(self, records: Sequence[bytes], box: str = "") -> None:
        """Print records, given as the JSON that the server sent."""
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

        rows = [decode(record, RawRecord) for record in records]
        texts = {"box": box, "seq": str(rows[-1].seq)}
        for name, text in (*texts.items(), *(("tag", record.tag or "") for record in rows)):
            self._widths[name] = min(max(self._widths[name], len(text)), 32)
        if not self._has_heading:
            self._has_heading = True
            click.echo(_paint(self._columns("box", "seq", "time", "tag") + "data", bold=True))
        for record in rows:
            front = self._columns(box, str(record.seq), moment(record.ts)[:19], record.tag or "")
            more = "".join(
                f"  {name} {value}"
                for name, value in (("node", record.node), ("meta", _json(record.meta)))
                if value
            )
            # The name of a stream of S2 has a slash. Its records are base64 here, and mostly text.
            data = _printable(
                _stream_text(bytes(record.data))
                if "/" in box
                else bytes(record.data).decode(errors="replace")
            )
            click.echo(_paint(_printable(front), dim=True) + data + _paint(_printable(more), dim=True))

    def _columns(self, box: str, seq: str, time: str, tag: str) -> str:
        name = f"{box:{self._widths['box']}}  " if self._with_box else ""
        return f"{name}{seq:>{self._widths['seq']}}  {time:19}  {tag:{self._widths['tag']}}  "


def _stream_text(data: bytes) -> str:
    """Return the text of a record of S2; one that is no text stays base64."""
    from base64 import b64decode

    import msgspec

    try:
        return b64decode(msgspec.json.decode(data, type=str), validate=True).decode()
    except (ValueError, msgspec.DecodeError):
        return data.decode(errors="replace")


def _json(value: Mapping[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(value).decode() if value else ""


def _printable(text: str) -> str:
    """Escape control characters, so that stored data cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)


def _paint(text: str, **style: bool) -> str:
    is_plain = not text or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, **style)


# -- live output


class AdvanceProgress(Protocol):
    def __call__(self, count: int) -> None: ...


@contextmanager
def progress(title: str, total: int | None, *, beside: IO[Any] | None = None) -> Iterator[AdvanceProgress]:
    """Show a progress bar on standard error if that is a terminal; `step(count)` advances it.

    Without a bar if `beside`, the file that is read or written meanwhile, is a terminal too: both would
    write over each other.
    """
    if not sys.stderr.isatty() or (beside is not None and beside.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, completed=count)


class Screen(Protocol):
    def __call__(self, headings: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None: ...


@contextmanager
def screen(*, as_json: bool) -> Iterator[Screen]:
    """Redraw a table in place on a terminal; elsewhere print one line of JSON per row of each drawing."""
    if not is_for_people(as_json):
        yield lambda headings, rows: write_lines(_encode_rows(rows))
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(markup=False), auto_refresh=False, screen=True) as live:

        def draw(headings: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
            cells = [[_cell(heading, row.get(heading)) for heading in headings] for row in rows]
            live.update(_table(headings, cells), refresh=True)

        yield draw


def _encode_rows(rows: Sequence[Mapping[str, Any]]) -> list[bytes]:
    import msgspec

    return [msgspec.json.encode(row) for row in rows]
