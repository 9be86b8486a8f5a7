"""What a load must find: every record once, in its producer's order. Pure; knows no HTTP and no clock.

A producer numbers its records 0, 1, 2 … in each box, and every record carries who made it and its number. So
any reader can tell on its own what is missing, came twice or came late:

    lost        a seq or a number that was passed over, or an acked record that is not there in the end
    doubled     a number that came before
    reordered   a number that was passed over and came later
    invented    a number that its producer has never sent
    returned    a job that was given out again after its ack had been answered, or while it was leased

Boxes of a load are never capped and never expire, so readers see every seq. What a check remembers is one
number for each producer, and at most `GAPS_MAX` gaps; a box's length costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap

#: Gaps that a reader remembers, to tell a late record from one that came twice; and faults told in full.
GAPS_MAX = 1000
TOLD_MAX = 50

KINDS = ("lost", "doubled", "reordered", "invented", "returned")


class Faults:
    """What was found, counted by kind, the first few in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []

    def add(self, kind: str, text: str, count: int = 1) -> None:
        assert kind in KINDS
        self.counts[kind] += count
        if len(self.told) < TOLD_MAX:
            self.told.append(f"{kind}: {text}")

    def merge(self, counts: Mapping[str, int], told: Iterable[str]) -> None:
        self.counts.update(counts)
        self.told = [*self.told, *told][:TOLD_MAX]

    def __bool__(self) -> bool:
        return self.counts.total() > 0

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)


@dataclass
class Sent:
    """What one producer knows of its records in one box: numbers below `acked` are there for certain, numbers
    from `sent` on were never sent. In between lies at most one write whose answer never came."""

    sent: int = 0
    acked: int = 0


@dataclass
class Ledger:
    """What all producers know, by box and producer."""

    boxes: dict[str, dict[str, Sent]] = field(default_factory=dict)

    def of(self, box: str, producer: str) -> Sent:
        return self.boxes.setdefault(box, {}).setdefault(producer, Sent())

    def as_json(self) -> dict[str, dict[str, list[int]]]:
        return {
            box: {name: [each.sent, each.acked] for name, each in found.items()}
            for box, found in self.boxes.items()
        }

    def update(self, told: Mapping[str, Mapping[str, Iterable[int]]]) -> None:
        """Takes what another process has told of its own producers; the last word stands."""
        for box, found in told.items():
            for name, (sent, acked) in found.items():
                self.boxes.setdefault(box, {})[name] = Sent(sent, acked)

    def acked_records(self) -> int:
        return sum(each.acked for found in self.boxes.values() for each in found.values())


