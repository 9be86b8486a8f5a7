"""The events of watches (v0 §7): a struct for each, which gateways encode and clients decode.

The rules in the header of `replies.py` apply here too. A gateway does not encode `RecordsEvent` from the
struct: it joins stored bytes (`gateway/watch/page.py`). The struct is for clients and the API description.
"""

from __future__ import annotations

import msgspec

from streams.protocol.messages.replies import Record


class RecordsEvent(msgspec.Struct, frozen=True):
    """The records of one box between `from_seq` and `to_seq` that match the watch."""

    box: str
    records: list[Record]
    from_seq: int
    to_seq: int
    head_seq: int


class TombstoneEvent(msgspec.Struct, frozen=True):
    """A `Tombstone` of a watched box. For a gap before the watch began, the reason is `from_seq_too_old`."""

    box: str
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int


class CaughtUp(msgspec.Struct, frozen=True):
    """The watch has sent all existing records of a box; from now on it sends new ones."""

    box: str
    head_seq: int


class BoxDeleted(msgspec.Struct, frozen=True):
    """A watched box was deleted. The watch continues for its other boxes."""

    box: str
    head_seq: int
    reason: str = ""
