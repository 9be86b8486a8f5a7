"""Group commit: three threads write the log, fsync it and prepare its files, and report how far it is.

    engine --submit--> backlog --> [wal-commit thread] append, then fsync if a reply waits or it is due
    engine <---post--- on_logged(lsn, append_ms), on_durable(lsn, fsync_ms), on_failed(error)
                                   [wal-sync thread]  fsyncs that no reply waits for, beside further appends
                                   [wal-files thread] creates and releases files (`log_files.py`)
    engine --append_now--> log     a small group, in the engine's own thread while the commit thread is idle

While one group is written, the next one gathers in the backlog. So groups grow with the load, and all replies
of a group share one fsync. Frames that no reply waits for are synced `sync_interval_ms` after they were
written, by the sync thread. After a quiet interval the log writes a marker (PROVEN_WHEN_QUIET of
`wal/log.py`).

Rules of the file:
  1. It knows frames and lsns, never a box. It uses plain threads, no trio, and one lock (see `append_now`).
  2. Reports are handed to `post(callback, *args)`, which must be safe to call from any thread and not block.
  3. A failure is reported once. Afterwards nothing is written and nothing is reported, even if frames come.
  4. A full disk is not a failure. The commit thread keeps its frames and waits for space (`waits_for_space`).
     Long before that, the files thread reports that it cannot create the next file (`lacks_next_file`).

Invariants:
  REPORT_ORDER   lsns reported by one callback only grow; a durable lsn was reported as logged before, unless
                 no frame up to it had `notify_logged`.
  REPORT_AFTER   an lsn is reported as logged after its `append`, as durable after its `sync`, returned.
  BOUNDED_GROUP  a group takes no more once it has `group_bytes_max` or `group_frames_max`; it holds at least
                 one submission, whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import Protocol

from shard.engine.log_files import LogFiles
from shard.storage.wal import FrameParts, Wal
from streams.protocol.telemetry.histogram import Histogram

SYNC_INTERVAL_MS = 50
#: Writing 8 MiB takes about 15 ms: longer groups would only delay the first frames in them.
GROUP_BYTES_MAX = 8 << 20
GROUP_FRAMES_MAX = 1024
#: How often a write is retried while the disk is full.
_FULL_WAIT_S = 0.25

#: Bytes that the engine's own thread may write at once: a copy of some 50 µs into the page cache. More goes
#: to the commit thread, which writes in parallel with the engine. For less, the two thread switches and the
#: contention for the interpreter would cost the engine more than the write.
APPEND_NOW_BYTES_MAX = 128 << 10

#: Unsynced bytes beyond which `append_now` writes nothing: the disk is the bottleneck, the kernel blocks
#: writers inside a write, and it must not block the engine. A disk that keeps up stays far below: a million
#: records a second are some 20 MB in the time of an fsync.
UNSYNCED_BYTES_MAX = 128 << 20

#: (frames, their bytes, sync, notify_logged)
_Submission = tuple[Sequence[FrameParts], int, bool, bool]


class Post(Protocol):
    def __call__(self, callback: Callable[..., None], /, *args: object) -> object: ...


class CommitFailed(Exception):
    """The log could not be written; the shard has to end."""


@dataclass(frozen=True, slots=True)
class CommitterStatistics:
    frames: int
    groups: int
    fsyncs: int
    bytes_written: int
    rotations: int
    backlog_bytes: int
    append_ms_last: float
    fsync_ms_last: float
    logged_lsn: int
    durable_lsn: int


class _WakeUp:
    """Wakes the commit thread to compute its next deadline: `append_now` wrote frames that need a sync."""


_WAKE_UP = _WakeUp()


class _GroupBoundary:
    """A boundary in the backlog: no group contains frames from both sides of it."""


_GROUP_BOUNDARY = _GroupBoundary()


class _Flush:
    """A place in the backlog: `done` is set when all before it is durable, or never will be."""

    __slots__ = ("completion", "is_last")

    def __init__(self, *, is_last: bool) -> None:
        self.completion = threading.Event()
        self.is_last = is_last


_Item = _Submission | _Flush | _WakeUp | _GroupBoundary | BaseException


class Committer:
    def __init__(
        self,
        wal: Wal,
        *,
        post: Post,
        on_logged: Callable[[int, float], None],
        on_durable: Callable[[int, float], None],
        on_failed: Callable[[BaseException], None],
        on_space: Callable[[], None] = lambda: None,
        sync_interval_ms: int = SYNC_INTERVAL_MS,
        group_bytes_max: int = GROUP_BYTES_MAX,
        group_frames_max: int = GROUP_FRAMES_MAX,
        unsynced_bytes_max: int = UNSYNCED_BYTES_MAX,
    ) -> None:
        self._wal = wal
        self._post = post
        self._on_logged = on_logged
        self._on_durable = on_durable
        self._on_failed = on_failed
        #: Called when `waits_for_space` or `files.lacks_next_file` has changed.
        self._on_space = on_space
        #: True while the commit thread waits for room on the disk. Set by the commit thread.
        self.waits_for_space = False
        self._is_stopping = threading.Event()
        self._space_retries = 0
        wal.on_full = self._wait_for_space
        self._sync_interval_ns = sync_interval_ms * 1_000_000
        self._group_bytes_max = group_bytes_max
        self._group_frames_max = group_frames_max
        self._unsynced_bytes_max = unsynced_bytes_max
        #: An exception in it is a failure of the files or sync thread, which the commit thread reports.
        self._backlog: SimpleQueue[_Item] = SimpleQueue()
        #: Protects the log. `append_now` does not wait for it.
        self._wal_lock = threading.Lock()
        self.files = LogFiles(wal, on_space=partial(post, on_space), on_failed=self._backlog.put)
        self._commit_thread = threading.Thread(target=self._run, name="wal-commit", daemon=True)
        #: True requests a sync, None ends the thread.
        self._sync_requests: SimpleQueue[bool | None] = SimpleQueue()
        self._sync_thread = threading.Thread(target=self._run_syncs, name="wal-sync", daemon=True)
        #: True while the sync thread runs a sync. Set by the commit thread, cleared by the other.
        self._is_syncing = False
        self._failure: BaseException | None = None
        #: An item taken from the backlog and not processed yet. It must not be lost when a write fails.
        self._pending_item: _Flush | BaseException | None = None
        self._oldest_unsynced_ns = 0
        # Written by the engine's thread alone.
        self._submissions = 0
        self._submitted_bytes = 0
        # Written by the commit thread alone.
        self._submissions_written = 0
        self._written_bytes = 0
        # Written by the thread that holds the lock.
        self._durable_bytes = 0
        self._frames = 0
        self._groups = 0
        self._fsyncs = 0
        self.append_ms_last = 0.0
        self.fsync_ms_last = 0.0
        self.fsync_times = Histogram()

    def __repr__(self) -> str:
        state = "failed" if self._failure else "running" if self._commit_thread.is_alive() else "stopped"
        return f"<Committer {state}: {self.backlog_bytes} B waiting, durable {self._wal.durable_lsn}>"

    # For the engine's thread.

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are submitted and not yet logged."""
        return self._submitted_bytes - self._written_bytes

    @property
    def is_working(self) -> bool:
        """True while a thread writes or syncs the log, or has something to write."""
        return self._submissions != self._submissions_written or self._is_syncing or self._wal_lock.locked()

    @property
    def progress_count(self) -> int:
        """Groups written and syncs finished since the start: it grows whenever the log makes progress. A
        retry on a full disk counts too, because that disk does not hang."""
        return self._groups + self._fsyncs + self._space_retries

    def start(self) -> None:
        self.files.start()
        self._sync_thread.start()
        self._commit_thread.start()

    def submit(self, frames: Sequence[FrameParts], *, sync: bool, notify_logged: bool = True) -> None:
        """Submit frames in lsn order. `sync`: a reply waits until they are durable. `notify_logged`: a reply
        or a reader waits until they are logged; if none in a group does, only its durability is reported.
        """
        size = 0
        for frame in frames:
            for part in frame[3]:
                size += len(part)
        self._submissions += 1
        self._submitted_bytes += size
        self._backlog.put((frames, size, sync, notify_logged))

    def end_group(self) -> None:
        """End the current group: later submissions, which are large and which no reply waits for, do not
        delay its sync."""
        self._backlog.put(_GROUP_BOUNDARY)

    def append_now(self, frames: Sequence[FrameParts]) -> bool:
        """Write frames that need no sync now, in the calling thread, if the commit thread is idle. Return
        True if they are logged; then no `on_logged` report follows.

        Handing them to the commit thread would cost two thread switches, more than such a write itself. Only
        here do two threads compete for the log, hence the lock; this method does not wait for it.
        """
        if self._submissions != self._submissions_written:
            return False
        size = 0
        for frame in frames:
            for part in frame[3]:
                size += len(part)
        if size > APPEND_NOW_BYTES_MAX or not self._wal_lock.acquire(blocking=False):
            return False
        try:
            if self._failure is not None or not self._wal.has_room(len(frames), size):
                return False
            if self._wal.bytes_written - self._durable_bytes > self._unsynced_bytes_max:
                return False
            was_synced = not self._oldest_unsynced_ns
            if not self._try_append(frames):
                return False
            if was_synced:
                self._backlog.put(_WAKE_UP)
        except BaseException as failure:
            self._failure = failure
            self._post(self._on_failed, failure)
        finally:
            self._wal_lock.release()
        return self._failure is None

    @property
    def room_bytes(self) -> int:
        """Bytes that can certainly be logged beyond all submissions, even if the disk fills up."""
        return self._wal.room_bytes - self.backlog_bytes

    def statistics(self) -> CommitterStatistics:
        return CommitterStatistics(
            frames=self._frames,
            groups=self._groups,
            fsyncs=self._fsyncs,
            bytes_written=self._wal.bytes_written,
            rotations=self._wal.rotations,
            backlog_bytes=self.backlog_bytes,
            append_ms_last=self.append_ms_last,
            fsync_ms_last=self.fsync_ms_last,
            logged_lsn=self._wal.logged_lsn,
            durable_lsn=self._wal.durable_lsn,
        )

    def flush(self) -> None:
        """Block until all submissions are durable and reported. Raises `CommitFailed` if the log fails."""
        self._flush_and_wait(is_last=False)

    def stop(self) -> None:
        """Flush, close the log and end the threads. Blocks; `CommitFailed` if there was a failure."""
        if self._commit_thread.is_alive():
            self._is_stopping.set()
            self._sync_requests.put(None)
            self.files.stop()
            self._sync_thread.join()
            try:
                self._flush_and_wait(is_last=True)
            finally:
                self._commit_thread.join()

    def _flush_and_wait(self, *, is_last: bool) -> None:
        flush = _Flush(is_last=is_last)
        self._backlog.put(flush)
        flush.completion.wait()
        if self._failure is not None:
            raise CommitFailed(str(self._failure)) from self._failure

    # The commit thread.

    def _run(self) -> None:
        try:
            self._commit_until_stopped()
        except BaseException as failure:
            # Not only OSError: any error that ends this thread must end the shard, or writers would wait
            # forever.
            try:
                if self._failure is None:  # else `append_now` has reported it
                    self._failure = failure
                    self._post(self._on_failed, failure)
            finally:
                self._discard_until_stopped()

    def _commit_until_stopped(self) -> None:
        is_stopped = False
        while not is_stopped:
            if self._pending_item is not None:
                with self._wal_lock:
                    is_stopped = self._process_pending(self._pending_item)
                continue
            try:
                item = self._backlog.get(timeout=self._wait_s())
            except Empty:
                with self._wal_lock:
                    self._on_idle()
                continue
            if isinstance(item, tuple):
                with self._wal_lock:
                    self._commit_group(item)
            elif not isinstance(item, _WakeUp | _GroupBoundary):
                self._pending_item = item

    def _process_pending(self, item: _Flush | BaseException) -> bool:
        """Finish a flush, or raise a failure of another thread. Return True if it was the last item."""
        if isinstance(item, BaseException):
            raise item
        self._sync()
        if item.is_last:
            self._wal.close()
        self._pending_item = None
        item.completion.set()
        return item.is_last

    def _wait_s(self) -> float | None:
        """Return how long to wait for submissions before frames must be synced or a marker may be written."""
        if self._is_syncing:
            return None  # its end wakes this thread
        if self._oldest_unsynced_ns:
            return max(0, self._oldest_unsynced_ns + self._sync_interval_ns - monotonic_ns()) / 1e9
        if self._wal.needs_marker:
            return self._sync_interval_ns / 1e9
        return None

    def _on_idle(self) -> None:
        if self._oldest_unsynced_ns:
            self._begin_sync()
        elif not self._is_syncing:
            self._wal.mark()

    def _commit_group(self, first: _Submission) -> None:
        frames, size, sync, notify_logged = first
        backlog = self._backlog
        group = frames
        submissions = 1
        if backlog.qsize():
            group = list(frames)
            while size < self._group_bytes_max and len(group) < self._group_frames_max and backlog.qsize():
                item = backlog.get_nowait()
                if isinstance(item, _WakeUp):
                    continue
                if isinstance(item, _GroupBoundary):
                    break
                if not isinstance(item, tuple):
                    self._pending_item = item
                    break
                submissions += 1
                group += item[0]
                size += item[1]
                sync = sync or item[2]
                notify_logged = notify_logged or item[3]
        self._append(group)
        self._written_bytes += size
        self._submissions_written += submissions
        if notify_logged:
            self._post(self._on_logged, self._wal.logged_lsn, self.append_ms_last)
        if sync:
            self._sync()
        elif monotonic_ns() - self._oldest_unsynced_ns >= self._sync_interval_ns:
            self._begin_sync()

    def _append(self, group: Sequence[FrameParts]) -> None:
        wal = self._wal
        rotations = wal.rotations
        started_ns = monotonic_ns()
        wal.append(group)
        self._count_append(group, started_ns)
        if self.waits_for_space:
            self.waits_for_space = False
            self._post(self._on_space)
        if wal.rotations != rotations:
            self.files.prepare()

    def _try_append(self, group: Sequence[FrameParts]) -> bool:
        """Append without waiting. Return False if the disk is full; then the commit thread waits for
        space."""
        started_ns = monotonic_ns()
        if not self._wal.try_append(group):
            return False
        self._count_append(group, started_ns)
        return True

    def _count_append(self, group: Sequence[FrameParts], started_ns: int) -> None:
        self.append_ms_last = (monotonic_ns() - started_ns) / 1e6
        self._oldest_unsynced_ns = self._oldest_unsynced_ns or started_ns
        self._frames += len(group)
        self._groups += 1

    def _wait_for_space(self, error: OSError) -> bool:
        """Wait a while for space on the disk. Return False if the committer stops instead.

        The current frames are not acknowledged yet, and are written when there is space. So no acknowledged
        write is lost."""
        if not self.waits_for_space:
            self.waits_for_space = True
            self._post(self._on_space)
        self._space_retries += 1
        return not self._is_stopping.wait(_FULL_WAIT_S)

    def _sync(self) -> None:
        if self._wal.durable_lsn < self._wal.logged_lsn:
            started_ns = monotonic_ns()
            self._wal.sync()
            self._oldest_unsynced_ns = 0
            self._durable_bytes = self._wal.bytes_written
            self._report_durable(started_ns)

    def _begin_sync(self) -> None:
        if not self._is_syncing:
            self._is_syncing = True
            self._sync_requests.put(True)

    def _report_durable(self, started_ns: int) -> None:
        self.fsync_ms_last = (monotonic_ns() - started_ns) / 1e6
        self.fsync_times.observe(self.fsync_ms_last / 1000)
        self._fsyncs += 1
        self._post(self._on_durable, self._wal.durable_lsn, self.fsync_ms_last)

    def _discard_until_stopped(self) -> None:
        """After a failure: write nothing more, and only release the callers that wait for a flush."""
        item: object = self._pending_item
        while True:
            if isinstance(item, _Flush):
                item.completion.set()
                if item.is_last:
                    self._wal.abandon()
                    return
            item = self._backlog.get()

    # The sync thread. It holds the lock before and after an fsync, never during it.

    def _run_syncs(self) -> None:
        try:
            while self._sync_requests.get() is not None:
                self._sync_in_background()
        except BaseException as failure:
            self._backlog.put(failure)

    def _sync_in_background(self) -> None:
        with self._wal_lock:
            syncing = self._wal.begin_sync()
            self._oldest_unsynced_ns = 0
            synced_bytes = self._wal.bytes_written
        if syncing is not None:
            started_ns = monotonic_ns()
            self._wal.run_sync(syncing)
            with self._wal_lock:
                self._durable_bytes = max(self._durable_bytes, synced_bytes)
                if self._wal.end_sync(syncing):
                    self._report_durable(started_ns)
        self._is_syncing = False
        self._backlog.put(_WAKE_UP)
