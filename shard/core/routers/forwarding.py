"""Handles and applies copies between boxes: both endpoints of an origin, and how they are attached.

Theory of operation
-------------------

`streams/protocol/messages/forwards.py` has the whole picture. An *origin* is one ordered sequence of copies
into one box: those of a router, or the dead letters of a queue. This file connects its two halves to boxes,
log and clock.

An *endpoint* is one end of a router at a box (a "tie" in the log and on the wire). At the source it is an
*outbox* in `box.outboxes` (`outbox.py`, `router_outbox.py`): the confirmed position and the batches in
flight. At the destination it is a *pinned* entry in `box.origins` (`copy_sources.py`): the position up to
which it has all copies. `gateway/shards/router_reconciler.py` sends `AttachEndpoint` and `DetachEndpoint`.
Dead letters have no endpoints: their first batch creates the origin (`bind`).

A *copy batch* holds the source's records with `after` < position <= `upto`. It is appended only if the
origin's position is `after`, and the same change sets the position to `upto`. So a repeat changes nothing.

The source:

    an append is shown ─► `Context._on_shown` ─► `note` ─► `Outboxes.note`: may an outbox send?
    if so, RELAY is among the names that the engine wakes (`Durability._show` returns it; of a memory box
    it is in the outcome) ─► the engine handles the waiting `Collect` again ─► `_collect`: copy batches
    `ReportDelivery`: the result of a batch ─► `_report_delivery`: the outbox advances, retries or replans

The destination:

    `Forward`: a batch ─► `_forward`: does it start at the origin's position? ─► one `BatchForwarded`
    if not, nothing changes, and the reply contains the origin's position

The relay in between (`gateway/shards/router_relay.py`) has no state. If both boxes are on this shard, there
is none: `local_copies.py` hands the batch from `outbox.py` to `receive`, and its reply to `settle`.

Rules of the file
- An endpoint is part of its box, like the config: it is logged, and durable before the reply. This holds for
  a memory box too; its positions are not logged.
- One change holds the records of a batch and the origin's position: the invariant ONCE of `copy_sources.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.context import Context
from shard.core.durability import NOTHING, ReplyKind
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.move_queue import MoveQueue
from shard.core.routers import copy_sources
from shard.core.routers.copy_sources import Origin
from shard.core.routers.outbox import Outbox, Outboxes
from shard.core.routers.router_outbox import RouterOutbox
from streams.protocol.errors import BoxNotFound, FencingTokenMismatch, RouterNotFound
from streams.protocol.messages import forwards
from streams.protocol.messages.forwards import RELAY, ForwardHead, ForwardReply
from streams.protocol.messages.routers import router_of
from streams.protocol.model.job_fields import JobFields
from streams.protocol.model.records import columns_of, render


class Receipt(NamedTuple):
    """The effect of a copy batch on its destination."""

    box: Box
    reply: ForwardReply
    #: Boxes whose readers see the copies now.
    wakes: tuple[str, ...] = ()
    #: True if readers see the copies only when they are durable.
    until_durable: bool = False


class Forwarding:
    """The part of a machine that copies records between boxes. It works on the machine's own boxes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_check(self.check)
        self.outboxes = Outboxes(context.boxes)
        #: The lsn of the last change of an endpoint, or of the start; also the version of `EndpointList`.
        self.endpoints_lsn = 0
        context.on_command(forwards.Forward, self._forward)
        context.on_command(forwards.Collect, self._collect)
        context.on_command(forwards.ReportDelivery, self._report_delivery)
        context.on_command(forwards.AttachEndpoint, self._attach)
        context.on_command(forwards.DetachEndpoint, self._detach)
        context.on_command(forwards.GetOutbox, self._get_outbox)
        context.on_command(forwards.ListEndpoints, self._list_endpoints)
        context.on_box_change(changes.BatchForwarded, self._apply_forwarded, validation.validate_forward)
        context.on_box_change(changes.OriginMoved, self._apply_origin_moved)
        context.on_box_change(changes.OriginDropped, self._apply_origin_dropped)
        context.on_box_change(changes.OutboxTied, self._apply_attach)
        context.on_box_change(changes.OutboxUntied, self._apply_detach, _require_outbox)
        context.on_box_change(changes.OutboxMoved, self._apply_outbox_moved, _require_outbox)

    def __repr__(self) -> str:
        return f"<Forwarding {self.outboxes!r}>"

    # -- the destination

    def _forward(self, command: forwards.Forward, now_ms: int, entries: LogEntries) -> Outcome:
        """Confirm copies only when they are durable, because the source never sends confirmed records again.
        Readers see the copies as soon as other records of the box."""
        receipt = self.receive(command, now_ms, entries)
        wait = self._context.durability.wait_for(ReplyKind.COPY, receipt.box, receipt.box.last_lsn)
        outcome = reply_after(wait, entries, receipt.reply, receipt.wakes)
        is_patient = not (command.head.is_urgent or receipt.until_durable)
        return outcome._replace(is_patient=True) if is_patient else outcome

    def receive(self, command: forwards.Forward, now_ms: int, entries: LogEntries) -> Receipt:
        """Append a copy batch, if it starts at the origin's position."""
        context, head = self._context, command.head
        box = context.boxes.get(head.box)
        creation: changes.BoxCreated | None = None
        if box is None:
            if head.create is False:
                raise BoxNotFound(f"box {head.box} does not exist; it may have been deleted", box=head.box)
            if context.usage.is_on:
                context.usage.require_for_all(head.box, "boxes")
            creation, box = context.plan_created(head, now_ms)
        else:
            context.expire(box, now_ms, entries)
        origin = self._origin_for(box, head)
        if not copy_sources.fits(origin, head):
            return Receipt(
                box, ForwardReply(origin.generation, origin.position, origin.total, box.generation)
            )
        if box.fencing_token:
            raise FencingTokenMismatch(
                f"box {box.name} is fenced, and copies of a router have no token", field="fencing_token"
            )
        change = _plan_copies(box, command, origin, now_ms) if head.count else None
        if change is not None and context.usage.is_on and router_of(head.origin) is not None:
            # A moved job leaves its source, so only the copies of routers need more storage.
            context.usage.require_for_all(box.name, "stored_bytes", change.batch.live_bytes)
        if creation is not None:
            context.log(creation, entries)
            box = context.generations[creation.generation]
        reply = ForwardReply(head.life, head.upto, origin.total + head.count, box.generation)
        if change is not None:
            outcome = context.append_batch(command, box, change, creation is not None, entries)
            return Receipt(box, reply, outcome.wakes, outcome.until_durable)
        lost_count = origin.lost_count + head.lost
        move = changes.OriginMoved(box.generation, head.origin, head.life, head.upto, lost_count)
        context.stage(move, box, entries)
        return Receipt(box, reply)

    @staticmethod
    def _origin_for(box: Box, head: ForwardHead) -> Origin:
        origin = box.origins.get(head.origin)
        if origin is not None:
            return copy_sources.enter_generation(origin, head)
        if not head.bind:
            raise RouterNotFound(f"{head.origin} is not attached to box {box.name}; it may have been deleted")
        copy_sources.check_room(box.origins, head.origin)
        return Origin(head.life, head.after)

    def _apply_forwarded(self, change: changes.BatchForwarded, lsn: int) -> None:
        box = self._context.generations[change.generation]
        if change.lost:
            box.log.skip(change.lost)
        self._context.box_appliers.apply_append(change, lsn)
        copy_sources.apply_forward(box.origins, change)

    def _apply_origin_moved(self, change: changes.OriginMoved, lsn: int) -> None:
        box = self._context.generations[change.generation]
        if change.origin not in box.origins:
            self._note_endpoint(lsn)
        copy_sources.apply_move(box.origins, change)
        box.last_lsn = lsn

    def _apply_origin_dropped(self, change: changes.OriginDropped, lsn: int) -> None:
        # An origin of a memory box may not be in the log, only its end.
        self._context.generations[change.generation].origins.pop(change.origin, None)
        self._note_endpoint(lsn)

    # -- the source

    def _collect(self, command: forwards.Collect, now_ms: int, entries: LogEntries) -> Outcome:
        batches = self.outboxes.collect(command.carrier)
        if not batches and command.wait_ms:
            return Outcome(entries, None)
        return Outcome(entries, forwards.CollectReply(self.outboxes.start_lsn, batches))

    def _report_delivery(self, command: forwards.ReportDelivery, now_ms: int, entries: LogEntries) -> Outcome:
        outbox = self.settle(command, now_ms, entries)
        if outbox is not None:
            self.outboxes.note((outbox,))
        # An `AwaitMoves` may wait until records have left the source.
        wakes = (RELAY, outbox.source) if isinstance(outbox, MoveQueue) else (RELAY,)
        return Outcome(entries, forwards.ReportDeliveryReply(outbox is not None), wakes=wakes)

    def settle(self, report: forwards.ReportDelivery, now_ms: int, entries: LogEntries) -> Outbox | None:
        """Apply the result of a batch at its source. Return its outbox, or None if it is not in flight."""
        outbox = self.outboxes.settle(report, now_ms)
        if outbox is not None:
            box = self._context.boxes[outbox.source]
            is_paused = outbox.is_planned and self.outboxes.are_moves_paused
            change = None if is_paused else outbox.change_of_move(box.generation, now_ms)
            if change is not None:
                self._context.stage(change, box, entries)
        return outbox

    def _apply_outbox_moved(self, change: changes.OutboxMoved, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.outboxes[change.origin].apply_logged(change.position, change.total)

    def note(self, box: Box) -> bool:
        """Queue the outboxes of a box with new visible records. Return True if the relay may collect."""
        return self.outboxes.note(box.outboxes.values())

    def note_staged(self, box: Box) -> None:
        """Queue the outboxes of a box with new records whose destination is on this shard."""
        self.outboxes.note_staged(box.outboxes.values(), box.log.head_seq)

    # -- endpoints

    def _attach(self, command: forwards.AttachEndpoint, now_ms: int, entries: LogEntries) -> Outcome:
        context, origin = self._context, command.origin
        box = context.require(command.box)
        if command.route is None:
            if origin not in box.origins:
                copy_sources.check_room(box.origins, origin)
                context.log(
                    changes.OriginMoved(box.generation, origin, command.life, command.position, pinned=True),
                    entries,
                )
            state = box.origins[origin]
            return self._when_durable(entries, forwards.AttachEndpointReply(state.generation, state.position))
        outbox = box.outboxes.get(origin)
        is_newer = isinstance(outbox, RouterOutbox) and outbox.route.revision < command.route.revision
        if outbox is None or is_newer:
            position = command.position if command.life == box.generation else 0
            position = outbox.position if outbox is not None else min(position, box.log.head_seq)
            total = outbox.total if outbox is not None else 0
            change = changes.OutboxTied(box.generation, origin, command.route, position, total)
            context.log(change, entries)
        outbox = box.outboxes[origin]
        self.note(box)
        answer = forwards.AttachEndpointReply(outbox.generation, outbox.position)
        return self._when_durable(entries, answer)._replace(wakes=(RELAY,))

    def _detach(self, command: forwards.DetachEndpoint, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.boxes.get(command.box)
        if box is not None and command.origin in box.outboxes:
            context.log(changes.OutboxUntied(box.generation, command.origin), entries)
        if box is not None and command.origin in box.origins:
            context.log(changes.OriginDropped(box.generation, command.origin), entries)
        return self._when_durable(entries, forwards.DetachEndpointReply(bool(entries)))

    def _when_durable(self, entries: LogEntries, reply: forwards.Reply) -> Outcome:
        """Reply when the last change of any endpoint is durable: a repeat must not overtake the first."""
        return reply_after(self._context.durability.wait_for_endpoint(self.endpoints_lsn), entries, reply)

    def _get_outbox(self, command: forwards.GetOutbox, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.boxes.get(command.box)
        outbox = box.outboxes.get(command.origin) if box is not None else None
        if not isinstance(outbox, RouterOutbox):
            return self._when_durable(entries, forwards.OutboxState(is_tied=False))
        state = forwards.OutboxState(
            is_tied=True,
            forwarded_total=outbox.total,
            position=outbox.done_position,
            lag=outbox.lag,
            is_blocked=bool(outbox.failures),
            last_error=outbox.last_error,
        )
        dest = self._context.boxes.get(outbox.dest)
        wait = NOTHING
        if dest is not None and not dest.is_object:
            # Copies inside the shard count at once. Reply when readers can see them.
            wait = self._context.durability.wait_for(ReplyKind.RECORDS, dest, dest.last_lsn)
        return reply_after(wait, entries, state)

    def _list_endpoints(self, command: forwards.ListEndpoints, now_ms: int, entries: LogEntries) -> Outcome:
        """Return all endpoints of this shard, unless none has changed since the caller's version."""
        if command.version == self.endpoints_lsn:
            return self._when_durable(entries, forwards.EndpointList(self.endpoints_lsn, True, [], []))
        boxes = self._context.boxes.values()
        sources = [(box.name, origin) for box in boxes for origin in box.outboxes]
        dests = [
            (box.name, origin) for box in boxes for origin, state in box.origins.items() if state.is_pinned
        ]
        return self._when_durable(entries, forwards.EndpointList(self.endpoints_lsn, False, sources, dests))

    def _apply_attach(self, change: changes.OutboxTied, lsn: int) -> None:
        box = self._context.generations[change.generation]
        old = box.outboxes.get(change.origin)
        if old is not None:
            self.outboxes.close(old)
        box.outboxes[change.origin] = RouterOutbox(
            log=box.log,
            route=change.route,
            origin=change.origin,
            generation=box.generation,
            position=change.position,
            total=change.total,
        )
        self._note_endpoint(lsn)

    def _apply_detach(self, change: changes.OutboxUntied, lsn: int) -> None:
        box = self._context.generations[change.generation]
        self.outboxes.close(box.outboxes.pop(change.origin))
        self._note_endpoint(lsn)

    def _note_endpoint(self, lsn: int) -> None:
        self.endpoints_lsn = max(self.endpoints_lsn, lsn)

    # -- deleted and recreated boxes

    def routers_of(self, box: Box) -> list[str]:
        """Return the origins of all routers that are attached to this box."""
        ends = [*box.outboxes, *box.origins]
        return sorted({origin for origin in ends if router_of(origin) is not None})

    def close(self, outbox: Outbox) -> None:
        """Stop an outbox."""
        self.outboxes.close(outbox)

    def box_deleted(self, box: Box, lsn: int) -> None:
        for outbox in box.outboxes.values():
            self.outboxes.close(outbox)
        if box.outboxes or box.origins:
            self._note_endpoint(lsn)

    def box_reborn(self, old: Box, new: Box) -> None:
        """Attach the endpoints of a memory box to its next generation, after a restart."""
        new.origins = {name: origin.restart(is_memory=True) for name, origin in old.origins.items()}
        for origin, outbox in old.outboxes.items():
            self.outboxes.close(outbox)
            new.outboxes[origin] = outbox.recreate(new.log, new.generation)

    def check(self) -> None:
        """Asserts ORIGINS, and that each outbox of a box has its origin as key. For tests."""
        for box in self._context.boxes.values():
            assert len(box.origins) <= copy_sources.ORIGINS_MAX, "ORIGINS"
            assert all(outbox.origin == origin for origin, outbox in box.outboxes.items()), "ORIGINS"
        self.outboxes.check()


def _plan_copies(box: Box, command: forwards.Forward, origin: Origin, now_ms: int) -> changes.BatchForwarded:
    """Return the change that appends a batch. Copies get the current time, also where clients set times."""
    head, log = command.head, box.log
    lost_count = origin.lost_count + head.lost
    columns = columns_of(command.text, tags=head.tags, keep_nodes=head.keep_nodes)
    first_seq = log.head_seq + (2 if lost_count else 1)  # the seq left out is the hole that reports the loss
    batch = render(columns, first_seq=first_seq, times=max(now_ms, log.last_ts))
    batch.hops = head.hops
    if head.job_fields is not None:
        batch.job_fields = JobFields.from_bytes(head.job_fields)[0]
    assert batch.count == head.count, "a batch holds as many records as its head says"
    evict_before_seq = 0
    if box.config.cap_records or box.config.cap_bytes:
        evict_before_seq = box.fit(batch.count, batch.live_bytes)
    return changes.BatchForwarded(
        box.generation,
        batch,
        now_ms,
        None,
        0,
        evict_before_seq,
        0,
        log.measure_before(evict_before_seq) if evict_before_seq else 0,
        log.newest_ts_before(evict_before_seq) if evict_before_seq else 0,
        origin=head.origin,
        life=head.life,
        position=head.upto,
        lost=lost_count,
    )


def _require_outbox(change: changes.OutboxUntied | changes.OutboxMoved, box: Box) -> None:
    if change.origin not in box.outboxes:
        raise DoesNotApply(f"nothing copies from box {box.name} for {change.origin}")
