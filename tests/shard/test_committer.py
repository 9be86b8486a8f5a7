"""Goal: group commit reports what is logged and durable, in order, in time, once, and never after a failure.

Method: the real thread, on real files and on the fault disk. Tests wait for reports, never for time to pass;
to see a group form, a disk with a gate holds the thread inside a sync.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from shard.engine.committer import APPEND_NOW_BYTES_MAX, CommitFailed, Committer
from shard.storage.files import Disk, DiskLike
from shard.storage.wal import HEADER_BYTES, FrameParts, Wal
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk

FILE_BYTES = HEADER_BYTES + 4096
#: A report that takes this long is not late, it is missing.
PATIENCE_S = 60.0
#: Long enough that nothing in a test is ever synced because of it.
NEVER_MS = 3_600_000


class GatedDisk(FaultDisk):
    """Holds a thread inside a sync of its own until the gate is opened."""

    def __init__(self, thread: str = "wal-commit") -> None:
        super().__init__("/data")
        self.thread = thread
        self.error: OSError | None = None
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.armed = False

    def fdatasync(self, handle: int) -> None:
        if self.armed and threading.current_thread().name == self.thread:
            self.reached.set()
            assert self.gate.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
        super().fdatasync(handle)


class Desk:
    """A committer with its reports gathered in order, each with the lsn or the error it carried."""

    def __init__(self, disk: DiskLike, directory: str, **options: Any) -> None:
        self.disk = disk
        self.wal = Wal(disk, directory, file_bytes=FILE_BYTES, reserves=True)
        list(self.wal.scan())
        self.wal.settle()
        self.wal.prepare_next()
        self.reports: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self.committer = Committer(
            self.wal,
            post=self._post,
            on_logged=lambda lsn, ms: self.reports.put(("logged", lsn)),
            on_durable=lambda lsn, ms: self.reports.put(("durable", lsn)),
            on_failed=lambda error: self.reports.put(("failed", error)),
            **options,
        )
        self.lsn = 0

    def _post(self, callback: Callable[..., None], /, *args: object) -> None:
        callback(*args)

    def submit(self, *contents: bytes, sync: bool, notify_logged: bool = True) -> None:
        frames: list[FrameParts] = []
        for content in contents:
            self.lsn += 1
            frames.append((1, 1, self.lsn, [content]))
        self.committer.submit(frames, sync=sync, notify_logged=notify_logged)

    def next(self) -> tuple[str, object]:
        return self.reports.get(timeout=PATIENCE_S)

    def rest(self) -> list[tuple[str, object]]:
        return [self.reports.get_nowait() for _ in range(self.reports.qsize())]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Makes desks, started, and stops them."""
    made: list[Desk] = []

    def make(disk: DiskLike | None = None, **options: Any) -> Desk:
        options.setdefault("sync_interval_ms", NEVER_MS)
        made.append(Desk(disk or Disk(), "/data/wal" if disk else f"{tmp_path}/wal", **options))
        made[-1].committer.start()
        return made[-1]

    yield make
    for one in made:
        try:
            one.committer.stop()
        except CommitFailed:
            pass


@pytest.mark.parametrize("real", [True, False])
def test_logged_is_reported_then_durable(desk: Callable[..., Desk], real: bool) -> None:
    one = desk(None if real else FaultDisk("/data"))
    one.submit(b"a", sync=True)
    assert [one.next(), one.next()] == [("logged", 1), ("durable", 1)]
    one.submit(b"b", b"c", sync=False)
    assert one.next() == ("logged", 3)
    one.committer.stop()
    assert one.rest() == [("durable", 3)]


