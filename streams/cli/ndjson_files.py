"""`streams export` and `streams import`: write a box to an NDJSON file and back. Both can be resumed.

An export resumes after the seq in the last line of its file. An import keeps a checkpoint file beside its
input and writes it before and after each append, with the idempotency key of that append. An append without
an answer is repeated with its key while the box remembers keys. After that the command cannot know whether
the append happened, and asks the user to check.
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
from streams.cli.records import LINE_BYTES_MAX, decode_text, match_of, warn_about_gap
from streams.cli.starts import seq_before, start_ts, time_options
from streams.cli.suggestions import BOX_NAME
from streams.cli.verbs import ServerTarget, example, server_options

_PAGE_BYTES: Final = 8 << 20
_WRITE_BYTES: Final = 4 << 20
_WRITE_RECORDS: Final = 5000
#: An append is retried for this share of the time that its box remembers keys.
_WINDOW_SHARE: Final = 0.8
_TAIL_BYTES: Final = 4 << 20


@example(
    "streams export orders -o orders.ndjson",
    "streams export orders -o orders.ndjson --resume",
    "streams export orders | wc -l",
)
@click.command("export")
@click.argument("box", type=BOX_NAME)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (default: standard output).",
)
@click.option("--resume", is_flag=True, help="Continue after the last complete line of the file.")
@click.option("--from", "from_seq", type=int, default=0, help="Start after this seq.")
@time_options
@click.option("--match", metavar="TAG", help="Only records with this tag; `user-*` matches a prefix.")
@server_options
def export(
    target: ServerTarget,
    box: str,
    path: Path | None,
    resume: bool,
    from_seq: int,
    since: int | None,
    at: int | None,
    match: str | None,
) -> None:
    """Write the records of BOX, one JSON object per line, up to its current end."""
    from_ts = start_ts(since, at, **{"from": from_seq or None})
    if resume and path is None:
        raise output.Refusal("--resume needs a file: add -o FILE")
    if path is not None and path.exists() and not resume:
        raise output.Refusal(f"{path} exists already; add --resume to continue it, or choose another file")
    with target.client(is_patient=True) as client:
        handle = client.box(box)
        state = handle.state()
        if from_ts is not None:
            from_seq = seq_before(handle, from_ts)
        if path is None:
            _export(handle, sys.stdout.buffer, from_seq, state.head_seq, match)
            return
        with open(path, "ab+") as file:
            if resume and (last_seq := _last_seq(file)) > state.head_seq:
                raise output.Refusal(
                    f"{path} ends with record {last_seq}, but box {box!r} ends with {state.head_seq}: the "
                    "file is from another box, or the box was recreated; export to a new file"
                )
            from_seq = max(from_seq, last_seq) if resume else from_seq
            count = _export(handle, file, from_seq, state.head_seq, match)
            file.flush()
            os.fsync(file.fileno())
    output.show_facts({"box": box, "file": str(path), "records": count}, as_json=target.as_json)


def _export(box: Any, file: IO[bytes], from_seq: int, until: int, match: str | None) -> int:
    query: dict[str, Any] = {
        "from_seq": from_seq,
        "include_tags": True,
        "limit": 1000,
        "max_bytes": _PAGE_BYTES,
    }
    if match is not None:
        query["match"] = match_of(match)
    count = 0
    with output.progress(f"exporting {box.name}", until - from_seq, beside=file) as step:
        while query["from_seq"] < until:
            page = box.raw_page(**query)
            warn_about_gap(box.name, page.tombstone)
            file.write(b"".join([output.as_line(record) + b"\n" for record in page.records]))
            count += len(page.records)
            query |= {"from_seq": page.next_from_seq, "generation": page.generation}
            step(page.next_from_seq - from_seq)
            if page.caught_up:
                break
    file.flush()
    return count


def _last_seq(file: IO[bytes]) -> int:
    """Return the seq of the last complete line, and cut off an incomplete line after it."""
    import msgspec

    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _TAIL_BYTES)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(b"\n") + 1
    if end == 0:
        if start:
            raise output.Refusal(
                f"{file.name}: the last line is longer than {_TAIL_BYTES:,} bytes, so this is not an export; "
                "choose another file"
            )
        file.truncate(0)
        return 0
    line = tail[tail.rfind(b"\n", 0, end - 1) + 1 : end]
    try:
        seq = msgspec.json.decode(line)["$seq"]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise output.Refusal(
            f"{file.name}: the last line is not a record of an export: {line[:60]!r}; choose another file"
        ) from None
    file.truncate(start + end)
    file.seek(0, os.SEEK_END)
    return int(seq)


# -- import


@example("streams import copy orders.ndjson", "streams export orders | streams import copy2 -")
@click.command("import")
@click.argument("box", type=BOX_NAME)
@click.argument("source", type=click.Path(allow_dash=True, dir_okay=False))
@click.option(
    "--data", "data_only", is_flag=True, help="Each line is the data of a record, not a record of an export."
)
@click.option("--keep-ts", is_flag=True, help="Keep the times of the records; the box must accept them.")
@click.option("--resume", is_flag=True, help="Continue an interrupted import of this file into this box.")
@server_options
def import_(
    target: ServerTarget, box: str, source: str, data_only: bool, keep_ts: bool, resume: bool
) -> None:
    """Append the lines of SOURCE (`-` for standard input) to BOX, in order, each exactly once."""
    if source == "-":
        if resume:
            raise output.Refusal("--resume needs a file; standard input cannot be resumed")
        with target.client(is_patient=True) as client:
            count = _import(client.box(box), sys.stdin.buffer, None, data_only, keep_ts)
    else:
        path = Path(source)
        if not path.is_file():
            raise output.Refusal(f"{path} is not a file; to import from a pipe, use - as SOURCE")
        checkpoint = _Checkpoint(path, box)
        if checkpoint.exists() and not resume:
            raise output.Refusal(
                f"an earlier import of {path} into {box} did not finish; add --resume to continue it, or "
                f"delete {checkpoint.path} to start over"
            )
        if resume and not checkpoint.exists():
            raise output.Refusal(
                f"there is no interrupted import of {path} into {box}; leave out --resume to import all of it"
            )
        with target.client(is_patient=True) as client, open(path, "rb") as file:
            count = _import(client.box(box), file, checkpoint, data_only, keep_ts)
        checkpoint.forget()
    output.show_facts({"box": box, "records": count}, as_json=target.as_json)


def _new_progress() -> dict[str, Any]:
    return {"offset": 0, "lines": 0, "count": 0, "key": uuid.uuid4().hex, "pending_since_ms": None}


def _validate(progress: dict[str, Any]) -> None:
    """Raise `ValueError` if an import did not write this checkpoint.

    The file lies beside the input, so it may come from the same untrusted source.
    """
    if progress.keys() != _new_progress().keys():
        raise ValueError("it has unexpected fields")
    numbers = [progress["offset"], progress["lines"], progress["count"], progress["pending_since_ms"] or 0]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("one of its numbers is not a whole number of 0 or more")
    if not isinstance(progress["key"], str) or not progress["key"].isalnum() or len(progress["key"]) > 64:
        raise ValueError("its key is not 1 to 64 letters and digits")


class _Checkpoint:
    """The progress of an import: one line of JSON beside its input, replaced atomically."""

    def __init__(self, source: Path, box: str) -> None:
        digest = hashlib.sha256(box.encode()).hexdigest()[:8]
        self.path = source.with_name(f"{source.name}.import-{digest}")

    def exists(self) -> bool:
        return self.path.exists()

    def load(self) -> dict[str, Any]:
        import msgspec

        try:
            progress = {"lines": 0, **msgspec.json.decode(self.path.read_bytes(), type=dict[str, Any])}
            _validate(progress)
        except FileNotFoundError:
            return _new_progress()
        except ValueError as error:
            raise output.Refusal(
                f"{self.path} is not a valid import checkpoint ({error}); find the last imported record with "
                "`streams tail`, delete that file, and import the remaining lines"
            ) from None
        return progress

    def save(self, progress: dict[str, Any]) -> None:
        import msgspec

        temporary = self.path.with_name(self.path.name + ".new")
        # Other users may be able to write to the folder of the input: do not follow a link there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(msgspec.json.encode(progress))
            file.flush()
            os.fsync(file.fileno())  # an empty checkpoint after a power cut would be worse than none
        os.replace(temporary, self.path)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _import(box: Any, file: IO[bytes], checkpoint: _Checkpoint | None, data_only: bool, keep_ts: bool) -> int:
    from streams.client.retry import Retry
    from streams.protocol.errors import StreamsError

    progress = checkpoint.load() if checkpoint is not None else _new_progress()
    if checkpoint is not None:
        _check_pending(box, progress, checkpoint)
        file.seek(progress["offset"])
    window_ms = box.idempotency_window_ms()
    retry = Retry(total_s=60.0 if window_ms is None else min(60.0, window_ms / 1000 * _WINDOW_SHARE))
    with output.progress(f"importing into {box.name}", None, beside=file) as step:
        try:
            for write in _writes(file, progress.get("lines", 0), data_only, keep_ts):
                _write(box, write, progress, checkpoint, retry)
                step(progress["count"])
        except output.Refusal as refusal:
            raise output.Refusal(f"{refusal.message}\n{_so_far(progress, checkpoint)}") from None
        except StreamsError as error:
            raise type(error)(f"{error.message}; {_so_far(progress, checkpoint)}", **error.detail) from error
    return int(progress["count"])


def _so_far(progress: dict[str, Any], checkpoint: _Checkpoint | None) -> str:
    can_resume = checkpoint is not None and checkpoint.exists()
    resume = "; fix the cause, then repeat the command with --resume" if can_resume else ""
    return f"{progress['count']} records were imported, up to line {progress.get('lines', 0)}{resume}"


def _write(
    box: Any, write: _Write, progress: dict[str, Any], checkpoint: _Checkpoint | None, retry: Any
) -> None:
    """Append one batch, and save the checkpoint before it (pending) and after it (done)."""
    from streams.protocol.errors import Busy, Refused

    since_ms = progress.get("pending_since_ms")
    if checkpoint is not None:
        checkpoint.save({**progress, "pending_since_ms": since_ms or int(time.time() * 1000)})
    try:
        box.append_encoded(write.records, key=f"{progress['key']}-{progress['offset']}", retry=retry)
    except (Refused, Busy) as error:
        # This attempt wrote nothing. A refusal also proves that an earlier run wrote nothing: the server
        # would have recognised that append by its key.
        progress["pending_since_ms"] = None if isinstance(error, Refused) else since_ms
        if checkpoint is not None:
            checkpoint.save(progress)
        raise
    progress |= {
        "offset": progress["offset"] + write.bytes,
        "lines": progress.get("lines", 0) + write.lines,
        "count": progress["count"] + len(write.records),
        "pending_since_ms": None,
    }
    if checkpoint is not None:
        checkpoint.save(progress)


def _check_pending(box: Any, progress: dict[str, Any], checkpoint: _Checkpoint) -> None:
    since_ms = progress.get("pending_since_ms")
    if since_ms is None:
        return
    window_ms = box.idempotency_window_ms()
    if window_ms is None or time.time() * 1000 - since_ms < window_ms * _WINDOW_SHARE:
        return
    from streams.protocol.errors import Uncertain

    raise Uncertain(
        f"the append after the first {progress['count']} records got no answer, and box {box.name!r} no "
        f"longer remembers its idempotency key. Check with `streams tail {box.name}` whether it happened; "
        f"if it did not, set pending_since_ms to null in {checkpoint.path} and repeat the command"
    )


class _Write(NamedTuple):
    records: list[bytes]
    #: Length of these lines in the file.
    bytes: int
    lines: int


def _writes(file: IO[bytes], lines_before: int, data_only: bool, keep_ts: bool) -> Iterator[_Write]:
    """Divide the lines into appends by size and count, so that a resumed import divides them equally."""
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
    """Convert a line of an export into a record to append. Numbers keep their digits."""
    import msgspec

    excerpt = decode_text(line, f"line {number}")[:60]
    try:
        if data_only:
            return b'{"data":%b}' % bytes(msgspec.json.decode(line, type=msgspec.Raw))
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        what = "valid JSON" if data_only else "a record of `streams export`"
        raise output.Refusal(f"line {number}: {excerpt!r} is not {what} ({error})") from None
    if "data" not in fields:
        raise output.Refusal(f"line {number} has no field data; add --data if each line is the data itself")
    names = {"data": "data", "meta": "meta", "$tag": "tag", "$node": "node", "tag": "tag", "node": "node"}
    if keep_ts:
        names["$ts"] = "ts"
    return msgspec.json.encode({names[name]: value for name, value in fields.items() if name in names})
