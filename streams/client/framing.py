"""A state as records of the box it is the state of, and back. Pure.

A snapshot is one record, or several when it is big, all with the tag `snapshot` and, in `meta.snapshot`,
which snapshot they are a part of and which seq it covers: the state of all records up to there. The first
part stands at the next seq (`match_seq` sees to it), so no record is between what is covered and the parts.
Records of other writers may stand between the parts. The write of the last part trims what is covered, in the
same atomic step: a reader that finds trimmed records finds a whole snapshot. Parts without a last one
are of a writer that died; they mean nothing.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any, NamedTuple

from streams.client.answers import Entry, Record

TAG = "snapshot"
#: Of one part before base64, so that a part is well below the 1 MiB that a record may have.
PART_BYTES = 512 * 1024
#: Parts that are written at once: a quarter of the 64 MiB that a body may have.
PARTS_PER_WRITE = 22


class Restored(NamedTuple):
    """A state, and the seq up to which it covers the box. Without a snapshot, None and 0."""

    state: Any
    seq: int


def entries_of(id: str, covers: int, content: bytes) -> list[Entry]:
    chunks = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)] or [b""]
    return [
        Entry(
            b64encode(chunk).decode(),
            tag=TAG,
            meta={"snapshot": {"id": id, "part": part, "parts": len(chunks), "covers": covers}},
        )
        for part, chunk in enumerate(chunks)
    ]


def writes_of(entries: list[Entry]) -> Iterator[tuple[list[Entry], bool, bool]]:
    """(entries of one write, whether it is the first, whether it is the last)"""
    for at in range(0, len(entries), PARTS_PER_WRITE):
        yield entries[at : at + PARTS_PER_WRITE], at == 0, at + PARTS_PER_WRITE >= len(entries)


class SnapshotPart(NamedTuple):
    id: str
    part: int
    parts: int
    covers: int


def is_snapshot(record: Record) -> bool:
    """True for a record that is a saved state, or a part of one, and so none of the data of its box."""
    return part_of(record) is not None


def part_of(record: Record) -> SnapshotPart | None:
    """None for a record that is not part of a snapshot."""
    if record.tag != TAG:
        return None
    fields = record.meta.get("snapshot")
    if not isinstance(fields, dict):
        return None
    try:
        return SnapshotPart(
            str(fields["id"]), int(fields["part"]), int(fields["parts"]), int(fields["covers"])
        )
    except (KeyError, TypeError, ValueError):
        return None


class Assembler:
    """Parts in, whole snapshots out. Of snapshots that are not whole, the newest is kept."""

    __slots__ = ("_chunks", "_id")

    def __init__(self) -> None:
        self._id = ""
        self._chunks: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Assembler {self._id or 'idle'}, {len(self._chunks)} parts>"

    def add(self, part: SnapshotPart, data: object) -> bytes | None:
        """The content, when this part completes it."""
        if part.part == 0:
            self._id, self._chunks = part.id, []
        if part.id != self._id or part.part != len(self._chunks):
            return None
        self._chunks.append(b64decode(str(data)))
        if len(self._chunks) < part.parts:
            return None
        content = b"".join(self._chunks)
        self._id, self._chunks = "", []
        return content
