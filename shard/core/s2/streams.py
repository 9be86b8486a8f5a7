"""Handles commands and applies changes of S2 streams (s2 §9, §11, §14, §15).

A stream is a box whose records are binary. This file creates, changes and deletes it; its log, visibility,
sealing and recovery are those of any box. Its additional state is in `stream.py`. The record format and the
numbering of records are in `streams/protocol/model/binary_records.py`.

Rules of the file
- A fence or trim inside a batch is part of the change that appends it: applying one never looks at a record.
- A stream in deletion rejects every command; it is removed a moment later.
"""

from __future__ import annotations

from msgspec.structs import replace

from shard.core import changes
from shard.core.boxes import validation
from shard.core.boxes.box import Box
from shard.core.boxes.live_runs import RunCollector, walk_live_runs
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.s2.stream import StreamState
from streams.protocol.errors import (
    CipherMismatch,
    FencingTokenMismatch,
    Forbidden,
    InvalidRequest,
    PositionUnwritten,
    ResourceAlreadyExists,
    SeqMismatch,
    StreamDeletionPending,
    StreamNotFound,
    StreamsError,
)
from streams.protocol.messages import s2
from streams.protocol.messages.commands import ReadStream
from streams.protocol.messages.s2 import DEFAULTS, Stream
from streams.protocol.model import binary_records
from streams.protocol.model.records import Batch, render_binary, resolve_times

#: Most boxes that one page of a list scans: a millisecond. Most of them may be no streams.
_LISTED_MAX = 5_000

#: Failed sessions to remember until their remaining inputs arrive, a few milliseconds later.
_FAILED_SESSIONS_MAX = 4096

#: From this time on, the stored size of a record is at least its metered size (a time of five bytes or more,
#: with two more around it, has at least eight), so records whose stored size fits also fit as metered.
_PLAIN_TS_MIN = 1 << 28


