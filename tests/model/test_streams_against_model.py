"""Goal: for any operations on a stream, in any order, with seals, restarts and power cuts in between, its
readers see what a list would show, and nothing that was acked is ever missing (s2 §11, §14, §15).

Method: a hypothesis state machine beside a list. The model knows records by their numbers; what is to go by
time is bounded from both sides, because trims and retention lag.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shard.core.s2.stream import TRIM_LAG_MS
from streams.protocol.errors import FencingTokenMismatch, PositionUnwritten, SeqMismatch
from streams.protocol.messages import s2
from streams.protocol.messages.commands import ReadStream
from streams.protocol.messages.s2 import Spec, SpecPatch
from streams.protocol.model import binary_records
from tests.support.machines import Driver, sampled

BOX = "the-basin/s"
NOW = 1_700_000_000_000
AGE_S = 100
TOKENS = ("", "a", "b")


class Written(NamedTuple):
    body: bytes
    timestamp: int
    at_ms: int


class Streams(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.driver = Driver(now_ms=NOW)
        self.driver.start("boot")
        spec = Spec(age_secs=AGE_S, uncapped=True)
        self.driver.ask(s2.PutStream(box=BOX, basin_number=1, asked=spec, defaults=Spec()))
        self.records: list[Written] = []
        self.token = ""
        #: Numbers below which new readers get nothing.
        self.trims: list[int] = []

    # -- what a list would do

    def last_ts(self) -> int:
        return self.records[-1].timestamp if self.records else 0

    def floors(self) -> tuple[int, int]:
        """Numbers below which all is gone for sure, and from which all is there for sure."""
        now_ms = self.driver.now_ms
        gone = kept = 0
        for number, written in enumerate(self.records):
            # A mark is a 256th of the age long, and neighbours are joined only beyond 512 of them.
            if written.at_ms + 1000 * AGE_S * (1 + 1 / 256) + 1 < now_ms:
                gone = number + 1
            if written.at_ms + 1000 * AGE_S < now_ms:
                kept = number + 1
        gone = max(gone, *self.trims, 0)
        return gone, max(gone, kept)

    # -- writing

    @rule(
        bodies=st.lists(st.binary(max_size=30), min_size=1, max_size=4),
        times=st.none() | st.lists(st.none() | st.integers(-50, 50), min_size=4, max_size=4),
        match=st.sampled_from([None, "right", "wrong"]),
        token=st.none() | st.sampled_from(TOKENS),
        fence=st.none() | st.sampled_from(TOKENS),
        trim=st.none() | st.integers(0, 40),
    )
    def append(
        self,
        bodies: list[bytes],
        times: list[int | None] | None,
        match: str | None,
        token: str | None,
        fence: str | None,
        trim: int | None,
    ) -> None:
        now_ms, first = self.driver.now_ms, len(self.records)
        given = None
        if times is not None:
            given = [None if each is None else now_ms + each for each in times[: len(bodies)]]
        command = s2.AppendStream(
            box=BOX,
            tails=[binary_records.tail_of([], body) for body in bodies],
            times=given,
            match_seq_num=None if match is None else first + (match == "wrong"),
            fencing_token=token,
            fence=fence,
            trims=() if trim is None else ((len(bodies) - 1, trim),),
        )
        reply: Any = self.driver.do(command).reply
        if token is not None and token != self.token:
            assert isinstance(reply, FencingTokenMismatch) and reply.detail["token"] == self.token
            return
        if match == "wrong":
            assert isinstance(reply, SeqMismatch) and reply.detail["next_seq"] == first
            return
        assert isinstance(reply, s2.AppendStreamReply), reply
        for at, body in enumerate(bodies):
            asked = given[at] if given is not None else None
            timestamp = max(self.last_ts(), now_ms if asked is None else asked)
            self.records.append(Written(body, timestamp, now_ms))
        assert (reply.start_seq_num, reply.end_seq_num) == (first, len(self.records))
        assert (reply.start_ts, reply.end_ts) == (self.records[first].timestamp, self.last_ts())
        if fence is not None:
            self.token = fence
        if trim is not None:
            self.trims.append(min(trim, len(self.records)))
        self.driver.sync()

    # -- time, upkeep, lives

    @rule(ms=st.sampled_from([1, 100, TRIM_LAG_MS, 30_000, 101_000]))
    def wait(self, ms: int) -> None:
        self.driver.now_ms += ms
        self.driver.tick()
        self.driver.sync()

    @rule(batches=st.integers(1, 5))
    def seal(self, batches: int) -> None:
        self.driver.seal(BOX, batches)
        self.driver.forget()

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        state = self.driver.machine.snapshot() if from_snapshot else None
        self.driver = self.driver.reborn(state=state)
        self.driver.start("boot")

    @rule(body=st.binary(max_size=5))
    def power_cut_before_the_ack(self, body: bytes) -> None:
        """What was not synced was not acked, and nobody has seen it: it never was."""
        lsn = self.driver.machine.lsn
        self.driver.do(s2.AppendStream(box=BOX, tails=[binary_records.tail_of([], body)], fence="lost"))
        self.driver = self.driver.after_power_cut(lsn)

    @rule(age=st.booleans())
    def configure(self, age: bool) -> None:
        patch = SpecPatch(age_secs=AGE_S) if age else SpecPatch(storage_class="standard")
        self.driver.ask(s2.PatchStream(BOX, patch, Spec()))

    # -- reading

    @rule(data=st.data())
    @precondition(lambda self: self.records)
    def read(self, data: st.DataObject) -> None:
        tail = len(self.records)
        start = data.draw(st.integers(0, tail + 1))
        limit = data.draw(st.integers(0, 12))
        max_bytes = data.draw(st.integers(0, 200))
        until = data.draw(st.none() | st.sampled_from([written.timestamp for written in self.records]))
        command = ReadStream(
            box=BOX, from_seq=start, limit=limit, max_bytes=max_bytes, until=until, may_follow=False
        )
        reply: Any = self.driver.do(command).reply
        if start >= tail:
            assert isinstance(reply, PositionUnwritten)
            return
        found = list(binary_records.records_of(reply.records))
        gone, kept = self.floors()
        # Where it begins is known up to the length of a mark; the rest follows from it.
        begins = [found[0].seq_num] if found else range(max(start, gone), max(start, kept) + 1)
        assert max(start, gone) <= begins[0] <= max(start, kept)
        seen = [record.seq_num for record in found]
        assert seen in [self.page(begin, limit, max_bytes, until) for begin in begins]
        for record in found:
            written = self.records[record.seq_num]
            assert (record.body, record.timestamp) == (written.body, written.timestamp)

    def page(self, begin: int, limit: int, max_bytes: int, until: int | None) -> list[int]:
        numbers: list[int] = []
        size = 0
        for number in range(begin, len(self.records)):
            written = self.records[number]
            size += 8 + len(written.body)
            is_late = until is not None and written.timestamp >= until
            if len(numbers) == limit or size > max_bytes or is_late:
                break
            numbers.append(number)
        return numbers

    @rule(data=st.data())
    @precondition(lambda self: self.records)
    def read_from_a_time(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from([written.timestamp for written in self.records]))
        reply: Any = self.driver.do(ReadStream(box=BOX, from_ts=wanted, limit=1, may_follow=True)).reply
        found = list(binary_records.records_of(reply.records))
        first = next(at for at, written in enumerate(self.records) if written.timestamp >= wanted)
        gone, kept = self.floors()
        if found:
            assert max(first, gone) <= found[0].seq_num <= max(first, kept)
        else:
            assert max(first, kept) == len(self.records)

    @invariant()
    def the_tail_is_that_of_a_list(self) -> None:
        if not hasattr(self, "driver"):
            return
        tail = self.driver.ask(s2.GetStreamTail(BOX))
        assert (tail.seq_num, tail.timestamp) == (len(self.records), self.last_ts())


TestStreams = Streams.TestCase
TestStreams.settings = sampled(25, steps=40)
