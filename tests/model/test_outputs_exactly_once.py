"""Goal: whatever happens on the way, an ack with outputs happens whole or not at all, and each of its outputs
is in its box once, in order (v0 §24).

Method: a queue on one machine, its output boxes on that one and on another, with their logs. Copy batches are
delivered in any order and more than once, answers are lost or late. Acks are repeated with their keys. The
carrier, a process or the power dies; a machine comes back from its log, with or without a snapshot. A box is
full for a while. At the end all is carried, and the boxes have the outputs of exactly the acks that count.
"""

from __future__ import annotations

import random
from typing import NamedTuple
from unittest.mock import patch as replaced

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streams.protocol.errors import StreamsError
from streams.protocol.messages import commands, queues
from streams.protocol.messages.forwards import ReportDelivery
from tests.model.test_dead_letters_exactly_once import Side
from tests.support.carrying import Given, bring, carry_all, collect, copies
from tests.support.machines import patch, sampled


class Acked(NamedTuple):
    """An ack whose reply its client may have."""

    seq: int
    lsn: int
    outputs: dict[str, list[int]]


#: The boxes of the outputs: the first on the queue's shard, the others on another.
BOXES = ("near", "far", "small")


class OutputsOnce(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        small = {"output_queue.DESTS_MAX": 2, "output_queue.BATCH_BYTES_MAX": 120}
        self.replaced = [replaced(f"shard.core.queues.{name}", value) for name, value in small.items()]
        for each in self.replaced:
            each.start()
        self.queue, self.other = Side(), Side()
        self.number = 0
        self.acks: list[Acked] = []
        self.carrier = 1
        self.batches: list[Given] = []
        self.answers: list[ReportDelivery] = []

    @initialize(durability=st.sampled_from(["disk", "fsync"]))
    def create(self, durability: str) -> None:
        driver = self.queue.driver
        driver.put("q", type="queue", durability=durability, idempotency_window_ms=600_000)
        driver.put("near", durability=durability)
        self.other.driver.put("far", durability="fsync")
        self.other.driver.put("small", durability="fsync", cap_records=2, discard="reject")

    # -- work

    @rule(
        counts=st.dictionaries(st.sampled_from(BOXES), st.integers(1, 3), min_size=1, max_size=2),
        is_durable=st.booleans(),
    )
    def work(self, counts: dict[str, int], is_durable: bool) -> None:
        driver = self.queue.driver
        driver.append("job", box="q")
        (job,) = driver.claim(box="q") or [None]
        if job is None:
            return
        outputs: dict[str, list[int]] = {}
        for box, count in counts.items():
            outputs[box] = list(range(self.number, self.number + count))
            self.number += count
        reply = driver.do(driver.outputs_of(job["$seq"], key=f"k{job['$seq']}", box="q", **outputs)).reply
        if isinstance(reply, StreamsError):
            return  # too many boxes have outputs
        self.acks.append(Acked(job["$seq"], driver.machine.lsn, outputs))
        if is_durable:
            driver.sync()

    @rule(seed=st.integers(0, 999))
    def repeat(self, seed: int) -> None:
        if self.acks:
            seq, _, outputs = random.Random(seed).choice(self.acks)
            driver = self.queue.driver
            reply = driver.do(driver.outputs_of(seq, key=f"k{seq}", box="q", **outputs)).reply
            assert isinstance(reply, queues.AckReply) and reply.deduped

    # -- the carrier

    @rule(is_early=st.booleans())
    def copy_locally(self, is_early: bool) -> None:
        self.queue.driver.copy_locally(is_early=is_early)

    @rule()
    def pick_up(self) -> None:
        self.batches = [*self.batches, *collect(self.queue.driver, self.carrier)][-20:]

    @rule(seed=st.integers(0, 999), keep=st.booleans(), lose=st.booleans())
    def deliver(self, seed: int, keep: bool, lose: bool) -> None:
        if self.batches:
            at = random.Random(seed).randrange(len(self.batches))
            answer = bring(self.other.driver, self.batches[at] if keep else self.batches.pop(at))
            if not lose:
                self.answers.append(answer)

    @rule(seed=st.integers(0, 999), is_durable=st.booleans())
    def report(self, seed: int, is_durable: bool) -> None:
        if self.answers:
            self.queue.driver.do(self.answers.pop(random.Random(seed).randrange(len(self.answers))))
            if is_durable:
                self.queue.driver.sync()

    @rule()
    def carrier_dies(self) -> None:
        self.carrier += 1

    @rule(cap=st.sampled_from([2, 5, 1000]))
    def resize(self, cap: int) -> None:
        """More than it holds, so that nothing is evicted."""
        driver = self.other.driver
        driver.put("small", cap_records=max(cap, driver.state("small").count, 1))

    @rule(box=st.sampled_from(["q", "near"]), durability=st.sampled_from(["disk", "fsync"]))
    def change_class(self, box: str, durability: str) -> None:
        self.queue.driver.do(commands.PutBox(box, patch(durability=durability)))

    # -- lives

    @rule(of_queue=st.booleans())
    def snapshot(self, of_queue: bool) -> None:
        (self.queue if of_queue else self.other).snapshot()

    @rule(of_queue=st.booleans(), share=st.floats(0, 1), with_snapshot=st.booleans())
    def die(self, of_queue: bool, share: float, with_snapshot: bool) -> None:
        side = self.queue if of_queue else self.other
        durable_lsn = self.queue.driver.machine.durable_lsn
        side.die(share, with_snapshot=with_snapshot)
        if of_queue:
            keys = self.queue.driver.machine.boxes["q"].keys
            kept = [ack for ack in self.acks if f"\0ack k{ack.seq}" in keys]
            assert kept == self.acks[: len(kept)], "a power cut takes the last ones"
            assert all(ack in kept for ack in self.acks if ack.lsn <= durable_lsn)
            self.acks = kept

    @rule(ms=st.sampled_from([10, 1000]))
    def time_passes(self, ms: int) -> None:
        for side in (self.queue.driver, self.other.driver):
            side.now_ms += ms
            side.tick()

    # -- always

    @invariant()
    def an_output_is_visible_or_pending(self) -> None:
        boxes = self.queue.driver.machine.boxes
        if "near" not in boxes:
            return
        outputs = boxes["q"].outputs
        near = None if outputs is None else outputs.queues.get("near")
        pending_count = 0 if near is None else near.pending_count
        acked_count = sum(len(ack.outputs.get("near", ())) for ack in self.acks)
        assert boxes["near"].log.visible_totals()[0] + pending_count >= acked_count

    # -- the end

    def teardown(self) -> None:
        try:
            self.every_output_is_in_its_box_once()
        finally:
            for each in self.replaced:
                each.stop()

    def every_output_is_in_its_box_once(self) -> None:
        queue, other = self.queue.driver, self.other.driver
        if "q" not in queue.machine.boxes:
            return
        other.put("small", cap_records=100_000)
        self.carrier += 1
        for _ in range(3):
            queue.copy_all_locally()
            other.sync()
            carry_all(queue, other, self.carrier)
        for box in BOXES:
            expected = [number for ack in self.acks for number in ack.outputs.get(box, ())]
            driver = queue if box == "near" else other
            assert copies(driver, box) == expected, box
            assert driver.read(box=box).tombstone is None
        assert queue.state("q").queue.outputs_pending == 0  # type: ignore[union-attr]


TestOutputsOnce = OutputsOnce.TestCase
TestOutputsOnce.settings = sampled(30, steps=50)
