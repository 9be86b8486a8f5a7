"""Outboxes: the ordered copies from one box to another, with position, batches in flight and retries.

The source's half of forwarding (`streams/protocol/messages/forwards.py` has the whole picture).

      position               sent_position                 seen_from                 head of the feed
         ▼                         ▼                           ▼                         ▼
   · · · |■■■■ batch ■■■|■■ batch ■■|░░ seen, nothing to send ░░|▒▒▒▒ not examined yet ▒▒▒▒|
         └── the destination confirmed up to here

- An `Outbox` sends to one destination, in order. `next_records` selects the records: a router's outbox reads
  the box's log, a queue's outbox reads its dead letters.
- `Outboxes` schedules all outboxes of a shard: turns, batches in flight, retries.

Rules of the file
- The destination's reply is the truth about `position`. The source logs it now and then. After a crash the
  destination reports its real position, so a stale logged position costs one exchange and nothing else.
- `next_records` changes nothing, so it can run again when a payload was not in memory.
- Only `log_position` is a fact of the log. All other state of an outbox is volatile.

Bounds: OUTBOX_BATCHES_MAX batches and OUTBOX_BYTES_MAX bytes (or one batch more) of an outbox, and
BATCHES_IN_FLIGHT_MAX batches and BYTES_IN_FLIGHT_MAX bytes of a shard are in flight; a batch is at most
BATCH_BYTES_MAX (or one record) and BATCH_RECORDS_MAX; one call of `next_records` examines at most EXAMINE_MAX
records, one reply to the relay COLLECT_EXAMINE_MAX.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.sealed import NotLoaded
from shard.core.changes import Change, OutboxMoved
from streams.protocol.messages import forwards
from streams.protocol.messages.forwards import ForwardHead, ForwardReply, ReportDelivery

#: Batches of one outbox in flight: enough to keep the destination busy while replies travel, and while small
#: batches wait for a sync.
OUTBOX_BATCHES_MAX = 32
#: Bytes of one outbox in flight: four full batches.
OUTBOX_BYTES_MAX = 2 * 1024 * 1024
#: A batch of a router asks for no sync while no more batches are in flight and it is no larger. A `disk` box
#: shows it at once, and the next sync confirms it, at most `sync_interval_ms` later.
PATIENT_BATCHES_MAX = 16
PATIENT_BYTES_MAX = 32 * 1024
BATCH_BYTES_MAX = 512 * 1024
BATCH_RECORDS_MAX = 5_000
#: Records that one `next_records` examines: a few milliseconds of the shard's time if few of them match.
EXAMINE_MAX = 20_000
#: Bytes of a shard in flight, which a gateway holds in memory; and the bytes of one reply to the relay.
BYTES_IN_FLIGHT_MAX = 32 * 1024 * 1024
COLLECT_BYTES_MAX = 4 * 1024 * 1024
COLLECT_BATCHES_MAX = 256
#: Records that one reply examines in all: some ten milliseconds when each of them is matched with a filter.
COLLECT_EXAMINE_MAX = 40_000
#: Batches of a shard in flight: each is a task of the relay and a request on a link, which allows 20,000.
BATCHES_IN_FLIGHT_MAX = 4096
#: Minimum time between two logged positions of an outbox.
LOG_EVERY_MS = 500
_RETRY_MS_MIN, _RETRY_MS_MAX = 20, 2_000
#: Errors that a smaller batch may avoid.
_TOO_MUCH = frozenset({"box_full", "record_too_large", "batch_too_large"})


class Load(msgspec.Struct, frozen=True):
    """The records that `next_records` selected: up to and including `upto`, none when `count` is 0."""

    upto: int
    count: int = 0
    text: bytes = b""
    tags: bytes | None = None
    lost_count: int = 0
    hops: int = 0
    #: True if it stopped at a bound: more records may follow.
    more: bool = False
    job_fields: bytes | None = None


class LoggedPosition(NamedTuple):
    """The position and the number of copies that the log has for an outbox."""

    position: int
    total: int


class SentBatch(msgspec.Struct, frozen=True):
    """A copy batch that was sent and has no reply yet."""

    number: int
    after: int
    upto: int
    count: int
    bytes: int


class Outbox:
    """Sends copies to one destination, in order. Subclasses select the records and write the batch heads.

    Its names and its generation are fixed. `log_position` is a fact of the log: only `apply_logged`
    changes it.
    Everything else is volatile: it starts from `log_position` after a restart, and the destination's replies
    correct it. A subclass says which of its own attributes are logged.
    """

    __slots__ = (
        "_rewind_position",
        "_total_before",
        "_total_of",
        "dest",
        "failures",
        "generation",
        "in_flight",
        "is_closed",
        "is_halted",
        "is_local",
        "is_relayed",
        "is_waiting",
        "last_error",
        "log_position",
        "logged_ms",
        "origin",
        "position",
        "records_max",
        "retry_at_ms",
        "seen_from",
        "seen_lost",
        "sent_position",
        "source",
        "total",
    )

    #: True if the source drops what has arrived (`queues/planned_outbox.py`).
    is_planned = False
    #: True if copies inside the shard count as arrived when readers see them, not at once.
    confirms_visible_copies = False

    def __init__(
        self, *, source: str, origin: str, dest: str, generation: int, position: int, total: int = 0
    ) -> None:
        self.source = source
        self.origin = origin
        self.dest = dest
        self.generation = generation
        self.log_position = LoggedPosition(position, total)
        #: The position and the number of copies that the destination confirmed. `log_position` may be older.
        self.position = position
        self.total = total
        #: The generation of the destination that `total` counts in, and the copies into earlier ones.
        self._total_of = 0
        self._total_before = 0
        self.logged_ms = 0
        #: The end of the last batch sent, and the end of the records examined after it that need no copy.
        self.sent_position = position
        self.seen_from = position
        self.seen_lost = 0
        self.in_flight: dict[int, SentBatch] = {}
        self.records_max = BATCH_RECORDS_MAX
        self.failures = 0
        self.retry_at_ms = 0
        self.last_error = ""
        #: True after an error: the outbox sends nothing until all batches in flight have a reply.
        self.is_halted = False
        self._rewind_position: int | None = None
        #: True while it waits for the relay; True while it waits for a copy inside this shard.
        self.is_waiting = False
        self.is_local = False
        #: True if the relay has the batches in flight.
        self.is_relayed = False
        self.is_closed = False

    def __repr__(self) -> str:
        state = f"{len(self.in_flight)} in flight, {'blocked' if self.failures else 'ok'}"
        return f"<Outbox {self.origin} to {self.dest} at {self.position}, {state}>"

    # -- for subclasses

    def next_records(self, after: int, records_max: int, upto: int = 0) -> Load:
        """Select the next records after `after`. Changes nothing. `upto` is the last position that may be
        copied, if it is not the last one that readers can see."""
        raise NotImplementedError

    def unseen_count(self, upto: int = 0) -> int:
        """Return the number of positions that `next_records` has not examined, up to the same bound."""
        raise NotImplementedError

    def batch_head(self, load: Load, after: int) -> ForwardHead:
        """Return the head of the copy batch."""
        raise NotImplementedError

    def recreate(self, log: BoxLog, generation: int) -> Outbox:
        """Return the outbox for the next generation of a memory box."""
        raise NotImplementedError

    # -- sending

    @property
    def may_send(self) -> bool:
        in_flight = self.in_flight
        return (
            not (self.is_closed or self.is_halted or self.retry_at_ms)
            and len(in_flight) < OUTBOX_BATCHES_MAX
            and (not in_flight or sum(batch.bytes for batch in in_flight.values()) < OUTBOX_BYTES_MAX)
        )

    def find(self, upto: int = 0) -> Load:
        """Select the next load. Its losses include those in records that were skipped before it."""
        load = self.next_records(self.seen_from, self.records_max, upto)
        return replace(load, lost_count=load.lost_count + self.seen_lost) if self.seen_lost else load

    def is_worth_sending(self, load: Load) -> bool:
        """Return True if a batch is due. A long run without copies is sent too: a restart then skips it."""
        return load.count > 0 or load.upto - self.sent_position >= EXAMINE_MAX

    def skip(self, load: Load) -> None:
        """Skip records that need no copy. They are not examined again."""
        self.seen_from, self.seen_lost = load.upto, load.lost_count

    def on_sent(self, load: Load, batch_number: int) -> None:
        """Record that a batch with this load was sent."""
        self.in_flight[batch_number] = SentBatch(
            batch_number, self.sent_position, load.upto, load.count, len(load.text)
        )
        self.sent_position = self.seen_from = load.upto
        self.seen_lost = 0

    # -- replies

    def on_reply(self, batch: SentBatch, answer: ForwardReply) -> None:
        """Apply the destination's reply to a batch."""
        if answer.generation != self._total_of:
            # A new generation of a memory box counts from 0 again.
            self._total_of = answer.generation
            self._total_before = self.total if answer.total < self.total else 0
        self.total = max(self.total, self._total_before + answer.total)  # replies may overtake each other
        if answer.position >= batch.upto:
            self.failures = 0
            self.last_error = ""
            self.position = max(self.position, answer.position)
            if self.position > self.sent_position:
                self.sent_position = self.seen_from = self.position
                self.seen_lost = 0
            self.records_max = min(BATCH_RECORDS_MAX, self.records_max + 1 + self.records_max // 8)
        else:  # plan again from its position, when no batch in flight can still move it
            self.is_halted = True
            self._rewind_position = answer.position

    def on_failure(self, count: int, code: str, message: str, now_ms: int) -> None:
        """Halt after an error: retry at once with fewer records, or later."""
        self.is_halted = True
        self.last_error = f"{code}: {message}" if message else code
        if code in _TOO_MUCH and count > 1:
            # Retry at once with fewer records: a box with room for one record must get one.
            self.records_max = max(1, count // 2)
        elif not self.retry_at_ms:  # several batches in flight fail for one reason
            self.failures += 1
            self.retry_at_ms = now_ms + min(_RETRY_MS_MIN << min(self.failures - 1, 10), _RETRY_MS_MAX)

    def settle(self) -> None:
        """Continue from the destination's position if the outbox is halted and no batch is in flight."""
        if self.is_halted and not self.in_flight:
            if self._rewind_position is not None:
                self.position = self._rewind_position
            self.restart()

    def restart(self) -> None:
        """Forget the batches in flight and send again from `position`."""
        self.in_flight.clear()
        self.sent_position = self.seen_from = self.position
        self.seen_lost = 0
        self.is_halted = False
        self._rewind_position = None

    # -- the logged position

    def change_of_move(self, generation: int, now_ms: int) -> Change | None:
        """Return the change that logs the destination's position; None when that can wait. A `MoveQueue`
        overrides it: its source deletes the records that have arrived, so it logs each time."""
        if self.position == self.log_position.position or now_ms - self.logged_ms < LOG_EVERY_MS:
            return None
        self.logged_ms = now_ms
        return OutboxMoved(generation, self.origin, self.position, self.total)

    def apply_logged(self, position: int, total: int) -> None:
        """Apply a logged change: the destination has the copies up to `position`."""
        self.log_position = LoggedPosition(position, total)
        if position != self.position:  # only in recovery: a live outbox logs its own position
            self.position, self.total = position, total
            self.restart()


class Outboxes:
    """Schedules the outboxes of a shard: their turns, the batches in flight and the retries."""

    def __init__(self, boxes: Container[str]) -> None:
        """`boxes` has the names of all boxes of this shard."""
        self._boxes = boxes
        #: Outboxes that may send through the relay, in the order of their turns. Each is here at most once.
        self._waiting: deque[Outbox] = deque()
        #: Outboxes that may copy into a box of this shard, likewise (`local_copies.py`).
        self.local: deque[Outbox] = deque()
        self._in_flight: dict[int, tuple[Outbox, SentBatch]] = {}
        self._bytes_in_flight = 0
        self._numbers = itertools.count(1)
        self._retries: list[tuple[int, int, Outbox]] = []
        self._order = itertools.count()
        self._relay_id = 0
        #: True while a backup is taken: planned outboxes send nothing.
        self.are_moves_paused = False
        #: The lsn at which this process started; `shard_life` on the wire. Batch numbers restart with the
        #: process, so it tells a late reply to an earlier process from a reply to this one.
        self.start_lsn = 0

    def __repr__(self) -> str:
        waiting = f"{len(self._waiting)} waiting, {len(self.local)} local"
        return f"<Outboxes {waiting}, {len(self._in_flight)} copy batches in flight>"

    def note(self, outboxes: Iterable[Outbox]) -> bool:
        """Queue outboxes that may have records to send. Return True if the relay may collect from any."""
        can_send = False
        for outbox in outboxes:
            if outbox.dest in self._boxes and not outbox.is_waiting:
                self._note_local(outbox, 0)
                continue
            if not (outbox.is_waiting or outbox.is_local) and self.may_send(outbox):
                outbox.is_waiting = True
                self._waiting.append(outbox)
            can_send = can_send or outbox.is_waiting
        return can_send

    def note_staged(self, outboxes: Iterable[Outbox], upto: int) -> None:
        """Queue outboxes whose destination is on this shard: their box has records up to `upto` that readers
        may not see yet."""
        for outbox in outboxes:
            if outbox.dest in self._boxes and not outbox.is_waiting:
                self._note_local(outbox, upto)

    def _note_local(self, outbox: Outbox, upto: int) -> None:
        # Batches of two ways would overtake each other. The relay's last reply queues the outbox again.
        is_relayed = outbox.is_relayed and bool(outbox.in_flight)
        if not (outbox.is_local or is_relayed) and outbox.unseen_count(upto) and self.may_send(outbox):
            outbox.is_local = True
            self.local.append(outbox)

    def release_local(self) -> bool:
        """Have the relay send what waits for a copy inside this shard. Return True if there is any."""
        has_any = bool(self.local)
        for outbox in self.local:
            outbox.is_local, outbox.is_waiting = False, True
        self._waiting.extend(self.local)
        self.local.clear()
        return has_any

    def may_send(self, outbox: Outbox) -> bool:
        return outbox.may_send and not (self.are_moves_paused and outbox.is_planned)

    def close(self, outbox: Outbox) -> None:
        """Stop an outbox. Its batches in flight may still arrive; their replies are ignored."""
        outbox.is_closed = True

    # -- sending

    def collect(self, relay_id: int) -> list[forwards.CopyBatch]:
        """Return the next batches, at most one for each outbox that waits.

        An outbox whose payload is not in memory loses its turn. If no batch can be sent, `NotLoaded` asks for
        the payload."""
        if relay_id != self._relay_id:
            self._restart_for_relay(relay_id)
        loads: list[tuple[Outbox, Load | None]] = []
        missing: NotLoaded | None = None
        size = examined_count = 0
        room = min(COLLECT_BYTES_MAX, BYTES_IN_FLIGHT_MAX - self._bytes_in_flight)
        count = min(COLLECT_BATCHES_MAX, BATCHES_IN_FLIGHT_MAX - len(self._in_flight))
        for outbox in itertools.islice(self._waiting, count):
            if size >= room or examined_count >= COLLECT_EXAMINE_MAX:
                break
            load: Load | None = Load(outbox.seen_from)
            if self.may_send(outbox):
                try:
                    load = outbox.find()
                except NotLoaded as error:
                    missing, load = missing or error, None
            loads.append((outbox, load))
            if load is not None:
                size += len(load.text)
                examined_count += load.upto - outbox.seen_from
        batches = [batch for outbox, load in loads for batch in self._send(outbox, load)]
        if missing is not None and not batches:
            raise missing  # its outbox is now last in turn and delays no other
        return batches

    def _send(self, outbox: Outbox, load: Load | None) -> list[forwards.CopyBatch]:
        """Return the batch of a load, if one is due. Without a load, the outbox waits for its payload."""
        self._waiting.popleft()
        if load is None:
            self._waiting.append(outbox)
            return []
        outbox.is_waiting = False
        if not self.may_send(outbox):
            return []
        batches = []
        if outbox.is_worth_sending(load):
            head = forwards.encode(outbox.batch_head(load, outbox.sent_position))
            number = self.begin(outbox, load, is_relayed=True)
            batches.append(
                forwards.CopyBatch(number, outbox.source, outbox.origin, outbox.dest, head, load.text)
            )
        else:
            outbox.skip(load)
        if load.more:
            self.note((outbox,))
        return batches

    def begin(self, outbox: Outbox, load: Load, *, is_relayed: bool) -> int:
        """Note that a load is in flight. Returns the number of its batch."""
        number = next(self._numbers)
        outbox.is_relayed = is_relayed
        outbox.on_sent(load, number)
        in_flight = outbox.in_flight[number]
        self._in_flight[number] = (outbox, in_flight)
        self._bytes_in_flight += in_flight.bytes
        return number

    def _restart_for_relay(self, relay_id: int) -> None:
        """Send all batches in flight again: a new relay asks, and the last one may have lost them."""
        self._relay_id = relay_id
        outboxes = {id(outbox): outbox for outbox, _ in self._in_flight.values()}
        self._in_flight.clear()
        self._bytes_in_flight = 0
        for outbox in outboxes.values():
            outbox.restart()
            self.note((outbox,))

    # -- replies

    def settle(self, report: ReportDelivery, now_ms: int) -> Outbox | None:
        """Apply the result of a batch. Return its outbox, or None if the batch is no longer in flight."""
        if report.shard_life != self.start_lsn or report.number not in self._in_flight:
            return None
        outbox, batch = self._in_flight.pop(report.number)
        self._bytes_in_flight -= batch.bytes
        del outbox.in_flight[report.number]
        if outbox.is_closed:
            return None
        answer = report.answer
        if answer is not None and answer.life == outbox.generation:
            outbox.on_reply(batch, answer)
        else:
            code = report.code if answer is None else "seq_mismatch"
            self.fail(outbox, batch.count, code, report.message, now_ms)
        outbox.settle()
        return outbox

    def fail(self, outbox: Outbox, count: int, code: str, message: str, now_ms: int) -> None:
        """Note that a batch of `count` records could not be copied."""
        was_paused = bool(outbox.retry_at_ms)
        outbox.on_failure(count, code, message, now_ms)
        if outbox.retry_at_ms and not was_paused:
            heapq.heappush(self._retries, (outbox.retry_at_ms, next(self._order), outbox))

    def next_retry_ms(self) -> int | None:
        return self._retries[0][0] if self._retries else None

    def retry(self, now_ms: int) -> bool:
        """Queue the outboxes whose retry is due. Return True if the relay may collect from any of them."""
        can_send = False
        while self._retries and self._retries[0][0] <= now_ms:
            _, _, outbox = heapq.heappop(self._retries)
            outbox.retry_at_ms = 0
            can_send = self.note((outbox,)) or can_send
        return can_send

    def statistics(self) -> dict[str, int]:
        return {"parcels_out": len(self._in_flight), "parcel_bytes_out": self._bytes_in_flight}

    def check(self) -> None:
        """Asserts WAITING: an outbox waits at most once, and the bytes in flight are correct. For tests."""
        waiting = [id(outbox) for outbox in (*self._waiting, *self.local)]
        assert len(set(waiting)) == len(waiting), "WAITING"
        assert all(outbox.is_waiting for outbox in self._waiting), "WAITING"
        assert all(outbox.is_local for outbox in self.local), "WAITING"
        assert self._bytes_in_flight == sum(batch.bytes for _, batch in self._in_flight.values()), "WAITING"
