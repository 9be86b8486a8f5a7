"""Goal: whatever prefix of the log survives, recovery ends exactly where the live machine stood there.

Method: a random history runs on a live machine, which now and then loses its process or its power and goes
on from what survived. At the end every prefix of the log is replayed, twice and from snapshots, and compared
with what the live machine looked like there. Every payload is unlike all others, so that a seq given to two
records would be seen. Few seqs are reserved, so that disk boxes often run into their ceiling.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch as replaced

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shard.core.machine import Machine
from shard.core.snapshot_facts import ShardState
from shard.storage import frames
from tests.support.machines import (
    Driver,
    decoded,
    facts_of,
    live_texts,
    random_command,
    recovered,
    replayed,
    sampled,
    seqs_of,
)


def is_stored(machine: Machine, name: str) -> bool:
    return bool(machine.boxes[name].config.durability != "memory")


class RecoveryAgainstLive(RuleBasedStateMachine):
    reserve_seqs = 8
    compact_at = 2

    def __init__(self) -> None:
        super().__init__()
        self.replaced = [
            replaced("shard.core.context.RESERVE_SEQS", self.reserve_seqs),
            replaced("shard.core.context.RESERVATION_IDLE_MS", 50),
            replaced("shard.core.boxes.tail._COMPACT_AT", self.compact_at),
        ]
        for each in self.replaced:
            each.start()
        self.driver = Driver()
        self.boots = 1
        self.number = 0
        #: What the live machine looked like after each lsn at which it came to rest.
        self.looks: dict[int, dict[str, Any]] = {}
        self.snapshots: list[tuple[ShardState, bytes]] = []
        #: Every record that a reader could ever have had.
        self.seen: dict[tuple[str, int, int], bytes] = {}
        self.driver.start("boot-1")
        self.look()

    @property
    def machine(self) -> Machine:
        return self.driver.machine

    def look(self) -> None:
        look = facts_of(self.machine)
        known = self.looks.setdefault(self.machine.lsn, look)
        assert known == look, "what is not logged changes no fact"

    # -- living

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 30))
    def work(self, seed: int, count: int) -> None:
        """Many steps in one: hypothesis is slow to draw them, and histories must be long to be of use."""
        rng = random.Random(seed)
        for _ in range(count):
            self.number += 1
            self.driver.do(random_command(rng, self.driver, self.number))
            self.look()
            chance = rng.random()
            if chance < 0.15:
                self.driver.logged(rng.randint(self.machine.logged_lsn, self.machine.lsn))
            elif chance < 0.25:
                self.driver.sync(rng.randint(self.machine.durable_lsn, self.machine.lsn))
            elif chance < 0.4:
                self.driver.now_ms += rng.randrange(30)
            elif chance < 0.45:
                self.tick()
            elif chance < 0.6:
                self.driver.some_upkeep(rng)
                self.look()
            self.no_seq_is_ever_two_records()

    @rule(ms=st.sampled_from([1, 20, 60, 301]))
    def wait(self, ms: int) -> None:
        self.driver.now_ms += ms

    @rule()
    def tick(self) -> None:
        self.driver.tick()
        self.look()

    @rule(share=st.floats(0, 1))
    def logged(self, share: float) -> None:
        done = self.machine.logged_lsn
        self.driver.logged(done + round((self.machine.lsn - done) * share))

    @rule(share=st.floats(0, 1))
    def durable(self, share: float) -> None:
        done = self.machine.durable_lsn
        self.driver.sync(done + round((self.machine.lsn - done) * share))

    @rule()
    def snapshot(self) -> None:
        state = self.machine.snapshot()
        self.snapshots = [*self.snapshots[-2:], (state, b"".join(frames.encode_state(state)))]

    @invariant()
    def no_seq_is_ever_two_records(self) -> None:
        for name, box in self.machine.boxes.items():
            if is_stored(self.machine, name):
                for seq, (_, text) in live_texts(self.machine, name, box.log.visible_seq).items():
                    if text:  # rows of a commit that are not rendered yet, or again after a crash, have none
                        assert self.seen.setdefault((name, box.generation, seq), text) == text

    # -- dying

    @rule(share=st.floats(0, 1), orderly=st.booleans())
    def process_dies(self, share: float, orderly: bool) -> None:
        """What is in the file stays in the file: everything that was acked is there."""
        if orderly:
            self.driver.stop()
        done = self.machine.logged_lsn
        survivor = self.survivor(done + round((self.machine.lsn - done) * share))
        before = {
            name: box.log.holes[-1].last_seq if box.log.holes else 0 for name, box in survivor.boxes.items()
        }
        self.go_on(survivor, f"boot-{self.boots}")
        for name, box in self.machine.boxes.items():
            last_lost = box.log.holes[-1].last_seq if box.log.holes else 0
            # A box in memory has begun anew.
            assert last_lost == before[name] or not is_stored(self.machine, name), "nothing was lost"

    @rule(share=st.floats(0, 1))
    def power_fails(self, share: float) -> None:
        """What was durable stays; of the rest, any prefix may have reached the disk."""
        self.no_seq_is_ever_two_records()
        live = self.machine
        done = live.durable_lsn
        cut = done + round((live.lsn - done) * share)
        self.boots += 1
        self.go_on(self.survivor(cut), f"boot-{self.boots}")
        for name, box in live.boxes.items():
            if not is_stored(live, name):
                continue
            shown = live_texts(live, name, box.log.visible_seq)
            kept = {seq: text for seq, (lsn, text) in shown.items() if lsn <= cut}
            again = self.machine.generations.get(box.generation)
            if again is None or again.name != name:
                # A box whose creation was never acked may vanish, and its number be given to another; and one
                # that was in memory begins anew if the change that was to store it is lost. Whoever has asked
                # for its records since is waiting for that change.
                assert not shown or box.config_lsn > cut, "a box that showed something is there"
                continue
            found = live_texts(self.machine, name)
            # Of a batch that was logged again the first copy may have survived.
            lost = [seq for seq, (lsn, _) in shown.items() if lsn > cut and seq not in found]
            for seq, text in kept.items():
                assert found[seq][1] == text
            # What was seen of a disk box may be lost; a change of its class to fsync is lost with it then.
            assert not lost or again.config.durability == "disk", "only disk boxes lose what was seen"
            self.losses_are_told(name, lost)

    def losses_are_told(self, name: str, lost: list[int]) -> None:
        """A reader from the start gets every live record, and a tombstone for every one that is lost."""
        told: set[int] = set()
        got: list[int] = []
        log = self.machine.boxes[name].log
        cursor = 0
        while cursor < log.visible_seq:
            page = self.driver.read(cursor, box=name, limit=5)
            assert page.next_from_seq > cursor or page.tombstone is not None
            if page.tombstone is not None:
                assert page.tombstone.gap_from == cursor + 1
                told |= set(range(page.tombstone.gap_from, page.tombstone.gap_to + 1))
            got += seqs_of(page)
            cursor = page.next_from_seq
        assert got == sorted(live_texts(self.machine, name))
        assert set(lost) <= told
        self.look()

    def survivor(self, lsn: int) -> Machine:
        """Recovered from the newest snapshot that such a log could have beside it, every second time."""
        usable = [state for state, _ in self.snapshots if state.lsn <= lsn]
        return recovered(self.driver.log[:lsn], usable[-1] if usable and self.number % 2 else None)

    def go_on(self, survivor: Machine, boot_id: str) -> None:
        """The next life: from what the log holds now, which is all that anyone will ever know."""
        log = self.driver.log[: survivor.lsn]
        self.driver = Driver(survivor, self.driver.now_ms)
        self.driver.log = list(log)
        self.looks = {lsn: look for lsn, look in self.looks.items() if lsn <= survivor.lsn}
        self.snapshots = [entry for entry in self.snapshots if entry[0].lsn <= survivor.lsn]
        self.look()
        self.driver.start(boot_id)
        self.look()

    # -- the end

    def teardown(self) -> None:
        try:
            self.every_prefix_is_the_same()
            self.snapshots_are_the_same()
        finally:
            for each in self.replaced:
                each.stop()

    def every_prefix_is_the_same(self) -> None:
        first, second = Machine(), Machine()
        for frame in self.driver.log:
            first.apply(decoded(frame), frame.lsn)
            second.apply(decoded(frame), frame.lsn)
            first.check()
            look = facts_of(first)
            assert look == facts_of(second)
            assert look == self.looks.get(frame.lsn, look)

    def snapshots_are_the_same(self) -> None:
        for state, content in self.snapshots:
            assert b"".join(frames.encode_state(state)) == content, (
                "a snapshot shares nothing with the machine"
            )
            ends = sorted({lsn for lsn in self.looks if lsn >= state.lsn})
            for lsn in {state.lsn, len(self.driver.log), *ends[:: max(1, len(ends) // 4)]}:
                machine = replayed(self.driver.log[:lsn], state)
                machine.check()
                assert facts_of(machine) == facts_of(replayed(self.driver.log[:lsn]))
                machine.end_recovery(lsn)
                machine.check()
                assert all(box.log.visible_seq == box.log.head_seq for box in machine.boxes.values())


class WithManySeqsReserved(RecoveryAgainstLive):
    reserve_seqs = 131_072
    compact_at = 1024

    def losses_are_told(self, name: str, lost: list[int]) -> None:
        holes = self.machine.boxes[name].log.holes
        assert all(any(hole.first_seq <= seq <= hole.last_seq for hole in holes) for seq in lost)


TestRecoveryAgainstLive = RecoveryAgainstLive.TestCase
TestRecoveryAgainstLive.settings = sampled(40, steps=25)
TestWithManySeqsReserved = WithManySeqsReserved.TestCase
TestWithManySeqsReserved.settings = sampled(12, steps=25)
