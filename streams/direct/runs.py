"""Pages of a scan: runs of stored records as buffers, ready to become columns without a loop."""

from __future__ import annotations

from array import array
from itertools import pairwise
from operator import add

import msgspec

from streams.client.answers import Tombstone
from streams.protocol.payloads.scans import RunHead, scan_page_head_decoder


class Run(RunHead, gc=False):
    """A stretch of records, laid out as docs/reference/wire.md says: its head, and its buffers, which are
    views of the answer.

    `data` of a record is its entry without `prefix` bytes in front and `suffix` bytes behind. `first_ts` is
    the `$ts` of all records when `times` is empty; `node` is that of all when `nodes` is empty ("" is none).
    """

    ends: memoryview
    values: memoryview
    seqs: memoryview
    times: memoryview
    tags: memoryview
    nodes: memoryview
    meta_ends: memoryview
    metas: memoryview

    def __repr__(self) -> str:
        return f"<Run {self.first_seq}, {self.count} records, {len(self.values)} B>"

    def data_offsets(self) -> bytes:
        """int32, one more than there are records: where the entries of `values` begin and end. (In numpy,
        which is not needed here: `concatenate(([0], ends - base)) + arange(count + 1) * stride`.)"""
        ends = array("I", self.ends.tobytes())
        shift = range(self.stride - self.base, self.stride * (self.count + 1) - self.base, self.stride or 1)
        if not self.stride:
            return array("i", [0, *ends]).tobytes()
        return array("i", [0, *map(add, ends, shift)]).tobytes()

    # -- one by one, for those who do not want columns

    def datas(self) -> list[bytes]:
        """The JSON text of every record."""
        offsets = array("i", self.data_offsets())
        return [
            bytes(self.values[start + self.prefix : end - self.suffix]) for start, end in pairwise(offsets)
        ]

    def seq_list(self) -> list[int]:
        if len(self.seqs):
            return array("q", self.seqs.tobytes()).tolist()
        return list(range(self.first_seq, self.first_seq + self.count))

    def time_list(self) -> list[int]:
        return array("q", self.times.tobytes()).tolist() if len(self.times) else [self.first_ts] * self.count

    def tag_list(self) -> list[str]:
        """ "" where a record has none."""
        return str(self.tags, "utf-8").split("\0") if len(self.tags) else [""] * self.count

    def node_list(self) -> list[str]:
        return str(self.nodes, "utf-8").split("\0") if len(self.nodes) else [self.node] * self.count

    def meta_list(self) -> list[bytes]:
        """The JSON text of every `meta`; b"" where a record has none."""
        if not len(self.meta_ends):
            return [b""] * self.count
        ends = array("I", self.meta_ends.tobytes())
        return [bytes(self.metas[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class ScanPage(msgspec.Struct, kw_only=True, gc=False):
    """An answer to a scan."""

    box: str
    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    #: The loss between the cursor and the first run.
    tombstone: Tombstone | None
    runs: list[Run]


def read_page(box: str, head: bytes, body: bytes) -> ScanPage:
    """A page as it came over the wire. Its buffers are views of `body`."""
    page = scan_page_head_decoder.decode(head)
    view = memoryview(body)
    at = 0
    runs: list[Run] = []
    for run in page.runs:
        buffers: list[memoryview] = []
        for size in run.sizes:
            buffers.append(view[at : at + size])
            at += size
        runs.append(Run(*msgspec.structs.astuple(run), *buffers))
    gap = page.gap
    return ScanPage(
        box=box,
        next_from_seq=page.next_from_seq,
        generation=page.generation,
        head_seq=page.head_seq,
        earliest_seq=page.earliest_seq,
        tombstone=None
        if gap is None
        else Tombstone(*gap[:3], page.earliest_seq, page.head_seq, missed_estimate=gap[3]),
        runs=runs,
    )
