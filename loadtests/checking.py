"""Checks that a load finds every record once, in its producer's order. Pure: no HTTP and no clock.

A producer numbers its records 0, 1, 2 … in each box, and every record has its producer and its number. So
each reader alone detects these faults:

    lost        a skipped seq or number, or an acked record that is missing at the end
    doubled     a number that arrives a second time
    reordered   a skipped number that arrives later
    invented    a number that its producer has never sent
    returned    a job that is claimed again after its ack succeeded, or while it is leased

Boxes of a load have no cap and no expiry, so readers see every seq. A reader stores one number for each
producer, and at most `GAPS_MAX` gaps, however long the box is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap

#: Gaps that a reader stores, to tell a late record from a duplicate; and faults that are described.
GAPS_MAX = 1000
DESCRIPTIONS_MAX = 50

KINDS = ("lost", "doubled", "reordered", "invented", "returned")


class Faults:
    """Counts of faults by kind, and descriptions of the first few."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.descriptions: list[str] = []

    def add(self, kind: str, text: str, count: int = 1) -> None:
        assert kind in KINDS
        self.counts[kind] += count
        if len(self.descriptions) < DESCRIPTIONS_MAX:
            self.descriptions.append(f"{kind}: {text}")

    def merge(self, counts: Mapping[str, int], descriptions: Iterable[str]) -> None:
        self.counts.update(counts)
        self.descriptions = [*self.descriptions, *descriptions][:DESCRIPTIONS_MAX]

    def __bool__(self) -> bool:
        return self.counts.total() > 0

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)


@dataclass
class ProducerCounts:
    """Counts of one producer in one box.

    Numbers below `acked_count` are stored for certain; numbers from `sent_count` on were never sent. At most
    one write without a response lies in between.
    """

    sent_count: int = 0
    acked_count: int = 0


@dataclass
class Ledger:
    """The counts of all producers, by box and producer."""

    boxes: dict[str, dict[str, ProducerCounts]] = field(default_factory=dict)

    def of(self, box: str, producer: str) -> ProducerCounts:
        return self.boxes.setdefault(box, {}).setdefault(producer, ProducerCounts())

    def as_json(self) -> dict[str, dict[str, list[int]]]:
        return {
            box: {name: [each.sent_count, each.acked_count] for name, each in producers.items()}
            for box, producers in self.boxes.items()
        }

    def update(self, report: Mapping[str, Mapping[str, Iterable[int]]]) -> None:
        """Replace the counts of another process's producers by its latest report."""
        for box, producers in report.items():
            for name, (sent_count, acked_count) in producers.items():
                self.boxes.setdefault(box, {})[name] = ProducerCounts(sent_count, acked_count)

    def acked_records(self) -> int:
        return sum(each.acked_count for producers in self.boxes.values() for each in producers.values())


