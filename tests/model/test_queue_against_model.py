"""Goal: a queue does what §8 says, in every order of events: nothing lost, nothing stuck, no job held twice.

Method: random workers, some of them connections, against the naive model of `tests/support/jobs.py`. Records
are deleted, evicted and expire meanwhile, the process is killed or restarted, leases begin or cease to be
logged. After every step the totals are compared. At the end every job that is left can be claimed and acked.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streams.protocol.messages import queues
from tests.support.jobs import ModelQueue, QueueDriver
from tests.support.machines import facts_of, recovered, sampled

NODES = st.sampled_from(["w1", "w2", "w3"])


class QueueAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = QueueDriver()
        self.driver.start("this-boot")
        #: Every lease that was ever given: (seq, node, lease id).
        self.leases: list[tuple[int, str, str]] = []
        self.unseen: list[range] = []
        self.acked: set[int] = set()
        self.is_paused = False

    @initialize(
        durability=st.sampled_from(["fsync", "disk", "memory"]),
        leases_durable=st.booleans(),
        jitter=st.booleans(),
        cap=st.sampled_from([0, 0, 12]),
        ttl=st.sampled_from([0, 0, 3_000]),
    )
    def make(self, durability: str, leases_durable: bool, jitter: bool, cap: int, ttl: int) -> None:
        self.is_memory, self.jitter = durability == "memory", jitter
        self.model = ModelQueue(leases_durable=leases_durable)
        self.driver.put(
            type="queue",
            durability=durability,
            leases_durable=leases_durable,
            claim_jitter_ms=50 if jitter else 0,
            cap_records=cap,
            ttl_ms=ttl,
            lease_ms=1000,
        )

    @property
    def now_ms(self) -> int:
        return self.driver.now_ms

    def follow(self) -> None:
        """Takes over from the log which records are there: that it is right is shown elsewhere."""
        log = self.driver.machine.boxes["b"].log
        while self.unseen and self.unseen[0][0] <= log.visible_seq:
            self.model.add(self.unseen.pop(0))
        for seq in [seq for seq in self.model.jobs if not log.is_live(seq)]:
            del self.model.jobs[seq]

    # -- jobs come and go

    @rule(count=st.integers(1, 6), is_shown=st.booleans())
    def produce(self, count: int, is_shown: bool) -> None:
        outcome = self.driver.do(self.driver.write(*range(count)))
        reply: Any = outcome.reply
        self.unseen.append(range(reply.first_seq, reply.last_seq + 1))
        if is_shown:
            self.driver.sync()
        self.follow()

    @rule(share=st.floats(0, 1))
    def delete(self, share: float) -> None:
        head = self.driver.machine.boxes["b"].log.head_seq
        self.driver.delete(round(head * share * 0.5))
        self.follow()

    @rule(ms=st.sampled_from([1, 99, 300, 1000, 2500]))
    def time_passes(self, ms: int) -> None:
        self.driver.now_ms += ms
        self.driver.tick()
        self.driver.sync()
        self.follow()

    # -- workers

    @rule(
        node=NODES,
        max=st.integers(1, 5),
        lease_ms=st.sampled_from([None, 100, 2000]),
        holder=st.integers(0, 2),
    )
    def claim(self, node: str, max: int, lease_ms: int | None, holder: int) -> None:
        self.claim_all([queues.Claim(box="b", node=node, max=max, lease_ms=lease_ms, holder=holder)])

    @rule(wants=st.lists(st.tuples(NODES, st.integers(1, 5), st.integers(0, 2)), min_size=2, max_size=4))
    def claim_at_once(self, wants: list[tuple[str, int, int]]) -> None:
        self.claim_all([queues.Claim(box="b", node=n, max=m, holder=h, wait_ms=9) for n, m, h in wants])

    def claim_all(self, claims: list[queues.Claim]) -> None:
        self.driver.sync()
        self.follow()
        self.driver.machine.tick(self.now_ms)
        claimable = [] if self.is_paused else self.model.claimable(self.now_ms)
        answers = self.driver.claim_together(*claims)
        self.follow()
        wanted: list[int] = []
        holding = {holder: len(self.model.held_by(holder, self.now_ms)) for holder in (1, 2)}
        for claim in claims:
            room = claim.max if not claim.holder else max(0, claim.max - holding[claim.holder])
            if claim.holder:
                holding[claim.holder] += room
            wanted.append(room)
        given = [[] if answer is None else answer for answer in answers]
        assert sum(map(len, given)) == min(sum(wanted), len(claimable)), "all that can be given is given"
        taken = [job["$seq"] for jobs in given for job in jobs]
        assert sorted(taken) == sorted(claimable[: len(taken)]), "those that came back before fresh ones"
        if self.jitter and len(set(wanted)) == 1:
            assert max(map(len, given)) - min(map(len, given)) <= 1, "an even share for everyone"
        if not self.jitter:
            for want, jobs, later in zip(wanted, given, given[1:], strict=False):
                assert len(jobs) == want or not later, "the first first"
        for claim, jobs in zip(claims, given, strict=True):
            assert [job["$seq"] for job in jobs] == sorted(job["$seq"] for job in jobs)
            for job in jobs:
                seq = job["$seq"]
                assert seq not in self.acked, "an acked job is gone for good"
                assert job["deliveries"] == self.model.jobs[seq]["deliveries"] + 1
                assert job["deadline"] == self.now_ms + (claim.lease_ms or 1000)
                assert (seq, job["lease_id"]) not in {(s, i) for s, _, i in self.leases}, "a lease is new"
                self.leases.append((seq, claim.node, job["lease_id"]))
                self.model.lease([seq], claim.node, job["lease_id"], job["deadline"], claim.holder)

    @rule(data=st.data(), what=st.sampled_from(["ack", "ack", "nack", "delay", "extend"]))
    def settle(self, data: st.DataObject, what: str) -> None:
        """With leases that may be long over, and a name that may be another's."""
        if not self.leases:
            return
        chosen = data.draw(st.lists(st.sampled_from(self.leases[-12:]), min_size=1, max_size=4))
        node = data.draw(st.sampled_from([chosen[0][1], "w1"]))
        seqs = [seq for seq, _, _ in chosen]
        lease_ids = [lease_id for _, _, lease_id in chosen] if data.draw(st.booleans()) else None
        held: list[int] = []
        skipped: list[int] = []
        for seq, lease_id in zip(seqs, lease_ids or [None] * len(seqs), strict=True):
            if seq not in held and self.model.holds(seq, node, lease_id, self.now_ms):
                held.append(seq)
            else:
                skipped.append(seq)
        if what == "ack":
            reply = self.driver.ack(*seqs, node=node, lease_ids=lease_ids)
            assert reply.acked == len(held)
            self.acked.update(held)
            for seq in held:
                del self.model.jobs[seq]
        elif what == "extend":
            reply = self.driver.extend(*seqs, node=node, lease_ids=lease_ids, lease_ms=700)
            assert reply.deadlines == {str(seq): self.now_ms + 700 for seq in held}
            for seq in held:
                self.model.jobs[seq]["lease"]["deadline"] = self.now_ms + 700
        else:
            delay_ms = 500 if what == "delay" else 0
            reply = self.driver.nack(*seqs, node=node, lease_ids=lease_ids, delay_ms=delay_ms)
            assert reply.nacked == len(held)
            self.model.give_back(held, self.now_ms + delay_ms if delay_ms else 0)
        assert reply.skipped == skipped
        self.follow()

    @rule(holder=st.integers(1, 2))
    def connection_ends(self, holder: int) -> None:
        held = self.model.held_by(holder, self.now_ms)
        assert self.driver.ask(queues.ReleaseHolder("b", holder)).released == len(held)
        self.model.give_back(held, 0)
        self.follow()

    # -- lives

    @rule(leases_durable=st.booleans())
    def change_whether_leases_are_logged(self, leases_durable: bool) -> None:
        self.driver.put(leases_durable=leases_durable)
        if leases_durable and not self.model.leases_durable:
            for job in self.model.jobs.values():
                job["kept"] = job["deliveries"]
        self.model.leases_durable = leases_durable
        self.follow()

    @rule(is_paused=st.sampled_from([True, False, False]))
    def pause_or_resume(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.driver.ask(queues.SetPaused("b", is_paused))
        self.follow()

    @rule(is_orderly=st.booleans())
    def next_life(self, is_orderly: bool) -> None:
        self.driver.sync()
        self.follow()
        if self.is_memory:
            self.unseen.clear()
            self.model.jobs.clear()
            self.leases.clear()
            self.acked.clear()  # the box begins anew, and so do its seqs
        elif is_orderly:
            self.model.restart()
        else:
            self.model.kill()
        self.driver = self.driver.after_restart() if is_orderly else self.driver.after_kill()
        self.follow()

    @invariant()
    def totals_agree_and_make_up_the_count(self) -> None:
        if self.driver.machine.boxes:
            self.driver.sync()
            self.follow()
            totals = self.driver.totals()
            self.follow()
            assert totals == self.model.totals(self.now_ms)

    def teardown(self) -> None:
        if not self.driver.machine.boxes:
            return
        self.replay_is_the_same()
        self.nothing_is_stuck()

    def replay_is_the_same(self) -> None:
        found = recovered(self.driver.log)
        state = self.driver.machine.snapshot()
        assert facts_of(found) == facts_of(self.driver.machine)
        assert facts_of(recovered(self.driver.log, state)) == facts_of(found)

    def nothing_is_stuck(self) -> None:
        """Whoever waits long enough gets every job that was never acked, and then there is none."""
        self.driver.put(ttl_ms=0, paused=False)
        self.driver.now_ms += 1_000_000
        self.driver.sync()
        self.follow()
        jobs = [job for answer in self.driver.claim_together(*self.everything()) for job in answer or []]
        assert sorted(job["$seq"] for job in jobs) == sorted(self.model.jobs)
        if jobs:
            reply = self.driver.ack(*[job["$seq"] for job in jobs], node="last")
            assert (reply.acked, reply.skipped, reply.ready, reply.in_flight) == (len(jobs), [], 0, 0)

    @staticmethod
    def everything() -> list[queues.Claim]:
        return [queues.Claim(box="b", node="last", max=1000)]


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = sampled(60, steps=40)
