"""Reads the boxes of a shard's folder, and builds a folder from boxes: for resharding, backups and repair.

    folder ──read_shard──► machine ──parts_of──► BoxFacts + unsealed batches ──ShardBuilder──► folder

A new folder looks like one that a shard leaves after a clean stop:

    wal/        lsn 1..n: every unsealed batch, as `BatchKept`; lsn n+1: `ShardStopped`
    snapshot/   n and n+1, both complete, so that either may be damaged and the shard still starts
    segments/   the files and stubs of its boxes, under their old names

A box keeps its generation when it moves, and generations are unique over all shards, so nothing is renamed.
Unsealed batches stay unsealed: a segment for each of a hundred thousand small boxes would be as many files
with four syncs each; the log of all of them is one.

Rules of the file
- Sources are only read: not even a torn tail is cut off. After any failure, the source is unchanged.
- When `finish` returns, everything is durable; `check` reads it back and compares it with the input.
- Facts of a box are copied unchanged, except positions in the old log, which are replaced.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from shard.core.boxes.box import Box
from shard.core.capture import Capture
from shard.core.changes import BatchKept, Change, ShardStopped
from shard.core.machine import Machine
from shard.core.snapshot_facts import BoxFacts, MarkFacts, ShardState
from shard.recovery.commit_renderer import chunk_reader, finish_commits
from shard.recovery.recovery import OpenSegment, RecoverySummary, recover
from shard.storage import frames, segments
from shard.storage.files import Corrupt, DiskLike, parent_of
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.sources import FileSource
from shard.storage.wal import FILE_BYTES, FrameParts, Wal
from streams.protocol.messages.routers import RegisteredRouter
from streams.protocol.messages.s2 import AccessToken, Basin
from streams.protocol.model.records import Batch

#: Size of a group of frames in the log: one system call each, and little memory.
_GROUP_BYTES = 1 << 20
_GROUP_FRAMES = 512

#: Errors of file systems that cannot link these two paths. Then files are copied.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class Parts(NamedTuple):
    """A shard at one lsn, without the payloads of its segments."""

    state: ShardState
    #: By generation: the unsealed batches that `state` names, in order, and those without live records.
    tails: dict[int, list[Batch]]

    def batches_of(self, facts: BoxFacts) -> list[Batch]:
        lsns = array("Q", facts.batches)
        tail = self.tails.get(facts.generation, [])
        return [batch for lsn, batch in zip(lsns, tail, strict=True) if lsn]


def parts_of(machine: Machine, keep: Callable[[Box], bool] | None = None) -> Parts:
    """Return the parts of a machine, or of the boxes that `keep` accepts. Only the immutable batches are
    shared."""
    capture = begin_parts(machine, keep)
    while capture.step(len(machine.generations)):
        pass
    return end_parts(machine, capture)


def begin_parts(machine: Machine, keep: Callable[[Box], bool] | None = None) -> Capture:
    """Begin to capture boxes with their batches, in steps, while the machine continues."""
    return machine.begin_snapshot(keep, with_batches=True)


def end_parts(machine: Machine, capture: Capture) -> Parts:
    machine.end_snapshot(capture)
    return Parts(capture.state(), capture.tails)


def servers_of(state: ShardState) -> list[str]:
    """Return the servers whose chains in the object store held these boxes."""
    own = [state.chain.rpartition("-")[2]] if state.chain else []
    return sorted({*state.follows, *own})


def read_shard(
    disk: DiskLike,
    directory: str,
    *,
    shard: int = 0,
    open_segment: OpenSegment | None = None,
    report: Callable[[float], None] = lambda ratio: None,
) -> Machine:
    """Return the machine that a shard would have after recovery. Read-only."""
    machine = Machine(shard=shard)
    wal = Wal(disk, f"{directory}/wal")
    opens = open_segment or SegmentStore(disk, f"{directory}/segments").open
    for step in recover(machine, wal, Snapshots(disk, f"{directory}/snapshot"), opens, settles=False):
        if not isinstance(step, RecoverySummary):
            report(step.ratio)
    finish_commits(machine, chunk_reader(wal))
    return machine


def end_life(machine: Machine, *, boot_id: str, now_ms: int, cache_survived: bool = True) -> None:
    """Settle the open state of the shard's last process, as its next start would, and stop it cleanly.

    So a loss from a power cut is in the facts before boxes of several shards are merged.
    """
    machine.start(boot_id=boot_id, now_ms=now_ms, cache_survived=cache_survived)
    machine.stop(now_ms)
    machine.end_recovery(machine.lsn)


# ---------------------------------------------------------------------------------------------------
# Segment files


class ImportedFiles(NamedTuple):
    """The number of linked files, and the bytes of copied ones."""

    linked_files: int
    copied_bytes: int


def has_links(disk: DiskLike, directory: str) -> bool:
    """Return True if the file system of this directory supports hard links."""
    one, two = f"{directory}/.one-name", f"{directory}/.another-name"
    disk.close(disk.create(one))
    try:
        if disk.exists(two):  # left by an interrupted try
            disk.unlink(two)
        disk.link(one, two)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    else:
        disk.unlink(two)
        return True
    finally:
        disk.unlink(one)


def _files_of(disk: DiskLike, directory: str, facts: BoxFacts) -> list[str]:
    """Return files and stubs of a box's segments. Each segment must have at least one of them."""
    folder = f"{directory}/{facts.generation}"
    present = set(disk.listdir(folder)) if facts.segments and disk.exists(folder) else set()
    files: list[str] = []
    for segment in facts.segments:
        name = Name(facts.generation, segment.first_seq, segment.serial)
        files_present = [file for file in (name.file, name.stub) if file.rpartition("/")[2] in present]
        if not files_present:
            raise Corrupt(f"{directory}/{name.file}", 0, "the segment is missing, and the log names it")
        files += files_present
    return files


