"""Scans on the wire: stored records as buffers, many at a time; see docs/reference/wire.md."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import msgspec
from msgspec import Raw

from streams.protocol.model.records import Batch, split_columns

#: Pages of this size stay in the buffers that a connection has anyway; larger ones are no faster, for each of
#: them the memory is asked for, cleared and given back.
BYTES_DEFAULT = 2 * 1024 * 1024
BYTES_MAX = 16 * 1024 * 1024

#: Shorter stretches are merged, at a third of a microsecond for each record. Otherwise the reader would build
#: columns of a few records each.
_SHORT_RECORDS = 32
#: So many records of short stretches in one run, a few milliseconds of work.
_TOGETHER_MAX = 10_000

#: The columns to return: a sum of these.
DATA, TAGS, NODES, META = 1, 2, 4, 8
ALL = DATA + TAGS + NODES + META


class ScanHead(msgspec.Struct, array_like=True, gc=False):
    box: str
    from_seq: int = 0
    #: 0 is the head.
    to_seq: int = 0
    generation: int | None = None
    max_bytes: int = BYTES_DEFAULT
    columns: int = ALL


class RunHead(msgspec.Struct, array_like=True, gc=False):
    count: int
    first_seq: int
    first_ts: int
    prefix: int
    suffix: int
    base: int
    stride: int
    node: str
    #: Bytes of ends, values, seqs, times, tags, nodes, meta_ends and metas in the body.
    sizes: tuple[int, int, int, int, int, int, int, int]


class ScanPageHead(msgspec.Struct, array_like=True, gc=False):
    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    #: gap_from, gap_to, reason, missed; or None.
    gap: tuple[int, int, str, int] | None
    runs: list[RunHead]


class ScanReply(msgspec.Struct, frozen=True, gc=False):
    """The reply to a scan. The body is in parts, most of them views of stored batches: nothing is copied on
    its way to the socket."""

    head: ScanPageHead
    parts: list[bytes | memoryview]


scan_head_decoder = msgspec.msgpack.Decoder(ScanHead)
scan_page_head_decoder = msgspec.msgpack.Decoder(ScanPageHead)


class RunWriter:
    """Builds runs from stretches of batches. A long, regular stretch is sent as stored, without decoding.
    Others are decoded and merged."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.heads: list[RunHead] = []
        self._parts: list[bytes | memoryview] = []
        self._short: list[tuple[Batch, int, int]] = []
        self._short_records = 0

    def __repr__(self) -> str:
        return f"<RunWriter {len(self.heads)} runs, {self._short_records} records of short stretches>"

    def add(self, batch: Batch, first: int, last: int) -> None:
        """Records first..last (indexes) of a batch; in the order of their seqs."""
        plain = batch.plain_runs(first, last) if last - first + 1 >= _SHORT_RECORDS else []
        if not plain:
            self._short.append((batch, first, last))
            self._short_records += last - first + 1
            if self._short_records >= _TOGETHER_MAX:
                self._put_together()
            return
        self._put_together()
        for run_first, run_last, prefix in plain:
            self._take(batch, run_first, run_last, prefix)

    def parts(self) -> list[bytes | memoryview]:
        """The body of all runs; the last of them has its head from here on."""
        self._put_together()
        return [part for part in self._parts if len(part)]

    def _take(self, batch: Batch, first: int, last: int, prefix: int) -> None:
        columns = self._columns
        assert batch.ends is not None, "a batch of one record is taken apart"
        ends = tags = comma = b""
        values: bytes | memoryview = b""
        base = batch.ends[first - 1] if first else 0
        if columns & DATA:
            ends = batch.ends[first : last + 1].tobytes()
            values, comma = batch.text(first, last), b","
        if columns & TAGS and batch.tags is not None:
            tags = batch.tags_of(first, last)
        node = str(batch.nodes or b"", "utf-8") if columns & NODES else ""
        self._put(
            RunHead(
                last - first + 1,
                batch.first_seq + first,
                batch.first_ts,
                prefix,
                len(b"},"),
                base,
                batch.stride,
                node,
                (len(ends), len(values) + len(comma), 0, 0, len(tags), 0, 0, 0),
            ),
            [ends, values, comma, tags],
        )

    def _put_together(self) -> None:
        if not self._short:
            return
        columns = self._columns
        records = split_columns(
            # A binary record as `/v0` shows it; any other as it is stored.
            [
                batch.text_as(first, last, tags=False, meta=True, data=True)
                for batch, first, last in self._short
            ]
        )
        count = len(records.seqs)
        is_row = records.seqs[-1] - records.seqs[0] == count - 1
        seqs = b"" if is_row else array("q", records.seqs).tobytes()
        times = b"" if records.times[0] == records.times[-1] else array("q", records.times).tobytes()
        ends = values = tags = nodes = meta_ends = metas = b""
        node = ""
        if columns & DATA:
            ends, values = _packed_texts(records.datas)
        if columns & TAGS and any(batch.tags is not None for batch, _, _ in self._short):
            tags = b"\0".join([batch.tags_of(first, last) for batch, first, last in self._short])
        if columns & NODES:
            if records.nodes.count(records.nodes[0]) == count:
                node = records.nodes[0]
            else:
                nodes = "\0".join(records.nodes).encode()
        if columns & META and any(map(len, records.metas)):
            meta_ends, metas = _packed_texts(records.metas)
        parts = [ends, values, seqs, times, tags, nodes, meta_ends, metas]
        sizes = tuple(map(len, parts))
        self._short, self._short_records = [], 0
        self._put(RunHead(count, records.seqs[0], records.times[0], 0, 0, 0, 0, node, sizes), parts)  # type: ignore[arg-type]

    def _put(self, head: RunHead, parts: Sequence[bytes | memoryview]) -> None:
        self.heads.append(head)
        self._parts += parts


def _packed_texts(texts: list[Raw]) -> tuple[bytes, bytes]:
    """Return the end of each text, and all texts joined."""
    return array("I", list(accumulate(map(len, texts)))).tobytes(), b"".join(texts)
