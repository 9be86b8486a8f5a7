"""Collects the frames of one turn of the event loop, and writes them to the log together.

    machine ─► Outcome.changes ─► log() ─► frames ─► write() ─┬─► append_now    small, no reply needs a sync
                                                              └─► submit        otherwise: the commit thread

A turn is the work of one wake-up of the event loop: the server submits every command that it has read, then
flushes once. So the changes of a turn leave in one write.

Bounds: a turn stages the changes of one wake-up's commands. The servers bound those, and stop reading while
the committer has too much to write (`pressure.py`).
"""

from __future__ import annotations

from shard.core.machine import Machine, Outcome
from shard.engine.committer import APPEND_NOW_BYTES_MAX, Committer
from shard.storage import frames
from shard.storage.wal import FrameParts


class Staging:
    def __init__(self, machine: Machine, committer: Committer) -> None:
        self._machine = machine
        self._committer = committer
        #: Frames that the committer does not have yet.
        self.frames: list[FrameParts] = []
        #: True if a reply waits until they are durable.
        self._needs_sync = False
        #: True if a reply or a reader waits until they are logged.
        self._notify_logged = False

    def __repr__(self) -> str:
        return f"<Staging {len(self.frames)} frames>"

    def log(self, outcome: Outcome, *, sync: bool) -> None:
        """Stage changes; they leave with the next `write`. Changes after the lsn that the reply waits for
        (`afterthoughts`) may be a hundred times larger, so they go into another group: the reply's sync does
        not wait for them."""
        for lsn, change in outcome.changes:
            if outcome.afterthoughts and lsn == outcome.waits_for_lsn + 1:
                self._needs_sync = self._needs_sync or sync
                self._submit()
                self._committer.end_group()
                sync = False
            self.frames.append(frames.encode(lsn, change))
        self._needs_sync = self._needs_sync or sync
        if not outcome.until_durable or self._machine.shows_when_logged:
            self._notify_logged = True

    def goes_to_thread(self, size: int) -> bool:
        """Return True if the next `write`, of commands of about this size, is likely to go through the commit
        thread. The frame of a write is somewhat longer than its body."""
        return self._needs_sync or size > APPEND_NOW_BYTES_MAX * 3 // 4

    def write(self) -> int:
        """Write the frames at once, if they are small, and return the last lsn. Otherwise submit them to the
        commit thread, which reports later, and return 0."""
        if self._needs_sync or not self._committer.append_now(self.frames):
            self._submit()
            return 0
        lsn = self.frames[-1][2]
        self.frames, self._notify_logged = [], False
        return lsn

    def _submit(self) -> None:
        group, sync, notify_logged = self.frames, self._needs_sync, self._notify_logged
        self.frames = []
        self._needs_sync = self._notify_logged = False
        self._committer.submit(group, sync=sync, notify_logged=notify_logged)
