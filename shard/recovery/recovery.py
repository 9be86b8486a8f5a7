"""Rebuilds the machine from the newest snapshot and the log, through `apply` alone. Never invents state.

    newest valid snapshot ──► machine.restore          (everything except payloads, as of lsn S)
    segments it names     ──► SegmentStore.open        (their indexes; payloads stay in the files)
    frames up to S        ──► payloads of the batches and chunks that the snapshot names, also from log files
                              that were retained for chunks alone; other frames are skipped
                              machine.end_hydration    (all payloads are loaded)
    frames after S        ──► machine.apply, in order
    the end of the log    ──► the scan stops at a torn tail; it raises `Corrupt` for damage
    wal.settle            ──► the log is synced, its torn tail is cut off, and it is open for writing
    machine.end_recovery  ──► all of it may be seen; object boxes wait for the store

It is a generator so that its caller can report progress to clients between two steps. The caller is
`shard/__main__.py`. It goes on with `page_cache.py` (has the page cache survived?) and `Engine.run`, which
logs the start of the shard (`Machine.start`) and has `commit_renderer.py` render the remaining rows of
commits. `docs/explanation/durability.md` describes what that means for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.changes import BatchAppended, BatchKept, Change, TxnHeld
from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from shard.core.snapshot_facts import SegmentFacts
from shard.storage import frames
from shard.storage.files import Corrupt
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Frame, Wal

#: Frames and bytes between two reports: a few milliseconds of work.
_STEP_FRAMES, _STEP_BYTES = 512, 2 * 1024 * 1024
_STEP_SEGMENTS = 64


#: Reads the index of a segment from its file.
OpenSegment = Callable[[int, SegmentFacts], Segment]


class RecoveryProgress(NamedTuple):
    done_bytes: int
    total_bytes: int

    @property
    def ratio(self) -> float:
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0


class RecoverySummary(NamedTuple):
    """The result of a recovery, for the shard's log lines."""

    snapshot_lsn: int
    needs_lsn: int
    last_lsn: int
    frames_applied: int
    bytes_read: int
    skipped_snapshots: list[str]


def recover(
    machine: Machine, wal: Wal, snapshots: Snapshots, open_segment: OpenSegment, *, settles: bool = True
) -> Iterator[RecoveryProgress | RecoverySummary]:
    """Recover a machine. Yields its progress, and at last a summary. Afterwards the log is open for writing.
    With `settles=False` nothing is written, and the log stays read-only."""
    snapshot = snapshots.load_newest()
    snapshot_lsn = needs_lsn = 0
    missing_batches: dict[int, Box | None] = {}
    missing_chunks: set[int] = set()
    if snapshot is not None:
        state = frames.decode_state(snapshot.content)
        snapshot_lsn, needs_lsn = snapshot.lsn, state.needs_lsn
        references = machine.restore(state)
        missing_batches = dict(references.batches)
        missing_chunks = set(references.held_lsns)
        for number, (owner, facts) in enumerate(references.segments):
            owner.log.attach(open_segment(owner.generation, facts), facts.dead)
            if number % _STEP_SEGMENTS == 0:
                yield RecoveryProgress(0, 1)
    for frame in wal.scan_retained():
        if frame.lsn in missing_chunks:
            missing_chunks.remove(frame.lsn)
            _load_chunk(machine, wal, frame)
    frames_applied = since_frames = since_bytes = read_bytes = 0
    hydrating = True
    for frame in wal.scan(snapshot_lsn=snapshot_lsn):
        size = len(frame.content)
        read_bytes += size
        if frame.lsn <= snapshot_lsn:
            box = missing_batches.pop(frame.lsn, None)
            if box is not None:
                change = _decode(wal, frame)
                assert isinstance(change, BatchAppended | BatchKept), (
                    "a snapshot names batches by the lsn of the frame that holds them"
                )
                change.batch.lsn = frame.lsn
                box.log.hydrate(change.batch)
            elif frame.lsn in missing_chunks:
                missing_chunks.remove(frame.lsn)
                _load_chunk(machine, wal, frame)
        else:
            if hydrating:
                hydrating = False
                _finish_hydration(machine, missing_batches.keys() | missing_chunks, wal)
            change = _decode(wal, frame)
            try:
                machine.apply(change, frame.lsn)
            except DoesNotApply as error:
                raise Corrupt(wal.path_of(frame.file), frame.offset, f"{error}") from error
            frames_applied += 1
        since_frames += 1
        since_bytes += size
        if since_frames >= _STEP_FRAMES or since_bytes >= _STEP_BYTES:
            since_frames = since_bytes = 0
            yield RecoveryProgress(read_bytes, max(wal.total_bytes, read_bytes))
    if hydrating:
        _finish_hydration(machine, missing_batches.keys() | missing_chunks, wal)
    if settles:
        wal.settle()
    machine.end_recovery(machine.lsn)
    skipped_snapshots = snapshot.damaged_paths if snapshot is not None else []
    yield RecoverySummary(snapshot_lsn, needs_lsn, machine.lsn, frames_applied, read_bytes, skipped_snapshots)


def _load_chunk(machine: Machine, wal: Wal, frame: Frame) -> None:
    change = _decode(wal, frame)
    assert isinstance(change, TxnHeld), "a snapshot names chunks by the lsn of their frame"
    machine.txns.give_back(change, frame.lsn)


def _decode(wal: Wal, frame: Frame) -> Change:
    try:
        return frames.decode(frame.kind, frame.version, frame.content)
    except frames.UnknownFrame as error:
        raise Corrupt(wal.path_of(frame.file), frame.offset, str(error)) from None


def _finish_hydration(machine: Machine, missing_lsns: Set[int], wal: Wal) -> None:
    if missing_lsns:
        first = min(missing_lsns)
        oldest = wal.path_of(wal.files()[0].number)
        raise Corrupt(oldest, 0, f"the frame of lsn {first}, which the snapshot needs, is missing")
    machine.end_hydration()
