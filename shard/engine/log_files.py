"""Creates and drops log files in a thread of its own, so that commits do not wait for it.

    engine, committer --prepare, release, drop_retained--> work --> [wal-files thread] --> Wal

The next file is created while the current one fills. It is filled with zeros, because an fsync of blocks that
exist is several times faster. If the last file was full within two seconds, the next one is only allocated,
because writing every byte twice would cost more than the fsyncs.

A full disk is not a failure. The thread reports it (`lacks_next_file`) long before the current file is full,
so that the engine refuses new data in time.

Bounds: one file is created at a time; a release is requested once per snapshot.
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
        #: True while the next log file cannot be created because the disk is full. Set by the thread.
        self.lacks_next_file = False
        #: A positive number: release all files up to it. A negative number: drop that file, which was
        #: released and retained. True: prepare the next file. None: end the thread.
        self._work: SimpleQueue[int | bool | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="wal-files", daemon=True)
        self._prepared_ns = -_FAST_FILE_NS - 1

    def __repr__(self) -> str:
        return f"<LogFiles of {self._wal!r}>"

    def start(self) -> None:
        self.prepare()
        self._thread.start()

    def stop(self) -> None:
        """End the thread when it has finished its queue. Blocks."""
        self._work.put(None)
        self._thread.join()

    def prepare(self) -> None:
        """Prepare the next log file, unless it is ready."""
        self._work.put(True)

    def release(self, number: int) -> None:
        """Drop all log files up to this number. Idempotent."""
        self._work.put(number)

    def drop_retained(self, number: int) -> None:
        """Drop a log file that was released and retained. Idempotent."""
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
