"""Scans on the wire: stored records as buffers, many at a time; see docs/reference/wire.md."""

from __future__ import annotations

import msgspec

BYTES_DEFAULT = 8 * 1024 * 1024
BYTES_MAX = 16 * 1024 * 1024

#: Which columns are wanted: a sum of these.
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


scan_head_decoder = msgspec.msgpack.Decoder(ScanHead)
scan_page_head_decoder = msgspec.msgpack.Decoder(ScanPageHead)
