"""Goal: transactions do what docs/reference/wire.md says, in every order of events, through crashes.

Method: two writers with a few epochs and plain appends between, against a model of dicts and lists. All boxes
are of class fsync, so what readers see is what the model had when the last durable change was made. A crash
takes the machine, and the model with it, back to any point that may survive.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shard.core import changes
from shard.core.transactions import state as txn
from shard.core.transactions.unrendered import NotRendered
from streams.protocol.errors import NotFound, WriterConflict
from streams.protocol.messages import bulk, commands
from streams.protocol.payloads.packed import pack
from tests.support.machines import Driver, facts_of, put_of, records_of, recovered, sampled

BOXES = ["a", "b", "c"]
WRITERS = st.sampled_from(["w1", "w2"])
STEPS = st.sampled_from([0, 1, 1, 1, 2])
PARCELS = st.sampled_from(["p1", "p2", "p3"])
QUERIES = st.sampled_from(["q", "q", "q", "q", "other"])


class Model:
    """What is true, as lists and dicts."""

    def __init__(self) -> None:
        self.boxes: dict[str, list[Any]] = {box: [] for box in BOXES}
        #: (writer, epoch) -> parcel -> chunk -> [(box, data)].
        self.held: dict[tuple[str, int], dict[str, dict[int, list[tuple[str, int]]]]] = {}
        self.marks: dict[str, tuple[int, str]] = {}
        self.put_ms: dict[tuple[str, int], int] = {}
        #: The query that put to an epoch last, and whether it took the writer over.
        self.queries: dict[tuple[str, int], tuple[str, bool]] = {}

    def others(self, txn: bulk.Txn) -> dict[tuple[str, int], bool]:
        """What other queries hold of the writer, and whether they took it over."""
        return {
            key: took_over
            for key, (query, took_over) in self.queries.items()
            if key[0] == txn.writer and query != txn.query
        }

    def drop(self, key: tuple[str, int]) -> None:
        del self.held[key], self.put_ms[key], self.queries[key]

    def standing(self, txn: bulk.Txn) -> str:
        mark = self.marks.get(txn.writer)
        if any(self.others(txn).values()) and not txn.reset:
            return "conflict"
        if mark is not None and mark[1] != txn.query:
            return "open" if txn.reset else "conflict"
        return "done" if mark is not None and mark[0] >= txn.epoch else "open"

    def commit(self, txn: bulk.Txn, parcels: list[str]) -> None:
        chunks = self.held.get((txn.writer, txn.epoch), {})
        for parcel in parcels:
            for number in sorted(chunks[parcel]):
                for box, data in chunks[parcel][number]:
                    self.boxes[box].append(data)
        self.marks[txn.writer] = (txn.epoch, txn.query)
        for key in [key for key in self.held if key[0] == txn.writer and key[1] <= txn.epoch]:
            self.drop(key)


class Moment(NamedTuple):
    """The model after a change, and the lsn that made it so."""

    lsn: int
    model: Model


class TxnAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.driver.start("boot")
        self.model = Model()
        self.moments: list[Moment] = []
        self.number = 0
        self.boots = 0

    @initialize()
    def make(self) -> None:
        for box in BOXES:
            self.driver.put(box, durability="fsync")
        self.note(self.driver.machine.lsn)

    def note(self, lsn: int) -> None:
        self.moments.append(Moment(lsn, copy.deepcopy(self.model)))

    def at(self, lsn: int) -> Model:
        return next(moment.model for moment in reversed(self.moments) if moment.lsn <= lsn)

    def txn(self, writer: str, step: int, query: str, reset: bool) -> bulk.Txn:
        mark = self.model.marks.get(writer, (0, ""))
        return bulk.Txn(writer, mark[0] + step, query, reset)

    # -- what clients do

    @rule(box=st.sampled_from(BOXES))
    def append(self, box: str) -> None:
        self.number += 1
        self.driver.do(self.driver.write(self.number, box=box))
        self.model.boxes[box].append(self.number)
        self.note(self.driver.machine.lsn)

    @rule(
        writer=WRITERS, step=STEPS, query=QUERIES, reset=st.booleans(), parcel=PARCELS,
        chunk=st.integers(0, 2), boxes=st.lists(st.sampled_from(BOXES), min_size=1, max_size=3, unique=True),
    )  # fmt: skip
    def put(
        self, writer: str, step: int, query: str, reset: bool, parcel: str, chunk: int, boxes: list[str]
    ) -> None:
        txn = self.txn(writer, step, query, reset)
        rows = []
        for box in boxes:
            self.number += 1
            rows.append((box, self.number))
        packed = pack(boxes, [1] * len(boxes), [b"%d" % data for _, data in rows])
        outcome = self.driver.do(put_of(txn, parcel, chunk, packed))
        reply: Any = outcome.reply
        standing = self.model.standing(txn)
        if standing == "conflict":
            assert isinstance(reply, WriterConflict)
            return
        key, others = (writer, txn.epoch), self.model.others(txn) if txn.reset else {}
        held = {} if key in others else self.model.held.get(key, {})
        chunks = held.get(parcel, {})
        assert (reply.is_done, reply.is_repeat) == (
            standing == "done",
            standing == "open" and chunk in chunks,
        )
        if standing == "open" and chunk not in chunks:
            mark = self.model.marks.get(writer, (0, query))
            _, had_taken_over = self.model.queries.get(key, ("", False))
            for lsn, change in outcome.changes[:-1]:
                assert isinstance(change, changes.TxnDropped)
                self.model.drop((writer, change.epoch))
                self.note(lsn)
            assert len(outcome.changes) == len(others) + 1
            takes_over = bool(others) or mark[1] != query or (key not in others and had_taken_over)
            self.model.queries[key] = (query, takes_over)
            self.model.held.setdefault(key, {}).setdefault(parcel, {})[chunk] = rows
            self.model.put_ms[key] = self.driver.now_ms
            self.note(self.driver.machine.lsn)

    @rule(
        writer=WRITERS, step=STEPS, query=QUERIES, reset=st.booleans(),
        parcels=st.lists(st.sampled_from(["p1", "p2", "p3", "p4"]), unique=True),
        is_exact=st.booleans(),
    )  # fmt: skip
    def commit(
        self, writer: str, step: int, query: str, reset: bool, parcels: list[str], is_exact: bool
    ) -> None:
        txn = self.txn(writer, step, query, reset)
        held = self.model.held.get((writer, txn.epoch), {})
        if is_exact:
            parcels = [parcel for parcel in parcels if parcel in held]
        named = [(parcel, max(held[parcel]) + 1 if parcel in held else 1) for parcel in parcels]
        dry = self.driver.do(bulk.TxnCommit(txn, named, dry=True))
        assert not dry.changes
        outcome = self.driver.do(bulk.TxnCommit(txn, named))
        reply: Any = outcome.reply
        assert str(dry.reply) == str(reply), "a dry run tells what a commit will"
        standing = self.model.standing(txn)
        if standing == "conflict":
            assert isinstance(reply, WriterConflict)
        elif standing == "done":
            assert reply.is_done and not outcome.changes
        elif any(sorted(held.get(parcel, ())) != list(range(count)) for parcel, count in named):
            assert isinstance(reply, NotFound) and not outcome.changes
        else:
            assert not reply.is_done
            for lsn, change in outcome.changes:
                if isinstance(change, changes.TxnDropped):
                    self.model.drop((writer, change.epoch))
                    self.note(lsn)
            self.model.commit(txn, parcels)
            assert not self.model.others(txn)
            self.note(outcome.waits_for_lsn)

    @rule(writer=WRITERS, step=STEPS, parcels=st.lists(PARCELS, max_size=2, unique=True))
    def abort(self, writer: str, step: int, parcels: list[str]) -> None:
        txn = self.txn(writer, step, "", False)
        reply: Any = self.driver.do(bulk.TxnAbort(txn, parcels)).reply
        key = (writer, txn.epoch)
        held = self.model.held.get(key, {})
        gone = [parcel for parcel in held if parcel in parcels or not parcels]
        assert reply.parcels == len(gone)
        for parcel in gone:
            del held[parcel]
        if gone and not held:
            self.model.drop(key)
        self.note(self.driver.machine.lsn)

    @rule(ms=st.sampled_from([1_000, 2_000_000]))
    def time_passes(self, ms: int) -> None:
        self.driver.now_ms += ms
        outcome = self.driver.tick()
        oldest_ms = self.driver.now_ms - self.driver.machine.txns.ttl_ms
        expired = {key for key, at_ms in self.model.put_ms.items() if at_ms <= oldest_ms}
        for lsn, change in outcome.changes:  # each by itself: a crash may come between them
            assert isinstance(change, changes.TxnDropped)
            key = (change.writer, change.epoch)
            expired.remove(key)
            self.model.drop(key)
            self.note(lsn)
        assert not expired

    # -- what the shard does

    @rule(share=st.floats(0, 1))
    def durable(self, share: float) -> None:
        done = self.driver.machine.durable_lsn
        self.driver.sync(done + round((self.driver.machine.lsn - done) * share))

    @rule(box=st.sampled_from(BOXES))
    def seal(self, box: str) -> None:
        self.driver.seal(box)

    @rule(bytes_max=st.sampled_from([1, 3_000, 1 << 30]), batches_max=st.sampled_from([1, 2, 1000]))
    def render(self, bytes_max: int, batches_max: int) -> None:
        """A step of the oldest commit, or a part of it, as if a crash came then."""
        lsn = next(iter(self.driver.machine.txns.commits), None)
        if lsn is not None and lsn <= self.driver.machine.durable_lsn:
            self.driver.keep(self.driver._render(lsn, bytes_max, batches_max))

    @rule()
    def keep(self) -> None:
        outcome = self.driver.machine.keep_held(self.driver.machine.durable_lsn)
        if outcome is not None:
            self.driver.keep(outcome)

    @rule(share=st.floats(0, 1), from_snapshot=st.booleans())
    def crash(self, share: float, from_snapshot: bool) -> None:
        machine = self.driver.machine
        lsn = machine.durable_lsn + round((machine.lsn - machine.durable_lsn) * share)
        survivor = recovered(self.driver.log[:lsn])
        state = survivor.snapshot() if from_snapshot else None
        if state is not None:
            assert facts_of(recovered(self.driver.log[:lsn], state)) == facts_of(survivor)
        self.driver = self.driver.reborn(lsn, state)
        self.model = copy.deepcopy(self.at(lsn))
        self.moments = [moment for moment in self.moments if moment.lsn <= lsn]
        self.boots += 1
        self.driver.start(f"boot-{self.boots}")

    # -- what is true

    @invariant()
    def readers_see_whole_transactions_and_nothing_else(self) -> None:
        if not self.moments:
            return
        seen = self.at(self.driver.machine.durable_lsn)
        for box in BOXES:
            diff = commands.ReadBox(box=box, limit=1000, max_bytes=1 << 20)
            found = self.driver.machine.handle(diff, self.driver.now_ms)
            if found.needs:
                if not isinstance(found.needs[0], NotRendered):
                    self.driver.do(diff)
                continue
            assert isinstance(found.reply, commands.DiffResult)
            datas = [record["data"] for record in records_of(found.reply)]
            # A page ends where rows of a commit are yet to be rendered; they are there all the same.
            assert found.reply.head_seq == len(seen.boxes[box])
            if found.reply.next_from_seq < found.reply.head_seq:
                assert self.driver.machine.boxes[box].log.tail.has_unrendered
            assert datas == seen.boxes[box][: found.reply.next_from_seq]

    @invariant()
    def what_is_held_and_marked_is_what_the_model_has(self) -> None:
        txns = self.driver.machine.txns
        held = {
            key: {parcel: sorted(chunks) for parcel, chunks in epoch.parcels.items()}
            for key, epoch in txns.epochs.items()
        }
        assert held == {
            key: {parcel: sorted(chunks) for parcel, chunks in parcels.items()}
            for key, parcels in self.model.held.items()
        }
        marks = {writer: (mark.epoch, mark.query) for writer, (mark,) in txns.marks.items()}
        assert marks == self.model.marks


class LargeTxnAgainstModel(TxnAgainstModel):
    """No transaction is small: what a commit brings is rendered afterwards, in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(txn, "SMALL_RECORDS", 0)

    def teardown(self) -> None:
        self.patch.undo()


TestTxnAgainstModel = TxnAgainstModel.TestCase
TestTxnAgainstModel.settings = sampled(40, 40)
TestLargeTxnAgainstModel = LargeTxnAgainstModel.TestCase
TestLargeTxnAgainstModel.settings = sampled(30, 40)
