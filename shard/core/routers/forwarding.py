"""Handles and applies copies between boxes: both ends of an origin, and tying them.

Theory of operation
-------------------

`streams/protocol/messages/forwards.py` has the whole picture. An *origin* is one ordered line of copies into
one box: a router's, or the dead letters of a queue. This file joins its two halves to boxes, log and clock.

A *tie* is one end of a router at a box. At the source it is an *outbox* in `box.outboxes` (`outbox.py`,
`router_outbox.py`): what the destination is known to have, and what is on the way. At the destination it is a
*pinned* entry in `box.origins` (`copy_sources.py`): the position up to which it has everything.
`AttachEndpoint` and `DetachEndpoint` come from `gateway/shards/router_reconciler.py`.
Dead letters have no ties: their first parcel creates
the origin (`bind`).

A *parcel* is a stretch of the source's records: those with `after` < position <= `upto`. It is appended only
if the origin stands at `after`, and the same change sets the origin to `upto`. So a repeat changes nothing.

The source:

    an append is shown ─► `Context._on_shown` ─► `note` ─► `Outboxes.note`: may an outbox send?
    if so, RELAY is among the names that the engine wakes (`Durability._show` returns it; of a memory box
    it is in the outcome) ─► the engine handles the waiting `Collect` again ─► `_collect`: parcels
    `ReportDelivery`: the result of a parcel ─► `_carried`: the outbox moves on, tries again, or plans anew

The destination:

    `Forward`: a parcel ─► `_forward`: does it begin where the origin stands? ─► one `BatchForwarded`
    if not, nothing changes, and the answer says where the origin stands

The carrier in between (`gateway/shards/router_relay.py`) keeps nothing.

Rules of the file
- A tie is part of what a box *is*, like its config: it is logged, and durable before it is answered, also for
  a memory box, whose positions are not.
- A parcel's records and its origin's position are one change: the invariant ONCE of `copy_sources.py`.
"""

from __future__ import annotations

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.context import Context
from shard.core.durability import Answer
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.move_lines import Line
from shard.core.routers import copy_sources
from shard.core.routers.copy_sources import Origin
from shard.core.routers.outbox import Outbox, Outboxes
from shard.core.routers.router_outbox import RouterOutbox
from streams.protocol.errors import BoxNotFound, FencingTokenMismatch, RouterNotFound
from streams.protocol.messages import forwards
from streams.protocol.messages.forwards import RELAY, ForwardHead, ForwardReply
from streams.protocol.messages.routers import router_of
from streams.protocol.model.records import columns_of, render