def _copy(disk: DiskLike, directory: str, file: str, target: str) -> int:
    """Copy a segment or a stub, and verify every byte."""
    source = FileSource(disk, f"{directory}/{file}")
    if file.endswith(".stub"):
        segments.write_stub(disk, target, segments.open_stub(source))
    else:
        segments.copy_segment(disk, target, source)
    return source.size()


def _create_empty(disk: DiskLike, directory: str, file: str, target: str) -> int:
    """Create an empty file of this name: a stub that nothing names is never read."""
    handle = disk.create(f"{target}/{file}")
    try:
        disk.fsync(handle)
    finally:
        disk.close(handle)
    return 0


# ---------------------------------------------------------------------------------------------------
# A folder


class ShardBuilder:
    """Builds the folder of one shard. The folder must not exist yet; its parent must."""

    def __init__(
        self,
        disk: DiskLike,
        directory: str,
        *,
        file_bytes: int = FILE_BYTES,
        pause: Callable[[int], None] = segments.no_pause,
    ) -> None:
        self._disk = disk
        self.directory = directory
        self._file_bytes = file_bytes
        self._pause = pause
        self._lsn = 0
        self._group: list[FrameParts] = []
        self._group_bytes = 0
        self._boxes: list[BoxFacts] = []
        self._not_recreated: dict[str, None] = {}
        self._routers: list[RegisteredRouter] = []
        self._last_router_number = 0
        self._marks: list[MarkFacts] = []
        self._basins: list[Basin] = []
        self._last_basin_number = 0
        self._tokens: list[AccessToken] = []
        self._follows: set[str] = set()
        #: Folders with new names that are not durable yet; at most one per box.
        self._folders: dict[str, None] = {}
        disk.mkdir(directory)
        disk.fsync_dir(parent_of(directory))
        self._wal = Wal(disk, f"{directory}/wal", file_bytes=file_bytes)
        for _ in self._wal.scan():
            raise AssertionError("a new folder has an empty log")
        self._wal.settle()

    def __repr__(self) -> str:
        return f"<ShardBuilder {self.directory}: {len(self._boxes)} boxes, {self._lsn} batches>"

    @property
    def needs_reconciling(self) -> bool:
        """True if the folder shares state with boxes that may be in another shard."""
        return bool(self._routers or self._basins) or any(map(needs_reconciling, self._boxes))

    @property
    def segments(self) -> str:
        """The directory for the segment files of its boxes."""
        return f"{self.directory}/segments"

    def add(self, facts: BoxFacts, batches: Iterable[Batch]) -> None:
        """Add a box and its unsealed batches, in order. Its segments come with `import_segments`."""
        lsns = array("Q")
        for batch in batches:
            self._lsn += 1
            lsns.append(self._lsn)
            self._group.append(frames.encode(self._lsn, BatchKept(facts.generation, batch)))
            self._group_bytes += len(batch.blob)
            if self._group_bytes >= _GROUP_BYTES or len(self._group) >= _GROUP_FRAMES:
                self._write_group()
        self._boxes.append(rebase(facts, lsns))

    def _write_group(self) -> None:
        if self._group:
            self._wal.append(self._group)
            self._wal.sync()
            written_bytes, self._group, self._group_bytes = self._group_bytes, [], 0
            self._pause(written_bytes)

    def import_segments(self, source: str, facts: BoxFacts) -> ImportedFiles:
        """Link or copy files and stubs of a box's segments from another `segments` directory."""
        return self._import_files(source, _files_of(self._disk, source, facts), _copy)

    def import_stub(self, source: str, stub: str) -> None:
        """Link or create a stub that nothing names: the server then drops that segment from the cold store.

        Only the name matters, so the stub may be damaged.
        """
        self._import_files(source, [stub], _create_empty)

    def _import_files(
        self,
        source: str,
        files: Sequence[str],
        copy: Callable[[DiskLike, str, str, str], int],
    ) -> ImportedFiles:
        disk, target = self._disk, self.segments
        linked_files = copied_bytes = 0
        for file in files:
            folder = parent_of(f"{target}/{file}")
            if folder not in self._folders:
                disk.mkdir(target)
                disk.mkdir(folder)
                self._folders[folder] = None
            try:
                disk.link(f"{source}/{file}", f"{target}/{file}")
                linked_files += 1
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                copied_bytes += copy(disk, source, file, target)
        return ImportedFiles(linked_files, copied_bytes)

    def add_not_recreated(self, names: Iterable[str]) -> None:
        """Add names of deleted boxes that must not be recreated implicitly."""
        self._not_recreated.update(dict.fromkeys(names))

    def add_routers(self, state: ShardState) -> None:
        """Add the registries of routers, basins and access tokens, which the first shard has."""
        self._routers += state.routers
        self._last_router_number = max(self._last_router_number, state.last_router_number)
        self._basins += state.basins
        self._last_basin_number = max(self._last_basin_number, state.last_basin_number)
        self._tokens += state.tokens

    def add_follows(self, servers: Iterable[str]) -> None:
        """Add servers whose chains in the object store held boxes of this shard: its own chain replaces
        them."""
        self._follows.update(servers)

    def add_marks(self, marks: Iterable[MarkFacts]) -> None:
        """Add marks of committed transactions. Held rows of others are dropped: their commits are refused,
        and their writers write them again."""
        self._marks += marks

    def finish(self, *, last_generation: int, boot_id: str, now_ms: int) -> None:
        """Make everything durable."""
        for folder in self._folders:
            self._disk.fsync_dir(folder)
        if self._folders:
            self._disk.fsync_dir(self.segments)
        batches = self._lsn
        self._lsn += 1
        self._group.append(frames.encode(self._lsn, ShardStopped(now_ms)))
        self._write_group()
        self._wal.close()
        snapshots = Snapshots(self._disk, f"{self.directory}/snapshot")
        for lsn in (batches, batches + 1):
            state = ShardState(
                lsn=lsn,
                needs_lsn=1 if batches else lsn + 1,
                boot_id=boot_id,
                stopped_clean=True,
                last_generation=last_generation,
                not_recreated=list(self._not_recreated),
                boxes=self._boxes,
                routers=self._routers,
                last_router_number=self._last_router_number,
                marks=self._marks,
                basins=self._basins,
                last_basin_number=self._last_basin_number,
                tokens=self._tokens,
                follows=sorted(self._follows),
                at_ms=now_ms,
            )
            content = frames.encode_state(state)
            snapshots.write(lsn, content)
            self._pause(sum(map(len, content)))
        self._disk.fsync_dir(self.directory)

    def check(self, open_segment: OpenSegment | None = None) -> Machine:
        """Read the folder as its shard will, compare it, and return its machine. Raises if the folder is
        damaged."""
        machine = read_shard(self._disk, self.directory, open_segment=open_segment)
        built_facts = {facts.generation: facts for facts in self._boxes}
        assert built_facts.keys() == machine.generations.keys(), "a box is missing"
        for generation, box in machine.generations.items():
            actual_facts, expected_facts = box.facts(), built_facts[generation]
            for field in ("name", "head_seq", "earliest_seq", "live_count", "live_bytes", "holes", "batches"):
                assert getattr(actual_facts, field) == getattr(expected_facts, field), (
                    f"{field} of {expected_facts.name} differs"
                )
        return machine

    def amend(self, changes: Sequence[tuple[int, Change]], *, now_ms: int) -> None:
        """Log changes after `finish`."""
        amend(self._disk, self.directory, changes, now_ms=now_ms, file_bytes=self._file_bytes)


