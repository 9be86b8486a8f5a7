"""Copies records between two boxes of this shard, without the relay.

    an append is staged, or shown ─► `Outboxes.local` ─► `step`: select, append to the destination, confirm
                                                                        │
                                          changes of the same log: BatchForwarded, OutboxMoved or MovesDone

The shard is its own relay here: the same outbox, the same copy batch, the same origin with its position, the
same changes as between two shards. So recovery, reshard and restore know nothing of this file. Two things are
simpler, because source and destination share one log:

- A destination confirms at once. The position of the outbox is logged after the copies, so no crash keeps the
  position and loses the copies. Only the object store may get the chains of two boxes in another order: a
  copy into an object box is confirmed when it is stored. Outputs of acks are confirmed when readers see them,
  because they count as pending until then.
- A copy may be logged in the same group as its record, before readers see the record, if no reader can see
  the copy first. `Durability.copyable_seq` decides that.

A step is bounded; the engine runs the next one after other commands (`shard/engine/local_copies.py`). An
*early* step runs before the group of a turn is written, so it delays the replies of that turn: it takes few
outboxes with few records each. Everything else follows after the replies.

Bounds: a step copies STEP_BATCHES_MAX batches and about STEP_BYTES_MAX bytes, and examines STEP_EXAMINE_MAX
records (the last batch may exceed the latter two). An early step takes EARLY_BATCHES_MAX outboxes that have
at most EARLY_RECORDS_MAX records each. One payload is fetched at a time. Unconfirmed copies are in flight,
which `outbox.py` bounds.
"""

from __future__ import annotations

from collections import deque

from shard.core.boxes.sealed import NotLoaded
from shard.core.context import Context
from shard.core.durability import NOTHING, ReplyKind, Wait
from shard.core.outcome import LogEntries, Outcome
from shard.core.queues.move_queue import MoveQueue
from shard.core.routers.forwarding import Forwarding
from shard.core.routers.outbox import Load, Outbox
from streams.protocol.errors import StreamsError
from streams.protocol.messages.forwards import RELAY, Forward, ReportDelivery

#: About two milliseconds of work.
STEP_BATCHES_MAX = 64
STEP_BYTES_MAX = 512 * 1024
STEP_EXAMINE_MAX = 20_000
#: About a third of a millisecond.
EARLY_BATCHES_MAX = 8
EARLY_RECORDS_MAX = 64