def test_logged_and_durable_are_one_report_when_nobody_waits_for_logged(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.submit(b"a", sync=True, notify_logged=False)
    assert one.next() == ("durable", 1)
    one.committer.flush()
    assert one.rest() == []


def test_what_nobody_waits_for_is_still_durable_after_the_interval(desk: Callable[..., Desk]) -> None:
    one = desk(sync_interval_ms=10)
    one.submit(b"a", sync=False)
    assert [one.next(), one.next()] == [("logged", 1), ("durable", 1)]
    assert one.committer.statistics().fsyncs == 1


def test_a_steady_flow_of_frames_that_nobody_waits_for_is_synced_all_the_same(
    desk: Callable[..., Desk],
) -> None:
    """The interval runs from the oldest frame that is not synced, however full the backlog is."""
    one = desk(FaultDisk("/data"), sync_interval_ms=5)
    while True:
        one.submit(b"more", sync=False)
        if one.next()[0] == "durable":
            break


def test_what_nobody_waits_to_be_synced_is_written_beside_a_sync(desk: Callable[..., Desk]) -> None:
    disk = GatedDisk("wal-sync")
    one = desk(disk, sync_interval_ms=5)
    disk.armed = True
    one.submit(b"a", sync=False)
    assert one.next() == ("logged", 1)
    assert disk.reached.wait(PATIENCE_S)
    one.submit(b"b", sync=False)
    assert one.next() == ("logged", 2)
    assert one.committer.append_now([(1, 1, 3, [b"c"])])
    assert one.rest() == []
    disk.gate.set()
    # Only what was written before the sync began is durable by it.
    assert [one.next(), one.next()] == [("durable", 1), ("durable", 3)]


def test_files_change_and_end_only_when_a_sync_beside_is_over(desk: Callable[..., Desk]) -> None:
    disk = GatedDisk("wal-sync")
    one = desk(disk, sync_interval_ms=5)
    disk.armed = True
    one.submit(b"a", sync=False)
    assert disk.reached.wait(PATIENCE_S)
    one.submit(b"b" * 4000, sync=False, notify_logged=False)  # needs the next file
    disk.gate.set()
    one.committer.stop()
    reports = [lsn for kind, lsn in one.rest() if kind == "durable"]
    assert reports[-1] == 2 and len(set(reports)) == len(reports)


def test_after_a_failed_sync_beside_no_other_sync_is_believed(desk: Callable[..., Desk]) -> None:
    """The next sync of the same file would succeed: the system reports the loss only once."""
    disk = GatedDisk("wal-sync")
    disk.error = OSError(errno.EIO, "input/output error")
    one = desk(disk, sync_interval_ms=5)
    disk.armed = True
    one.submit(b"a", sync=False)
    assert one.next() == ("logged", 1)
    assert disk.reached.wait(PATIENCE_S)
    one.submit(b"b", sync=True)
    assert one.next() == ("logged", 2)
    disk.gate.set()
    kind, error = one.next()
    assert kind == "failed" and isinstance(error, OSError | RuntimeError)
    with pytest.raises(CommitFailed):
        one.committer.flush()
    assert one.rest() == [] and one.wal.durable_lsn == 0


def test_a_quiet_log_is_marked_and_then_left_alone(desk: Callable[..., Desk]) -> None:
    class Listening(FaultDisk):
        def __init__(self) -> None:
            super().__init__("/data")
            self.syncs: SimpleQueue[None] = SimpleQueue()

        def fdatasync(self, handle: int) -> None:
            super().fdatasync(handle)
            if threading.current_thread().name == "wal-commit":
                self.syncs.put(None)

    disk = Listening()
    one = desk(disk, sync_interval_ms=1)
    one.submit(b"last", sync=True)
    for _ in ("header", "frame", "marker"):
        disk.syncs.get(timeout=PATIENCE_S)
    one.committer.stop()
    assert disk.syncs.qsize() == 0, "the log was proven already"
    disk.flip("/data/wal/000000000001.wal", HEADER_BYTES + 16)
    with pytest.raises(Exception, match="lsn 1 was durable"):
        list(Wal(disk, "/data/wal", file_bytes=FILE_BYTES).scan())


def test_what_comes_during_a_sync_is_one_group(desk: Callable[..., Desk]) -> None:
    disk = GatedDisk()
    one = desk(disk)
    disk.armed = True
    one.submit(b"first", sync=True)
    assert disk.reached.wait(PATIENCE_S)
    for number in range(20):
        one.submit(b"%d" % number, sync=number == 7, notify_logged=False)
    assert one.committer.backlog_bytes >= 30
    disk.armed = False
    disk.gate.set()
    one.committer.flush()
    statistics = one.committer.statistics()
    assert (statistics.groups, statistics.frames, statistics.fsyncs) == (2, 21, 2)
    assert statistics.backlog_bytes == 0
    assert one.rest() == [("logged", 1), ("durable", 1), ("durable", 21)]


def test_what_is_parted_is_synced_without_what_follows(desk: Callable[..., Desk]) -> None:
    disk = GatedDisk()
    one = desk(disk)
    disk.armed = True
    one.submit(b"first", sync=True)
    assert disk.reached.wait(PATIENCE_S)
    one.submit(b"waited for", sync=True, notify_logged=False)
    one.committer.end_group()
    one.submit(b"much", sync=False, notify_logged=False)
    disk.armed = False
    disk.gate.set()
    one.committer.flush()
    assert one.committer.statistics().groups == 3
    assert one.rest() == [("logged", 1), ("durable", 1), ("durable", 2), ("durable", 3)]


@pytest.mark.parametrize(
    ("options", "groups"), [({"group_frames_max": 5}, 4), ({"group_bytes_max": 50}, 4), ({}, 1)]
)
def test_groups_are_bounded(desk: Callable[..., Desk], options: dict[str, int], groups: int) -> None:
    disk = GatedDisk()
    one = desk(disk, **options)
    disk.armed = True
    one.submit(b"first", sync=True)
    assert disk.reached.wait(PATIENCE_S)
    for _ in range(20):
        one.submit(b"ten bytes.", sync=False)
    disk.armed = False
    disk.gate.set()
    one.committer.flush()
    assert one.committer.statistics().groups == 1 + groups


def test_reports_grow_and_everything_comes_back(desk: Callable[..., Desk], tmp_path: Path) -> None:
    one = desk(sync_interval_ms=1)
    rng = random.Random(6)
    contents = [rng.randbytes(rng.randrange(400)) for _ in range(3000)]
    position = 0
    while position < len(contents):
        count = rng.randrange(1, 6)
        one.submit(*contents[position : position + count], sync=rng.random() < 0.1)
        position += count
    one.committer.stop()
    logged = durable = 0
    for kind, lsn in one.rest():
        assert isinstance(lsn, int)
        if kind == "logged":
            assert lsn > logged
            logged = lsn
        else:
            assert kind == "durable" and durable < lsn <= logged
            durable = lsn
    assert logged == durable == len(contents)
    statistics = one.committer.statistics()
    assert statistics.frames == len(contents) and statistics.rotations > 100
    assert statistics.durable_lsn == statistics.logged_lsn == len(contents)
    again = Wal(Disk(), f"{tmp_path}/wal", file_bytes=FILE_BYTES)
    assert [bytes(frame.content) for frame in again.scan()] == contents


def test_nothing_reported_durable_is_lost_in_a_crash() -> None:
    for seed in range(30):
        disk = FaultDisk("/data")
        one = Desk(disk, "/data/wal", sync_interval_ms=1)
        rng = random.Random(seed)
        disk.crash_at(disk.operations + rng.randrange(100), rng.choice(MOMENTS))
        one.committer.start()
        for number in range(200):
            one.submit(b"%d" % number * 20, sync=rng.random() < 0.3)
        try:
            one.committer.stop()
        except CommitFailed as failed:
            assert isinstance(failed.__cause__, Crashed)
        durable = max(
            (lsn for kind, lsn in one.rest() if kind == "durable" and isinstance(lsn, int)), default=0
        )
        again = Wal(disk.crash(rng), "/data/wal", file_bytes=FILE_BYTES)
        frames = [bytes(frame.content) for frame in again.scan()]
        assert len(frames) >= durable
        assert frames == [b"%d" % number * 20 for number in range(len(frames))]


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync"])
def test_a_failure_is_reported_once_and_nothing_is_written_after_it(
    desk: Callable[..., Desk], operation: str
) -> None:
    disk = FaultDisk("/data")
    one = desk(disk)
    one.submit(b"good", sync=True, notify_logged=False)
    assert one.next() == ("durable", 1)
    failure = OSError(errno.EIO, "failed")
    disk.fail_next(operation, failure)
    one.submit(b"bad", sync=True, notify_logged=False)
    assert one.next() == ("failed", failure)
    operations = disk.operations
    for _ in range(5):
        one.submit(b"more", sync=True)
    with pytest.raises(CommitFailed):
        one.committer.flush()
    with pytest.raises(CommitFailed):
        one.committer.stop()
    assert one.rest() == []
    assert disk.history[operations:] == ["close"]


def test_a_flush_that_waits_when_the_failure_comes_is_let_go(desk: Callable[..., Desk]) -> None:
    disk = GatedDisk()
    one = desk(disk)
    disk.armed = True
    one.submit(b"first", sync=True)
    assert disk.reached.wait(PATIENCE_S)
    one.submit(b"second", sync=True)
    failures: list[Exception] = []

    def flush() -> None:
        try:
            one.committer.flush()
        except CommitFailed as failed:
            failures.append(failed)

    waiting = [threading.Thread(target=flush) for _ in range(3)]
    for thread in waiting:
        thread.start()
    disk.fail_next("pwritev", OSError(errno.EIO, "failed"))
    disk.gate.set()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert len(failures) == 3


def test_a_full_disk_while_preparing_is_no_failure_but_any_other_error_is() -> None:
    for code, fails in ((errno.ENOSPC, False), (errno.EIO, True)):
        disk = FaultDisk("/data")
        one = Desk(disk, "/data/wal", sync_interval_ms=NEVER_MS)
        one.wal._spares._ready.clear()
        disk.fail_next("create", OSError(code, "failed"))
        one.committer.start()
        if fails:
            assert one.next()[0] == "failed"
            with pytest.raises(CommitFailed):
                one.committer.stop()
        else:
            one.committer.stop()
            assert one.rest() == []


def test_old_files_are_released_in_the_background_and_reused(desk: Callable[..., Desk]) -> None:
    one = desk(FaultDisk("/data"))
    for _ in range(40):
        one.submit(b"x" * 1000, sync=True, notify_logged=False)
        one.committer.flush()
    files = one.wal.files()
    assert len(files) > 5
    one.committer.files.release(files[-2].number)
    one.committer.files.release(files[-3].number)
    one.committer.stop()
    assert one.wal.files() == files[-1:]
    assert "failed" not in dict(one.rest())


def test_stopping_twice_and_without_work_is_fine(desk: Callable[..., Desk]) -> None:
    one = desk()
    one.committer.stop()
    one.committer.stop()
    assert one.rest() == []
    assert "stopped" in repr(one.committer)


# Writing in the caller's own thread.


def idle(one: Desk) -> Desk:
    """With one durable frame, and the commit thread back at its backlog."""
    one.submit(b"a", sync=True)
    one.committer.flush()
    with one.committer._wal_lock:  # it lets go of the log only after its last report
        one.rest()
    return one


def now(one: Desk, *contents: bytes) -> bool:
    frames: list[FrameParts] = [(1, 1, one.lsn + at, [text]) for at, text in enumerate(contents, 1)]
    done = one.committer.append_now(frames)
    one.lsn += len(contents) if done else 0
    return done


def test_what_is_written_at_once_is_logged_on_return_and_synced_in_time(desk: Callable[..., Desk]) -> None:
    one = idle(desk(sync_interval_ms=20))
    assert now(one, b"b", b"c")
    assert one.wal.logged_lsn == 3
    assert one.next() == ("durable", 3)
    one.submit(b"d", sync=True)
    assert [one.next(), one.next()] == [("logged", 4), ("durable", 4)]


def test_nothing_is_written_at_once_while_the_thread_is_at_the_log_or_has_work(
    desk: Callable[..., Desk],
) -> None:
    disk = GatedDisk()
    one = idle(desk(disk))
    disk.armed = True
    one.submit(b"b", sync=True)
    assert disk.reached.wait(PATIENCE_S)
    assert not now(one, b"c")
    one.submit(b"c", sync=False)
    assert not now(one, b"d")
    disk.armed = False
    disk.gate.set()
    one.committer.flush()
    assert one.wal.durable_lsn == 3


def test_a_lot_or_more_than_the_file_holds_is_left_to_the_thread(desk: Callable[..., Desk]) -> None:
    one = idle(desk())
    assert not now(one, bytes(APPEND_NOW_BYTES_MAX + 1))
    assert not now(one, bytes(FILE_BYTES - HEADER_BYTES))
    assert one.wal.logged_lsn == 1


def test_nothing_is_written_at_once_while_the_disk_is_far_behind(desk: Callable[..., Desk]) -> None:
    """Whoever writes may then be made to wait for the disk, and that must not be the engine."""
    disk = GatedDisk("wal-sync")
    one = desk(disk, sync_interval_ms=5, unsynced_bytes_max=1000)
    disk.armed = True
    one.submit(b"a", sync=False)
    assert one.next() == ("logged", 1)
    assert disk.reached.wait(PATIENCE_S)
    assert now(one, bytes(1000))
    assert not now(one, b"c")
    disk.gate.set()
    assert [one.next(), one.next()] == [("durable", 1), ("durable", 2)]
    assert now(one, b"c")


def test_a_failed_write_at_once_is_reported_once_and_ends_everything(desk: Callable[..., Desk]) -> None:
    disk = FaultDisk("/data")
    one = idle(desk(disk))
    disk.fail_next("pwritev", OSError(errno.EIO, "failed"))
    assert not now(one, b"b")
    assert [kind for kind, _ in one.rest()] == ["failed"]
    assert not now(one, b"b")
    one.submit(b"b", sync=True)
    with pytest.raises(CommitFailed):
        one.committer.stop()
    assert one.rest() == []


# A disk that is full.


def test_a_commit_without_room_waits_and_is_reported_when_there_is_some(desk: Callable[..., Desk]) -> None:
    disk = FaultDisk("/data")
    one = desk(disk)
    one.submit(b"first", sync=True)
    assert [one.next(), one.next()] == [("logged", 1), ("durable", 1)]
    one.committer.flush()
    one.wal._spares._ready.clear()
    disk.is_full = True
    one.submit(b"x" * FILE_BYTES, sync=True)
    while not one.committer.waits_for_space:
        threading.Event().wait(0.001)
    done = one.committer.progress_count
    while (
        one.committer.progress_count == done
    ):  # it looks again and again, and is not taken for a disk that hangs
        threading.Event().wait(0.001)
    assert one.rest() == []
    disk.is_full = False
    assert [one.next(), one.next()] == [("logged", 2), ("durable", 2)]
    assert not one.committer.waits_for_space


def test_a_committer_that_waits_for_room_can_be_stopped(desk: Callable[..., Desk]) -> None:
    disk = FaultDisk("/data")
    one = desk(disk)
    one.wal._spares._ready.clear()
    disk.is_full = True
    one.submit(b"x" * FILE_BYTES, sync=True)
    while not one.committer.waits_for_space:
        threading.Event().wait(0.001)
    with pytest.raises(CommitFailed):
        one.committer.stop()


def test_the_next_file_that_cannot_be_made_is_told_before_the_current_one_is_full(
    desk: Callable[..., Desk],
) -> None:
    disk = FaultDisk("/data")
    told = threading.Event()
    one = desk(disk, on_space=told.set)
    one.submit(b"first", sync=True)
    assert one.next() == ("logged", 1)
    while not one.wal.has_spare:
        threading.Event().wait(0.001)
    disk.is_full = True
    one.wal._spares._ready.clear()
    one.committer.files.prepare()
    assert told.wait(PATIENCE_S) and one.committer.files.lacks_next_file
    assert one.wal.has_room(1, 1000)
    told.clear()
    disk.is_full = False
    one.committer.files.prepare()
    assert told.wait(PATIENCE_S) and not one.committer.files.lacks_next_file