def amend(
    disk: DiskLike, directory: str, changes: Sequence[tuple[int, Change]], *, now_ms: int, file_bytes: int
) -> None:
    """Log changes in a finished folder; they begin with the next lsn. Durable on return."""
    wal = Wal(disk, f"{directory}/wal", file_bytes=file_bytes)
    for _ in wal.scan():
        pass
    wal.settle()
    frame_parts = [frames.encode(lsn, change) for lsn, change in changes]
    frame_parts.append(frames.encode(changes[-1][0] + 1, ShardStopped(now_ms)))
    for at in range(0, len(frame_parts), _GROUP_FRAMES):
        wal.append(frame_parts[at : at + _GROUP_FRAMES])
        wal.sync()
    wal.close()


def rebase(facts: BoxFacts, lsns: array[int]) -> BoxFacts:
    """Return the facts of a box for a log in which its unsealed batches have these lsns.

    The lsns of its idempotency keys become 0: these writes are durable.
    """
    keys = [(key, first_seq, last_seq, at_ms, 0) for key, first_seq, last_seq, at_ms, _ in facts.keys]
    return msgspec.structs.replace(facts, batches=lsns.tobytes(), keys=keys)


def needs_reconciling(facts: BoxFacts) -> bool:
    """Return True if a box refers to another one, or a registry refers to it."""
    return bool(facts.origins or facts.outboxes or facts.moves or facts.outputs or facts.stream)
