"""`streams export` and `streams import`: a box as a file of lines, and back; both go on where they were
stopped.

An export's place is in its own last line: the seq. An import writes its place into a small file beside its
input, before and after each write, with the key of that write. A write whose outcome was never learnt is
repeated with its key while the box still remembers keys; after that, only a person can know, and is asked.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import click

from streams.cli import output
from streams.cli.records import LINE_BYTES_MAX, checked_text, match_of, tell_loss
from streams.cli.verbs import Target, connected, example

_PAGE_BYTES: Final = 8 << 20
_WRITE_BYTES: Final = 4 << 20
_WRITE_RECORDS: Final = 5000
#: A write is repeated for this share of the time that its box remembers keys.
_WINDOW_SHARE: Final = 0.8
_TAIL_BYTES: Final = 4 << 20


@example(
    "streams export orders -o orders.ndjson",
    "streams export orders -o orders.ndjson --resume",
    "streams export orders | wc -l",
)
@click.command("export")
@click.argument("box")
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), help="To this file.")
@click.option("--resume", is_flag=True, help="Go on after the last whole line of the file.")
@click.option("--from", "from_seq", type=int, default=0, help="After this seq.")
@click.option("--match", metavar="TAG", help="Only records with this tag; `user-*` for all that begin so.")
@connected
def export(
    target: Target, box: str, path: Path | None, resume: bool, from_seq: int, match: str | None
) -> None:
    """Write the records of BOX, one JSON object a line, up to what is its end now."""
    if resume and path is None:
        raise output.Refusal("--resume needs a file: -o FILE")
    if path is not None and path.exists() and not resume:
        raise output.Refusal(f"{path} is there already; --resume goes on with it")
    with target.client(is_patient=True) as client:
        found = client.box(box)
        state = found.state()
        if path is None:
            _export(found, sys.stdout.buffer, from_seq, state.head_seq, match)
            return
        with open(path, "ab+") as file:
            if resume and (last_seq := _last_seq(file)) > state.head_seq:
                raise output.Refusal(
                    f"{path} ends with record {last_seq}, and {box} with {state.head_seq}: it is another box"
                )
            from_seq = max(from_seq, last_seq) if resume else from_seq
            count = _export(found, file, from_seq, state.head_seq, match)
            file.flush()
            os.fsync(file.fileno())
    output.show_facts({"box": box, "file": str(path), "records": count}, as_json=target.as_json)


def _export(box: Any, file: IO[bytes], from_seq: int, until: int, match: str | None) -> int:
    asked: dict[str, Any] = {
        "from_seq": from_seq,
        "include_tags": True,
        "limit": 1000,
        "max_bytes": _PAGE_BYTES,
    }
    if match is not None:
        asked["match"] = match_of(match)
    count = 0
    with output.progress(f"exporting {box.name}", until - from_seq, beside=file) as step:
        while asked["from_seq"] < until:
            page = box.raw_page(**asked)
            tell_loss(box.name, page.tombstone)
            file.write(b"".join([output.as_line(record) + b"\n" for record in page.records]))
            count += len(page.records)
            asked |= {"from_seq": page.next_from_seq, "generation": page.generation}
            step(page.next_from_seq - from_seq)
            if page.caught_up:
                break
    file.flush()
    return count


def _last_seq(file: IO[bytes]) -> int:
    """The seq of the last whole line; half a line after it is cut off."""
    import msgspec

    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _TAIL_BYTES)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(b"\n") + 1
    if end == 0:
        if start:
            raise output.Refusal(f"its last line is over {_TAIL_BYTES} bytes; this is not an export")
        file.truncate(0)
        return 0
    line = tail[tail.rfind(b"\n", 0, end - 1) + 1 : end]
    try:
        seq = msgspec.json.decode(line)["$seq"]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise output.Refusal(f"its last line is not a record of an export: {line[:60]!r}") from None
    file.truncate(start + end)
    file.seek(0, os.SEEK_END)
    return int(seq)


# -- import


@example("streams import copy orders.ndjson", "streams export orders | streams import copy2 -")
@click.command("import")
@click.argument("box")
@click.argument("source", type=click.Path(allow_dash=True, dir_okay=False))
@click.option(
    "--data", "data_only", is_flag=True, help="Lines are data, not records as `streams export` writes them."
)
@click.option("--keep-ts", is_flag=True, help="Records keep their times; the box must take client times.")
@click.option("--resume", is_flag=True, help="Go on where an import of this file into this box was stopped.")
@connected
def import_(target: Target, box: str, source: str, data_only: bool, keep_ts: bool, resume: bool) -> None:
    """Append the lines of SOURCE (`-`: standard input) to BOX, in order, each once."""
    if source == "-":
        if resume:
            raise output.Refusal("--resume needs a file; standard input cannot be gone back in")
        with target.client(is_patient=True) as client:
            count = _import(client.box(box), sys.stdin.buffer, None, data_only, keep_ts)
    else:
        path = Path(source)
        if not path.is_file():
            raise output.Refusal(f"there is no file {path}; what comes out of a pipe is imported with -")
        place = _Place(path, box)
        if place.exists() and not resume:
            raise output.Refusal(
                f"an import of {path} into {box} was stopped; --resume goes on, "
                f"deleting {place.path} forgets it"
            )
        if resume and not place.exists():
            raise output.Refusal(
                f"no import of {path} into {box} was stopped; without --resume all of it is imported"
            )
        with target.client(is_patient=True) as client, open(path, "rb") as file:
            count = _import(client.box(box), file, place, data_only, keep_ts)
        place.forget()
    output.show_facts({"box": box, "records": count}, as_json=target.as_json)


def _start() -> dict[str, Any]:
    return {"offset": 0, "lines": 0, "count": 0, "key": uuid.uuid4().hex, "pending_since_ms": None}


def _check_place(place: dict[str, Any]) -> None:
    """Raises `ValueError` for anything that an import does not write: the file lies beside its input, and may
    come from wherever that came from."""
    if place.keys() != _start().keys():
        raise ValueError("it has other fields")
    numbers = [place["offset"], place["lines"], place["count"], place["pending_since_ms"] or 0]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a number in it is none")
    if not isinstance(place["key"], str) or not place["key"].isalnum() or len(place["key"]) > 64:
        raise ValueError("its key is none")


class _Place:
    """How far an import is: a line of JSON beside its input, replaced in one step."""

    def __init__(self, source: Path, box: str) -> None:
        digest = hashlib.sha256(box.encode()).hexdigest()[:8]
        self.path = source.with_name(f"{source.name}.import-{digest}")

    def exists(self) -> bool:
        return self.path.exists()

    def load(self) -> dict[str, Any]:
        import msgspec

        try:
            found = {"lines": 0, **msgspec.json.decode(self.path.read_bytes(), type=dict[str, Any])}
            _check_place(found)
        except FileNotFoundError:
            return _start()
        except ValueError as error:
            raise output.Refusal(
                f"{self.path} is not what an import writes ({error}); look with `streams tail` how far it "
                "came, delete that file, and import the rest of the lines"
            ) from None
        return found

    def save(self, place: dict[str, Any]) -> None:
        import msgspec

        temporary = self.path.with_name(self.path.name + ".new")
        # The input may lie in a folder that others can write to: a link there is not followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(msgspec.json.encode(place))
            file.flush()
            os.fsync(file.fileno())  # a note of nothing, after a power cut, would be worse than none
        os.replace(temporary, self.path)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _import(box: Any, file: IO[bytes], place: _Place | None, data_only: bool, keep_ts: bool) -> int:
    from streams.client.retry import Retry
    from streams.protocol.errors import StreamsError

    at = place.load() if place is not None else _start()
    if place is not None:
        _check_pending(box, at, place)
        file.seek(at["offset"])
    window_ms = box.idempotency_window_ms()
    retry = Retry(total_s=60.0 if window_ms is None else min(60.0, window_ms / 1000 * _WINDOW_SHARE))
    with output.progress(f"importing into {box.name}", None, beside=file) as step:
        try:
            for write in _writes(file, at.get("lines", 0), data_only, keep_ts):
                _write(box, write, at, place, retry)
                step(at["count"])
        except output.Refusal as refusal:
            raise output.Refusal(f"{refusal.message}\n{_so_far(at, place)}") from None
        except StreamsError as error:
            raise type(error)(f"{error.message}; {_so_far(at, place)}", **error.detail) from error
    return int(at["count"])


def _so_far(at: dict[str, Any], place: _Place | None) -> str:
    resume = "; when that is mended, the same with --resume goes on" if place and place.exists() else ""
    return f"{at['count']} records were imported, up to line {at.get('lines', 0)}{resume}"


def _write(box: Any, write: _Write, at: dict[str, Any], place: _Place | None, retry: Any) -> None:
    """Appends, and notes before that it may have and after that it has."""
    from streams.protocol.errors import Busy, Refused

    since_ms = at.get("pending_since_ms")
    if place is not None:
        place.save({**at, "pending_since_ms": since_ms or int(time.time() * 1000)})
    try:
        box.append_encoded(write.records, key=f"{at['key']}-{at['offset']}", retry=retry)
    except (Refused, Busy) as error:
        # Nothing was written now. A refusal says so of an earlier run, too, whose write would have been found
        # by its key.
        at["pending_since_ms"] = None if isinstance(error, Refused) else since_ms
        if place is not None:
            place.save(at)
        raise
    at |= {
        "offset": at["offset"] + write.bytes,
        "lines": at.get("lines", 0) + write.lines,
        "count": at["count"] + len(write.records),
        "pending_since_ms": None,
    }
    if place is not None:
        place.save(at)


def _check_pending(box: Any, at: dict[str, Any], place: _Place) -> None:
    since_ms = at.get("pending_since_ms")
    if since_ms is None:
        return
    window_ms = box.idempotency_window_ms()
    if window_ms is None or time.time() * 1000 - since_ms < window_ms * _WINDOW_SHARE:
        return
    from streams.protocol.errors import Uncertain

    raise Uncertain(
        f"the write after {at['count']} records was never answered, and {box.name} has forgotten its key: "
        f"look with `streams tail {box.name}` whether it happened. If not, set pending_since_ms in "
        f"{place.path} to null"
    )


class _Write(NamedTuple):
    records: list[bytes]
    #: Of the file, that they stood in.
    bytes: int
    lines: int


def _writes(file: IO[bytes], lines_before: int, data_only: bool, keep_ts: bool) -> Iterator[_Write]:
    """Cut by what is read, so a repeat cuts the same."""
    records: list[bytes] = []
    length = size = lines = 0
    while line := file.readline(LINE_BYTES_MAX):
        lines += 1
        length += len(line)
        if line.strip():
            record = _record(line.strip(), lines_before + lines, data_only, keep_ts)
            records.append(record)
            size += len(record)
        if size >= _WRITE_BYTES or len(records) >= _WRITE_RECORDS:
            yield _Write(records, length, lines)
            lines_before += lines
            records, length, size, lines = [], 0, 0, 0
    if records:
        yield _Write(records, length, lines)


def _record(line: bytes, number: int, data_only: bool, keep_ts: bool) -> bytes:
    """A line of an export as a record of a write; digits stay as they are."""
    import msgspec

    shown = checked_text(line, f"line {number}")[:60]
    try:
        if data_only:
            return b'{"data":%b}' % bytes(msgspec.json.decode(line, type=msgspec.Raw))
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        what = "JSON" if data_only else "what export writes"
        raise output.Refusal(f"line {number}: {shown!r} is not {what} ({error})") from None
    if "data" not in fields:
        raise output.Refusal(f"line {number}: has no data; --data takes each line as data")
    names = {"data": "data", "meta": "meta", "$tag": "tag", "$node": "node", "tag": "tag", "node": "node"}
    if keep_ts:
        names["$ts"] = "ts"
    return msgspec.json.encode({names[name]: value for name, value in fields.items() if name in names})
