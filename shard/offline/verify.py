"""Verifies every byte of a shard's folder, and reports every problem. Read-only.

    files       snapshots, log files, segments and stubs: every checksum, order and size in them
    together    recovery as on start; every named segment exists; floors, counts and orders of boxes; stubs
                match their segments; boxes are in the shard that owns their slot

A running shard is verified through an export (`transfer/exports.py`): its state of one moment, and the files
that do not change any more. The newest log file is being written; the next start verifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from shard.storage import frames, segments
from shard.storage.files import Corrupt, DiskLike
from shard.storage.segments.index import digest_of
from shard.storage.segments.store import ColdStoreUnreachable, Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.sources import FileSource, Source
from shard.storage.wal import Wal
from shard.transfer.shard_folders import read_shard
from streams.protocol.model.slots import slot_of

Pause = Callable[[int], None]


class Problem(NamedTuple):
    """One problem, with its position in a file."""

    path: str
    offset: int
    reason: str
    #: True if the shard can serve in spite of it.
    is_harmless: bool = False


class Scope(NamedTuple):
    """The folders to verify, and options."""

    #: The shard's folder, and the folder with its state: the same folder, or an export of a running shard.
    directory: str
    state: str
    store: SegmentStore
    #: Returns True if this shard owns the slot.
    owns: Callable[[int], bool]
    is_online: bool = False
    #: True to verify the segments in the cold store, too.
    with_cold: bool = False
    #: Called with the number of bytes after each read of a segment.
    pause: Pause = segments.no_pause


class VerifyResult(NamedTuple):
    """The problems of a shard, and counts of the verified data."""

    problems: list[Problem]
    #: Why the cold store could not be read completely; empty if it could. It is no sign of damage.
    unread: str
    boxes: int
    records: int
    segments: int
    bytes: int


def verify_shard(disk: DiskLike, scope: Scope) -> VerifyResult:
    """Verify one shard."""
    problems = list(_verify_snapshots(disk, scope.directory))
    if scope.is_online:
        problems += map(_problem, Wal(disk, f"{scope.directory}/wal").verify_closed())
    machine: Machine | None = None
    try:
        machine = read_shard(disk, scope.state, open_segment=scope.store.open)
    except Corrupt as damage:
        if damage.path not in {problem.path for problem in problems if not problem.is_harmless}:
            problems.append(_problem(damage))
    except (frames.UnknownFrame, DoesNotApply) as error:
        problems.append(Problem(scope.state, 0, f"snapshot and log contradict each other: {error!r}"))
    else:
        problems += _verify_state(scope, machine)
    names = _names_in_use(disk, scope, machine)
    unread = ""
    size = 0
    for name in names:
        try:
            segment_bytes, segment_problems = _verify_segment(disk, scope, name)
        except ColdStoreUnreachable as trouble:  # further calls would take as long
            unread, scope = str(trouble), scope._replace(with_cold=False)
            continue
        size += segment_bytes
        places = {(problem.path, problem.offset) for problem in problems}
        problems += [problem for problem in segment_problems if (problem.path, problem.offset) not in places]
    boxes = machine.boxes if machine is not None else {}
    records = sum(box.log.count for box in boxes.values() if not box.is_memory)
    return VerifyResult(problems, unread, len(boxes), records, len(names), size)


def bytes_to_read(disk: DiskLike, scope: Scope) -> int:
    """Return about how many bytes of segments a check of this scope reads."""
    directory = f"{scope.directory}/segments"
    files = segments.list_segments(disk, directory)
    size = 0
    for file in files:
        with suppress(FileNotFoundError):  # it has moved to the cold store, or was dropped
            size += disk.size(f"{directory}/{file}")
    if scope.with_cold:
        here = set(map(name_of, files))
        for stub in segments.list_stubs(disk, directory):
            with suppress(FileNotFoundError, Corrupt):  # damage is reported later
                if name_of(stub) not in here:
                    size += segments.open_stub(FileSource(disk, f"{directory}/{stub}")).file_bytes
    return size


def _problem(damage: Corrupt) -> Problem:
    return Problem(damage.path, damage.offset, damage.reason)


def _verify_snapshots(disk: DiskLike, directory: str) -> Iterator[Problem]:
    """Verify each snapshot. A damaged one is harmless while another one is intact."""
    snapshots = Snapshots(disk, f"{directory}/snapshot")
    problems: list[Problem] = []
    lsns = snapshots.list_lsns()
    for lsn in lsns:
        try:
            frames.decode_state(snapshots.load(lsn))
        except Corrupt as damage:
            problems.append(_problem(damage))
        except FileNotFoundError:  # a newer one has replaced it meanwhile
            pass
    for problem in problems:
        yield problem._replace(is_harmless=len(problems) < len(lsns))


def _verify_state(scope: Scope, machine: Machine) -> Iterator[Problem]:
    for name, box in machine.boxes.items():
        try:
            box.log.check()
        except AssertionError as error:
            yield Problem(scope.state, 0, f"box {name}: the invariant {error} does not hold")
        if not scope.owns(slot_of(name)):
            yield Problem(scope.state, 0, f"box {name} is in slot {slot_of(name)}, which another shard owns")
    try:
        machine.check()
    except AssertionError as error:
        yield Problem(scope.state, 0, f"the invariant {error} does not hold")


def _names_in_use(disk: DiskLike, scope: Scope, machine: Machine | None) -> list[Name]:
    """Return the segments that are in use; if unknown, all that exist."""
    if machine is not None:
        return [Name.of(segment) for segment in machine.segments()]
    files = segments.list_segments(disk, f"{scope.directory}/segments")
    stubs = segments.list_stubs(disk, f"{scope.directory}/segments")
    return sorted({name_of(file) for file in (*files, *stubs)})


def name_of(file: str) -> Name:
    """Return the name of the segment that a file or a stub in the segments directory belongs to."""
    generation, _, rest = file.partition("/")
    first_seq, _, serial = rest.partition(".")[0].partition("-")
    return Name(int(generation), int(first_seq), int(serial))


def _verify_segment(disk: DiskLike, scope: Scope, name: Name) -> tuple[int, list[Problem]]:
    """Verify a segment and its stub. Returns (bytes read, problems)."""
    directory = f"{scope.directory}/segments"
    file, stub = f"{directory}/{name.file}", f"{directory}/{name.stub}"
    problems: list[Problem] = []
    size = 0
    if disk.exists(stub):
        problems += map(_problem, segments.verify_stub(FileSource(disk, stub)))
    try:
        if disk.exists(file):
            size = disk.size(file)
            problems += map(
                _problem, segments.verify_segment(_PacedSource(FileSource(disk, file), scope.pause))
            )
        elif not disk.exists(stub):
            problems.append(Problem(file, 0, "the segment is missing, and the log names it"))
        elif scope.with_cold:
            try:  # the stub may be damaged; the store knows the size
                source = scope.store.source_in_cold(name)
            except Corrupt as damage:
                problems.append(_problem(damage))
            else:
                size = source.size()
                problems += map(_problem, segments.verify_segment(_PacedSource(source, scope.pause)))
        if disk.exists(stub) and disk.exists(file) and not problems:
            of_file = segments.open_segment(FileSource(disk, file))
            if digest_of(of_file) != digest_of(segments.open_stub(FileSource(disk, stub))):
                problems.append(Problem(stub, 0, "the stub is that of another segment"))
    except FileNotFoundError:  # it has moved to the cold store meanwhile
        return _verify_segment(disk, scope, name)
    return size, problems


class _PacedSource:
    """A source whose reads `pause` slows down."""

    def __init__(self, source: Source, pause: Pause) -> None:
        self._source = source
        self._pause = pause

    @property
    def name(self) -> str:
        return self._source.name

    def size(self) -> int:
        return self._source.size()

    def read(self, offset: int, length: int) -> bytes:
        content = self._source.read(offset, length)
        self._pause(len(content))
        return content
