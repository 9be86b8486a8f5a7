"""Goal: with real threads and real files nobody can tell where a record is: reads wait for the disk without
holding up others, writes keep their order, memory stays bounded, and trouble reaches only those it concerns.

Method: the engine over a machine, a log and segments in a temporary directory. A store with gates holds a
thread inside a read or a write until the test says so; tests wait for answers, never for time to pass.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import shard.engine.upkeep
from shard.core.boxes import deletion
from shard.core.boxes.sealed import Segment
from shard.core.boxes.upkeep import HotPolicy, SealPolicy
from shard.core.machine import Machine
from shard.core.queues import jobs as jobs_module
from shard.engine import waiting_claims
from shard.engine.engine import Engine
from shard.engine.timekeeper import Timekeeper
from shard.storage import frames, segments
from shard.storage.cold import FolderCold
from shard.storage.files import Disk
from shard.storage.retention import names_in
from shard.storage.segments.store import ColdStoreUnreachable, Name, SegmentStore
from shard.storage.snapshot import Snapshots
from streams.protocol.errors import ColdStoreUnavailable, DataDamaged
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Command
from streams.protocol.messages.queues import Claim
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.records import Batch
from tests.support.engine_desk import PATIENCE_S, EngineDesk, Ticket, recovered_engine
from tests.support.machines import Driver, columns, records_of, seqs_of

#: Nothing is sealed but on request: by age, which the test's clock decides.
NEVER_MS = 10**12


class Gate:
    """Holds threads until it is opened, and tells when one has come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S)

    async def wait_reached(self) -> None:
        assert await trio.to_thread.run_sync(self.reached.wait, PATIENCE_S)


class GatedStore(SegmentStore):
    """A real store whose reads and writes can be held up, and counted."""

    def __init__(self, directory: Path, cold: Path | None = None) -> None:
        disk = Disk()
        super().__init__(disk, str(directory), FolderCold(str(cold), disk) if cold else None)
        self.reading, self.writing = Gate(), Gate()
        self.reads: list[tuple[Name, int]] = []
        self.fails_with: Exception | None = None
        self.failed_sweeps = 0

    def remove_unnamed(self, named: Set[Name], cold: Set[Name] = frozenset()) -> int:
        try:
            return super().remove_unnamed(named, cold)
        except ColdStoreUnreachable:
            self.failed_sweeps += 1
            raise

    def read(self, name: Name, at: int, *, bytes_max: int) -> list[Batch]:
        self.reads.append((name, at))
        self.reading.pass_through()
        if self.fails_with is not None:
            raise self.fails_with
        return super().read(name, at, bytes_max=bytes_max)

    def write(
        self,
        generation: int,
        serial: int,
        batches: Iterable[Batch],
        pause: Callable[[int], None] = segments.no_pause,
    ) -> Segment:
        self.writing.pass_through()
        return super().write(generation, serial, batches, pause)


class Desk(EngineDesk):
    """An engine, its machine, its store and its clock."""

    def __init__(self, engine: Engine, machine: Machine, store: GatedStore, clock: list[int]) -> None:
        super().__init__(engine)
        self.machine = machine
        self.store = store
        self.clock = clock

    async def put(self, box: str = "b", **config: Any) -> None:
        reply = await self.ask(commands.PutBox(box, BoxPatch(**{"durability": "fsync", **config})))
        assert isinstance(reply, commands.PutBoxReply), reply

    async def append(self, *records: Any, box: str = "b", **more: Any) -> commands.AppendResult:
        reply = await self.ask(commands.Append(box=box, columns=columns(*records), **more))
        assert isinstance(reply, commands.AppendResult), reply
        return reply

    async def read(self, from_seq: int = 0, *, box: str = "b", **more: Any) -> commands.DiffResult:
        reply = await self.ask(commands.ReadBox(box=box, from_seq=from_seq, **more))
        assert isinstance(reply, commands.DiffResult), reply
        return reply

    async def seal(self, box: str = "b") -> None:
        """Until all of a box that can be sealed is."""
        self.clock[0] += 2 * NEVER_MS
        await self.until(lambda: not self.machine.boxes[box].log.tail.records)
        self.clock[0] -= 2 * NEVER_MS

    def forget(self) -> None:
        """Every sealed payload leaves memory."""
        cache = self.engine._cache
        bytes_max, cache.bytes_max = cache.bytes_max, 0
        cache.shrink()
        cache.shrink()  # once more for those that had been used
        cache.bytes_max = bytes_max
        assert cache.bytes == 0

    def segments(self, box: str = "b") -> list[Segment]:
        return self.machine.boxes[box].log.segments


