"""Batches as clients would have written them, and segments made of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Raw

from shard.storage.files import DiskLike
from shard.storage.segments import FileSource, SegmentIndex, Source, read_batches, write_segment
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch, render
from streams.protocol.payloads.appends import RecordLimits, parse_append

DIRECTORY = "/data/segments"
GOLDEN = Path(__file__).parent.parent / "storage" / "golden"
FOOTER_BYTES = 128


def a_batch(
    first_seq: int,
    count: int = 1,
    *,
    ts: int | list[int] = 1_700_000_000_000,
    tags: Sequence[str | None] | None = None,
    nodes: Sequence[str | None] | None = None,
    metas: Sequence[bytes | None] | None = None,
    data: bytes = b'{"a":1}',
) -> Batch:
    """A batch as if a client had written it."""
    fields: dict[str, Sequence[object] | None] = {"data": [Raw(data)] * count, "tag": tags, "node": nodes}
    fields["meta"] = [Raw(meta) if meta else None for meta in metas] if metas else None
    used = {name: column for name, column in fields.items() if column}
    records = [dict(zip(used, values, strict=True)) for values in zip(*used.values(), strict=True)]
    columns = parse_append(msgspec.json.encode({"records": records}), RecordLimits()).columns
    return render(columns, first_seq=first_seq, times=array("q", ts) if isinstance(ts, list) else ts)


def a_mixed_lot() -> list[Batch]:
    """Few bytes, much variety: holes, own times, nodes, metas, tags that nobody, some and all have."""
    return [
        a_batch(5, ts=1000),
        a_batch(6, 2, ts=1000, tags=["a", None], nodes=["n", "m"]),
        a_batch(8, 3, ts=[1000, 1001, 1007], tags=["ab", "a", "ü/日本"], metas=[b'{"k":1}', None, None]),
        a_batch(900, 12, ts=1007, tags=["all"] * 12, nodes=["n"] * 12, data=b"[1,2]"),
        a_batch(2**40, 2, ts=2000, tags=["", "\U0001f40d"]),
    ]


def many(count: int, *, records: int = 1) -> list[Batch]:
    return [a_batch(1 + at * records + at // 2, records, ts=10 * at) for at in range(count)]


def written(
    disk: DiskLike, batches: Iterable[Batch], *, directory: str = DIRECTORY, generation: int = 7
) -> tuple[SegmentIndex, FileSource]:
    index = write_segment(disk, directory, generation=generation, serial=12, batches=batches)
    return index, FileSource(disk, f"{directory}/{index.name}")


def bytes_of(batches: Iterable[Batch]) -> list[bytes]:
    return [b"".join(batch.to_parts()) for batch in batches]


def all_batches(source: Source, index: SegmentIndex) -> list[Batch]:
    found: list[Batch] = []
    while len(found) < len(index):
        found += read_batches(source, index, len(found), len(index) - 1)
    return found


def seqs_naively(batches: Iterable[Batch], match: Match) -> list[int]:
    return [seq for seq, tag, _ in records_of(batches) if match.accepts(tag)]


def sizes_naively(batches: Iterable[Batch], match: Match) -> list[int]:
    return [len(text) for _, tag, text in records_of(batches) if match.accepts(tag)]


def records_of(batches: Iterable[Batch]) -> Iterator[tuple[int, str, bytes]]:
    """Seq, tag and text of every record that may have a tag."""
    for batch in batches:
        for at, tag in enumerate(batch.tag_list() or ()):
            yield batch.first_seq + at, tag, bytes(batch.text(at, at))


class Recorded:
    """A source that takes down what was asked of it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = source.name
        self.reads: list[tuple[int, int]] = []

    def size(self) -> int:
        return self._source.size()

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self._source.read(offset, length)
