"""Decides which log files and segments the two snapshots on disk still need.

    snapshots      older         newer
    needs lsn      412           870           so log files up to lsn 411 can go
    names          {1, 2, 3}     {2, 4}        so the segments {1, 2, 3, 4} stay, and all live segments

A snapshot may also name single frames of older log files (chunks of transactions). These do not retain the
whole log: their files are set aside when they are released (`Wal.must_retain`), and dropped when no snapshot
names a frame in them.

The older snapshot must stay usable in case the newer one is damaged. The names in a snapshot of an earlier
process are unknown here; nothing is dropped until a new snapshot has replaced it.

Invariants
- TWO_SNAPSHOTS: there is one entry for each of the two newest snapshots, also for an unknown one.
- FILES_RISE: log files are passed in the order of their lsns, without overlap.
- BELOW_SNAPSHOT: a log file is released only if it ends before the first lsn that either snapshot needs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from shard.core.snapshot_facts import ShardState
from shard.storage.segments.store import Name
from shard.storage.wal import WalFile


class Retention:
    """The needs of the older and the newer snapshot, in this order."""

    def __init__(self, needs_lsn: int) -> None:
        """`needs_lsn`: of the snapshot that recovery used, 0 if there was none."""
        self._first_lsns = [0, needs_lsn]
        self._segments_by_snapshot: list[set[Name] | None] = [None, None]
        self._frames_by_snapshot: list[array[int] | None] = [None, None]

    def __repr__(self) -> str:
        return f"<Retention of the log from lsn {min(self._first_lsns)} on>"

    def is_settled(self, files: Sequence[WalFile]) -> bool:
        """Return True if one more snapshot would release neither segments nor any of these log files."""
        return self._segments_by_snapshot[0] == self._segments_by_snapshot[1] and _last_before(
            files, self._first_lsns[-1]
        ) == self.last_unneeded(files)

    def note_snapshot(self, needs_lsn: int, segments: set[Name], frame_lsns: Iterable[int] = ()) -> None:
        """Record that a snapshot is on disk and has replaced the oldest one.

        `frame_lsns`: the single frames that it names, besides all frames from `needs_lsn` on.
        """
        self._first_lsns = [self._first_lsns[-1], needs_lsn]
        self._segments_by_snapshot = [self._segments_by_snapshot[-1], segments]
        self._frames_by_snapshot = [self._frames_by_snapshot[-1], array("Q", sorted(frame_lsns))]
        assert (
            len(self._first_lsns) == len(self._segments_by_snapshot) == len(self._frames_by_snapshot) == 2
        ), "TWO_SNAPSHOTS"

    def needs_frames(self, first_lsn: int, last_lsn: int) -> bool:
        """Return True if a snapshot names a frame in this range, or if that is unknown. Any thread may call
        it."""
        for frame_lsns in list(self._frames_by_snapshot):
            if frame_lsns is None or bisect_left(frame_lsns, first_lsn) < bisect_right(frame_lsns, last_lsn):
                return True
        return False

    def named_segments(self) -> set[Name] | None:
        """Return the segments that a snapshot names; None if unknown."""
        older, newer = self._segments_by_snapshot
        return None if older is None or newer is None else older | newer

    def last_unneeded(self, files: Sequence[WalFile]) -> int:
        """Return the number of the last log file that no snapshot needs; 0 if there is none.

        `files` must not contain the file that is being written.
        """
        first_lsn = min(self._first_lsns)
        through = _last_before(files, first_lsn)
        assert all(file.last_lsn < first_lsn for file in files if file.number <= through), "BELOW_SNAPSHOT"
        return through


def _last_before(files: Sequence[WalFile], lsn: int) -> int:
    """Return the number of the last file that ends before this lsn; 0 if there is none."""
    assert all(older.last_lsn < newer.first_lsn for older, newer in pairwise(files)), "FILES_RISE"
    through = 0
    for file in files:
        if file.last_lsn >= lsn:
            break
        through = file.number
    return through


class Pins:
    """Segments that a reader uses: they stay although no snapshot names them any more.

    `is_all` pins every segment while the names are being collected.
    """

    def __init__(self) -> None:
        self.names: set[Name] = set()
        self.is_all = False

    def __repr__(self) -> str:
        return f"<Pins {'of all' if self.is_all else len(self.names)} segments>"

    def release(self) -> None:
        self.names, self.is_all = set(), False


def names_in(state: ShardState) -> set[Name]:
    """Return the segments that a snapshot names."""
    return {
        Name(facts.generation, segment.first_seq, segment.serial)
        for facts in state.boxes
        for segment in facts.segments
    }
