"""Goal: whatever happens on the way, each job that died is in the dead letter box, once, and only there (§8).

Method: a queue and its dead letter box on two machines with their logs. Jobs are worn out by workers. Parcels
are delivered in any order and more than once, answers are lost or late. The carrier or a process dies and
comes back from its log, with or without a snapshot. Letters are sent back and die again. At the end all is
carried, and every job is found in exactly one place.
"""

from __future__ import annotations

import random
from unittest.mock import patch as replaced

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from shard.core.snapshot_facts import ShardState
from streams.protocol.messages import queues
from streams.protocol.messages.forwards import CopyBatch, ReportDelivery
from tests.support.carrying import bring, carry_all, collect
from tests.support.jobs import QueueDriver
from tests.support.machines import facts_of, records_of, recovered, sampled


class Side:
    """A shard that can lose its process and come back."""

    def __init__(self) -> None:
        self.driver = QueueDriver()
        self.driver.start("boot")
        self.states: list[ShardState] = []

    def snapshot(self) -> None:
        self.driver.sync()
        self.states = [*self.states[-1:], self.driver.machine.snapshot()]

    def die(self, share: float, *, with_snapshot: bool) -> None:
        """What was durable is there; of the rest, any prefix may be."""
        machine = self.driver.machine
        lsn = machine.durable_lsn + round((machine.lsn - machine.durable_lsn) * share)
        usable = [state for state in self.states if state.lsn <= lsn]
        log = self.driver.log[:lsn]
        survivor = recovered(log, usable[-1] if usable and with_snapshot else None)
        assert facts_of(survivor) == facts_of(recovered(log))
        self.driver = QueueDriver(survivor, self.driver.now_ms)
        self.driver.log = list(log)
        self.states = usable
        self.driver.start("boot")


class DeadLetters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        small = {"BATCH_RECORDS_MAX": 3, "OUTBOX_BATCHES_MAX": 3}
        self.replaced = [
            replaced(f"shard.core.routers.outbox.{name}", value) for name, value in small.items()
        ]
        for each in self.replaced:
            each.start()
        self.queue, self.dead = Side(), Side()
        self.queue.driver.put("q", type="queue", durability="fsync", max_deliveries=1, dead_letter="dead")
        self.dead.driver.put("dead", durability="fsync")
        self.made: list[int] = []
        self.acked: set[int] = set()
        self.carrier = 1
        self.parcels: list[tuple[bool, CopyBatch]] = []
        self.answers: list[tuple[bool, ReportDelivery]] = []

    def side(self, of_queue: bool) -> QueueDriver:
        return (self.queue if of_queue else self.dead).driver

    # -- work

    @rule(count=st.integers(1, 5))
    def produce(self, count: int) -> None:
        fresh = list(range(len(self.made), len(self.made) + count))
        self.made += fresh
        self.queue.driver.append(*fresh, box="q")

    @rule(
        count=st.integers(1, 4),
        then=st.sampled_from(["ack", "nack", "nack", "hold"]),
        is_durable=st.booleans(),
    )
    def work(self, count: int, then: str, is_durable: bool) -> None:
        driver = self.queue.driver
        outcome = driver.do(queues.Claim(box="q", node="w", max=count))
        if is_durable:
            driver.sync()
        assert isinstance(outcome.reply, queues.ClaimResult)
        jobs = driver.claimed(outcome.reply)
        if not jobs:
            return
        seqs = [job["$seq"] for job in jobs]
        if then == "ack":
            driver.ack(*seqs, box="q")
            self.acked.update(job["data"] for job in jobs)
        elif then == "nack":
            driver.do(queues.Nack(box="q", node="w", seqs=seqs))
            if is_durable:
                driver.sync()

    @rule(count=st.integers(1, 5))
    def send_back(self, count: int) -> None:
        self.dead.driver.ask(queues.PlanRequeue("dead", "q", count))

    # -- the carrier

    @rule(from_queue=st.booleans())
    def pick_up(self, from_queue: bool) -> None:
        found = collect(self.side(from_queue), self.carrier)
        self.parcels = [*self.parcels, *((from_queue, parcel) for parcel in found)][-20:]

    @rule(seed=st.integers(0, 999), keep=st.booleans(), lose=st.booleans())
    def deliver(self, seed: int, keep: bool, lose: bool) -> None:
        if self.parcels:
            at = random.Random(seed).randrange(len(self.parcels))
            from_queue, parcel = self.parcels[at] if keep else self.parcels.pop(at)
            answer = bring(self.side(not from_queue), parcel)
            if not lose:
                self.answers.append((from_queue, answer))

    @rule(seed=st.integers(0, 999), is_durable=st.booleans())
    def tell(self, seed: int, is_durable: bool) -> None:
        if self.answers:
            from_queue, answer = self.answers.pop(random.Random(seed).randrange(len(self.answers)))
            self.side(from_queue).do(answer)
            if is_durable:
                self.side(from_queue).sync()

    @rule()
    def carrier_dies(self) -> None:
        self.carrier += 1

    # -- lives

    @rule()
    def die_right_after_a_claim(self) -> None:
        """Nothing of the claim is on the disk; whatever of it has left already would be promised twice."""
        self.queue.driver.sync()
        self.queue.driver.do(queues.Claim(box="q", node="w"))
        for parcel in collect(self.queue.driver, self.carrier):
            bring(self.dead.driver, parcel)
        self.queue.die(0.0, with_snapshot=False)

    @rule(of_queue=st.booleans())
    def snapshot(self, of_queue: bool) -> None:
        (self.queue if of_queue else self.dead).snapshot()

    @rule(of_queue=st.booleans(), share=st.floats(0, 1), with_snapshot=st.booleans())
    def die(self, of_queue: bool, share: float, with_snapshot: bool) -> None:
        (self.queue if of_queue else self.dead).die(share, with_snapshot=with_snapshot)

    @rule(ms=st.sampled_from([10, 1000, 40_000]))
    def time_passes(self, ms: int) -> None:
        for side in (self.queue.driver, self.dead.driver):
            side.now_ms += ms
            side.tick()

    # -- the end

    def teardown(self) -> None:
        try:
            self.every_job_is_in_one_place()
        finally:
            for each in self.replaced:
                each.stop()

    def every_job_is_in_one_place(self) -> None:
        queue, dead = self.queue.driver, self.dead.driver
        self.carrier += 1
        for _ in range(3):  # until nothing is on the way in either direction
            queue.sync()
            dead.sync()
            carry_all(queue, dead, self.carrier)
            carry_all(dead, queue, self.carrier)
        assert queue.totals("q")[2] == 0, "nothing is left on its way"
        waiting = [record["data"] for record in records_of(queue.read(box="q", limit=1000))]
        letters = records_of(dead.read(box="dead", limit=1000))
        found = waiting + [letter["data"] for letter in letters]
        assert sorted(found) == sorted(set(self.made) - self.acked)
        assert all(letter["meta"]["$dead_letter_from"] == "q" for letter in letters)
        assert dead.read(box="dead").tombstone is None and queue.read(box="q").tombstone is None


TestDeadLetters = DeadLetters.TestCase
TestDeadLetters.settings = sampled(60, steps=60)