class Reader:
    """One reader of one box.

    A reader from the start of the box expects every number. A later reader accepts the first number of each
    producer.
    """

    def __init__(self, box: str, faults: Faults, *, from_seq: int = 0) -> None:
        self.box = box
        self.seq = from_seq
        self.next: dict[str, int] = {}
        self._is_from_start = from_seq == 0
        self._faults = faults
        self._gaps: set[tuple[str, int]] = set()

    def page(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Check the records of one response or event."""
        next_numbers = self.next
        for record in records:
            seq, data = record["$seq"], record["data"]
            if seq != self.seq + 1:
                self._odd_seq(seq)
            self.seq = max(self.seq, seq)
            producer, number = data["p"], data["n"]
            if number == next_numbers.get(producer, 0 if self._is_from_start else number):
                next_numbers[producer] = number + 1
            else:
                self._odd_number(seq, producer, number)

    def add_gap(self, tombstone: Mapping[str, Any]) -> None:
        """Count a tombstone as lost records: no record of a load may be evicted."""
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
        due_number = self.next.get(producer, 0)
        where = f"{self.box} seq {seq}: number {number} of {producer} where {due_number} was due"
        if number > due_number:
            self._faults.add("lost", where, number - due_number)
            room = GAPS_MAX - len(self._gaps)
            self._gaps.update((producer, each) for each in range(due_number, min(number, due_number + room)))
            self.next[producer] = number + 1
        elif (producer, number) in self._gaps:
            self._gaps.remove((producer, number))
            self._faults.counts["lost"] -= 1
            self._faults.add("reordered", where)
        else:
            self._faults.add("doubled", where)


def settle(reader: Reader, producers: Mapping[str, ProducerCounts], faults: Faults) -> None:
    """Compare a reader of the whole box with the counts of its producers, after all have stopped."""
    for producer, each in producers.items():
        received_count = reader.next.get(producer, 0)
        if received_count < each.acked_count:
            faults.add(
                "lost",
                f"{reader.box}: {each.acked_count} of {producer} were acked, {received_count} are there",
                each.acked_count - received_count,
            )
        elif received_count > each.sent_count:
            faults.add(
                "invented",
                f"{reader.box}: {received_count} of {producer}, {each.sent_count} were sent",
                received_count - each.sent_count,
            )
    for producer in reader.next.keys() - producers.keys():
        faults.add("invented", f"{reader.box}: records of {producer}, which has never sent any")


class Jobs:
    """Checks the jobs of all workers of one queue.

    With `may_return`, shards are killed, so leases may end early. A job whose ack succeeded must never
    return.
    """

    def __init__(self, box: str, faults: Faults, *, may_return: bool = False) -> None:
        self.box = box
        self._faults = faults
        self._may_return = may_return
        #: Producer -> numbers whose ack succeeded; numbers whose ack was sent and may have arrived; and done
        #: numbers that the next report will contain.
        self.done_jobs: dict[str, BitMap] = {}
        self.maybe_done_jobs: dict[str, BitMap] = {}
        self._news: dict[str, list[int]] = {}
        self._holders: dict[tuple[str, int], str] = {}

    def on_claim(self, worker: str, producer: str, number: int) -> None:
        job = (producer, number)
        if number in self.done_jobs.get(producer, ()):
            self._faults.add(
                "returned", f"{self.box}: job {number} of {producer} was done, and {worker} has it"
            )
        elif job in self._holders and not self._may_return:
            self._faults.add(
                "returned", f"{self.box}: job {number} of {producer}: {self._holders[job]}, {worker}"
            )
        self._holders[job] = worker

    def on_ack_sent(self, producer: str, number: int) -> None:
        """Record that an ack is sent: from now on the job may be done, with or without a response."""
        self.maybe_done_jobs.setdefault(producer, BitMap()).add(number)

    def on_ack(self, producer: str, number: int) -> None:
        self._holders.pop((producer, number), None)
        self.maybe_done_jobs.get(producer, BitMap()).discard(number)
        self.done_jobs.setdefault(producer, BitMap()).add(number)
        self._news.setdefault(producer, []).append(number)

    def on_skip(self, worker: str, producer: str, number: int, *, was_repeated: bool = False) -> None:
        """Record an ack that the server skipped: the lease had ended, and another worker may have the job.

        If the ack was repeated, an earlier one may have arrived; then it is unknown whether the job is done.
        """
        if self._holders.get((producer, number)) == worker:
            del self._holders[(producer, number)]
        if was_repeated:
            return
        self.maybe_done_jobs.get(producer, BitMap()).discard(number)
        if not self._may_return:
            self._faults.add(
                "returned", f"{self.box}: job {number} of {producer} was taken away from {worker}"
            )

    def news(self) -> dict[str, dict[str, list[int]]]:
        news, self._news = self._news, {}
        return {
            "done": news,
            "maybe": {producer: list(numbers) for producer, numbers in self.maybe_done_jobs.items()},
        }

    def update(self, news: Mapping[str, Mapping[str, list[int]]]) -> None:
        """Add the done jobs of another process."""
        for producer, numbers in news["maybe"].items():
            self.maybe_done_jobs.setdefault(producer, BitMap()).update(numbers)
        for producer, numbers in news["done"].items():
            done_numbers = self.done_jobs.setdefault(producer, BitMap())
            for twice in done_numbers & BitMap(numbers):
                self._faults.add("returned", f"{self.box}: job {twice} of {producer} was done twice")
            done_numbers.update(numbers)

    def settle(self, waiting: Mapping[str, BitMap], producers: Mapping[str, ProducerCounts]) -> None:
        """Check the jobs still in the queue (`waiting`), after all workers and producers have stopped."""
        for producer, each in producers.items():
            done_numbers, ready_numbers = (
                self.done_jobs.get(producer, BitMap()),
                waiting.get(producer, BitMap()),
            )
            for both in done_numbers & ready_numbers:
                self._faults.add("returned", f"{self.box}: job {both} of {producer} was done and waits again")
            lost_numbers = (
                BitMap(range(each.acked_count))
                - done_numbers
                - ready_numbers
                - self.maybe_done_jobs.get(producer, BitMap())
            )
            if lost_numbers:
                self._faults.add(
                    "lost", f"{self.box}: jobs {list(lost_numbers)[:5]}… of {producer}", len(lost_numbers)
                )
            beyond = [number for number in (done_numbers | ready_numbers) if number >= each.sent_count]
            if beyond:
                self._faults.add("invented", f"{self.box}: jobs {beyond[:5]}… of {producer}", len(beyond))

    def jobs_done(self) -> int:
        return sum(map(len, self.done_jobs.values()))


def slope_per_hour(samples: Iterable[tuple[float, float]]) -> float:
    """Return the slope of the line that fits (seconds, value) best; 0 with fewer than two samples."""
    points = list(samples)
    if len(points) < 2:
        return 0.0
    middle_s = sum(at for at, _ in points) / len(points)
    middle = sum(value for _, value in points) / len(points)
    spread = sum((at - middle_s) ** 2 for at, _ in points)
    if not spread:
        return 0.0
    return 3600 * sum((at - middle_s) * (value - middle) for at, value in points) / spread
