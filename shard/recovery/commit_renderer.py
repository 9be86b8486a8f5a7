"""Renders the rows of commits: reads their chunks from the log, in a thread, and logs the rendered batches.

    core/transactions/commits.py ──► chunks read and rendered, in a thread ──► BatchKept …, TxnRendered

Commits take turns, one step each, so that a large commit does not delay the others. A step is a few
megabytes. Its result is logged in slices, and the shard serves requests between them.

Bounds: one step is in memory at a time. A step waits while the log is behind or the disk has no space. It
also waits while unsealed batches take too much memory, but at most `_PRESSURE_WAIT_S_MAX`: batches behind
rows that are not rendered cannot be sealed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio

from shard.core.changes import TxnHeld
from shard.core.machine import Machine
from shard.core.outcome import OutcomeLogger
from shard.core.transactions.commits import Commit, Step, render_step
from shard.storage.frames import decode
from shard.storage.wal import Wal
from streams.protocol.model.records import Batch
from streams.protocol.payloads.packed import unpack_again

#: Bytes that one step reads. With 64 boxes a batch gets some 2,000 records of 128 bytes.
STEP_BYTES = 16 << 20

#: Batches that are logged in one slice: about a millisecond.
_SLICE_BATCHES = 32

#: How long a step waits for memory at most, and how often it checks.
_PRESSURE_WAIT_S_MAX, _POLL_S = 0.5, 0.01


class CommitRenderer:
    def __init__(
        self,
        machine: Machine,
        read_chunk: Callable[[int], TxnHeld],
        *,
        log_outcome: OutcomeLogger,
        wait_durable: Callable[[int], Awaitable[bool]],
        is_blocked: Callable[[], bool],
        is_pressed: Callable[[], bool],
        on_rendered: Callable[[Iterable[int]], None],
    ) -> None:
        """`is_blocked`: the log accepts no more frames now. `is_pressed`: memory is short. `on_rendered` gets
        the generations of boxes with more rendered rows, or with no rows left to render."""
        self._machine = machine
        self._read_chunk = read_chunk
        self._log_outcome = log_outcome
        self._wait_durable = wait_durable
        self._is_blocked = is_blocked
        self._is_pressed = is_pressed
        self._on_rendered = on_rendered
        self._work_event = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<CommitRenderer of {len(self._machine.txns.commits)} commits>"

    def wake(self) -> None:
        """Start rendering: there are commits with rows to render."""
        self._work_event.set()

    async def wait_idle(self) -> None:
        """Wait until no commit has rows left to render."""
        while self._machine.txns.commits:
            self._idle = trio.Event()
            self.wake()
            await self._idle.wait()

    async def run(self) -> None:
        while True:
            await self._work_event.wait()
            self._work_event = trio.Event()
            while commits := list(self._machine.txns.commits.values()):
                for commit in commits:
                    await self._wait_for_capacity()
                    if not await self.step(commit):
                        return
            self._idle.set()

    async def _wait_for_capacity(self) -> None:
        with trio.move_on_after(_PRESSURE_WAIT_S_MAX):
            while self._is_pressed():  # noqa: ASYNC110 (no event reports the end of it)
                await trio.sleep(_POLL_S)
        while self._is_blocked():  # noqa: ASYNC110 (no event reports the end of it)
            await trio.sleep(_POLL_S)

    async def step(self, commit: Commit) -> bool:
        """Render the next chunks of a commit. Return False if the log has failed."""
        if not await self._wait_durable(commit.lsn):
            return False
        if commit.lsn not in self._machine.txns.commits:
            return True
        step = commit.plan(STEP_BYTES)
        rendered_batches = await trio.to_thread.run_sync(render_chunks, step, self._read_chunk)
        for at in range(0, len(rendered_batches), _SLICE_BATCHES):
            batches = rendered_batches[at : at + _SLICE_BATCHES]
            self._log_outcome(self._machine.keep_rendered(commit, batches))
            self._on_rendered([generation for generation, _ in batches])
            await trio.lowlevel.checkpoint()
        self._log_outcome(self._machine.keep_rendered(commit, [], len(step.chunks)))
        # All targets, because a box may have been deleted meanwhile, and its rows with it.
        self._on_rendered([target.generation for target in commit.targets.values()])
        return True


def render_chunks(step: Step, read_chunk: Callable[[int], TxnHeld]) -> list[tuple[int, Batch]]:
    """Read and render the chunks of a step. Runs in a thread."""
    changes = [read_chunk(chunk.lsn) for chunk in step.chunks]
    columns = [unpack_again(change.packed, change.body) for change in changes]
    return list(render_step(step, columns))


def chunk_reader(wal: Wal) -> Callable[[int], TxnHeld]:
    """Return a function that reads a chunk from the log. Any thread may call it."""

    def read(lsn: int) -> TxnHeld:
        frame = wal.read(lsn)
        change = decode(frame.kind, frame.version, frame.content)
        assert isinstance(change, TxnHeld), "a chunk is found by the lsn of its frame"
        return change

    return read


def finish_commits(machine: Machine, read_chunk: Callable[[int], TxnHeld]) -> None:
    """Render all remaining rows of commits, in memory alone. For tools that read a folder."""
    for commit in list(machine.txns.commits.values()):
        while commit.lsn in machine.txns.commits:
            step = commit.plan(STEP_BYTES)
            machine.keep_rendered(commit, render_chunks(step, read_chunk), len(step.chunks))
