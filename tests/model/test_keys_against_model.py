"""Goal: a key never has two leases at `key_concurrency` 1, its jobs come in order through returns, lost
leases and crashes, and no job comes before its time, whatever the clock does (v0 §21, §23).

Method: random jobs with keys, priorities and times; workers that ack, nack, or let their leases run out; the
process is killed, with a snapshot or without; the system clock is set forward and back. What is promised is
checked at every claim. At the end every job is delivered.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from shard.core.snapshot_facts import ShardState
from streams.protocol.messages import queues
from tests.support.jobs import QueueDriver
from tests.support.machines import recovered, sampled

KEYS = ("", "a", "b", "c")
LEASE_MS = 10_000


class Keys(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = QueueDriver(now_ms=1_000_000)
        self.driver.start("boot")
        self.states: list[ShardState] = []
        #: Jobs that are not acked, by seq: key and `deliver_at`.
        self.jobs: dict[int, tuple[str, int]] = {}
        #: Seqs that were delivered and came back, or are leased now with their deadline.
        self.delivered: set[int] = set()
        self.leases: dict[int, int] = {}

    @initialize(fair=st.booleans(), leases_durable=st.booleans(), backoff=st.booleans())
    def create(self, fair: bool, leases_durable: bool, backoff: bool) -> None:
        self.driver.put(
            type="queue",
            durability="fsync",
            key_concurrency=1,
            fair=fair,
            leases_durable=leases_durable,
            lease_ms=LEASE_MS,
            retry_backoff={"initial_ms": 500, "factor": 2, "max_ms": 4_000, "jitter": 0.5}
            if backoff
            else None,
        )
        self.leases_durable = leases_durable

    @property
    def wall_ms(self) -> int:
        return self.driver.now_ms + self.driver.machine.wall_ahead_ms

    @rule(
        jobs=st.lists(
            st.tuples(st.sampled_from(KEYS), st.integers(0, 3), st.sampled_from([0, 0, 0, 700, 5_000])),
            min_size=1,
            max_size=5,
        )
    )
    def produce(self, jobs: list[tuple[str, int, int]]) -> None:
        records = [
            {"data": 1, "ordering_key": key, "job_priority": priority}
            | ({"deliver_at": self.wall_ms + delay_ms} if delay_ms else {})
            for key, priority, delay_ms in jobs
        ]
        reply = self.driver.append(*records)
        for seq, record in enumerate(records, reply.first_seq):
            self.jobs[seq] = str(record["ordering_key"]), int(str(record.get("deliver_at", 0)))

    def expire(self) -> None:
        self.leases = {seq: end for seq, end in self.leases.items() if end > self.driver.now_ms}

    def check(self, jobs: list[dict[str, Any]]) -> None:
        """The promises of one answer."""
        self.expire()
        for job in jobs:
            seq = job["$seq"]
            key, deliver_at = self.jobs[seq]
            assert seq not in self.leases, "a job has two leases"
            assert deliver_at <= self.wall_ms or seq in self.delivered or seq in self.became_due, "too early"
            if key:
                others = [each for each in self.leases if self.jobs[each][0] == key]
                assert not others, f"key {key} has two leases"
                earlier = [
                    each
                    for each, (its_key, its_time) in self.jobs.items()
                    if each < seq
                    and its_key == key
                    and (each in self.delivered or its_time <= self.wall_ms)
                    and (each in self.delivered or not its_time)
                ]
                assert not earlier, f"{earlier} of key {key} come before {seq}"
            self.leases[seq] = self.driver.now_ms + LEASE_MS
            self.delivered.add(seq)

    @property
    def became_due(self) -> set[int]:
        """Jobs that are ready though the clock says that they are early: it was set back since."""
        queue = self.driver.machine.boxes["b"].queue
        assert queue is not None
        return {seq for seq in self.jobs if self.jobs[seq][1] <= self.latest_wall_ms}

    latest_wall_ms = 0

    @rule(count=st.integers(1, 6), then=st.sampled_from(["ack", "ack", "nack", "hold"]))
    def work(self, count: int, then: str) -> None:
        self.latest_wall_ms = max(self.latest_wall_ms, self.wall_ms)
        jobs = self.driver.claim(max=count)
        self.check(jobs)
        seqs = [job["$seq"] for job in jobs]
        if seqs and then == "ack":
            assert self.driver.ack(*seqs).skipped == []
            for seq in seqs:
                del self.jobs[seq], self.leases[seq]
        elif seqs and then == "nack":
            self.driver.nack(*seqs, error="e")
            for seq in seqs:
                del self.leases[seq]

    @rule(ms=st.sampled_from([1, 400, 3_000, 11_000]))
    def time_passes(self, ms: int) -> None:
        self.driver.now_ms += ms
        self.latest_wall_ms = max(self.latest_wall_ms, self.wall_ms)
        self.driver.tick()

    @rule(ms=st.sampled_from([-20_000, -600, 600, 20_000]))
    def clock_is_set(self, ms: int) -> None:
        self.driver.machine.wall_ahead_ms += ms
        self.latest_wall_ms = max(self.latest_wall_ms, self.wall_ms)
        self.driver.tick()

    @rule()
    def snapshot(self) -> None:
        self.driver.sync()
        self.states = [self.driver.machine.snapshot()]

    @rule(with_snapshot=st.booleans())
    def die(self, with_snapshot: bool) -> None:
        self.driver.sync()
        ahead_ms = self.driver.machine.wall_ahead_ms
        survivor = recovered(self.driver.log, self.states[-1] if self.states and with_snapshot else None)
        other = QueueDriver(survivor, self.driver.now_ms)
        other.log = list(self.driver.log)
        survivor.wall_ahead_ms = ahead_ms
        other.start("boot")
        self.driver = other
        if not self.leases_durable:
            # A first delivery that was not logged is forgotten; the order of its key holds all the same.
            self.leases.clear()
            queue = survivor.boxes["b"].queue
            assert queue is not None
            self.delivered = {
                seq for seq in self.delivered if seq in queue.jobs and queue.jobs[seq].deliveries
            }

    def teardown(self) -> None:
        if "b" not in self.driver.machine.boxes:
            return
        for _ in range(1_000):
            if not self.jobs:
                break
            self.driver.now_ms += 60_000
            self.latest_wall_ms = max(self.latest_wall_ms, self.wall_ms)
            jobs = self.driver.claim(max=50)
            self.check(jobs)
            seqs = [job["$seq"] for job in jobs]
            if seqs:
                self.driver.ack(*seqs)
            for seq in seqs:
                del self.jobs[seq], self.leases[seq]
        assert not self.jobs, "every job is delivered"


TestKeys = Keys.TestCase
TestKeys.settings = sampled(15, steps=30)


def test_a_tenant_with_many_jobs_delays_no_other_one() -> None:
    """With `fair`, the job of a quiet tenant is in the next answer, however many another one has."""
    driver = QueueDriver()
    driver.start("boot")
    driver.put(type="queue", fair=True)
    for _ in range(10):
        driver.append(*[{"data": n, "ordering_key": "noisy"} for n in range(1_000)])
    for _ in range(3):  # what is new becomes claimable some thousand jobs at a time
        driver.claim(max=10)
    for _ in range(20):
        driver.append({"data": "quiet", "ordering_key": "quiet"})
        reply = driver.ask(queues.Claim(box="b", node="w", max=2))
        assert "quiet" in [job["data"] for job in driver.claimed(reply)]
