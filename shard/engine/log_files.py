"""The thread that makes and drops log files, so that commits do not wait for it.

    engine, committer --prepare, release, drop_retained--> work --> [wal-files thread] --> Wal

The next file is made while the current one fills: full of zeros, because a sync over blocks that exist is
several times faster; or only allocated, if the last one was full so soon that writing every byte twice would
cost more than the syncs.

A full disk is not a failure. The thread says so (`lacks_next_file`), long before the current file is full, so
that the engine stops taking data in time.

Bounds: one file is made at a time; a release is asked for once a snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic_ns

from shard.storage.files import NO_SPACE
from shard.storage.wal import Wal

#: A file that lasts for less than this is not followed by one full of zeros.
_FAST_FILE_NS = 2_000_000_000


class LogFiles:
    def __init__(
        self, wal: Wal, *, on_space: Callable[[], object], on_failed: Callable[[BaseException], None]
    ) -> None:
        """In the thread `on_space` is called when `lacks_next_file` has changed, `on_failed` when an error
        ends it."""
        self._wal = wal
        self._on_space = on_space
        self._on_failed = on_failed
        #: True while the next log file cannot be made, because the disk is full. Set by the thread.
        self.lacks_next_file = False
        #: A number asks to release all files up to it, a negative one to drop that file, which was kept; True
        #: asks for a spare to be ready, None ends the thread.
        self._work: SimpleQueue[int | bool | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="wal-files", daemon=True)
        self._prepared_ns = -_FAST_FILE_NS - 1

    def __repr__(self) -> str:
        return f"<LogFiles of {self._wal!r}>"

    def start(self) -> None:
        self.prepare()
        self._thread.start()

    def stop(self) -> None:
        """End the thread when it has done what it was asked for. Blocks."""
        self._work.put(None)
        self._thread.join()

    def prepare(self) -> None:
        """Try to have the next log file ready, if it is not."""
        self._work.put(True)

    def release(self, number: int) -> None:
        """Drop all log files up to this number. May be asked twice."""
        self._work.put(number)

    def drop_retained(self, number: int) -> None:
        """Drop a log file that was released and kept. May be asked twice."""
        self._work.put(-number)

    # In the thread.

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                if work is True:
                    self._prepare_next()
                elif work < 0:
                    self._wal.drop_retained(-work)
                else:
                    self._release(work)
        except BaseException as failure:
            self._on_failed(failure)

    def _prepare_next(self) -> None:
        now_ns = monotonic_ns()
        zeros = now_ns - self._prepared_ns > _FAST_FILE_NS
        self._prepared_ns = now_ns
        lacked_file = self.lacks_next_file
        try:
            self._wal.prepare_next(zeros=zeros)
            self.lacks_next_file = False
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.lacks_next_file = True
        if self.lacks_next_file != lacked_file:
            self._on_space()

    def _release(self, through: int) -> None:
        for file in self._wal.files()[:-1]:
            if file.number <= through:
                self._wal.release(file.number)
