"""Goal: inside a shard a destination has each record of its source once, in order, and no reader sees a
copy of a record that can still be lost (v0 §6.1).

Method: one real machine with its log; a chain, a fan-out and a cycle between boxes of all classes. Steps of
the copies run early (with the append, in one group) or late; the log advances to any lsn; the process or the
power fails at any moment, and the shard comes back from the log alone or with a snapshot; a full box refuses.
After each step all visible copies are compared with the visible records of their source. At the end
everything is copied and compared.
"""

from __future__ import annotations

from unittest.mock import patch as replaced

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shard.core.boxes.box import Box
from shard.core.snapshot_facts import ShardState
from streams.protocol.messages import commands, forwards
from tests.support.carrying import copies, tie
from tests.support.machines import Driver, live_texts, recovered, sampled

#: Copies go from the first to the second.
ROUTES = (
    ("disk", "disk-2"),
    ("disk", "fsync-2"),
    ("disk", "memory"),
    ("disk", "full"),
    ("fsync", "disk-2"),
    ("fsync", "fsync-2"),
    ("fsync-2", "end"),
    ("end", "fsync-2"),
)
CLASSES = {
    "disk": "disk",
    "fsync": "fsync",
    "disk-2": "disk",
    "fsync-2": "fsync",
    "memory": "memory",
    "full": "disk",
    "end": "fsync",
}


class LocalCopiesExactlyOnce(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        small = {"outbox.BATCH_RECORDS_MAX": 3, "outbox.EXAMINE_MAX": 7, "router_outbox.EXAMINE_MAX": 7}
        small |= {"local_copies.STEP_BATCHES_MAX": 4, "local_copies.EARLY_RECORDS_MAX": 4}
        self.replaced = [replaced(f"shard.core.routers.{name}", value) for name, value in small.items()]
        for each in self.replaced:
            each.start()
        self.driver = Driver()
        self.driver.start("boot-1")
        self.boots = 1
        self.states: list[ShardState] = []
        self.number = 0
        #: By source: the numbers that were written to it and are not lost.
        self.written: dict[str, list[int]] = {"disk": [], "fsync": []}
        for name, durability in CLASSES.items():
            is_full = name == "full"
            self.driver.put(
                name,
                durability=durability,
                cap_records=4 if is_full else 0,
                discard="reject" if is_full else "old",
            )
        for number, (source, dest) in enumerate(ROUTES):
            tie(self.driver, self.driver, origin=f"r{number}#{number}", source=source, dest=dest)

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            for each in self.replaced:
                each.stop()

    # -- working

    @rule(
        source=st.sampled_from(("disk", "fsync")), counts=st.lists(st.integers(1, 6), min_size=1, max_size=4)
    )
    def write(self, source: str, counts: list[int]) -> None:
        for count in counts:
            numbers = range(self.number + 1, self.number + count + 1)
            self.number += count
            self.written[source] += numbers
            self.driver.do(self.driver.write(*numbers, box=source))

    @rule(is_early=st.booleans())
    def copy(self, is_early: bool) -> None:
        self.driver.copy_locally(is_early=is_early)

    @rule(part=st.integers(0, 4), is_sync=st.booleans())
    def advance_log(self, part: int, is_sync: bool) -> None:
        """The committer reports some of the log, or all of it."""
        machine = self.driver.machine
        start = machine.durable_lsn if is_sync else machine.logged_lsn
        lsn = start + (machine.lsn - start) * part // 4
        (self.driver.sync if is_sync else self.driver.logged)(lsn)

    @rule(ms=st.sampled_from([1, 30, 700]))
    def wait(self, ms: int) -> None:
        self.driver.now_ms += ms
        self.driver.tick()

    @rule()
    def make_room(self) -> None:
        head = self.driver.machine.boxes["full"].log.head_seq
        self.driver.do(commands.DeleteRecords("full", head + 1))

    @rule()
    def snapshot(self) -> None:
        self.states = [*self.states[-1:], self.driver.machine.snapshot()]

    # -- failing

    @rule(with_snapshot=st.booleans(), is_power=st.booleans())
    def die(self, with_snapshot: bool, is_power: bool) -> None:
        """A process leaves all that is logged, a power failure all that is durable."""
        machine = self.driver.machine
        lsn = machine.durable_lsn if is_power else machine.logged_lsn
        self.boots += is_power
        usable = [state for state in self.states if state.lsn <= lsn]
        log = self.driver.log[:lsn]
        self.driver = Driver(
            recovered(log, usable[-1] if usable and with_snapshot else None), self.driver.now_ms
        )
        self.driver.log = list(log)
        self.states = usable
        self.driver.start(f"boot-{self.boots}")
        self.driver.sync()
        for source in self.written:
            self.written[source] = numbers_of(self.driver, source)

    # -- what always holds

    @invariant()
    def no_copy_is_visible_before_its_record(self) -> None:
        if not hasattr(self, "written"):
            return
        seen = {name: set(numbers_of(self.driver, name)) for name in CLASSES}
        assert seen["disk-2"] <= seen["disk"] | seen["fsync"]
        assert seen["memory"] | seen["full"] <= seen["disk"]
        assert seen["fsync-2"] <= seen["disk"] | seen["fsync"]
        assert seen["end"] <= seen["fsync-2"]

    # -- the end

    def finish(self) -> None:
        driver = self.driver
        for _ in range(2 * self.number + 4):
            driver.copy_all_locally()
            driver.now_ms += 5_000
            driver.tick()
            if driver.machine.boxes["full"].outboxes or driver.machine.boxes["full"].log.count:
                self.make_room()
        driver.copy_all_locally()
        both = sorted(self.written["disk"] + self.written["fsync"])
        assert sorted(copies(driver, "disk-2")) == both  # type: ignore[type-var]
        for source in ("disk", "fsync"):
            of_source = set(self.written[source])
            assert [each for each in copies(driver, "disk-2") if each in of_source] == self.written[source]
        looped = copies(driver, "end")
        first_time = list(dict.fromkeys(looped))
        assert sorted(first_time) == both, "each record goes round the cycle until it has made all its steps"
        assert all(looped.count(each) == looped.count(first_time[0]) for each in first_time)
        for number, (source, dest) in enumerate(ROUTES):
            box = driver.machine.boxes[source]
            outbox = box.outboxes[f"r{number}#{number}"]
            state = driver.ask(forwards.GetOutbox(source, outbox.origin))
            assert (state.position, state.lag, state.is_blocked) == (visible_seq(box), 0, False)
            if dest != "memory":
                total = driver.machine.boxes[dest].origins[outbox.origin].total
                assert state.forwarded_total == total, "the total counts copies, not attempts"
        assert driver.machine.boxes["disk"].outboxes["r3#3"].total == len(self.written["disk"])


def numbers_of(driver: Driver, name: str) -> list[int]:
    """The records of a box that readers can see."""
    texts = live_texts(driver.machine, name, visible_seq(driver.machine.boxes[name]))
    return [int(text.rpartition(b'"data":')[2].rstrip(b"}")) for _, text in texts.values()]


def visible_seq(box: Box) -> int:
    return box.log.visible_seq


TestLocalCopiesExactlyOnce = LocalCopiesExactlyOnce.TestCase
TestLocalCopiesExactlyOnce.settings = sampled(30, steps=40)
