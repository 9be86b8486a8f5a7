"""The volatile state of one box: hints and work under way that are lost with the process, by design.

Nothing here is logged, and no replay rebuilds it. The logged state is the rest of the box (`box.py`), which
appliers alone change.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard.core.boxes.deletion import Deletion
from streams.protocol.messages.commands import Match


class Volatile:
    __slots__ = (
        "compacted_seq",
        "deletion",
        "last_read_ms",
        "reserved_durable_seq",
        "reserved_lsn",
        "staged_durable_lsn",
        "tag_lookups",
        "unsealed_since_ms",
    )

    def __init__(self, now_ms: int) -> None:
        #: The deletion by tag that is under way, and its lookups in tag indexes of segments:
        #: (serial, match) -> (seqs, their bytes).
        self.deletion: Deletion | None = None
        self.tag_lookups: dict[tuple[int, Match], tuple[Sequence[int], Sequence[int]]] = {}
        #: The last seq that compaction has examined; a hint when to look again.
        self.compacted_seq = 0
        #: About when the oldest unsealed batch was appended; a hint for sealing.
        self.unsealed_since_ms = now_ms
        #: When the box was last read; a hint for priorities.
        self.last_read_ms: int | None = None
        # For `shard/core/durability.py`.
        #: Seqs up to here are reserved durably; `reserved_lsn` is the last reservation.
        self.reserved_durable_seq = 0
        self.reserved_lsn = 0
        #: The last append that is shown when it is durable.
        self.staged_durable_lsn = 0

    def __repr__(self) -> str:
        return f"<Volatile read {self.last_read_ms}, deletion {self.deletion}>"