class Forwarding:
    """The part of a machine that copies records between boxes. It works on the machine's own boxes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_check(self.check)
        self.outboxes = Outboxes()
        #: The last change of a tie, or the start of this life; it is the version of the ties too.
        self.ties_lsn = 0
        context.on_command(forwards.Forward, self._forward)
        context.on_command(forwards.Collect, self._collect)
        context.on_command(forwards.ReportDelivery, self._carried)
        context.on_command(forwards.AttachEndpoint, self._tie)
        context.on_command(forwards.DetachEndpoint, self._untie)
        context.on_command(forwards.GetOutbox, self._get_outbox)
        context.on_command(forwards.ListEndpoints, self._list_ties)
        context.on_box_change(changes.BatchForwarded, self._apply_forwarded, validation.forwarded)
        context.on_box_change(changes.OriginMoved, self._apply_origin_moved)
        context.on_box_change(changes.OriginDropped, self._apply_origin_dropped)
        context.on_box_change(changes.OutboxTied, self._apply_outbox_tied)
        context.on_box_change(changes.OutboxUntied, self._apply_outbox_untied, _require_outbox)
        context.on_box_change(changes.OutboxMoved, self._apply_outbox_moved, _require_outbox)

    def __repr__(self) -> str:
        return f"<Forwarding {self.outboxes!r}>"

    # -- the destination

    def _forward(self, command: forwards.Forward, now_ms: int, entries: LogEntries) -> Outcome:
        context, head = self._context, command.head
        box = context.boxes.get(head.box)
        created: changes.BoxCreated | None = None
        if box is None:
            if not head.create:
                raise BoxNotFound(f"box {head.box} does not exist (any more)", box=head.box)
            if context.usage.is_on:
                context.usage.require_for_all(head.box, "boxes")
            created, box = context.plan_created(head, now_ms)
        else:
            context.expire(box, now_ms, entries)
        known = self._standing(box, head)
        if not copy_sources.fits(known, head):
            answer = ForwardReply(known.life, known.position, known.total, box.generation)
            return self._confirm(box, answer, entries)
        if box.fencing_token:
            raise FencingTokenMismatch(f"{box.name} is fenced: copies have no token", field="fencing_token")
        change = _plan_copies(box, command, known, now_ms) if head.count else None
        if change is not None and context.usage.is_on and router_of(head.origin) is not None:
            # A job that moves takes its place elsewhere; a copy of a router is one more.
            context.usage.require_for_all(box.name, "stored_bytes", change.batch.live_bytes)
        if created is not None:
            context.log(created, entries)
            box = context.generations[created.generation]
        answer = ForwardReply(head.life, head.upto, known.total + head.count, box.generation)
        if change is not None:
            written = context.append_batch(command, box, change, created is not None, entries)
            return self._confirm(box, answer, entries, written.wakes)
        lost = known.lost + head.lost
        moved = changes.OriginMoved(box.generation, head.origin, head.life, head.upto, lost)
        context.stage(moved, box, entries)
        return self._confirm(box, answer, entries)

    def _confirm(
        self, box: Box, reply: ForwardReply, entries: LogEntries, wakes: tuple[str, ...] = ()
    ) -> Outcome:
        """The source drops what is confirmed and never sends it again, so a confirmation reports nothing that
        a power cut can take. Readers see the copies as soon as other records of the box."""
        wait = self._context.durability.wait_for(Answer.COPY, box, box.last_lsn)
        return reply_after(wait, entries, reply, wakes)

    @staticmethod
    def _standing(box: Box, head: ForwardHead) -> Origin:
        known = box.origins.get(head.origin)
        if known is not None:
            return copy_sources.standing(known, head)
        if not head.bind:
            raise RouterNotFound(f"{head.origin} is not tied to {box.name} (any more)")
        copy_sources.check_room(box.origins, head.origin)
        return Origin(head.life, head.after)

    def _apply_forwarded(self, change: changes.BatchForwarded, lsn: int) -> None:
        box = self._context.generations[change.generation]
        if change.lost:
            box.log.skip(change.lost)
        self._context.box_appliers.appended(change, lsn)
        copy_sources.forwarded(box.origins, change)

    def _apply_origin_moved(self, change: changes.OriginMoved, lsn: int) -> None:
        box = self._context.generations[change.generation]
        if change.origin not in box.origins:
            self._note_tie(lsn)
        copy_sources.moved(box.origins, change)
        box.last_lsn = lsn

    def _apply_origin_dropped(self, change: changes.OriginDropped, lsn: int) -> None:
        # What came into a box in memory is in no log: then the log knows of the end of an origin alone.
        self._context.generations[change.generation].origins.pop(change.origin, None)
        self._note_tie(lsn)

    # -- the source

    def _collect(self, command: forwards.Collect, now_ms: int, entries: LogEntries) -> Outcome:
        parcels = self.outboxes.collect(command.carrier)
        if not parcels and command.wait_ms:
            return Outcome(entries, None)
        return Outcome(entries, forwards.CollectReply(self.outboxes.shard_life, parcels))

    def _carried(self, command: forwards.ReportDelivery, now_ms: int, entries: LogEntries) -> Outcome:
        outbox = self.outboxes.came_back(command, now_ms)
        if outbox is not None:
            box = self._context.boxes[outbox.source]
            is_held = outbox.is_line and self.outboxes.lines_held
            moved = None if is_held else outbox.change_of_move(box.generation, now_ms)
            if moved is not None:
                self._context.stage(moved, box, entries)
        # Somebody may wait until records have moved out of the source.
        wakes = (RELAY, outbox.source) if isinstance(outbox, Line) else (RELAY,)
        return Outcome(entries, forwards.ReportDeliveryReply(outbox is not None), wakes=wakes)

    def _apply_outbox_moved(self, change: changes.OutboxMoved, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.outboxes[change.origin].saved(change.position, change.total)

    def note(self, box: Box) -> bool:
        """Readers of this box may see more, and so may whoever copies from it."""
        return self.outboxes.note(box.outboxes.values())

    # -- ties

    def _tie(self, command: forwards.AttachEndpoint, now_ms: int, entries: LogEntries) -> Outcome:
        context, origin = self._context, command.origin
        box = context.require(command.box)
        if command.route is None:
            if origin not in box.origins:
                copy_sources.check_room(box.origins, origin)
                context.log(
                    changes.OriginMoved(box.generation, origin, command.life, command.position, pinned=True),
                    entries,
                )
            known = box.origins[origin]
            return self._when_durable(entries, forwards.AttachEndpointReply(known.life, known.position))
        outbox = box.outboxes.get(origin)
        is_newer = isinstance(outbox, RouterOutbox) and outbox.route.revision < command.route.revision
        if outbox is None or is_newer:
            position = command.position if command.life == box.generation else 0
            position = outbox.position if outbox is not None else min(position, box.log.head_seq)
            total = outbox.total if outbox is not None else 0
            tied = changes.OutboxTied(box.generation, origin, command.route, position, total)
            context.log(tied, entries)
        outbox = box.outboxes[origin]
        self.note(box)
        answer = forwards.AttachEndpointReply(outbox.life, outbox.position)
        return self._when_durable(entries, answer)._replace(wakes=(RELAY,))

    def _untie(self, command: forwards.DetachEndpoint, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.boxes.get(command.box)
        if box is not None and command.origin in box.outboxes:
            context.log(changes.OutboxUntied(box.generation, command.origin), entries)
        if box is not None and command.origin in box.origins:
            context.log(changes.OriginDropped(box.generation, command.origin), entries)
        return self._when_durable(entries, forwards.DetachEndpointReply(bool(entries)))

    def _when_durable(self, entries: LogEntries, reply: forwards.Reply) -> Outcome:
        """An answer about ties waits for the last change of any: a repeat must not overtake the first."""
        return reply_after(self._context.durability.wait_for_endpoint(self.ties_lsn), entries, reply)

    def _get_outbox(self, command: forwards.GetOutbox, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.boxes.get(command.box)
        outbox = box.outboxes.get(command.origin) if box is not None else None
        if not isinstance(outbox, RouterOutbox):
            return self._when_durable(entries, forwards.OutboxState(is_tied=False))
        return Outcome(
            entries,
            forwards.OutboxState(
                is_tied=True,
                forwarded_total=outbox.total,
                position=outbox.reached,
                lag=outbox.lag,
                is_blocked=bool(outbox.failures),
                last_error=outbox.last_error,
            ),
        )

    def _list_ties(self, command: forwards.ListEndpoints, now_ms: int, entries: LogEntries) -> Outcome:
        """All ties of this shard, unless none has changed since the asker last knew them."""
        if command.version == self.ties_lsn:
            return self._when_durable(entries, forwards.EndpointList(self.ties_lsn, True, [], []))
        boxes = self._context.boxes.values()
        sources = [(box.name, origin) for box in boxes for origin in box.outboxes]
        dests = [(box.name, origin) for box in boxes for origin, known in box.origins.items() if known.pinned]
        return self._when_durable(entries, forwards.EndpointList(self.ties_lsn, False, sources, dests))

    def _apply_outbox_tied(self, change: changes.OutboxTied, lsn: int) -> None:
        box = self._context.generations[change.generation]
        old = box.outboxes.get(change.origin)
        if old is not None:
            self.outboxes.close(old)
        box.outboxes[change.origin] = RouterOutbox(
            log=box.log,
            route=change.route,
            origin=change.origin,
            life=box.generation,
            position=change.position,
            total=change.total,
        )
        self._note_tie(lsn)

    def _apply_outbox_untied(self, change: changes.OutboxUntied, lsn: int) -> None:
        box = self._context.generations[change.generation]
        self.outboxes.close(box.outboxes.pop(change.origin))
        self._note_tie(lsn)

    def _note_tie(self, lsn: int) -> None:
        self.ties_lsn = max(self.ties_lsn, lsn)

    # -- boxes that end, or begin anew

    def routers_of(self, box: Box) -> list[str]:
        """The origins of all routers that are tied to this box."""
        ends = [*box.outboxes, *box.origins]
        return sorted({origin for origin in ends if router_of(origin) is not None})

    def close(self, outbox: Outbox) -> None:
        """Nothing leaves this outbox any more."""
        self.outboxes.close(outbox)

    def box_deleted(self, box: Box, lsn: int) -> None:
        for outbox in box.outboxes.values():
            self.outboxes.close(outbox)
        if box.outboxes or box.origins:
            self._note_tie(lsn)

    def box_reborn(self, old: Box, new: Box) -> None:
        """A memory box after a restart: tied as before, at the beginning of another life."""
        new.origins = {name: known.kept(is_memory=True) for name, known in old.origins.items()}
        for origin, outbox in old.outboxes.items():
            self.outboxes.close(outbox)
            new.outboxes[origin] = outbox.reborn(new.log, new.generation)

    def check(self) -> None:
        """Asserts ORIGINS, and that outboxes of a box are filed under their origins. For tests."""
        for box in self._context.boxes.values():
            assert len(box.origins) <= copy_sources.ORIGINS_MAX, "ORIGINS"
            assert all(outbox.origin == origin for origin, outbox in box.outboxes.items()), "ORIGINS"
        self.outboxes.check()


def _plan_copies(box: Box, command: forwards.Forward, known: Origin, now_ms: int) -> changes.BatchForwarded:
    """The change that a parcel becomes. Copies are written now, whatever the box says of clients' times."""
    head, log = command.head, box.log
    lost = known.lost + head.lost
    columns = columns_of(command.text, tags=head.tags, keep_nodes=head.keep_nodes)
    first_seq = log.head_seq + (2 if lost else 1)  # the one left out is the hole that tells of the loss
    batch = render(columns, first_seq=first_seq, times=max(now_ms, log.last_ts))
    batch.hops = head.hops
    assert batch.count == head.count, "a parcel holds what its label says"
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
        lost=lost,
    )


def _require_outbox(change: changes.OutboxUntied | changes.OutboxMoved, box: Box) -> None:
    if change.origin not in box.outboxes:
        raise DoesNotApply(f"nothing copies from box {box.name} for {change.origin}")