@pytest.fixture(autouse=True)
def eager_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is looked for all the time, and no box is too small for a segment."""
    monkeypatch.setattr(shard.engine.upkeep, "_PAUSE_S", 0.002)
    monkeypatch.setattr("shard.core.boxes.unsealed.SMALL_BYTES", 0)


Open = Callable[..., Any]


@pytest.fixture
def open_desk(tmp_path: Path) -> Open:
    """`async with open_desk(...) as desk`: an engine on this directory, as a start of the shard makes it."""

    @asynccontextmanager
    async def make(*, cold: Path | None = None, fails: bool = False, **settings: Any) -> AsyncIterator[Desk]:
        disk = Disk()
        store = GatedStore(tmp_path / "segments", cold)
        seal = settings.setdefault("seal", SealPolicy(10_000, 1 << 26, NEVER_MS))
        machine = Machine(due_records=seal.records, due_bytes=seal.bytes)
        clock = [1_000_000]
        engine = recovered_engine(
            tmp_path,
            disk,
            machine,
            store,
            settings={"upkeep_bytes_per_s": 0, "snapshot_interval_ms": 10**8, **settings},
            now_ms=lambda: clock[0],
        )
        desk = Desk(engine, machine, store, clock)
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: engine.run(boot_id="boot", task_status=task_status))
            try:
                yield desk
            finally:
                store.reading.open()
                store.writing.open()
                nursery.cancel_scope.cancel()
        assert (engine.failure is not None) == fails, engine.failure
        if not fails:
            await engine.stop()

    return make


# -- reads


async def test_two_readers_of_what_is_sealed_share_one_read_of_the_disk(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.append(*range(20))
        await desk.seal()
        desk.forget()
        desk.store.reading.shut()
        first, second = desk.send(commands.ReadBox(box="b")), desk.send(commands.ReadBox(box="b", from_seq=5))
        await desk.store.reading.wait_reached()
        third = desk.send(commands.GetRecord("b", 7))
        desk.store.reading.open()
        assert seqs_of(await first.reply()) == list(range(1, 21))
        assert seqs_of(await second.reply()) == list(range(6, 21))
        assert json.loads((await third.reply()).record)["data"] == 6
        assert len(desk.store.reads) == 1


async def test_a_read_that_waits_for_the_disk_holds_up_nobody_else(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.append("sealed")
        await desk.seal()
        desk.forget()
        desk.store.reading.shut()
        waiting = desk.send(commands.ReadBox(box="b"))
        await desk.store.reading.wait_reached()
        assert (await desk.append("meanwhile")).first_seq == 2
        assert seqs_of(await desk.read(1)) == [2]
        await desk.put("other")
        assert (await desk.append("x", box="other")).first_seq == 1
        assert not waiting.is_answered
        desk.store.reading.open()
        assert seqs_of(await waiting.reply()) == [1, 2], "it shows what there is when it is answered"


async def test_neighbours_are_brought_in_together(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        for number in range(50):
            await desk.append(number)
        await desk.seal()
        desk.forget()
        assert len(records_of(await desk.read(0))) == 50
        assert len(desk.store.reads) == 1


async def test_the_cache_stays_within_its_bound_however_much_is_read(open_desk: Open) -> None:
    cache_bytes = 64 * 1024
    async with open_desk(cache_bytes=cache_bytes, seal=SealPolicy(20, 1 << 26, NEVER_MS)) as desk:
        await desk.put()
        for number in range(100):
            await desk.append(*({"data": "x" * 400, "tag": str(number)} for _ in range(10)))
        await desk.seal()
        cache = desk.engine._cache
        assert desk.machine.boxes["b"].log.bytes > 5 * cache_bytes
        read: list[int] = []
        while len(read) < 1000:
            read += seqs_of(await desk.read(len(read), limit=30))
            loaded = sum(
                batch.bytes_in_memory
                for segment in desk.segments()
                for at in range(len(segment))
                if (batch := segment.cached_payload(at)) is not None
            )
            assert loaded == cache.bytes <= cache_bytes
        assert read == list(range(1, 1001))


async def test_a_page_that_is_larger_than_the_cache_is_read_all_the_same(open_desk: Open) -> None:
    async with open_desk(cache_bytes=1_000, seal=SealPolicy(4, 1 << 26, NEVER_MS)) as desk:
        await desk.put()
        for number in range(40):
            await desk.append({"data": "x" * 300, "tag": str(number)})
            if number % 10 == 9:  # upkeep alone would seal as many at once as came while it was busy
                await desk.seal()
        assert len(desk.segments()) >= 4
        desk.forget()
        assert seqs_of(await desk.read(0, limit=1000)) == list(range(1, 41))
        # A delete looks at the tags of all, and one with a seq at the batch it cuts through.
        both = commands.DeleteRecords("b", before_seq=30, match=commands.Match("2", True))
        assert (await desk.ask(both)).deleted == 10
        assert desk.engine._cache.bytes <= 1_000


async def test_a_long_poll_goes_on_across_sealed_data(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.append(*({"data": at, "tag": "dull"} for at in range(10)))
        await desk.seal()
        desk.forget()
        poll = commands.ReadBox(box="b", wait_ms=20_000, match=commands.Match("rare"))
        waiting = desk.send(poll)
        await desk.until(lambda: len(desk.store.reads) == 1)
        assert not waiting.is_answered, "nothing matches"
        desk.forget()
        await desk.append({"data": "no", "tag": "dull"})
        desk.forget()
        await desk.append({"data": "yes", "tag": "rare"})
        assert seqs_of(await waiting.reply()) == [12]


async def test_a_long_poll_that_was_taken_back_is_never_answered(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        gone = desk.send(commands.ReadBox(box="b", wait_ms=20_000))
        stays = desk.send(commands.ReadBox(box="b", wait_ms=20_000))
        assert desk.engine.delivery.forget(gone) and not desk.engine.delivery.forget(gone)
        assert len(desk.engine.delivery.reads.waiting) == 1
        await desk.append({"data": 1})
        assert seqs_of(await stays.reply()) == [1] and not gone.is_answered
        assert not desk.engine.delivery.forget(stays) and len(desk.engine.delivery.reads.waiting) == 0


async def long_poll_at_the_disk(desk: Desk) -> Ticket:
    """A long poll for a rare tag, of 5 s, that was woken by another record and waits for the disk."""
    await desk.put()
    await desk.append(*({"data": at, "tag": "dull"} for at in range(10)))
    await desk.seal()
    desk.forget()
    waiting = desk.send(commands.ReadBox(box="b", wait_ms=5_000, match=commands.Match("rare")))
    await desk.until(lambda: desk.engine.delivery.reads.waiting.has("b"))
    desk.forget()
    desk.store.reading.shut()
    await desk.append({"data": "no", "tag": "dull"})
    await desk.store.reading.wait_reached()
    return waiting


async def test_a_long_poll_that_is_taken_back_while_it_waits_for_the_disk_is_never_answered(
    open_desk: Open,
) -> None:
    async with open_desk() as desk:
        waiting = await long_poll_at_the_disk(desk)
        assert desk.engine.delivery.forget(waiting)
        desk.store.reading.open()
        await desk.append({"data": "yes", "tag": "rare"})
        assert seqs_of(await desk.read(11)) == [12]
        assert not waiting.is_answered and len(desk.engine.delivery.reads.waiting) == 0


async def test_what_is_left_of_answered_long_polls_is_bounded(open_desk: Open) -> None:
    """They are answered at once, while their time would be up in half a minute."""
    async with open_desk() as desk:
        await desk.put()
        for seq in range(300):
            waiting = desk.send(commands.ReadBox(box="b", from_seq=seq, wait_ms=30_000))
            await desk.append({"data": seq})
            assert seqs_of(await waiting.reply()) == [seq + 1]
            taken_back = desk.send(commands.ReadBox(box="b", from_seq=seq + 1, wait_ms=30_000))
            assert desk.engine.delivery.forget(taken_back)
        assert len(desk.engine.delivery.reads.waiting._deadlines) < 100
        assert sum(map(len, desk.engine.delivery.reads.waiting._by_box.values())) < 100


async def test_a_long_poll_whose_time_is_up_while_it_waits_for_the_disk_is_answered_once(
    open_desk: Open,
) -> None:
    async with open_desk() as desk:
        waiting = await long_poll_at_the_disk(desk)
        desk.clock[0] += 6_000
        desk.engine._ticker.wake()
        await desk.until(lambda: desk.engine.delivery.reads.waiting.next_s is None)
        desk.store.reading.open()
        reply = await waiting.reply()
        assert (reply.records, reply.next_from_seq) == (b"", 11)


# -- writes


async def test_writes_behind_one_that_waits_for_the_disk_keep_their_order(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put(cap_records=10)
        await desk.put("other")
        await desk.append(*({"data": at, "tag": "old"} for at in range(10)))
        await desk.seal()
        desk.forget()
        desk.store.reading.shut()
        writes = [
            desk.send(commands.Append(box="b", columns=columns({"data": text, "tag": "new"})))
            for text in ("one", "two", "three")
        ]
        await desk.store.reading.wait_reached()
        writes.append(desk.send(commands.DeleteRecords("b", match=commands.Match("new"))))
        assert (await desk.append("x", box="other")).first_seq == 1
        assert not any(write.is_answered for write in writes)
        desk.store.reading.open()
        replies = [await write.reply() for write in writes]
        assert [reply.first_seq for reply in replies[:3]] == [11, 12, 13]
        assert replies[3].deleted == 3, "the delete came last"
        assert [ticket for ticket in desk.order if ticket in writes] == writes


async def test_a_write_that_cannot_have_what_it_needs_is_refused_and_those_behind_it_go_on(
    open_desk: Open,
) -> None:
    async with open_desk() as desk:
        await desk.put(cap_records=10)
        await desk.append(*range(10))
        await desk.seal()
        desk.forget()
        desk.store.reading.shut()
        desk.store.fails_with = ColdStoreUnreachable("the store is away")
        write = desk.send(commands.Append(box="b", columns=columns("needs the disk")))
        await desk.store.reading.wait_reached()
        behind = desk.send(commands.SetFence("b", "token"))
        desk.store.reading.open()
        assert isinstance(await write.reply(), ColdStoreUnavailable)
        assert isinstance(await behind.reply(), commands.SetFenceReply)
        desk.store.fails_with = None
        assert (await desk.append("again", fencing_token="token")).first_seq == 11


# -- pressure


@pytest.mark.parametrize(("is_urgent", "factor"), [(False, 2), (True, 3)])
async def test_writers_who_are_faster_than_sealing_are_held_up_until_it_has_caught_up(
    open_desk: Open, is_urgent: bool, factor: int
) -> None:
    """Urgent commands stop later than the rest, but they stop too."""
    seal = SealPolicy(10, 1 << 26, NEVER_MS)
    async with open_desk(cache_bytes=20_000, seal=seal) as desk:
        await desk.put()
        desk.store.writing.shut()
        while desk.machine.unsealed_boxes.bytes <= factor * 20_000:
            await desk.engine.backpressure.wait(is_urgent=is_urgent)
            await desk.append("x" * 1_000)
        assert desk.engine.backpressure.exceeds()
        relieved: list[bool] = []

        async def wait() -> None:
            await desk.engine.backpressure.wait(is_urgent=is_urgent)
            relieved.append(desk.engine.backpressure.exceeds())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await desk.store.writing.wait_reached()
            await trio.testing.wait_all_tasks_blocked()
            assert relieved == []
            desk.store.writing.open()
            with trio.fail_after(PATIENCE_S):
                await desk.until(lambda: relieved != [])
        assert relieved == [False]
        head = desk.machine.boxes["b"].log.head_seq
        assert len(records_of(await desk.read(0, limit=1000))) == head


# -- trouble


async def test_a_disk_that_cannot_take_a_segment_ends_the_shard(
    open_desk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_desk(fails=True) as desk:
        await desk.put()
        await desk.append("x")

        def broken(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(desk.store, "write", broken)
        desk.clock[0] += 2 * NEVER_MS
        with trio.fail_after(PATIENCE_S):
            await desk.engine.failure_event.wait()
        assert isinstance(desk.engine.failure, OSError)


async def test_a_disk_that_is_full_is_tried_again_and_nobody_is_held_up(
    open_desk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.engine.upkeep._FULL_PAUSE_S", 0.0)
    async with open_desk() as desk:
        await desk.put()
        await desk.append("x")
        write, refused = desk.store.write, []

        def full(*arguments: Any, **options: Any) -> Any:
            if len(refused) < 3:
                refused.append(True)
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*arguments, **options)

        monkeypatch.setattr(desk.store, "write", full)
        desk.clock[0] += 2 * NEVER_MS
        with trio.fail_after(PATIENCE_S):
            await desk.until(lambda: desk.machine.boxes["b"].log.segments != [])
        assert len(refused) == 3 and seqs_of(await desk.read(0)) == [1]


async def test_a_reading_thread_that_fails_for_no_known_reason_ends_the_shard(
    open_desk: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever waits for it would wait for ever."""
    async with open_desk(fails=True) as desk:
        await desk.put()
        await desk.append("x")
        await desk.seal()
        desk.forget()
        desk.store.fails_with = ZeroDivisionError("a bug")
        desk.send(commands.ReadBox(box="b"))
        with trio.fail_after(PATIENCE_S):
            await desk.engine.failure_event.wait()


