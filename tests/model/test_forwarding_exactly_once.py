"""Goal: whatever happens on the way, a destination holds each record of its source once, in order (§6.1).

Method: two real machines with their logs. Parcels are collected, delivered in any order and more than once,
their answers lost or late; the carrier, either process or either machine's power fails at any moment, and
comes back from the log alone or with a snapshot; full boxes refuse. At the end everything is carried, and
the destination is compared with the source. A power failure may take the end of a disk box: what it took is
sent again.
"""

from __future__ import annotations

import random
from unittest.mock import patch as replaced

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from shard.core.snapshot_facts import ShardState
from streams.protocol.messages import commands
from streams.protocol.messages.forwards import ReportDelivery
from tests.support.carrying import Given, bring, carry_all, collect, copies, tie
from tests.support.machines import Driver, recovered, sampled


class Shard:
    """A driver that can lose its process or its power, and come back."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.start("boot-1")
        self.boots = 1
        self.states: list[ShardState] = []

    def snapshot(self) -> None:
        self.states = [*self.states[-1:], self.driver.machine.snapshot()]

    def die(self, lsn: int, *, power: bool, with_snapshot: bool) -> None:
        self.boots += power
        usable = [state for state in self.states if state.lsn <= lsn]
        machine = recovered(self.driver.log[:lsn], usable[-1] if usable and with_snapshot else None)
        log = self.driver.log[:lsn]
        self.driver = Driver(machine, self.driver.now_ms)
        self.driver.log = list(log)
        self.states = usable
        self.driver.start(f"boot-{self.boots}")


class ExactlyOnce(RuleBasedStateMachine):
    durability = "fsync"
    cap_records = 0

    def __init__(self) -> None:
        super().__init__()
        small = {"BATCH_RECORDS_MAX": 3, "OUTBOX_BATCHES_MAX": 3, "EXAMINE_MAX": 7}
        self.replaced = [
            replaced(f"shard.core.routers.outbox.{name}", value) for name, value in small.items()
        ]
        self.replaced.append(replaced("shard.core.routers.router_outbox.EXAMINE_MAX", 7))
        for each in self.replaced:
            each.start()
        self.source, self.dest = Shard(), Shard()
        self.source.driver.put("from", durability="fsync")
        config = {"durability": self.durability, "cap_records": self.cap_records, "discard": "reject"}
        self.dest.driver.put("to", **config)
        self.dest.driver.put("other", durability="fsync")
        tie(self.source.driver, self.dest.driver)
        tie(self.source.driver, self.dest.driver, origin="other#2", dest="other")
        self.number = 0
        self.carrier = 1
        self.parcels: list[Given] = []
        self.answers: list[ReportDelivery] = []
        #: What was in the destination and has been taken out of it, when it is bounded.
        self.taken: list[object] = []

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            for each in self.replaced:
                each.stop()

    # -- working

    @rule(counts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
    def write(self, counts: list[int]) -> None:
        for count in counts:
            numbers = range(self.number + 1, self.number + count + 1)
            self.number += count
            self.source.driver.append(*numbers, box="from")

    @rule()
    def ask(self) -> None:
        self.parcels += collect(self.source.driver, self.carrier)

    @precondition(lambda self: self.parcels)
    @rule(at=st.randoms(use_true_random=False), keep=st.booleans())
    def deliver(self, at: random.Random, keep: bool) -> None:
        """Any parcel that was ever given out, again if it is kept."""
        index = at.randrange(len(self.parcels))
        parcel = self.parcels[index] if keep else self.parcels.pop(index)
        self.answers.append(bring(self.dest.driver, parcel, sync=self.durability == "fsync"))

    @precondition(lambda self: self.answers)
    @rule(at=st.randoms(use_true_random=False), keep=st.booleans())
    def answer(self, at: random.Random, keep: bool) -> None:
        index = at.randrange(len(self.answers))
        carried = self.answers[index] if keep else self.answers.pop(index)
        self.source.driver.do(carried)

    @rule(ms=st.sampled_from([1, 30, 700]))
    def wait(self, ms: int) -> None:
        for shard in (self.source, self.dest):
            shard.driver.now_ms += ms
            shard.driver.tick()
            shard.driver.sync()

    @rule(source=st.booleans())
    def snapshot(self, source: bool) -> None:
        (self.source if source else self.dest).snapshot()

    # -- failing

    @rule()
    def another_carrier(self) -> None:
        """What the old one had is still under way, and its answers are."""
        self.carrier += 1

    @rule(source=st.booleans(), with_snapshot=st.booleans())
    def process_dies(self, source: bool, with_snapshot: bool) -> None:
        shard = self.source if source else self.dest
        shard.driver.logged()
        shard.die(shard.driver.machine.lsn, power=False, with_snapshot=with_snapshot)

    @rule(source=st.booleans(), with_snapshot=st.booleans())
    def power_fails(self, source: bool, with_snapshot: bool) -> None:
        shard = self.source if source else self.dest
        shard.die(shard.driver.machine.durable_lsn, power=True, with_snapshot=with_snapshot)

    # -- the end

    def finish(self) -> None:
        carry_all(self.source.driver, self.dest.driver, self.carrier + 1)
        assert self.taken + copies(self.dest.driver) == list(range(1, self.number + 1))
        assert copies(self.dest.driver, "other") == list(range(1, self.number + 1))
        outbox = self.source.driver.machine.boxes["from"].outboxes["copy#1"]
        assert outbox.total == self.number, "the total counts copies, not attempts"


class ExactlyOnceIntoADiskBox(ExactlyOnce):
    """A power failure takes copies from it that readers have seen. They come again: none was answered."""

    durability = "disk"


class ExactlyOnceIntoAFullBox(ExactlyOnce):
    cap_records = 4

    @rule()
    def make_room(self) -> None:
        self.taken += copies(self.dest.driver)
        head = self.dest.driver.state("to").head_seq
        self.dest.driver.ask(commands.DeleteRecords("to", head + 1))

    def finish(self) -> None:
        for _ in range(self.number + 1):
            self.make_room()
            for shard in (self.source, self.dest):
                shard.driver.now_ms += 5_000
                shard.driver.tick()
            for parcel in collect(self.source.driver, self.carrier):
                self.source.driver.do(bring(self.dest.driver, parcel))
            for carried in self.answers:
                self.source.driver.do(carried)
            self.carrier += 1
        self.make_room()
        assert self.taken == list(range(1, self.number + 1))
        assert copies(self.dest.driver, "other") == list(range(1, self.number + 1))


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = sampled(60, steps=40)
TestExactlyOnceIntoADiskBox = ExactlyOnceIntoADiskBox.TestCase
TestExactlyOnceIntoADiskBox.settings = sampled(60, steps=40)
TestExactlyOnceIntoAFullBox = ExactlyOnceIntoAFullBox.TestCase
TestExactlyOnceIntoAFullBox.settings = sampled(40, steps=40)
