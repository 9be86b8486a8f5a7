"""Shows the contents of a shard's file: one row per frame, batch or box. Read-only; damage is reported.

Rows contain no payloads, except the records of a segment on request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec
from pyroaring import BitMap64

from shard.core.changes import BoxCreated
from shard.core.snapshot_facts import ShardState
from shard.storage import frames
from shard.storage.files import Corrupt, DiskLike
from shard.storage.salvage import frames_of
from shard.storage.segments import read_batches
from shard.storage.segments.index import SegmentIndex, open_segment, open_stub
from shard.storage.snapshot import Snapshots
from shard.storage.sources import FileSource, ReadAhead
from streams.protocol.model.records import Batch

#: Longer lists are shown as their length.
_ITEMS_MAX = 8

Row = dict[str, Any]


class UnknownFileKind(Exception):
    """The file has no name that a shard gives its files."""


def inspect(disk: DiskLike, path: str, *, records: bool = False) -> Iterator[Row]:
    """Yield the rows of one file, by its name. Damage is a row with `problem`."""
    reader = _READERS.get(PurePosixPath(path).suffix)
    if reader is None:
        raise UnknownFileKind(
            f"{path} is not a log (.wal), segment (.seg), stub (.stub) or snapshot (.snap) file"
        )
    try:
        yield from reader(disk, path, records)
    except Corrupt as damage:
        yield {"offset": damage.offset, "problem": damage.reason}


def _log(disk: DiskLike, path: str, records: bool) -> Iterator[Row]:
    names = _box_names(disk, str(PurePosixPath(path).parent.parent / "snapshot"))
    for frame in frames_of(disk, path):
        if isinstance(frame, int):
            yield {"offset": frame, "problem": "no valid frame begins here"}
            continue
        row: Row = {"offset": frame.offset, "lsn": frame.lsn, "bytes": len(frame.content)}
        try:
            change = frames.decode(frame.kind, frame.version, frame.content)
        except frames.UnknownFrame as unknown:
            yield row | {"problem": str(unknown)}
            continue
        if isinstance(change, BoxCreated):
            names[change.generation] = change.name
        fields = {name: _summarize(value) for name, value in msgspec.structs.asdict(change).items()}
        box = names.get(fields.get("generation", 0))
        yield row | {"change": _words(type(change).__name__)} | ({"box": box} if box else {}) | fields


def _segment(disk: DiskLike, path: str, records: bool) -> Iterator[Row]:
    source = ReadAhead(FileSource(disk, path))
    index = open_segment(source)
    if not records:
        yield from _batches(index)
        return
    at = 0
    while at < len(index):
        for batch in read_batches(source, index, at, len(index) - 1):
            text = batch.text_as(0, batch.count - 1, tags=True, meta=True, data=True)
            for record in msgspec.json.decode(b"[%b]" % bytes(text), type=list[msgspec.Raw]):
                yield {"record": record}
            at += 1


def _stub(disk: DiskLike, path: str, records: bool) -> Iterator[Row]:
    yield from _batches(open_stub(FileSource(disk, path)))


def _batches(index: SegmentIndex) -> Iterator[Row]:
    for at in range(len(index)):
        yield {
            "offset": index.offsets[at],
            "first_seq": index.first_seqs[at],
            "records": index.counts[at],
            "bytes": index.sizes[at],
            "first_ts": index.first_times[at],
            "last_ts": index.last_times[at],
        }


def _snapshot(disk: DiskLike, path: str, records: bool) -> Iterator[Row]:
    for box in _state(disk, path).boxes:
        yield {
            "box": box.name,
            "generation": box.generation,
            "durability": box.config.durability,
            "head_seq": box.head_seq,
            "earliest_seq": box.earliest_seq,
            "records": box.live_count,
            "bytes": box.live_bytes,
            "unsealed_batches": len(box.batches) // 8,
            "segments": [segment.serial for segment in box.segments],
        }


_READERS: dict[str, Callable[[DiskLike, str, bool], Iterator[Row]]] = {
    ".wal": _log,
    ".seg": _segment,
    ".stub": _stub,
    ".snap": _snapshot,
}


def _state(disk: DiskLike, path: str) -> ShardState:
    file = PurePosixPath(path)
    if not file.stem.isdigit():
        raise UnknownFileKind(f"{path} is not named like a snapshot (LSN.snap)")
    return frames.decode_state(Snapshots(disk, str(file.parent)).load(int(file.stem)))


def _box_names(disk: DiskLike, directory: str) -> dict[int, str]:
    """Return the box names by generation, from the newest snapshot."""
    try:
        snapshot = Snapshots(disk, directory).load_newest()
    except Corrupt:
        return {}
    boxes = frames.decode_state(snapshot.content).boxes if snapshot is not None else []
    return {box.generation: box.name for box in boxes}


def _summarize(value: Any) -> Any:
    if isinstance(value, Batch):
        return {"first_seq": value.first_seq, "records": value.count, "bytes": len(value.blob)}
    if isinstance(value, BitMap64):
        return {"seqs": len(value), "first": value.min(), "last": value.max()} if value else {"seqs": 0}
    if isinstance(value, bytes | memoryview):
        return {"bytes": len(value)}
    if isinstance(value, msgspec.Struct):
        return {name: _summarize(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_summarize(each) for each in value] if len(value) <= _ITEMS_MAX else {"items": len(value)}
    return value


def _words(name: str) -> str:
    """Turn `BatchAppended` into `batch appended`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