def path_of(desk: Desk, segment: Segment) -> Path:
    return Path(desk.store._path(Name.of(segment).file))


def hide(path: Path) -> Callable[[], object]:
    """Takes a file away; what is returned brings it back."""
    kept = path.rename(path.with_suffix(".kept"))
    return lambda: kept.rename(path)


def damage(desk: Desk, at: int, box: str = "b") -> str:
    """Flips a bit in the middle of a segment's batches; the path of the file."""
    path = path_of(desk, desk.segments(box)[at])
    content = bytearray(path.read_bytes())
    content[200] ^= 4
    path.write_bytes(content)
    return str(path)


async def test_damage_is_told_to_those_who_need_what_is_damaged_and_to_nobody_else(open_desk: Open) -> None:
    async with open_desk(seal=SealPolicy(5, 1 << 26, NEVER_MS)) as desk:
        await desk.put()
        for _ in range(3):
            await desk.append(*("x" * 50 for _ in range(5)))
            await desk.seal()
        await desk.append("unsealed")
        desk.forget()
        path = damage(desk, 1)
        assert seqs_of(await desk.read(0, limit=5)) == [1, 2, 3, 4, 5]
        assert seqs_of(await desk.read(10)) == [11, 12, 13, 14, 15, 16]
        told = await desk.ask(commands.ReadBox(box="b", from_seq=5, limit=2))
        assert isinstance(told, DataDamaged)
        assert "box 'b'" in str(told) and path not in str(told), "the path is for the log and streams doctor"
        assert isinstance(await desk.ask(commands.GetRecord("b", 7)), DataDamaged)
        assert isinstance(await desk.ask(commands.ReadBox(box="b", from_seq=0)), DataDamaged), "never a gap"
        assert (await desk.append("on")).first_seq == 17


