"""The events of watches (v0 §7), one struct each: a gateway encodes it, clients decode it.

The rules of `replies.py` hold. An event of records is written by hand (`gateway/watch/page.py`), because most
of it is stored bytes; its struct describes and decodes.
"""

from __future__ import annotations

import msgspec

from streams.protocol.messages.replies import Record


class RecordsEvent(msgspec.Struct, frozen=True):
    """Records of one box: those between `from_seq` and `to_seq` that the watch selects."""

    box: str
    records: list[Record]
    from_seq: int
    to_seq: int
    head_seq: int


class TombstoneEvent(msgspec.Struct, frozen=True):
    """A `Tombstone` of a watched box. The reason `from_seq_too_old` is for a gap before the watch began."""

    box: str
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int


class CaughtUp(msgspec.Struct, frozen=True):
    """A watch has shown all there was of a box and is live from here."""

    box: str
    head_seq: int


class BoxDeleted(msgspec.Struct, frozen=True):
    """A watched box was deleted; the other boxes go on."""

    box: str
    head_seq: int
    reason: str = ""
