"""A shard without threads and without a clock: machine, log, snapshots and recovery on a disk that lies.

`engine.py` and `committer.py` join the same parts with a trio task and two threads. Here one thread does what
they do, in an order that the script chooses, so that a crash can be put at each operation of the disk and the
whole run repeated byte for byte:

    submit          Engine.submit and flush: handle, hand the frames over, answer now or park the reply
    commit          Committer._commit_group: append, report logged; sync if someone waits for it
    sync, pause     Committer._sync, _on_idle
    do_file_work    the files thread: zeros for the next file, release of old ones
    snapshot        Engine._take_snapshot, box by box; between two of them, and before it is written, anything
                    may happen
    do_upkeep       `Upkeep.step` itself: what it has a thread do is done here, and between that and what
                    comes of it anything may happen
    reads           the fetcher and the cache themselves, without their threads
"""

from __future__ import annotations

import errno
import heapq
import json
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pyroaring import BitMap64

from shard.core.boxes.sealed import SealedBatch, Span
from shard.core.boxes.upkeep import HotPolicy, SealPolicy
from shard.core.capture import Capture
from shard.core.changes import RecordsEvicted, SeqsReserved
from shard.core.machine import LogEntries, Machine, Missing, Outcome
from shard.core.transactions.unrendered import NotRendered, UnrenderedRows
from shard.engine.cache import PayloadCache
from shard.engine.fetcher import FetchedPayloads, Fetcher
from shard.engine.upkeep import Upkeep
from shard.recovery.commit_renderer import chunk_reader, render_chunks
from shard.recovery.recovery import RecoverySummary, recover
from shard.storage import frames
from shard.storage.cold import FolderCold
from shard.storage.retention import Retention, names_in
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import HEADER_BYTES, FrameParts, Wal
from streams.protocol.errors import ColdStoreUnavailable, DataDamaged, StreamsError
from streams.protocol.messages import commands
from streams.protocol.model.records import Batch, Columns
from streams.protocol.payloads.appends import RecordLimits, parse_append
from tests.crash.promises import LEVEL_OF, BoxBook, Level, Promises
from tests.support.faultdisk import FaultDisk

FILE_BYTES = HEADER_BYTES + 2500
#: Log files that may be pinned by unsealed batches.
PINNED_FILES = 3
#: So little of everything that a run of a few dozen steps seals, rewrites, moves and forgets all the time.
SEAL = SealPolicy(records=8, bytes=3_000, age_ms=50)
HOT = HotPolicy(segments=2, bytes=0)
CACHE_BYTES = 2_000

#: What a command brings about without having been asked to: its reply does not promise that.
BY_THE_WAY = (RecordsEvicted, SeqsReserved)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000


@dataclass
class World:
    """What outlives a life: time, the promises, and every frame that was ever handed to the log."""

    clock: Clock = field(default_factory=Clock)
    promises: Promises = field(default_factory=Promises)
    logged: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)
    boots: int = 1
    numbers: int = 0
    #: The worst that has happened since a life last served.
    end: Level = Level.NOTHING

    @property
    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    def oldest_keys(self) -> dict[int, int]:
        """By generation: older idempotency keys may have lapsed, now or earlier in a window that was shorter.
        Ticks drop those, and the log does not say when."""
        return {
            generation: self.clock.now_ms - min(config.idempotency_window_ms for _, config in book.configs)
            for generation, book in self.promises.books.items()
            if book.configs
        }

    def ended(self, end: Level) -> None:
        self.end = max(self.end, end)
        self.boots += end is Level.POWER_CUT

    def settled(self, last_lsn: int) -> None:
        """A life has recovered everything up to here, and made it durable: the rest is nobody's any more."""
        self.promises.survived(last_lsn, self.end)
        self.logged = {lsn: frame for lsn, frame in self.logged.items() if lsn <= last_lsn}

    def number(self) -> int:
        self.numbers += 1
        return self.numbers


@dataclass(order=True)
class Parked:
    lsn: int
    order: int
    command: commands.Command = field(compare=False)
    reply: commands.Reply | StreamsError = field(compare=False)
    book: BoxBook | None = field(compare=False)
    level: Level = field(compare=False)
    own: tuple[int, ...] = field(compare=False)
    stood_at: int = field(compare=False)
    config_lsn: int = field(compare=False)


