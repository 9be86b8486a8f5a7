"""Exports the state of a running shard at one lsn, for a backup or a check.

    begin(id) ──► captures state and unsealed batches ──► durable ──► <folder>/wal, <folder>/snapshot
                  in small steps; the segments it names are pinned: upkeep drops none of them
    renew(id) ──► extends the lease by `LEASE_S`
    end(id)   ──► removes folder and pins, then replies; also done when the lease expires

Before a backup captures the first shard, it makes all shards hold moves (`move_hold.py`), and after the last
one release them: `begin` and `renew` carry `holds_moves`.

The client reads the folder and the segment files itself, in another process: sealed data is not copied here.

Rules of the file
- One export at a time; another id has to wait. A repeated `begin` of one id gets the first reply again.
- The reply to `end`, and to a `begin` that fails, comes after the export is over. A client that has this
  reply can begin its next export at once.
- The folder is temporary: the remains of an earlier process are removed before the next export, and a full
  disk fails the export, not the shard.

Bounds: an export holds the unsealed batches in memory only until they are written, and backpressure bounds
them. It writes no faster than upkeep does. Pins last as long as the lease.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
import trio

from shard.core.machine import Machine
from shard.core.outcome import Outcome
from shard.storage.files import DiskLike, remove_tree
from shard.storage.retention import Pins, names_in
from shard.transfer.move_hold import MoveHold
from shard.transfer.shard_folders import Parts, ShardBuilder, begin_parts, end_parts, servers_of
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest, NotFound, ShuttingDown, StreamsError, Throttled
from streams.protocol.model.names import quote

log = structlog.get_logger()

#: Boxes per capture step, and the pause after each, as for a snapshot (`engine/engine.py`).
_STEP_BOXES, _STEP_REST_S = 32, 0.002

#: An export ends this long after its last renewal.
LEASE_S = 60.0

Answer = Callable[[dict[str, object] | StreamsError], None]


class ExportRequest(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    #: True with `begin`: hold moves, and begin no export yet. False with `renew`: release them.
    holds_moves: bool | None = None


class Exports:
    """The current export of a shard."""

    def __init__(
        self,
        machine: Machine,
        disk: DiskLike,
        folder: str,
        *,
        now_ms: Callable[[], int],
        wait_durable: Callable[[int], Awaitable[bool]],
        wait_rendered: Callable[[], Awaitable[None]],
        pins: Pins,
        on_unpinned: Callable[[], None],
        log_outcome: Callable[[Outcome], None],
        file_bytes: int,
        bytes_per_s: int,
        lease_s: float = LEASE_S,
    ) -> None:
        self._machine = machine
        self._disk = disk
        self._folder = folder
        self._now_ms = now_ms
        self._wait_durable = wait_durable
        self._wait_rendered = wait_rendered
        self._pins = pins
        self._on_unpinned = on_unpinned
        self._file_bytes = file_bytes
        self._bytes_per_s = bytes_per_s
        self._lease_s = lease_s
        self._hold = MoveHold(machine, now_ms=now_ms, log_outcome=log_outcome, lease_s=lease_s)
        #: The id of the current export, until its folder and its pins are removed.
        self._id = ""
        self._is_open = False
        self._facts: dict[str, object] | None = None
        #: Pending replies to `begin`, and to `end`.
        self._waiting: list[Answer] = []
        self._ending: list[Answer] = []
        self._wake_up = trio.Event()

    def __repr__(self) -> str:
        return f"<Exports {self._id or 'none'}, {self._pins!r}>"

    # -- requests

    def ask(self, op: int, body: bytes, answer: Answer) -> None:
        try:
            request = msgspec.json.decode(body, type=ExportRequest)
        except msgspec.DecodeError as error:
            answer(InvalidRequest(f"body: {error}"))
            return
        id = request.id
        self._hold.renew(id)
        if op == wire.OP_EXPORT_END or (op == wire.OP_EXPORT_RENEW and request.holds_moves is False):
            self._hold.end(id)
        if op == wire.OP_EXPORT and request.holds_moves and id:
            if self._hold.begin(id):
                answer({"id": id})
            else:
                answer(Throttled("another backup of this shard is in progress; try again when it has ended"))
        elif op == wire.OP_EXPORT:
            self._begin(id, answer)
        elif not id or id != self._id or (op == wire.OP_EXPORT_RENEW and not self._is_open):
            answer(NotFound(f"id: export {quote(id)} does not exist; it may have expired", field="id"))
        elif op == wire.OP_EXPORT_RENEW:
            self._wake_up.set()
            answer({"id": id})
        else:
            self._is_open = False
            self._wake_up.set()
            self._ending.append(answer)

    def _begin(self, id: str, answer: Answer) -> None:
        if not id:
            answer(InvalidRequest("id: required", field="id"))
        elif self._id and (id != self._id or not self._is_open):
            answer(
                Throttled("another backup or check of this shard is in progress; try again when it has ended")
            )
        elif self._facts is not None:
            answer(self._facts)
        else:
            self._id, self._is_open = id, True
            self._waiting.append(answer)
            self._wake_up.set()

    # -- running an export

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hold.run)
            nursery.start_soon(self._run_exports)

    async def _run_exports(self) -> None:
        while True:
            await self._wake_up.wait()
            self._wake_up = trio.Event()
            if self._id:  # also if `end` came before this task ran: it needs its reply
                id = self._id
                try:
                    failure = await self._run_export(id)
                    await trio.to_thread.run_sync(self._remove_folder)
                finally:
                    self._release()
                if failure is not None:
                    _answer_all(self._waiting, failure)
                _answer_all(self._ending, {"id": id})

    async def _run_export(self, id: str) -> StreamsError | None:
        """Run one export from begin to end. Returns the error if it failed."""
        parts, taken_ms = await self._capture()
        if not await self._wait_durable(parts.state.lsn):
            return ShuttingDown()
        try:
            await trio.to_thread.run_sync(self._write, parts, taken_ms)
        except OSError as error:
            return Throttled(f"the state of this shard could not be written for the export: {error}")
        self._facts = {
            "id": id,
            "folder": self._folder,
            "lsn": parts.state.lsn,
            "taken_ms": taken_ms,
            "boxes": len(parts.state.boxes),
            "segments": len(self._pins.names),
        }
        del parts  # the unsealed batches are in the folder now
        _answer_all(self._waiting, self._facts)
        while self._is_open:
            with trio.move_on_after(self._lease_s) as lease:
                await self._wake_up.wait()
            self._wake_up = trio.Event()
            if lease.cancelled_caught:
                log.warning("an export has expired: its client did not renew it in time", id=id)
                self._is_open = False
        return None

    async def _capture(self) -> tuple[Parts, int]:
        """Capture the state of this moment. Rows of commits are rendered first. Returns it with its time."""
        await self._wait_rendered()
        self._pins.is_all = True
        capture, taken_ms = begin_parts(self._machine), self._now_ms()
        try:
            while capture.step(_STEP_BOXES):  # noqa: ASYNC110 (it waits for nothing, it leaves room)
                await trio.sleep(_STEP_REST_S)
        except BaseException:
            self._machine.end_snapshot(capture)
            raise
        parts = end_parts(self._machine, capture)
        self._pins.names = await trio.to_thread.run_sync(names_in, parts.state)
        self._pins.is_all = False
        return parts, taken_ms

    def _remove_folder(self) -> None:
        try:
            remove_tree(self._disk, self._folder)
        except OSError as error:  # harmless; the next export tries again
            log.warning(
                "the folder of an export could not be removed; the next export tries again", reason=str(error)
            )

    def _release(self) -> None:
        self._id, self._is_open = "", False
        self._facts = None
        self._pins.release()
        self._on_unpinned()

    def _write(self, parts: Parts, taken_ms: int) -> None:
        remove_tree(self._disk, self._folder)
        write_export(
            self._disk, self._folder, parts, now_ms=taken_ms, file_bytes=self._file_bytes, pause=self._pause
        )

    def _pause(self, written_bytes: int) -> None:
        if self._bytes_per_s:
            time.sleep(written_bytes / self._bytes_per_s)


def _answer_all(waiting: list[Answer], reply: dict[str, object] | StreamsError) -> None:
    answers = waiting.copy()
    waiting.clear()
    for answer in answers:
        answer(reply)


def write_export(
    disk: DiskLike,
    folder: str,
    parts: Parts,
    *,
    now_ms: int,
    file_bytes: int,
    pause: Callable[[int], None] = lambda written_bytes: None,
) -> None:
    """Write the folder of a shard from `parts`, without segments."""
    builder = ShardBuilder(disk, folder, file_bytes=file_bytes, pause=pause)
    for facts in parts.state.boxes:
        builder.add(facts, parts.batches_of(facts))
    builder.add_not_recreated(parts.state.not_recreated)
    builder.add_routers(parts.state)
    builder.add_marks(parts.state.marks)
    builder.add_follows(servers_of(parts.state))
    builder.finish(last_generation=parts.state.last_generation, boot_id=parts.state.boot_id, now_ms=now_ms)
