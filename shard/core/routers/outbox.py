"""What a box has to send to another one: a position, what is on the way, and when to try again.

The source's half of forwarding (`streams/protocol/messages/forwards.py` has the whole picture).

      position          seen_from    sent                    head of the feed
         ▼                  ▼          ▼                          ▼
   · · · |■■■■ parcel ■■■■|■■■ parcel ■■■|░░ seen, nothing to send ░░|▒▒▒▒ not looked at ▒▒▒▒|
         └── what the destination has    └── what has left

- An `Outbox` is one ordered line to one destination. What it sends comes from `look`, which a router's
  outbox answers from the box's log, and a queue's from its dead letters.
- `Outboxes` are all of a shard: whose turn it is, what is out, when a failed one is due again.

Rules of the file
- The destination's answer is the truth about `position`. The source saves it now and then; after a crash the
  destination says where it really stands, so a stale saved position costs one exchange and nothing else.
- `look` changes nothing, so that it can be asked again when what it wanted to read was not in memory.
- Everything but `position`, `total` and `life` is forgotten with the process.

Bounds: FLIGHTS_MAX parcels of an outbox, PARCELS_OUT_MAX parcels and BYTES_OUT_MAX bytes of a shard are out
at a time; a parcel is at most PARCEL_BYTES_MAX (or one record) and PARCEL_RECORDS_MAX; one look examines at
most EXAMINE_MAX records, one answer to the carrier COLLECT_EXAMINE_MAX.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from shard.core.boxes.log import Log
from shard.core.boxes.sealed import NotLoaded
from shard.core.changes import Change, OutboxMoved
from streams.protocol.messages import forwards
from streams.protocol.messages.forwards import ForwardHead, ForwardReply, ReportDelivery

#: Parcels of one outbox on the way at a time: enough to keep the destination busy while answers travel.
FLIGHTS_MAX = 4
PARCEL_BYTES_MAX = 512 * 1024
PARCEL_RECORDS_MAX = 5_000
#: Records one look may pass over: a few milliseconds of the shard's time when a filter wants few of them.
EXAMINE_MAX = 20_000
#: Of a whole shard: what a gateway may have to hold for it, and how much one answer brings.
BYTES_OUT_MAX = 32 * 1024 * 1024
COLLECT_BYTES_MAX = 4 * 1024 * 1024
COLLECT_PARCELS_MAX = 256
#: Records one answer may look at in all: some ten milliseconds when each of them is held to a filter.
COLLECT_EXAMINE_MAX = 40_000
#: Of a whole shard too: each is a task of the carrier and a request in flight on a link, which takes 20,000.
PARCELS_OUT_MAX = 4096
#: A position that has moved is logged at most this often.
SAVE_EVERY_MS = 500
_RETRY_MS_MIN, _RETRY_MS_MAX = 20, 2_000
#: Refusals that a smaller parcel may escape.
_TOO_MUCH = frozenset({"box_full", "record_too_large", "batch_too_large"})


class Load(msgspec.Struct, frozen=True):
    """What a look found: records up to and including `upto`, none when `count` is 0."""

    upto: int
    count: int = 0
    text: bytes = b""
    tags: bytes | None = None
    lost: int = 0
    hops: int = 0
    #: Whether it stopped for a bound and not because nothing is left.
    more: bool = False


class _Flight(msgspec.Struct, frozen=True):
    number: int
    after: int
    upto: int
    count: int
    bytes: int


class Outbox:
    """One ordered line of copies to one destination. Subclasses say what is sent and how it is labelled."""

    __slots__ = (
        "_rewound_to",
        "_total_before",
        "_total_of",
        "dest",
        "failures",
        "flights",
        "is_closed",
        "is_halted",
        "is_waiting",
        "last_error",
        "life",
        "origin",
        "position",
        "records_max",
        "retry_at_ms",
        "saved_ms",
        "saved_position",
        "saved_total",
        "seen_from",
        "seen_lost",
        "sent",
        "source",
        "total",
    )

    #: Whether its source lets go of what has arrived (`queues/record_moves.py`).
    is_line = False

    def __init__(
        self, *, source: str, origin: str, dest: str, life: int, position: int, total: int = 0
    ) -> None:
        self.source = source
        self.origin = origin
        self.dest = dest
        self.life = life
        #: What the destination has. What is saved of it may be older.
        self.position = self.saved_position = position
        self.total = self.saved_total = total
        #: The generation of the destination that counts, and what came before it.
        self._total_of = 0
        self._total_before = 0
        self.saved_ms = 0
        #: The end of what has left, and how far was looked beyond it without finding anything to send.
        self.sent = position
        self.seen_from = position
        self.seen_lost = 0
        self.flights: dict[int, _Flight] = {}
        self.records_max = PARCEL_RECORDS_MAX
        self.failures = 0
        self.retry_at_ms = 0
        self.last_error = ""
        #: Something went wrong: nothing leaves until everything that is out has come back.
        self.is_halted = False
        self._rewound_to: int | None = None
        self.is_waiting = False
        self.is_closed = False

    def __repr__(self) -> str:
        state = "blocked" if self.failures else "ok"
        return f"<Outbox {self.origin} to {self.dest} at {self.position}, {len(self.flights)} out, {state}>"

    # -- what subclasses say

    def look(self, after: int, records_max: int) -> Load:
        """What follows `after`. Changes nothing."""
        raise NotImplementedError

    def label(self, load: Load, after: int) -> ForwardHead:
        raise NotImplementedError

    def reborn(self, log: Log, life: int) -> Outbox:
        """The same line from a memory box that has begun anew."""
        raise NotImplementedError

    # -- leaving

    @property
    def may_send(self) -> bool:
        return not (self.is_closed or self.is_halted or self.retry_at_ms) and len(self.flights) < FLIGHTS_MAX

    def find(self) -> Load:
        """The next load to leave, with what was lost and passed over before it."""
        load = self.look(self.seen_from, self.records_max)
        return replace(load, lost=load.lost + self.seen_lost) if self.seen_lost else load

    def is_worth_sending(self, load: Load) -> bool:
        """A long stretch of nothing is sent too, so that a restart need not look at it again."""
        return load.count > 0 or load.upto - self.sent >= EXAMINE_MAX

    def passed(self, load: Load) -> None:
        """Nothing of it leaves. It is not looked at again."""
        self.seen_from, self.seen_lost = load.upto, load.lost

    def left(self, load: Load, number: int) -> None:
        self.flights[number] = _Flight(number, self.sent, load.upto, load.count, len(load.text))
        self.sent = self.seen_from = load.upto
        self.seen_lost = 0

    # -- coming back

    def came_back(self, flight: _Flight, answer: ForwardReply) -> None:
        """The destination's answer to a parcel."""
        if answer.generation != self._total_of:
            # A memory box that began anew counts from 0 again.
            self._total_of = answer.generation
            self._total_before = self.total if answer.total < self.total else 0
        self.total = max(self.total, self._total_before + answer.total)  # answers may overtake each other
        if answer.position >= flight.upto:
            self.failures = 0
            self.last_error = ""
            self.position = max(self.position, answer.position)
            if self.position > self.sent:
                self.sent = self.seen_from = self.position
                self.seen_lost = 0
            self.records_max = min(PARCEL_RECORDS_MAX, self.records_max + 1 + self.records_max // 8)
        else:  # it stands elsewhere: plan again from there, when nothing is out that could still move it
            self.is_halted = True
            self._rewound_to = answer.position

    def failed(self, flight: _Flight, code: str, message: str, now_ms: int) -> None:
        self.is_halted = True
        self.last_error = f"{code}: {message}" if message else code
        if code in _TOO_MUCH and flight.count > 1:
            # At once with less of it: a box with room for one record must get one.
            self.records_max = max(1, flight.count // 2)
        elif not self.retry_at_ms:  # several that were out together fail for one reason
            self.failures += 1
            self.retry_at_ms = now_ms + min(_RETRY_MS_MIN << min(self.failures - 1, 10), _RETRY_MS_MAX)

    def settle(self) -> None:
        """Everything is back after something went wrong: go on from what the destination has."""
        if self.is_halted and not self.flights:
            if self._rewound_to is not None:
                self.position = self._rewound_to
            self.restart()

    def restart(self) -> None:
        self.flights.clear()
        self.sent = self.seen_from = self.position
        self.seen_lost = 0
        self.is_halted = False
        self._rewound_to = None

    # -- saving

    def change_of_move(self, generation: int, now_ms: int) -> Change | None:
        """What is logged of how far the destination has come; None when that can wait. An outbox whose source
        lets go of what has arrived overrides it, and says so each time."""
        if self.position == self.saved_position or now_ms - self.saved_ms < SAVE_EVERY_MS:
            return None
        self.saved_ms = now_ms
        return OutboxMoved(generation, self.origin, self.position, self.total)

    def saved(self, position: int, total: int) -> None:
        """A fact of the log: the destination had this much."""
        self.saved_position, self.saved_total = position, total
        if position != self.position:  # only in recovery: live, what is saved is where it stands
            self.position, self.total = position, total
            self.restart()


class Outboxes:
    """All outboxes of a shard: whose turn it is, what is out, who is to be tried again and when."""

    def __init__(self) -> None:
        #: In turn. One outbox is here at most once.
        self._waiting: deque[Outbox] = deque()
        self._out: dict[int, tuple[Outbox, _Flight]] = {}
        self._bytes_out = 0
        self._numbers = itertools.count(1)
        self._retries: list[tuple[int, int, Outbox]] = []
        self._order = itertools.count()
        self._carrier = 0
        #: Whether lines of moves send nothing for now, while a backup is taken.
        self.lines_held = False
        #: The lsn at which this life of the shard began. Parcels are numbered anew in each, and an answer to
        #: one of an earlier life, which may still be under way, must not be taken for one of this.
        self.shard_life = 0

    def __repr__(self) -> str:
        return f"<Outboxes {len(self._waiting)} waiting, {len(self._out)} parcels out>"

    def note(self, outboxes: Iterable[Outbox]) -> bool:
        """There may be something to send. Whether anyone may send it now."""
        noted = False
        for outbox in outboxes:
            if not outbox.is_waiting and self._may_send(outbox):
                outbox.is_waiting = True
                self._waiting.append(outbox)
            noted = noted or outbox.is_waiting
        return noted

    def _may_send(self, outbox: Outbox) -> bool:
        return outbox.may_send and not (self.lines_held and outbox.is_line)

    def close(self, outbox: Outbox) -> None:
        """It sends nothing any more. What is out may still arrive; its answer is not waited for."""
        outbox.is_closed = True

    # -- leaving

    def collect(self, carrier: int) -> list[forwards.CopyBatch]:
        """The next parcels, a share for each that waits. One that needs what is not in memory is passed over;
        when nothing else leaves, it is asked for."""
        if carrier != self._carrier:
            self._begin(carrier)
        found: list[tuple[Outbox, Load | None]] = []
        missing: NotLoaded | None = None
        size = looked_at = 0
        room = min(COLLECT_BYTES_MAX, BYTES_OUT_MAX - self._bytes_out)
        count = min(COLLECT_PARCELS_MAX, PARCELS_OUT_MAX - len(self._out))
        for outbox in itertools.islice(self._waiting, count):
            if size >= room or looked_at >= COLLECT_EXAMINE_MAX:
                break
            load: Load | None = Load(outbox.seen_from)
            if self._may_send(outbox):
                try:
                    load = outbox.find()
                except NotLoaded as error:
                    missing, load = missing or error, None
            found.append((outbox, load))
            if load is not None:
                size += len(load.text)
                looked_at += load.upto - outbox.seen_from
        parcels = [parcel for outbox, load in found for parcel in self._give_out(outbox, load)]
        if missing is not None and not parcels:
            raise missing  # whose turn it was is last in line now, and holds nobody up
        return parcels

    def _give_out(self, outbox: Outbox, load: Load | None) -> list[forwards.CopyBatch]:
        """What leaves of a load, if anything; without one, the outbox has to wait for its payload."""
        self._waiting.popleft()
        if load is None:
            self._waiting.append(outbox)
            return []
        outbox.is_waiting = False
        if not self._may_send(outbox):
            return []
        parcels = []
        if outbox.is_worth_sending(load):
            number = next(self._numbers)
            label = forwards.encode(outbox.label(load, outbox.sent))
            outbox.left(load, number)
            flight = outbox.flights[number]
            self._out[number] = (outbox, flight)
            self._bytes_out += flight.bytes
            parcels.append(
                forwards.CopyBatch(number, outbox.source, outbox.origin, outbox.dest, label, load.text)
            )
        else:
            outbox.passed(load)
        if load.more:
            self.note((outbox,))
        return parcels

    def _begin(self, carrier: int) -> None:
        """Another carrier: what the last one had may or may not have arrived. It is all given out anew."""
        self._carrier = carrier
        lost = {id(outbox): outbox for outbox, _ in self._out.values()}
        self._out.clear()
        self._bytes_out = 0
        for outbox in lost.values():
            outbox.restart()
            self.note((outbox,))

    # -- coming back

    def came_back(self, carried: ReportDelivery, now_ms: int) -> Outbox | None:
        """The outbox that this answer was for, unless its parcel is not out any more."""
        if carried.shard_life != self.shard_life or carried.number not in self._out:
            return None
        outbox, flight = self._out.pop(carried.number)
        self._bytes_out -= flight.bytes
        del outbox.flights[carried.number]
        if outbox.is_closed:
            return None
        answer = carried.answer
        if answer is not None and answer.life == outbox.life:
            outbox.came_back(flight, answer)
        else:
            code = carried.code if answer is None else "seq_mismatch"
            paused = bool(outbox.retry_at_ms)
            outbox.failed(flight, code, carried.message, now_ms)
            if outbox.retry_at_ms and not paused:
                heapq.heappush(self._retries, (outbox.retry_at_ms, next(self._order), outbox))
        outbox.settle()
        self.note((outbox,))
        return outbox

    def next_retry_ms(self) -> int | None:
        return self._retries[0][0] if self._retries else None

    def retry(self, now_ms: int) -> bool:
        """Those whose pause is over. Whether there were any."""
        due = False
        while self._retries and self._retries[0][0] <= now_ms:
            _, _, outbox = heapq.heappop(self._retries)
            outbox.retry_at_ms = 0
            due = self.note((outbox,)) or due
        return due

    def statistics(self) -> dict[str, int]:
        return {"parcels_out": len(self._out), "parcel_bytes_out": self._bytes_out}

    def check(self) -> None:
        """Asserts WAITING: an outbox is in turn at most once, and what is out is counted. For tests."""
        waiting = [id(outbox) for outbox in self._waiting]
        assert len(set(waiting)) == len(waiting), "WAITING"
        assert all(outbox.is_waiting for outbox in self._waiting), "WAITING"
        assert self._bytes_out == sum(flight.bytes for _, flight in self._out.values()), "WAITING"
