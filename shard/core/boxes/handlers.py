"""Handles the commands of boxes: create, configure, delete; append, read, delete records, fence.

Rules of the file
- A write is worked out in full and checked before its first change is made.
- A box that the append creates is checked as a placeholder first: a refused append creates nothing.
"""

from __future__ import annotations

import msgspec

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.listing import queue_totals
from shard.core.boxes.sealed import UNFINISHED
from shard.core.context import Context
from shard.core.durability import ReplyKind
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.transactions.unrendered import NotRendered
from shard.core.watch.watch_pages import page_for
from streams.protocol.access.key_limits import AccountsUse, ExchangeUse
from streams.protocol.errors import BoxNotEmpty, FencingTokenMismatch, NotFound, Throttled
from streams.protocol.messages import commands
from streams.protocol.model.boxes import BoxConfig, merge

#: Idempotency keys remembered per shard. One costs about 320 bytes, so this is at most about 320 MB; at the
#: default window of two minutes it allows 8,000 keyed writes a second. Beyond it, keyed writes are refused
#: until older keys lapse: forgetting a key early would break a promise silently.
KEYS_MAX = 1_000_000


class BoxHandlers:
    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_command(commands.Append, self._append)
        context.on_command(commands.ReadBox, self._diff)
        context.on_command(commands.Follow, self._follow)
        context.on_command(commands.PutSession, self._session)
        context.on_command(commands.TakeSession, self._session)
        context.on_command(commands.KeepSession, self._session)
        context.on_command(commands.GetState, self._get_state)
        context.on_command(commands.PutBox, self._put_box)
        context.on_command(commands.DeleteBox, self._delete_box)
        context.on_command(commands.GetRecord, self._get_record)
        context.on_command(commands.GetTail, self._get_tail)
        context.on_command(commands.DeleteRecords, self._delete_records)
        context.on_command(commands.SetFence, self._set_fence)
        context.on_command(ExchangeUse, self._exchange_use)

    def _put_box(self, command: commands.PutBox, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.boxes.get(command.box)
        if box is None:
            if command.account:
                context.usage.require(command.account, "boxes")
            change = context.plan_box(command.box, command.patch, now_ms)
            lsn = context.log(change, entries)
            put = commands.PutBoxReply(command.box, True, change.config)
            return reply_after(
                context.durability.wait_for_config(lsn, change.config.durability), entries, put
            )
        context.expire(box, now_ms, entries)  # by the old TTL: what has expired stays expired
        config = merge(box.config, command.patch, box=command.box, exists=True)
        context.check_class(config, box)
        old_class, is_changed = box.config.durability, config != box.config
        if is_changed:
            self._configure(box, config, entries)
        # Also when nothing changes: a crash may have kept an earlier config and lost what it brought about.
        floor = box.floor_for_caps()
        if floor:
            context.stage(box.plan_eviction(floor, "cap", now_ms), box, entries)
        context.expire(box, now_ms, entries)
        context.arm_timer(box)
        lsn = max(box.config_lsn, entries[-1][0] if entries else 0)
        wait = context.durability.wait_for_config(lsn, old_class, config.durability)
        # A change of a memory box is visible at once. A queue may deliver more jobs, or none, from now on.
        wakes = (box.name,) if box.is_memory or (box.queue is not None and is_changed) else ()
        return reply_after(wait, entries, commands.PutBoxReply(command.box, False, config), wakes)

    def _configure(self, box: Box, config: BoxConfig, entries: LogEntries) -> None:
        context = self._context
        was_memory = box.is_memory
        if was_memory and box.log.tail.has_unrendered:
            raise NotRendered(box.generation)
        leases_durable = box.config.leases_durable
        if was_memory and config.durability != "memory":
            context.log(changes.BoxRestated(box.facts(whole=True)), entries)
            for batch in list(box.log.tail):
                if batch.dead < batch.count:
                    context.log(changes.BatchKept(box.generation, batch), entries)
        into_disk = config.durability == "disk" and not box.is_disk
        reserved_seq = context.ceiling_above(box.log.head_seq) if into_disk else 0
        context.log(changes.BoxConfigured(box.generation, config, reserved_seq), entries)
        begins = config.leases_durable and (was_memory or not leases_durable) and not box.is_memory
        if begins and box.queue is not None:
            context.jobs.restate(box, entries)

    def _get_state(self, command: commands.GetState, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        if command.touch:
            box.volatile.last_read_ms = now_ms
        log = box.log
        count, size = log.visible_totals()
        reply = commands.BoxState(
            box=box.name,
            type=box.config.type,
            head_seq=log.visible_seq,
            earliest_seq=box.visible_earliest_seq,
            next_seq=log.visible_seq + 1,
            generation=box.generation,
            count=count,
            bytes=size,
            config=box.config,
            effective_priority=box.effective_priority(now_ms),
            last_write_ts=log.visible_ts or None,
            last_read_ts=box.volatile.last_read_ms,
            fencing_token=box.fencing_token,
            queue=queue_totals(box, count, now_ms, self._context.wall_ms(now_ms)),
        )
        return self._context.answer(box, reply, entries, box.floor_lsn)

    def _delete_box(self, command: commands.DeleteBox, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.boxes.get(command.box)
        if box is None:
            return context.answer_absent(
                command.box, commands.DeleteBoxReply(command.box, False, [], []), entries
            )
        context.expire(box, now_ms, entries)
        if command.if_empty and box.log.count:
            raise BoxNotEmpty(
                f"box {box.name} has {box.log.count} records; delete them first, or delete without if_empty",
                count=box.log.count,
            )
        outputs_count = 0 if box.outputs is None else box.outputs.pending_count
        if command.if_empty and outputs_count:
            raise BoxNotEmpty(
                f"box {box.name} has {outputs_count} outputs of acks that wait for their boxes; see "
                f"outputs_error in GET /v0/boxes/{box.name}, or delete without if_empty to drop them",
                count=outputs_count,
            )
        origins = context.forwarding.routers_of(box)
        lsn = context.log(changes.BoxDeleted(box.generation), entries)
        reply = commands.DeleteBoxReply(command.box, True, sorted(box.schedules), origins)
        wait = context.durability.wait_for_config(lsn, box.config.durability)
        return reply_after(wait, entries, reply, (command.box,))

    def _append(self, command: commands.Append, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.boxes.get(command.box)
        creation: changes.BoxCreated | None = None
        if box is None:
            if command.account:
                context.usage.require(command.account, "boxes")
            creation, box = context.plan_created(command, now_ms)
        else:
            if command.idempotency_key is not None:
                key = box.known_key(command.idempotency_key, now_ms)
                if key is not None:
                    reply = commands.AppendResult(
                        box.name,
                        key.first_seq,
                        key.last_seq,
                        max(key.last_seq, box.log.visible_seq),
                        False,
                        True,
                        command.return_seqs,
                    )
                    # A write of a memory box has no lsn: then the reply waits for the change of class.
                    return context.answer(box, reply, entries, max(key.lsn, box.config_lsn))
            context.expire(box, now_ms, entries)
        box.check_conditions(command)
        if command.idempotency_key is not None and (command.account or context.keys_kept >= KEYS_MAX):
            make_room_for_keys(context, command.account, now_ms)
        change = box.plan_append(command, now_ms, context.wall_ms(now_ms))
        if command.account or context.quota is not None:
            context.require_room(command.account, change.batch.live_bytes, now_ms)
        if creation is not None:
            context.log(creation, entries)
            box = context.generations[creation.generation]
        return context.append_batch(command, box, change, creation is not None, entries)

    def _diff(self, command: commands.ReadBox, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        if command.touch:
            box.volatile.last_read_ms = now_ms
        rests_on = box.floor_lsn
        if command.group is not None:
            group = box.groups.require(command.group, box.name)
            rests_on = max(rests_on, group.lsn)
            command = msgspec.structs.replace(command, from_seq=group.cursor)
        reply = box.read(command)
        nothing = not reply.records and reply.tombstone is None and reply.next_from_seq == reply.head_seq
        if nothing and command.wait_ms:
            return Outcome(entries, None)
        self._count_read(reply)
        return self._context.answer(box, reply, entries, rests_on)

    def _follow(self, command: commands.Follow, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        if command.awaits_box and command.wait_ms and command.box not in context.boxes:
            return Outcome(entries, None)
        box = context.find_box(command.box, now_ms, entries)
        page = page_for(box, command, context.durability.durable_lsn)
        if page is None:
            return Outcome(entries, None)
        if command.touch:
            box.volatile.last_read_ms = now_ms
        self._count_read(page)
        answer = ReplyKind.STRONG_READ if command.strong else ReplyKind.RECORDS
        return reply_after(context.durability.wait_for(answer, box, box.floor_lsn), entries, page)

    def _count_read(self, reply: commands.DiffResult) -> None:
        tally = self._context.tally
        tally.reads += 1
        tally.records_read += reply.records_scanned
        if reply.tombstone is not None:
            tally.tombstones += 1

    def _session(self, command: commands.SessionCommand, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        if isinstance(command, commands.PutSession) and command.owner in context.usage.accounts:
            context.sessions.drop_lapsed(now_ms)
            if command.wid not in context.sessions:
                context.usage.require(command.owner, "sessions")
        return Outcome(entries, context.sessions.handle(command, now_ms))

    def _get_record(self, command: commands.GetRecord, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        log = box.log
        if command.seq > log.visible_seq or not log.is_live(command.seq):
            raise NotFound(
                f"box {box.name} has no record {command.seq}; it may have been deleted", seq=command.seq
            )
        span = log.span_at(command.seq)
        assert span is not None
        index = command.seq - span.first_seq
        text = bytes(span.payload.text_as(index, index, tags=True, meta=True, data=True))
        return self._context.answer(box, commands.GetRecordResult(box.name, text), entries, box.floor_lsn)

    def _get_tail(self, command: commands.GetTail, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        log = box.log
        reply = commands.Tail(box.name, log.visible_seq, log.visible_seq + 1, log.visible_ts or None)
        return self._context.answer(box, reply, entries, box.floor_lsn)

    def _delete_records(self, command: commands.DeleteRecords, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.find_box(command.box, now_ms, entries)
        log = box.log
        before = log.count
        if command.dry_run:
            return self._count_deletes(command, box, now_ms, entries)
        if command.match is None:
            change = box.plan_trim(command.before_seq or 0, now_ms)
            if change.before_seq > log.earliest_seq:
                context.stage(change, box, entries)
            deleted_count = before - log.count
        else:
            deletion = box.begin_deletion(command, command.match, command.before_seq)
            if deletion.deleted_count is None:
                delete = deletion.step(box, now_ms)
                if delete is None:
                    return Outcome(entries, None, needs=(UNFINISHED,))
                if delete.seqs:
                    context.stage(delete, box, entries)
                deletion.deleted_count = before - log.count
                is_settled = log.is_settled
            else:  # readers see all of it; what is counted per batch follows
                is_settled = not log.settle_deletes()
            if not is_settled:
                return Outcome(entries, None, needs=(UNFINISHED,))
            box.end_deletion()
            deleted_count = deletion.deleted_count
        count, size = log.visible_totals()
        reply = commands.DeleteRecordsReply(
            box.name, deleted_count, box.visible_earliest_seq, log.visible_seq, count, size
        )
        return context.answer(box, reply, entries, box.floor_lsn)

    def _count_deletes(
        self, command: commands.DeleteRecords, box: Box, now_ms: int, entries: LogEntries
    ) -> Outcome:
        """Count the records that a delete would take."""
        if command.match is None:
            deleted_count = box.log.live_before(min(command.before_seq or 0, box.log.head_seq + 1))[0]
        else:
            delete = box.begin_deletion(command, command.match, command.before_seq).step(box, now_ms)
            if delete is None:
                return Outcome(entries, None, needs=(UNFINISHED,))
            box.end_deletion()
            deleted_count = len(delete.seqs or ())
        count, size = box.log.visible_totals()
        reply = commands.DeleteRecordsReply(
            box.name, deleted_count, box.visible_earliest_seq, box.log.visible_seq, count, size, True
        )
        return self._context.answer(box, reply, entries, box.floor_lsn)

    def _set_fence(self, command: commands.SetFence, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.require(command.box)
        if command.if_token is not None and command.if_token != box.fencing_token:
            raise FencingTokenMismatch(f"if_token: {box.name} is fenced by another token", field="if_token")
        if command.token != box.fencing_token:
            context.stage(changes.TokenFenced(box.generation, command.token), box, entries)
        return context.answer(box, commands.SetFenceReply(box.name, command.token), entries, box.last_lsn)

    def _exchange_use(self, command: ExchangeUse, now_ms: int, entries: LogEntries) -> Outcome:
        return Outcome(
            entries, AccountsUse(self._context.usage.exchange(command.accounts, command.elsewhere))
        )


def make_room_for_keys(context: Context, account: str, now_ms: int) -> None:
    """Drops lapsed idempotency keys at a limit; raises `Throttled` when none has lapsed."""
    if context.keys_kept < KEYS_MAX:
        try:
            context.usage.require(account, "idempotency_keys")
            return
        except Throttled:
            pass
    context.keys_kept -= context.key_expiry.step(
        context.generations, now_ms, context.on_keys_dropped, slack_ms=0
    )
    context.usage.require(account, "idempotency_keys")
    if context.keys_kept >= KEYS_MAX:
        raise Throttled(
            f"this shard remembers {context.keys_kept} idempotency keys, which is its limit; retry when "
            "older keys have lapsed, or set a shorter idempotency_window_ms on the boxes that use many",
            limit="idempotency_keys",
        )