async def test_a_segment_file_that_is_gone_is_told_like_damage(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.append("x")
        await desk.seal()
        desk.forget()
        path = path_of(desk, desk.segments()[0])
        bring_back = hide(path)
        told = await desk.ask(commands.ReadBox(box="b"))
        assert isinstance(told, DataDamaged) and "box 'b'" in str(told)
        bring_back()
        assert seqs_of(await desk.read(0)) == [1]


async def test_upkeep_that_meets_damage_leaves_the_box_alone_and_goes_on(open_desk: Open) -> None:
    async with open_desk(seal=SealPolicy(6, 1 << 26, NEVER_MS)) as desk:
        for box in ("b", "whole"):
            await desk.put(box)
            await desk.append(*({"data": "x" * 50, "tag": str(at % 2)} for at in range(6)), box=box)
            await desk.seal(box)
        desk.forget()
        damage(desk, 0)
        for box in ("b", "whole"):
            await desk.ask(commands.DeleteRecords(box, match=commands.Match("1")))
        await desk.until(lambda: desk.segments("whole")[0].serial == 2)
        await desk.until(lambda: desk.machine.boxes_with_dead_records == {})
        assert desk.segments("b")[0].serial == 1
        assert seqs_of(await desk.read(0, box="whole")) == [1, 3, 5]
        assert isinstance(await desk.ask(commands.ReadBox(box="b")), DataDamaged)


async def test_compaction_and_moves_that_meet_damage_leave_the_box_alone(
    open_desk: Open, tmp_path: Path
) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    async with open_desk(cold=cold, hot=HotPolicy(10, 0)) as desk:
        await desk.put()
        await desk.append(*({"data": at, "tag": "same"} for at in range(4)))
        await desk.seal()
        path = path_of(desk, desk.segments()[0])
        bring_back = hide(path)
        desk.store._indexes.clear()
        await desk.ask(commands.PutBox("b", BoxPatch(compact="tag")))
        await desk.until(lambda: desk.machine.compactable == {})
        desk.engine._background.upkeep._hot = HotPolicy(0, 0)
        desk.machine.movable[desk.machine.boxes["b"].generation] = desk.machine.boxes["b"]
        desk.engine._background.upkeep.wake()
        await desk.until(lambda: desk.machine.movable == {})
        assert desk.segments()[0].is_cold is False
        bring_back()
        assert len(records_of(await desk.read(0))) == 4
        await desk.append({"data": "new", "tag": "same"})
        desk.clock[0] += 20_000  # a box that is quiet for a while is looked at again
        await desk.until(lambda: desk.machine.boxes["b"].log.count == 1)


async def test_compaction_of_a_box_whose_last_record_is_deleted_comes_to_an_end(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.append(*({"data": at, "tag": "same"} for at in range(4)))
        await desk.append({"data": "last", "tag": "other"})
        await desk.ask(commands.DeleteRecords("b", match=commands.Match("other")))
        await desk.ask(commands.PutBox("b", BoxPatch(compact="tag")))
        desk.clock[0] += 20_000
        desk.engine._background.upkeep.wake()
        await desk.until(lambda: desk.machine.boxes["b"].log.count == 1)
        await desk.until(lambda: desk.machine.compactable == {})


async def test_a_read_whose_segment_makes_place_for_another_meanwhile_finds_that_one(
    open_desk: Open,
) -> None:
    async with open_desk(seal=SealPolicy(6, 1 << 26, NEVER_MS)) as desk:
        await desk.put()
        await desk.append(*({"data": at, "tag": str(at % 2)} for at in range(6)))
        await desk.seal()
        desk.forget()
        (old,) = desk.segments()
        desk.store.reading.shut()
        waiting = desk.send(commands.ReadBox(box="b"))
        await desk.store.reading.wait_reached()
        await desk.ask(commands.DeleteRecords("b", match=commands.Match("1")))
        await desk.until(lambda: desk.segments() != [old])
        hide(path_of(desk, old))
        desk.store._indexes.clear()
        desk.store.reading.open()
        assert seqs_of(await waiting.reply()) == [1, 3, 5]


async def test_a_delete_by_tag_that_cannot_look_into_a_segment_deletes_nothing(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.append({"data": 1, "tag": "t"})
        await desk.seal()
        hide(path_of(desk, desk.segments()[0]))
        desk.store._indexes.clear()
        told = await desk.ask(commands.DeleteRecords("b", match=commands.Match("t")))
        assert isinstance(told, DataDamaged)
        assert (await desk.ask(commands.GetState("b"))).count == 1


# -- the cold store


async def test_records_that_went_cold_are_read_from_there(open_desk: Open, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    async with open_desk(cold=cold, hot=HotPolicy(1, 0), seal=SealPolicy(5, 1 << 26, NEVER_MS)) as desk:
        await desk.put()
        for _ in range(4):
            await desk.append(*range(5))
            await desk.seal()
        await desk.until(lambda: [segment.is_cold for segment in desk.segments()] == [True] * 3 + [False])
        await desk.until(lambda: len(list((tmp_path / "segments").rglob("*.seg"))) == 1)
        desk.forget()
        assert seqs_of(await desk.read(0)) == list(range(1, 21))
        assert (await desk.ask(commands.DeleteRecords("b", before_seq=8))).deleted == 7
        cold.rename(tmp_path / "away")
        desk.forget()
        told = await desk.ask(commands.ReadBox(box="b"))
        assert isinstance(told, ColdStoreUnavailable)
        assert seqs_of(await desk.read(15)) == [16, 17, 18, 19, 20]
        assert (await desk.append("on")).first_seq == 21
        (tmp_path / "away").rename(cold)
        assert seqs_of(await desk.read(0)) == list(range(8, 22))


async def test_a_file_that_goes_cold_between_the_look_and_the_read_is_found_there(
    open_desk: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    async with open_desk(cold=cold, hot=HotPolicy(10, 0)) as desk:
        await desk.put()
        await desk.append("x")
        await desk.seal()
        desk.forget()
        name = Name.of(desk.segments()[0])
        desk.store.copy_to_cold(name)
        looks: Iterator[bool] = iter([True, True])
        exists = Disk.exists

        def just_gone(disk: Disk, path: str) -> bool:
            if path.endswith(".seg") and next(looks, False):
                segments.remove_segment(disk, desk.store._directory, name.file)
                return True
            return exists(disk, path)

        monkeypatch.setattr(Disk, "exists", just_gone)
        assert seqs_of(await desk.read(0)) == [1]


# -- snapshots


async def test_a_snapshot_is_of_one_moment_although_writes_go_on_while_it_is_taken(
    open_desk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.engine.snapshots._BOXES", 1)
    async with open_desk(snapshot_wal_bytes=4096) as desk:
        boxes = [f"box-{number}" for number in range(20)]
        for box in boxes:
            await desk.put(box)
        for number in range(60):
            sent = [desk.send(commands.Append(box=box, columns=columns(number))) for box in boxes]
            await trio.lowlevel.checkpoint()
        await sent[-1].reply()
        await desk.until(lambda: desk.engine._background.snapshots.lsn_taken > 100)
        states = {box: await desk.ask(commands.GetState(box)) for box in boxes}
    async with open_desk() as desk:
        for box in boxes:
            again = await desk.ask(commands.GetState(box))
            assert (again.head_seq, again.count) == (states[box].head_seq, states[box].count) == (60, 60)
            assert [record["data"] for record in records_of(await desk.read(0, box=box))] == list(range(60))


async def test_both_snapshots_of_a_quiet_shard_can_be_started_from(open_desk: Open, tmp_path: Path) -> None:
    """What a deleted box leaves goes although nothing else happens, and no snapshot is left that names it."""
    async with open_desk(snapshot_interval_ms=20) as desk:
        for box in ("a", "b"):
            await desk.put(box)
            await desk.append(1, 2, box=box)
            await desk.seal(box)
        (gone,) = desk.segments("a")
        snapshots = Snapshots(Disk(), f"{tmp_path}/snapshot")

        def newest() -> set[Name]:
            return names_in(frames.decode_state(snapshots.load(snapshots.list_lsns()[-1])))

        await desk.until(lambda: len(snapshots.list_lsns()) == 2 and len(newest()) == 2)
        await desk.ask(commands.DeleteBox("a"))
        await desk.until(lambda: desk.store.is_only_in_cold(Name.of(gone)))
        states = [frames.decode_state(snapshots.load(lsn)) for lsn in snapshots.list_lsns()]
        assert [names_in(state) for state in states] == [{Name.of(desk.segments("b")[0])}] * 2


async def test_a_quiet_shard_drops_copies_from_a_cold_store_that_was_away(
    open_desk: Open, tmp_path: Path
) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    async with open_desk(cold=cold, hot=HotPolicy(0, 0), snapshot_interval_ms=20) as desk:
        await desk.put()
        await desk.append(1, 2)
        await desk.seal()
        await desk.until(lambda: not list((tmp_path / "segments").rglob("*.seg")))
        assert len(list(cold.rglob("*.seg"))) == 1
        cold.rename(tmp_path / "away")
        await desk.ask(commands.DeleteBox("b"))
        await desk.until(lambda: desk.store.failed_sweeps > 0)
        (tmp_path / "away").rename(cold)
        await desk.until(lambda: not list(cold.rglob("*.seg")))


@pytest.mark.parametrize("others", [[], ["small"]])
async def test_a_shard_without_writes_gives_back_the_log_of_a_deleted_box(
    open_desk: Open, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    """Also if another box has a record in the oldest file that is not sealed."""
    monkeypatch.setattr("shard.core.boxes.unsealed.SMALL_BYTES", 64 * 1024)
    async with open_desk(snapshot_interval_ms=20) as desk:
        for box in others:
            await desk.put(box)
            await desk.append("kept", box=box)
        await desk.put()
        for _ in range(5):
            await desk.append("x" * 900_000)
        await desk.ask(commands.DeleteBox("b"))
        await desk.until(lambda: len(desk.engine._wal.files()) == 1)
        for box in others:
            assert seqs_of(await desk.read(0, box=box)) == [1]


async def test_the_older_snapshot_has_all_the_log_it_needs_when_the_newer_one_is_damaged(
    open_desk: Open, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshot"
    async with open_desk() as desk:
        await desk.put()
        for _ in range(3):  # each is followed by more than one log file
            await desk.engine._background.snapshots.take()
            for _ in range(3):
                await desk.append("x" * 900_000)
            await desk.seal()
        await desk.until(lambda: not (tmp_path / "wal" / "000000000001.wal").exists())
    _, newer = sorted(folder.iterdir())
    content = bytearray(newer.read_bytes())
    content[len(content) // 2] ^= 1
    newer.write_bytes(content)
    async with open_desk() as desk:
        assert seqs_of(await desk.read(0, max_bytes=1 << 24)) == list(range(1, 10))


# -- claims that wait


async def test_claims_that_wait_get_the_jobs_that_are_there_though_one_pass_does_not_reach(
    open_desk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jobs_module, waiting_claims):
        monkeypatch.setattr(module, "PASS_JOBS_MAX", 3)
    async with open_desk() as desk:
        await desk.ask(commands.PutBox("q", BoxPatch(type="queue")))
        claims = [desk.send(Claim(box="q", node=f"n{at}", max=2, wait_ms=600_000)) for at in range(6)]
        await desk.ask(commands.Append(box="q", columns=columns(*range(8))))
        given = [[seq for seq, _ in (await claim.reply()).jobs] for claim in claims[:5]]
        assert given == [[1, 2], [3], [4, 5], [6], [7, 8]]
        assert not claims[5].is_answered
        await desk.ask(commands.Append(box="q", columns=columns("x")))
        assert [seq for seq, _ in (await claims[5].reply()).jobs] == [9]


# -- a system clock that is set


async def test_long_polls_and_claims_end_in_time_though_the_clock_was_set_back(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.put()
        await desk.ask(commands.PutBox("q", BoxPatch(type="queue")))
        read = desk.send(commands.ReadBox(box="b", from_seq=0, wait_ms=30))
        claim = desk.send(Claim(box="q", node="n", wait_ms=30))
        desk.clock[0] -= 3_600_000
        assert (await read.reply()).records == b""
        assert (await claim.reply()).jobs == []


async def test_a_claim_in_a_window_is_served_though_the_clock_was_set_back(open_desk: Open) -> None:
    async with open_desk() as desk:
        await desk.ask(commands.PutBox("q", BoxPatch(type="queue", claim_jitter_ms=20)))
        claim = desk.send(Claim(box="q", node="n"))
        desk.clock[0] -= 3_600_000
        assert (await claim.reply()).jobs == []


def test_leases_outlast_a_clock_that_is_set_forward_and_end_after_one_that_is_set_back() -> None:
    """The time of the core is that of `Timekeeper`; the readings are the test's."""
    wall_ns, mono_ns = [1_700_000_000 * 10**9], [0]
    keeper = Timekeeper(wall_ns=lambda: wall_ns[0] + mono_ns[0], monotonic_ns=lambda: mono_ns[0])
    driver = Driver(now_ms=keeper.now_ms())

    def claimed_after(seconds: int) -> list[int]:
        mono_ns[0] += seconds * 10**9
        keeper.observe()
        driver.now_ms = keeper.now_ms()
        driver.tick()
        return [seq for seq, _ in driver.ask(Claim(box="q", node="n", max=9)).jobs]

    driver.put("q", type="queue", lease_ms=30_000, ttl_ms=3_600_000)
    driver.append("job", box="q", idempotency_key="k")
    assert claimed_after(0) == [1]
    wall_ns[0] += 86_400 * 10**9
    assert claimed_after(0) == [] and claimed_after(20) == []
    assert driver.append("job", box="q", idempotency_key="k").deduped
    assert claimed_after(13) == [1], "and the record did not expire"
    wall_ns[0] -= 90_000 * 10**9
    assert claimed_after(25) == [] and claimed_after(10) == [1]
    driver.append("late", box="q")
    assert records_of(driver.read(1, box="q"))[0]["$ts"] < 1_700_000_000_000 + 2 * 68_000


# -- commands in steps


async def test_others_are_served_between_the_steps_of_a_large_delete(
    open_desk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "STEP_BATCHES", 1)
    async with open_desk() as desk:
        await desk.put()
        for number in range(5):
            await desk.append({"data": number, "tag": "t"})
            await desk.seal()
        steps = []
        handle = desk.machine.handle

        def noted(command: Command, now_ms: int) -> Any:
            steps.append(type(command).__name__)
            return handle(command, now_ms)

        monkeypatch.setattr(desk.machine, "handle", noted)
        delete = desk.send(commands.DeleteRecords("b", None, commands.Match("t")))
        behind = desk.send(commands.Append(box="b", columns=columns({"data": "late", "tag": "t"})))
        while not delete.is_answered:
            await desk.ask(commands.Append(box="other", columns=columns("x")))
        assert (await delete.reply()).deleted == 5
        assert (await behind.reply()).first_seq == 6
        assert steps.count("DeleteRecords") >= 3, "once without what it needs, and once for each segment"
        assert steps.index("Append") < len(steps) - steps[::-1].index("DeleteRecords") - 1, "to the other box"
        assert desk.order.index(delete) < desk.order.index(behind)
        assert seqs_of(await desk.ask(commands.ReadBox(box="b"))) == [6]


async def test_a_quiet_shard_gives_memory_back_once_after_it_has_grown(open_desk: Open) -> None:
    class Memory:
        asked = runs = 0
        was_asked_again = trio.Event()

        @property
        def is_worth_it(self) -> bool:
            self.asked += 1
            if self.asked == 4:
                self.was_asked_again.set()
            return not self.runs

        def run(self) -> int:
            self.runs += 1
            return 1 << 20

    memory = Memory()
    async with open_desk(snapshot_interval_ms=10) as desk:
        desk.engine._background.snapshots._memory = memory  # type: ignore[assignment]
        with trio.fail_after(60):
            await memory.was_asked_again.wait()
        assert memory.runs == 1
