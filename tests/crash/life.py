"""A shard without threads and without a clock: machine, log, snapshots and recovery on a disk that lies.

`engine.py` and `committer.py` join the same parts with a trio task and two threads. Here one thread does what
they do, in an order that the script chooses, so that a crash can be put at each operation of the disk and the
whole run repeated byte for byte:

    submit          Engine.submit and flush: handle, hand the frames over, answer now or park the reply
    commit          Committer._commit_group: append, report logged; sync if someone waits for it
    sync, pause     Committer._sync, _use_the_pause
    do_file_work    the files thread: zeros for the next file, release of old ones
    snapshot        Engine._take_snapshot, in its two halves, between which anything may happen
"""

from __future__ import annotations

import errno
import heapq
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from pyroaring import BitMap64

from shard.core.changes import RecordsEvicted, SeqsReserved, ShardState
from shard.core.machine import Machine, Outcome
from shard.recovery import Recovered, recover
from shard.storage import frames
from shard.storage.snapshot import Snapshots
from shard.storage.store import SegmentStore
from shard.storage.wal import HEADER_BYTES, FrameParts, Wal
from streams.protocol import commands
from streams.protocol.appends import RecordLimits, parse_append
from streams.protocol.errors import StreamsError
from streams.protocol.records import Columns
from tests.crash.promises import LEVEL_OF, BoxBook, Level, Promises
from tests.support.faultdisk import FaultDisk

FILE_BYTES = HEADER_BYTES + 2500

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


class Life:
    """One process of the shard. Raises what the disk raises; then it is over."""

    def __init__(self, disk: FaultDisk, world: World) -> None:
        self.disk = disk
        self.world = world
        self.machine, self.wal, self.snapshots, self.found = recovered(disk)
        world.settled(self.found.last_lsn)
        self._needs = [0, self.found.needs_lsn]
        self._backlog: list[tuple[list[FrameParts], bool, bool]] = []
        self._until_logged: list[Parked] = []
        self._until_durable: list[Parked] = []
        self._unsynced = False
        self._file_work: deque[int | bool] = deque([True])
        self._state: ShardState | None = None
        self.answers = 0
        #: Whether the commit thread is at work; if the disk fails then, the log takes nothing any more.
        self.is_writing = False

    def __repr__(self) -> str:
        return f"<Life {self.machine!r}, {len(self._backlog)} submissions waiting>"

    def begin(self) -> None:
        outcome = self.machine.start(boot_id=self.world.boot_id, now_ms=self.world.clock.now_ms)
        self._hand_over(outcome, sync=True)
        self.commit()

    def end(self) -> None:
        """In order, as on SIGTERM."""
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
        outcome = self.machine.handle(command, now_ms)
        assert outcome.reply is not None, "nobody waits in here"
        self._hand_over(outcome, sync=outcome.until_durable)
        book = self.world.promises.issued(command, outcome, now_ms) or before
        level = LEVEL_OF[book.config.durability] if book is not None else Level.NOTHING
        parked = Parked(
            outcome.waits_for_lsn,
            self.world.number(),
            command,
            outcome.reply,
            book,
            level,
            tuple(lsn for lsn, change in outcome.changes if not isinstance(change, BY_THE_WAY)),
            self.machine.lsn,
        )
        if not outcome.waits_for_lsn:
            self._answer(parked)
        else:
            heapq.heappush(self._until_durable if outcome.until_durable else self._until_logged, parked)
        return outcome.reply

    def tick(self) -> None:
        outcome = self.machine.tick(self.world.clock.now_ms)
        self._hand_over(outcome, sync=False)

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
            parked.command, parked.reply, parked.book, parked.level, parked.own, parked.stood_at
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
        if any(logged_matters for _, _, logged_matters in taken):
            self.machine.logged(self.wal.logged_lsn)
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
        self.machine.durable(lsn)
        self._release(self._until_logged, lsn)
        self._release(self._until_durable, lsn)

    def pause(self) -> None:
        """The commit thread has had nothing to do for a whole interval."""
        if self._unsynced:
            self.sync()
        elif self.wal.mark_due:
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

    # -- snapshots

    @property
    def is_taking_snapshot(self) -> bool:
        return self._state is not None

    def begin_snapshot(self) -> None:
        self._state = self.machine.snapshot()

    def finish_snapshot(self) -> None:
        state, self._state = self._state, None
        assert state is not None
        while self.machine.durable_lsn < state.lsn:
            self.commit()
            self.sync()
        self.snapshots.write(state.lsn, frames.encode_state(state))
        self._needs = [self._needs[-1], state.needs_lsn]
        needed_lsn = min(self._needs)
        through = 0
        for file in self.wal.files()[:-1]:
            if file.last_lsn >= needed_lsn:
                break
            through = file.number
        if through:
            self._file_work.append(through)


def recovered(disk: FaultDisk) -> tuple[Machine, Wal, Snapshots, Recovered]:
    machine = Machine()
    wal = Wal(disk, "/data/wal", file_bytes=FILE_BYTES)
    snapshots = Snapshots(disk, "/data/snapshot")
    *_, found = recover(machine, wal, snapshots, SegmentStore(disk, "/data/segments").open)
    assert isinstance(found, Recovered)
    assert found.skipped_snapshots == [], "a crash never damages a snapshot"
    return machine, wal, snapshots, found


def replayed(world: World, last_lsn: int) -> Machine:
    """A machine that has seen every frame from the first on, and no snapshot."""
    twin = Machine()
    for lsn in range(1, last_lsn + 1):
        kind, version, content = world.logged[lsn]
        twin.apply(frames.decode(kind, version, memoryview(content)), lsn)
    twin.recovered(last_lsn)
    return twin


def fingerprint(machine: Machine) -> dict[str, object]:
    """Everything that is stored, payloads too. Of a memory box only what is stored of it."""
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
        facts["deleted"] = list(BitMap64.deserialize(facts["deleted"]))
        log = box.log
        text = b",".join(
            span.payload.text_as(first, last, tags=True, meta=True, data=True)
            for span in log.spans()
            for first, last in log.runs(span, 0, span.count - 1)
        )
        found[name] = (facts, bytes(text))
    return found


def columns(datas: Iterable[dict[str, object]]) -> Columns:
    """Records to write, whose tag and node are told by their data, so that a reader can be held to it."""
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
        reply = life.submit(commands.Diff(box=box, from_seq=at, limit=limit, include_tags=True))
        assert isinstance(reply, commands.Records), reply
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