class Reader:
    """One reader of one box. From the start of the box it expects every number; from elsewhere it takes the
    first number of each producer as it comes."""

    def __init__(self, box: str, faults: Faults, *, from_seq: int = 0) -> None:
        self.box = box
        self.seq = from_seq
        self.next: dict[str, int] = {}
        self._is_from_start = from_seq == 0
        self._faults = faults
        self._gaps: set[tuple[str, int]] = set()

    def page(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Records as an answer or an event lists them."""
        expected = self.next
        for record in records:
            seq, data = record["$seq"], record["data"]
            if seq != self.seq + 1:
                self._odd_seq(seq)
            self.seq = max(self.seq, seq)
            producer, number = data["p"], data["n"]
            if number == expected.get(producer, 0 if self._is_from_start else number):
                expected[producer] = number + 1
            else:
                self._odd_number(seq, producer, number)

    def told_of_a_gap(self, tombstone: Mapping[str, Any]) -> None:
        """No record of a load may ever be evicted."""
        first, last = tombstone["gap_from"], tombstone["gap_to"]
        self._faults.add(
            "lost",
            f"{self.box}: a tombstone for seqs {first}-{last} ({tombstone['reason']})",
            last - first + 1,
        )

    def _odd_seq(self, seq: int) -> None:
        if seq > self.seq:
            missing = seq - self.seq - 1
            self._faults.add("lost", f"{self.box}: seq {seq} after {self.seq}", missing)
        else:
            self._faults.add("reordered", f"{self.box}: seq {seq} after {self.seq}")

    def _odd_number(self, seq: int, producer: str, number: int) -> None:
        expected = self.next.get(producer, 0)
        where = f"{self.box} seq {seq}: number {number} of {producer} where {expected} was due"
        if number > expected:
            self._faults.add("lost", where, number - expected)
            room = GAPS_MAX - len(self._gaps)
            self._gaps.update((producer, each) for each in range(expected, min(number, expected + room)))
            self.next[producer] = number + 1
        elif (producer, number) in self._gaps:
            self._gaps.remove((producer, number))
            self._faults.counts["lost"] -= 1
            self._faults.add("reordered", where)
        else:
            self._faults.add("doubled", where)


def settle(reader: Reader, sent: Mapping[str, Sent], faults: Faults) -> None:
    """A reader from the start has reached the end, and no producer sends any more: is everything there?"""
    for producer, each in sent.items():
        found = reader.next.get(producer, 0)
        if found < each.acked:
            faults.add(
                "lost",
                f"{reader.box}: {each.acked} of {producer} were acked, {found} are there",
                each.acked - found,
            )
        elif found > each.sent:
            faults.add(
                "invented", f"{reader.box}: {found} of {producer}, {each.sent} were sent", found - each.sent
            )
    for producer in reader.next.keys() - sent.keys():
        faults.add("invented", f"{reader.box}: records of {producer}, which has never sent any")


class Jobs:
    """All workers of one queue. `may_return` says that leases can be void by no fault of the server's: its
    shards are killed. A job whose ack was answered never comes back in any case."""

    def __init__(self, box: str, faults: Faults, *, may_return: bool = False) -> None:
        self.box = box
        self._faults = faults
        self._may_return = may_return
        #: By producer: numbers whose ack was answered, those whose ack was sent and may have arrived, and
        #: those done that were not told to others yet.
        self.done: dict[str, BitMap] = {}
        self.maybe: dict[str, BitMap] = {}
        self._news: dict[str, list[int]] = {}
        self._held: dict[tuple[str, int], str] = {}

    def claimed(self, worker: str, producer: str, number: int) -> None:
        job = (producer, number)
        if number in self.done.get(producer, ()):
            self._faults.add(
                "returned", f"{self.box}: job {number} of {producer} was done, and {worker} has it"
            )
        elif job in self._held and not self._may_return:
            self._faults.add(
                "returned", f"{self.box}: job {number} of {producer}: {self._held[job]}, {worker}"
            )
        self._held[job] = worker

    def acking(self, producer: str, number: int) -> None:
        """From here on it may be done, whatever becomes of the answer."""
        self.maybe.setdefault(producer, BitMap()).add(number)

    def acked(self, producer: str, number: int) -> None:
        self._held.pop((producer, number), None)
        self.maybe.get(producer, BitMap()).discard(number)
        self.done.setdefault(producer, BitMap()).add(number)
        self._news.setdefault(producer, []).append(number)

    def skipped(self, worker: str, producer: str, number: int, *, was_repeated: bool = False) -> None:
        """The lease was void, and the job is somebody else's now. Or the ack was sent more than once and an
        earlier one had arrived: then it stays unknown whether the job is done."""
        if self._held.get((producer, number)) == worker:
            del self._held[(producer, number)]
        if was_repeated:
            return
        self.maybe.get(producer, BitMap()).discard(number)
        if not self._may_return:
            self._faults.add(
                "returned", f"{self.box}: job {number} of {producer} was taken away from {worker}"
            )

    def news(self) -> dict[str, dict[str, list[int]]]:
        news, self._news = self._news, {}
        return {"done": news, "maybe": {producer: list(found) for producer, found in self.maybe.items()}}

    def update(self, news: Mapping[str, Mapping[str, list[int]]]) -> None:
        """Takes what another process has done."""
        for producer, numbers in news["maybe"].items():
            self.maybe.setdefault(producer, BitMap()).update(numbers)
        for producer, numbers in news["done"].items():
            done = self.done.setdefault(producer, BitMap())
            for twice in done & BitMap(numbers):
                self._faults.add("returned", f"{self.box}: job {twice} of {producer} was done twice")
            done.update(numbers)

    def settle(self, waiting: Mapping[str, BitMap], sent: Mapping[str, Sent]) -> None:
        """`waiting` is what the queue still has, when nobody works or produces any more."""
        for producer, each in sent.items():
            done, rest = self.done.get(producer, BitMap()), waiting.get(producer, BitMap())
            for both in done & rest:
                self._faults.add("returned", f"{self.box}: job {both} of {producer} was done and waits again")
            lost = BitMap(range(each.acked)) - done - rest - self.maybe.get(producer, BitMap())
            if lost:
                self._faults.add("lost", f"{self.box}: jobs {list(lost)[:5]}… of {producer}", len(lost))
            beyond = [number for number in (done | rest) if number >= each.sent]
            if beyond:
                self._faults.add("invented", f"{self.box}: jobs {beyond[:5]}… of {producer}", len(beyond))

    def jobs_done(self) -> int:
        return sum(map(len, self.done.values()))


def slope_per_hour(samples: Iterable[tuple[float, float]]) -> float:
    """Of the straight line that fits (seconds, value) best; 0 with fewer than two moments."""
    points = list(samples)
    if len(points) < 2:
        return 0.0
    middle_s = sum(at for at, _ in points) / len(points)
    middle = sum(value for _, value in points) / len(points)
    spread = sum((at - middle_s) ** 2 for at, _ in points)
    if not spread:
        return 0.0
    return 3600 * sum((at - middle_s) * (value - middle) for at, value in points) / spread