class _Turn:
    """What a coroutine waits for: somebody who does the work and sends what it returned."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def __await__(self) -> Generator[_Turn, Any, Any]:
        return (yield self)


class _InlineFetcher(Fetcher):
    """Reads at once, in the thread of the caller."""

    def _submit(self, is_cold: bool, work: Callable[[], None]) -> None:
        work()


def _at_once(work: Callable[..., None], *args: Any) -> None:
    work(*args)


class Life:
    """One process of the shard. Raises what the disk raises; then it is over."""

    def __init__(self, disk: FaultDisk, world: World) -> None:
        self.disk = disk
        self.world = world
        self.machine, self.wal, self.snapshots, self.store, self.found = recovered(disk)
        world.settled(self.found.last_lsn)
        self.cache = PayloadCache(CACHE_BYTES)
        self._read_chunk = chunk_reader(self.wal)
        self._fetcher = _InlineFetcher(
            self.machine,
            self.store,
            self.cache,
            read_chunk=self._read_chunk,
            post=_at_once,
            on_failed=lambda error: None,
        )
        self.upkeep = Upkeep(
            self.machine,
            self.store,
            self.cache,
            SEAL,
            HOT,
            now_ms=lambda: world.clock.now_ms,
            log_outcome=lambda outcome: self._hand_over(outcome, sync=False),
            wait_durable=self._wait_durable,
            pinned_lsn=self._pinned_lsn,
            unsealed_bytes_max=1 << 20,
            bytes_per_s=0,
            in_thread=_in_thread,
            sleep=_no_sleep,
        )
        self._step: Coroutine[_Turn, Any, bool] | None = None
        self._turn: _Turn | None = None
        self._retention = Retention(self.found.needs_lsn)
        self.wal.must_retain = self._retention.needs_frames
        self._capture: Capture | None = None
        self._backlog: list[tuple[list[FrameParts], bool, bool]] = []
        self._until_logged: list[Parked] = []
        self._until_durable: list[Parked] = []
        self._unsynced = False
        self._file_work: deque[int | bool] = deque([True])
        self.answers = 0
        #: Segment files and stubs that were swept.
        self.removed = 0
        #: Whether the commit thread is at work; if the disk fails then, the log takes nothing any more.
        self.is_writing = False

    def __repr__(self) -> str:
        return f"<Life {self.machine!r}, {len(self._backlog)} submissions waiting>"

    def begin(self) -> None:
        self.store.remove_leftovers()
        outcome = self.machine.start(boot_id=self.world.boot_id, now_ms=self.world.clock.now_ms)
        self._hand_over(outcome, sync=True)
        self.commit()

    def end(self) -> None:
        """In order, as on SIGTERM."""
        self.drop_upkeep()
        if self._capture is not None:
            self.finish_snapshot()
        self._hand_over(self.machine.stop(self.world.clock.now_ms), sync=True)
        self.commit()
        self.begin_snapshot()
        self.finish_snapshot()
        while self._file_work:
            self.do_file_work()
        self.sync()
        self.wal.close()

    # -- commands

    def submit(self, command: commands.Command) -> commands.Reply | StreamsError:
        """Handles a command; the reply may not have left yet."""
        now_ms = self.world.clock.now_ms
        before = self.world.promises.current(getattr(command, "box", ""))
        outcome = self._handle(command, now_ms)
        assert outcome.reply is not None, "nobody waits in here"
        book = self.world.promises.issued(command, outcome, now_ms) or before
        level = LEVEL_OF[book.config.durability] if book is not None else Level.NOTHING
        if isinstance(outcome.reply, ColdStoreUnavailable | DataDamaged):
            return outcome.reply  # which says nothing of the box
        parked = Parked(
            outcome.waits_for_lsn,
            self.world.number(),
            command,
            outcome.reply,
            book,
            level,
            tuple(lsn for lsn, change in outcome.changes if not isinstance(change, BY_THE_WAY)),
            self.machine.lsn,
            book.configs[-1][0] if book is not None else 0,
        )
        if not outcome.waits_for_lsn:
            self._answer(parked)
        else:
            heapq.heappush(self._until_durable if outcome.until_durable else self._until_logged, parked)
        return outcome.reply

    def _handle(self, command: commands.Command, now_ms: int) -> Outcome:
        """Again and again, until the machine has all that it needs from segments."""
        made: LogEntries = []
        held: FetchedPayloads = []
        while True:
            self.cache.add_all(held)
            outcome = self.machine.handle(command, now_ms)
            self.cache.shrink()
            made += outcome.changes
            self._hand_over(outcome, sync=outcome.until_durable)
            if outcome.needs and isinstance(outcome.needs[0], NotRendered):
                self.do_render()
                continue
            if outcome.needs:
                error = self._fetch(outcome.needs[0], held)
                if error is None:
                    continue
                outcome = outcome._replace(reply=error)
            return outcome._replace(changes=made)

    def _fetch(self, missing: Missing, held: FetchedPayloads) -> StreamsError | None:
        came: list[StreamsError | None] = []

        def done(error: StreamsError | None, brought: FetchedPayloads) -> None:
            came.append(error)
            held.extend(brought)

        self._fetcher.fetch(missing, 1_000, done)
        return came[0]

    def copy_locally(self, *, is_early: bool) -> None:
        """`LocalCopier._step`: one step of the copies between boxes of this shard."""
        copies, now_ms = self.machine.local_copies, self.world.clock.now_ms
        outcome = copies.step(now_ms, is_early=is_early)
        self._hand_over(outcome, sync=outcome.until_durable)
        while outcome.needs:
            assert self._fetch(outcome.needs[0], []) is None
            copies.resume(None, now_ms)
            outcome = copies.step(now_ms, is_early=False)
            self._hand_over(outcome, sync=outcome.until_durable)
        self.cache.shrink()

    def tick(self) -> None:
        outcome = self.machine.tick(self.world.clock.now_ms)
        self._hand_over(outcome, sync=False)
        for missing in outcome.needs:
            if not isinstance(missing, NotRendered):
                self._fetch(missing, [])

    def _hand_over(self, outcome: Outcome, *, sync: bool) -> None:
        if not outcome.changes:
            return
        group = [frames.encode(lsn, change) for lsn, change in outcome.changes]
        for kind, version, lsn, parts in group:
            self.world.logged[lsn] = (kind, version, b"".join(parts))
        self._backlog.append((group, sync, not outcome.until_durable))

    def _answer(self, parked: Parked) -> None:
        self.answers += 1
        self.world.promises.told(
            parked.command,
            parked.reply,
            parked.book,
            parked.level,
            parked.own,
            parked.stood_at,
            parked.config_lsn,
        )

    # -- the commit thread

    @property
    def is_idle(self) -> bool:
        return not self._backlog and not self._unsynced

    def commit(self, submissions: int = 1 << 30) -> None:
        taken, self._backlog = self._backlog[:submissions], self._backlog[submissions:]
        if not taken:
            return
        rotations = self.wal.rotations
        self.is_writing = True
        self.wal.append([frame for group, _, _ in taken for frame in group])
        self._unsynced = True
        if self.wal.rotations != rotations:
            self._file_work.append(True)
        if any(notify_logged for _, _, notify_logged in taken):
            self.machine.on_logged(self.wal.logged_lsn)
            self._release(self._until_logged, self.wal.logged_lsn)
        if any(sync for _, sync, _ in taken):
            self.sync()
        self.is_writing = False

    def sync(self) -> None:
        if not self._unsynced:
            return
        self.is_writing = True
        self.wal.sync()
        self.is_writing = False
        self._unsynced = False
        lsn = self.wal.durable_lsn
        self.machine.on_durable(lsn)
        self._release(self._until_logged, lsn)
        self._release(self._until_durable, lsn)

    def pause(self) -> None:
        """The commit thread has had nothing to do for a whole interval."""
        if self._unsynced:
            self.sync()
        elif self.wal.needs_marker:
            self.is_writing = True
            self.wal.mark()
            self.is_writing = False

    def _release(self, parked: list[Parked], lsn: int) -> None:
        while parked and parked[0].lsn <= lsn:
            self._answer(heapq.heappop(parked))

    # -- the files thread

    def do_file_work(self) -> None:
        if not self._file_work:
            return
        work = self._file_work.popleft()
        if work is not True and work < 0:
            self.wal.drop_retained(-work)
            return
        if work is not True:
            for file in self.wal.files()[:-1]:
                if file.number <= work:
                    self.wal.release(file.number)
            return
        try:
            # The committer asks for zeros by how fast files fill; here every other one has them.
            self.wal.prepare_next(zeros=self.wal.rotations % 2 == 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    # -- commits

    def do_render(self, bytes_max: int = 1, batches_max: int = 1 << 30) -> bool:
        """The next step of the oldest commit, or only some of its batches. Whether there was one."""
        lsn = next(iter(self.machine.txns.commits), None)
        if lsn is None:
            return False
        self._make_durable(lsn)
        commit = self.machine.txns.commits[lsn]
        step = commit.plan(bytes_max)
        rendered = render_chunks(step, self._read_chunk)
        chunks = len(step.chunks) if batches_max >= len(rendered) else 0
        self._hand_over(self.machine.keep_rendered(commit, rendered[:batches_max], chunks), sync=False)
        return True

    # -- upkeep

    def do_upkeep(self) -> bool:
        """The next stretch of it: a piece of work begins, or what it waits for is done. Whether it found
        anything to do."""
        if self._step is None:
            self._step = self.upkeep.step()
            return self._go_on(None)
        assert self._turn is not None
        try:
            came = self._turn.work()
        except Exception as error:
            return self._go_on(None, error)
        self.removed += came if type(came) is int else 0
        return self._go_on(came)

    def _go_on(self, came: Any, error: Exception | None = None) -> bool:
        assert self._step is not None
        try:
            self._turn = self._step.send(came) if error is None else self._step.throw(error)
        except StopIteration as end:
            self._step = None
            return bool(end.value)
        return True

    def drop_upkeep(self) -> None:
        """As when the engine is stopped: a thread ends what it is at, and nothing comes of it."""
        if self._step is not None and self._turn is not None:
            self._turn.work()
            self._step.close()
            self._step = None

    async def _wait_durable(self, lsn: int) -> bool:
        await _Turn(lambda: self._make_durable(lsn))
        return True

    def _make_durable(self, lsn: int) -> None:
        while self.machine.durable_lsn < lsn:
            self.commit()
            self.sync()

    def _pinned_lsn(self) -> int:
        files = self.wal.files()[:-PINNED_FILES]
        return files[-1].last_lsn if files else 0

    # -- snapshots

    @property
    def is_taking_snapshot(self) -> bool:
        return self._capture is not None

    def begin_snapshot(self) -> None:
        self._capture = self.machine.begin_snapshot()

    def advance_snapshot(self) -> None:
        assert self._capture is not None
        self._capture.step(1)

    def finish_snapshot(self) -> None:
        capture, self._capture = self._capture, None
        assert capture is not None
        capture.step(len(self.machine.boxes) + 100)
        self.machine.end_snapshot(capture)
        state = capture.state()
        self._make_durable(state.lsn)
        self.snapshots.write(state.lsn, frames.encode_state(state))
        self._retention.note_snapshot(state.needs_lsn, names_in(state), state.held)
        for kept in self.wal.retained_files():
            if not self._retention.needs_frames(kept.first_lsn, kept.last_lsn):
                self._file_work.append(-kept.number)
        named = self._retention.named_segments()
        if named is not None:
            self.upkeep.sweep(named)
        through = self._retention.last_unneeded(self.wal.files()[:-1])
        if through:
            self._file_work.append(through)


async def _in_thread(work: Callable[..., Any], *args: Any) -> Any:
    return await _Turn(lambda: work(*args))


async def _no_sleep(_seconds: float) -> None:
    await _Turn(lambda: None)


def new_disk() -> FaultDisk:
    """With a data directory, and a folder that is the cold store."""
    return FaultDisk("/data", "/cold")


def recovered(disk: FaultDisk) -> tuple[Machine, Wal, Snapshots, SegmentStore, RecoverySummary]:
    machine = Machine(due_records=SEAL.records, due_bytes=SEAL.bytes)
    wal = Wal(disk, "/data/wal", file_bytes=FILE_BYTES, reserves=True)
    snapshots = Snapshots(disk, "/data/snapshot")
    store = SegmentStore(disk, "/data/segments", FolderCold("/cold", disk))
    *_, found = recover(machine, wal, snapshots, store.open)
    assert isinstance(found, RecoverySummary)
    assert found.skipped_snapshots == [], "a crash never damages a snapshot"
    return machine, wal, snapshots, store, found


def replayed(world: World, last_lsn: int) -> Machine:
    """A machine that has seen every frame from the first on, and no snapshot."""
    twin = Machine()
    for lsn in range(1, last_lsn + 1):
        kind, version, content = world.logged[lsn]
        twin.apply(frames.decode(kind, version, memoryview(content)), lsn)
    twin.end_recovery(last_lsn)
    return twin


def fingerprint(
    machine: Machine, store: SegmentStore, oldest_keys: Mapping[int, int] | None = None
) -> dict[str, object]:
    """Everything that is stored, payloads too. Of a memory box only what is stored of it. Idempotency keys
    that are older than `oldest_keys` (`World.oldest_keys`) are left out."""
    found: dict[str, object] = {
        "": (machine.lsn, machine.last_generation, machine.boot_id, machine.stopped_clean),
        " not recreated": list(machine.not_recreated),
    }
    for name, box in machine.boxes.items():
        config = msgspec.to_builtins(box.config)
        if box.is_memory:
            found[name] = (box.generation, config)
            continue
        facts = msgspec.to_builtins(box.facts(), builtin_types=(bytes,))
        oldest_ms = (oldest_keys or {}).get(box.generation, 0)
        facts["keys"] = [entry for entry in facts["keys"] if entry[3] >= oldest_ms]
        facts["deleted"] = list(BitMap64.deserialize(facts["deleted"]))
        facts["batches"] = [lsn for lsn in array("Q", facts["batches"]) if lsn]
        for segment in facts["segments"]:
            segment[3] = None  # whether it is cold: that is found out anew, from the files
        log = box.log
        text = b",".join(
            b""
            if isinstance(span, UnrenderedRows)
            else payload_of(span, store).text_as(first, last, tags=True, meta=True, data=True)
            for span in log.spans()
            for first, last in log.runs(span, 0, span.count - 1)
        )
        found[name] = (facts, bytes(text))
    return found


def payload_of(span: Span, store: SegmentStore) -> Batch:
    if not isinstance(span, SealedBatch):
        return span.payload
    # Without a note that it was used: a machine that goes on must not know that it was looked at.
    segment, at = span._segment, span._at
    return segment.cached_payload(at) or store.read(Name.of(segment), at, bytes_max=1)[0]


def columns(datas: Iterable[dict[str, object]]) -> Columns:
    """Records to write, whose tag and node follow from their data, so that a reader can be held to it."""
    records = [{"data": data, "tag": data["tag"], "node": data["node"]} for data in datas]
    return parse_append(json.dumps({"records": records}).encode(), RecordLimits()).columns


@dataclass
class Reading:
    """What a reader gets who reads a box from the start."""

    records: dict[int, dict[str, object]] = field(default_factory=dict)
    gaps: list[commands.Tombstone] = field(default_factory=list)
    head_seq: int = 0
    earliest_seq: int = 0
    generation: int = 0

    def gap_over(self, seq: int) -> str:
        return next((gap.reason for gap in self.gaps if gap.gap_from <= seq <= gap.gap_to), "")


def read_all(life: Life, box: str, *, limit: int) -> Reading:
    reading = Reading()
    at = 0
    while True:
        reply = life.submit(commands.ReadBox(box=box, from_seq=at, limit=limit, include_tags=True))
        assert isinstance(reply, commands.DiffResult), reply
        if reply.tombstone is not None:
            assert reply.tombstone.gap_from == at + 1 and reply.tombstone.gap_to >= reply.tombstone.gap_from
            reading.gaps.append(reply.tombstone)
        for record in json.loads(b"[" + reply.records + b"]"):
            assert record["$seq"] not in reading.records
            assert record["$seq"] > max(reading.records, default=0)
            reading.records[record["$seq"]] = record
        reading.head_seq, reading.earliest_seq = reply.head_seq, reply.earliest_seq
        reading.generation = reply.generation
        if reply.next_from_seq == reply.head_seq:
            return reading
        assert reply.next_from_seq > at, "a reader makes progress"
        at = reply.next_from_seq