class Streams:
    def __init__(self, context: Context) -> None:
        self._context = context
        #: Sessions with a failed input. Inputs that they sent before the error reached them are refused.
        self._failed_sessions: dict[str, None] = {}
        context.on_command(s2.AppendStream, self._append)
        context.on_command(ReadStream, self._read)
        context.on_command(s2.PutStream, self._put)
        context.on_command(s2.PatchStream, self._patch)
        context.on_command(s2.GetStream, self._get)
        context.on_command(s2.ListStreams, self._list)
        context.on_command(s2.DeleteStream, self._delete)
        context.on_command(s2.GetStreamTail, self._get_tail)
        context.on_command(s2.GetUsage, self._get_usage)
        context.on_change(changes.StreamCreated, self._apply_created, context.box_appliers.require_new)
        context.on_box_change(changes.StreamStated, self._apply_stated, validation.is_stream)
        context.on_box_change(changes.StreamAppended, self._apply_appended, _require_stream)

    def __repr__(self) -> str:
        return "<Streams>"

    @property
    def _in_store(self) -> bool:
        """True if new streams get the class object."""
        return self._context.uploading.registers

    # -- finding

    def _require(self, name: str) -> tuple[Box, StreamState]:
        """Return a stream; raise unless it exists and is not in deletion."""
        box = self._context.boxes.get(name)
        if box is None or box.stream is None:
            raise StreamNotFound(f"stream {name} does not exist", stream=name)
        if box.stream.stream.deleted_ms:
            raise StreamDeletionPending(f"stream {name} is being deleted", stream=name)
        return box, box.stream

    def _require_and_expire(self, name: str, now_ms: int, entries: LogEntries) -> tuple[Box, StreamState]:
        """Return a stream after removing the records that are trimmed or have expired by now."""
        box, state = self._require(name)
        self.expire(box, state, now_ms, entries)
        return box, state

    def expire(self, box: Box, state: StreamState, now_ms: int, entries: LogEntries) -> None:
        earliest_seq = box.log.earliest_seq
        if state.trimmed_before(now_ms) > earliest_seq:
            deletion = box.plan_trim(state.trimmed_before(now_ms), now_ms)
            self._context.stage(deletion, box, entries)
        if state.expired_before(now_ms) > box.log.earliest_seq:
            eviction = box.plan_eviction(state.expired_before(now_ms), "ttl", now_ms)
            self._context.stage(eviction, box, entries)

    # -- streams

    def _put(self, command: s2.PutStream, now_ms: int, entries: LogEntries) -> Outcome:
        spec = command.asked.over(command.defaults).over(DEFAULTS)
        box = self._context.boxes.get(command.box)
        if box is None:
            if command.account:
                self._context.usage.require(command.account, "boxes")
            generation = self._context.plan_generation(now_ms)
            stream = Stream(
                basin_number=command.basin_number,
                spec=spec,
                created_ms=now_ms,
                cipher=command.cipher,
                token=command.token,
                asked=command.asked,
            )
            config = replace(spec.box_config, durability="object" if self._in_store else "fsync")
            change = changes.StreamCreated(generation, command.box, config, now_ms, 0, stream=stream)
            lsn = self._context.log(change, entries)
            wait = self._context.durability.wait_for_config(lsn, config.durability)
            return reply_after(wait, entries, s2.PutStreamReply(stream, "created"))
        assert box.stream is not None, "no other box has such a name"
        stream = box.stream.stream
        if stream.deleted_ms or stream.basin_number != command.basin_number:
            raise StreamDeletionPending(f"stream {command.box} is being deleted", stream=command.box)
        result: s2.Result = "noop"
        if command.ensures:
            if stream.spec != spec:
                if not command.may_update:
                    raise Forbidden(
                        f"stream {command.box} exists with another config, which the caller may not change"
                    )
                stream = self._state(box, replace(stream, spec=spec), entries)
                result = "updated"
        elif not command.token or (command.token, command.asked) != (stream.token, stream.asked):
            raise ResourceAlreadyExists(f"stream {command.box} already exists", stream=command.box)
        return self._context.answer(box, s2.PutStreamReply(stream, result), entries, box.config_lsn)

    def _patch(self, command: s2.PatchStream, now_ms: int, entries: LogEntries) -> Outcome:
        box, state = self._require_and_expire(command.box, now_ms, entries)
        spec = command.patch.apply(state.stream.spec).over(command.defaults).over(DEFAULTS)
        stream = state.stream
        if spec != stream.spec:
            stream = self._state(box, replace(stream, spec=spec), entries)
        return self._context.answer(box, s2.GetStreamReply(stream), entries, box.config_lsn)

    def _state(self, box: Box, stream: Stream, entries: LogEntries) -> Stream:
        config = replace(stream.spec.box_config, durability=box.config.durability)
        self._context.log(changes.StreamStated(box.generation, config, stream), entries)
        return stream

    def _get(self, command: s2.GetStream, now_ms: int, entries: LogEntries) -> Outcome:
        box, state = self._require(command.box)
        return self._context.answer(box, s2.GetStreamReply(state.stream), entries, box.config_lsn)

    def _delete(self, command: s2.DeleteStream, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.boxes.get(command.box)
        if box is None or box.stream is None:
            raise StreamNotFound(f"stream {command.box} does not exist", stream=command.box)
        stream = box.stream.stream
        is_meant = command.basin_number in (0, stream.basin_number)
        if is_meant and not stream.deleted_ms:
            stream = self._state(box, replace(stream, deleted_ms=now_ms), entries)
        answer = self._context.answer(box, s2.GetStreamReply(stream), entries, box.config_lsn)
        return answer._replace(wakes=(box.name,))  # wakes the readers that follow it

    def _list(self, command: s2.ListStreams, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        page: list[tuple[str, Stream]] = []
        last_name = command.after
        boxes_shown: list[tuple[Box, int]] = []
        for index, name in enumerate(context.boxes.irange(minimum=max(command.prefix, command.after))):
            if not name.startswith(command.prefix):
                break
            if len(page) == command.limit or index == _LISTED_MAX:
                wait = context.durability.wait_for_list(boxes_shown)
                return reply_after(wait, entries, s2.StreamPage(page, last_name))
            last_name = name
            box = context.boxes[name]
            if name > command.after and box.stream is not None:
                boxes_shown.append((box, box.config_lsn))
                page.append((name, box.stream.stream))
        return reply_after(context.durability.wait_for_list(boxes_shown), entries, s2.StreamPage(page))

    def _get_usage(self, command: s2.GetUsage, now_ms: int, entries: LogEntries) -> Outcome:
        """Count visible records only, so the reply waits for nothing."""
        boxes = self._context.boxes
        count = records = size = 0
        last_name = command.after
        for index, name in enumerate(boxes.irange(minimum=max(command.prefix, command.after))):
            if not name.startswith(command.prefix) or (command.is_exact and name != command.prefix):
                break
            if index == _LISTED_MAX:
                return Outcome(entries, s2.StreamUsage(count, records, size, last_name))
            last_name = name
            box = boxes[name]
            if name > command.after and box.stream is not None:
                box_records, box_size = box.log.visible_totals()
                count, records, size = count + 1, records + box_records, size + box_size
        return Outcome(entries, s2.StreamUsage(count, records, size))

    # -- records

    def _append(self, command: s2.AppendStream, now_ms: int, entries: LogEntries) -> Outcome:
        if not command.chain:
            return self._append_one(command, now_ms, entries)
        if command.chain in self._failed_sessions:
            raise InvalidRequest("an earlier input of this session has failed")
        try:
            return self._append_one(command, now_ms, entries)
        except StreamsError:
            self.fail_session(command.chain)
            raise

    def fail_session(self, chain: str) -> None:
        """Refuse all further inputs of this session, because one has failed."""
        self._failed_sessions[chain] = None
        if len(self._failed_sessions) > _FAILED_SESSIONS_MAX:
            del self._failed_sessions[next(iter(self._failed_sessions))]

    def _append_one(self, command: s2.AppendStream, now_ms: int, entries: LogEntries) -> Outcome:
        box, state = self._require_and_expire(command.box, now_ms, entries)
        log, config = box.log, box.config
        if command.cipher != state.stream.cipher:
            raise CipherMismatch(f"{box.name} uses another cipher", cipher=state.stream.cipher)
        if command.fencing_token is not None and command.fencing_token != box.fencing_token:
            raise FencingTokenMismatch(
                f"fencing_token: {box.name} is fenced by another token", token=box.fencing_token
            )
        if command.match_seq_num is not None and command.match_seq_num != log.head_seq:
            raise SeqMismatch(
                f"match_seq_num: the next number of {box.name} is {log.head_seq}", next_seq=log.head_seq
            )
        times = resolve_times(
            command.times,
            len(command.tails),
            now_ms=now_ms,
            not_before=log.last_ts,
            mode=config.timestamping.mode,
            allow_future=config.timestamping.uncapped,
            field="timestamp",
        )
        first_seq = log.head_seq + 1
        batch = render_binary(command.tails, first_seq=first_seq, times=times)
        self._context.require_room(command.account, batch.live_bytes, now_ms)
        trim_seq = max(
            (min(binary_records.seq_of(number), first_seq + index + 1) for index, number in command.trims),
            default=0,
        )
        change = changes.StreamAppended(box.generation, batch, now_ms, fence=command.fence, trim_seq=trim_seq)
        answer = s2.AppendStreamReply(log.head_seq, batch.first_ts, batch.last_seq, batch.last_ts)
        return self._context.append_batch(command, box, change, False, entries)._replace(reply=answer)

    def _get_tail(self, command: s2.GetStreamTail, now_ms: int, entries: LogEntries) -> Outcome:
        box, _ = self._require_and_expire(command.box, now_ms, entries)
        tail = s2.StreamTail(box.log.visible_seq, box.log.visible_ts)
        return self._context.answer(box, tail, entries, box.floor_lsn)

    def _read(self, command: ReadStream, now_ms: int, entries: LogEntries) -> Outcome:
        box, state = self._require_and_expire(command.box, now_ms, entries)
        if command.generation not in (None, box.generation):
            raise StreamNotFound(f"stream {box.name} was deleted and created again", stream=box.name)
        log = box.log
        start, rests_on = command.from_seq, box.floor_lsn
        if command.begins:
            start = _start(box, command, state.stream.cipher)
            first_untrimmed = min(state.first_seq_for_new_readers - 1, log.visible_seq)
            if first_untrimmed > start:
                start, rests_on = first_untrimmed, max(rests_on, state.trim_lsn)
        page = _StreamPageCollector(command)
        next_number = page.fill(box, start)
        if command.wait_ms and not page.parts and not page.is_full:
            return Outcome(entries, None)
        box.volatile.last_read_ms = now_ms
        reply = s2.StreamRecords(
            records=binary_records.SEPARATOR.join(page.parts),
            count=command.limit - page.records_left,
            next_seq_num=next_number,
            tail_seq_num=log.visible_seq,
            tail_ts=log.visible_ts,
            generation=box.generation,
            cipher=state.stream.cipher,
            is_full=page.is_full,
        )
        return self._context.answer(box, reply, entries, rests_on)

    # -- applying

    def _apply_created(self, change: changes.StreamCreated, lsn: int) -> None:
        self._context.box_appliers.apply_creation(change, lsn)
        box = self._context.generations[change.generation]
        box.stream = StreamState(change.stream)
        self._context.arm_timer(box)

    def _apply_stated(self, change: changes.StreamStated, lsn: int) -> None:
        box = self._context.generations[change.generation]
        assert box.stream is not None
        box.config = change.config
        box.stream.stream = change.stream
        box.last_lsn = box.floor_lsn = box.config_lsn = lsn
        self._context.arm_timer(box)

    def _apply_appended(self, change: changes.StreamAppended, lsn: int) -> None:
        box = self._context.generations[change.generation]
        assert box.stream is not None
        box.stream.apply_append(change, box.log.earliest_seq, lsn)
        self._context.box_appliers.apply_append(change, lsn)
        if change.fence is not None:
            box.fencing_token = change.fence
        if change.trim_seq:
            self._context.arm_timer(box)


def _require_stream(change: changes.StreamAppended, box: Box) -> None:
    validation.is_stream(change, box)
    validation.validate_append(change, box)


def _start(box: Box, command: ReadStream, cipher: s2.Cipher | None) -> int:
    """Return the number at which the reader begins (s2 §11). Raise if there is no record yet."""
    log = box.log
    tail, tail_ts = log.visible_seq, log.visible_ts
    is_beyond = False
    if command.from_ts is not None:
        is_beyond = command.from_ts > tail_ts
        if not is_beyond:
            return min(log.first_seq_at(command.from_ts) - 1, tail)
        start = tail
    elif command.tail_offset is not None:
        start = max(0, tail - command.tail_offset)
    else:
        is_beyond = command.from_seq > tail
        start = min(command.from_seq, tail)
    if (is_beyond and not command.clamp) or (start == tail and not command.may_follow):
        raise PositionUnwritten(
            f"{box.name} has no record there yet: its next one is {tail}",
            seq_num=tail,
            timestamp=tail_ts,
            cipher=cipher,
        )
    return start


class _StreamPageCollector(RunCollector):
    """Collects the runs of one read within its limits, which are exact."""

    __slots__ = (
        "_bytes_left",
        "_is_full",
        "_next_number",
        "_unmetered_parts",
        "_until",
        "parts",
        "records_left",
    )

    def __init__(self, command: ReadStream) -> None:
        #: Records that it may still take.
        self.records_left = command.limit
        self._bytes_left = command.max_bytes
        #: Parts that were counted by their stored size, which may exceed their metered size.
        self._unmetered_parts: list[tuple[int, bytes | memoryview]] = []
        self._until = command.until
        self.parts: list[bytes | memoryview] = []
        self._is_full = not self.records_left or not self._bytes_left
        #: The number of the next record.
        self._next_number = 0

    @property
    def is_full(self) -> bool:
        """True if it has stopped at a limit."""
        return self._is_full

    def fill(self, box: Box, start: int) -> int:
        """Take records from this number on. Return the number of the next record."""
        self._next_number = start
        upto_seq = box.log.visible_seq
        if not self.is_full:
            walk_live_runs(self, box.log, start + 1, upto_seq)
        return self._next_number if self.is_full else max(self._next_number, upto_seq)

    def take(self, batch: Batch, first: int, last: int) -> int:
        top = min(last, first + self.records_left - 1)
        if self._until is not None:
            top = min(top, batch.index_from_ts(self._until) - 1)
        if top >= first:
            top = self._within_bytes(batch, first, top)
        if top >= first:
            self.parts.append(batch.text(first, top))
            self.records_left -= top - first + 1
            self._next_number = batch.first_seq + top
        self._is_full = top < last or not self.records_left
        return top

    def _within_bytes(self, batch: Batch, first: int, last: int) -> int:
        stored_size = batch.size(first, last)
        if stored_size <= self._bytes_left and batch.ts(first) >= _PLAIN_TS_MIN:
            self._bytes_left -= stored_size
            self._unmetered_parts.append((stored_size, batch.text(first, last)))
            return last
        # Close to the limit, or with small times: measure each record.
        for part_size, part in self._unmetered_parts:
            self._bytes_left += part_size - sum(binary_records.metered_sizes(part))
        self._unmetered_parts.clear()
        top = first - 1
        for size in binary_records.metered_sizes(batch.text(first, last)):
            if size > self._bytes_left:
                break
            self._bytes_left -= size
            top += 1
        return top