class LocalCopies:
    def __init__(self, context: Context, forwarding: Forwarding) -> None:
        self._context = context
        self._forwarding = forwarding
        self._outboxes = forwarding.outboxes
        #: Outboxes whose payload is not in memory. The engine fetches that of the first one.
        self._without_payload: list[Outbox] = []
        #: Reports for outboxes, about copies into object boxes and about outputs, in the order of their lsns.
        self._until_stored: deque[tuple[Wait, ReportDelivery]] = deque()
        self._until_visible: deque[tuple[Wait, ReportDelivery]] = deque()

    def __repr__(self) -> str:
        return f"<LocalCopies {len(self._outboxes.local)} outboxes wait>"

    @property
    def is_due(self) -> bool:
        """True if a step has anything to do."""
        return bool(self._outboxes.local) or self.can_confirm

    @property
    def can_confirm(self) -> bool:
        """True if copies have arrived whose outboxes do not know it."""
        is_over = self._context.durability.is_over
        return any(
            waiting and is_over(waiting[0][0]) for waiting in (self._until_stored, self._until_visible)
        )

    def step(self, now_ms: int, *, is_early: bool) -> Outcome:
        """Copy the next records. The outcome asks for a sync if readers of a destination wait for one."""
        entries: LogEntries = []
        wakes: dict[str, None] = {}
        needs: tuple[NotLoaded, ...] = ()
        self._confirm(now_ms, entries, wakes)
        queue, large_outboxes = self._outboxes.local, list[Outbox]()
        batches_left = EARLY_BATCHES_MAX if is_early else STEP_BATCHES_MAX
        bytes_left, examine_left = STEP_BYTES_MAX, STEP_EXAMINE_MAX
        needs_sync = False
        while queue and batches_left > 0 and bytes_left > 0 and examine_left > 0:
            outbox = queue.popleft()
            batches_left -= 1
            if is_early and outbox.unseen_count() > EARLY_RECORDS_MAX:
                large_outboxes.append(outbox)
                continue
            seen_from = outbox.seen_from
            try:
                size, is_urgent = self._copy(outbox, now_ms, entries, wakes)
            except NotLoaded as missing:
                if not self._without_payload:
                    needs = (missing.with_traceback(None),)
                self._without_payload.append(outbox)
                continue
            needs_sync = needs_sync or is_urgent
            bytes_left -= size
            examine_left -= max(0, outbox.seen_from - seen_from)
        queue.extendleft(reversed(large_outboxes))
        return Outcome(entries, None, 0, needs_sync, tuple(wakes), 0, needs)

    def confirm(self, now_ms: int) -> Outcome:
        """Confirm the copies that have arrived, and copy nothing."""
        entries: LogEntries = []
        wakes: dict[str, None] = {}
        self._confirm(now_ms, entries, wakes)
        return Outcome(entries, None, wakes=tuple(wakes))

    def resume(self, error: StreamsError | None, now_ms: int) -> None:
        """Try outboxes again whose payload was not in memory: the first one has it, or an error."""
        outboxes, self._without_payload = self._without_payload, []
        if error is not None:
            outbox = outboxes.pop(0)
            outbox.is_local = False
            self._outboxes.fail(outbox, 0, error.code, error.message, now_ms)
            outbox.settle()
        self._outboxes.local.extendleft(reversed(outboxes))

    def _copy(
        self, outbox: Outbox, now_ms: int, entries: LogEntries, wakes: dict[str, None]
    ) -> tuple[int, bool]:
        """Copy the next batch of an outbox. Returns its size, and whether its readers wait for a sync. Raises
        `NotLoaded` before the outbox has changed."""
        context, outboxes = self._context, self._outboxes
        dest = context.boxes.get(outbox.dest)
        if dest is None or not outboxes.may_send(outbox):
            outbox.is_local = False
            if outboxes.note((outbox,)):
                wakes[RELAY] = None
            return 0, False
        upto = context.durability.copyable_seq(context.boxes[outbox.source], dest)
        load = outbox.find(upto)
        is_urgent = False
        if outbox.is_worth_sending(load):
            is_urgent = self._send(outbox, load, now_ms, entries, wakes)
        else:
            outbox.skip(load)
        outbox.is_local = False
        if load.more or outbox.seen_from != load.upto:
            outboxes.note_staged((outbox,), upto)
        return len(load.text), is_urgent

    def _send(
        self, outbox: Outbox, load: Load, now_ms: int, entries: LogEntries, wakes: dict[str, None]
    ) -> bool:
        """Append a batch to its destination, and confirm it. Returns True if readers wait for a sync."""
        context, outboxes = self._context, self._outboxes
        forward = Forward(outbox.batch_head(load, outbox.sent_position), load.text)
        try:
            refusal = context.uploading.refuses(forward) if context.uploading.is_on else None
            if refusal is not None:
                raise refusal
            receipt = self._forwarding.receive(forward, now_ms, entries)
        except StreamsError as error:
            number = outboxes.begin(outbox, load, is_relayed=False)
            report = ReportDelivery(outboxes.start_lsn, number, None, error.code, error.message)
            self._settle(report, now_ms, entries, wakes)
            return False
        number = outboxes.begin(outbox, load, is_relayed=False)
        report = ReportDelivery(outboxes.start_lsn, number, receipt.reply)
        wakes.update(dict.fromkeys(receipt.wakes))
        wait = NOTHING
        if receipt.box.is_object or outbox.confirms_visible_copies:
            wait = context.durability.wait_for(ReplyKind.RECORDS, receipt.box, receipt.box.last_lsn)
        if wait.lsn:
            (self._until_stored if wait.until_uploaded else self._until_visible).append((wait, report))
        else:
            self._settle(report, now_ms, entries, wakes)
        return receipt.until_durable

    def _confirm(self, now_ms: int, entries: LogEntries, wakes: dict[str, None]) -> None:
        """Confirm the copies into object boxes that are in the store, and the outputs that are visible."""
        is_over = self._context.durability.is_over
        for waiting in (self._until_stored, self._until_visible):
            while waiting and is_over(waiting[0][0]):
                outbox = self._settle(waiting.popleft()[1], now_ms, entries, wakes)
                if outbox is not None and self._outboxes.note((outbox,)):
                    wakes[RELAY] = None

    def _settle(
        self, report: ReportDelivery, now_ms: int, entries: LogEntries, wakes: dict[str, None]
    ) -> Outbox | None:
        outbox = self._forwarding.settle(report, now_ms, entries)
        if isinstance(outbox, MoveQueue):
            wakes[outbox.source] = None  # an `AwaitMoves` may wait until records have left the source
        return outbox
