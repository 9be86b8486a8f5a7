"""Goal: whatever operation the power, the process or the disk fails at, the next life of a shard keeps what
was promised, tells of what is lost, and goes on.

Method: `script.py` drives a shard (`life.py`) on the fault disk, and what it would leave if it were stopped
at one of its operations, before, midway or after (`stops.py`), in recovery too, is found by a next life. That
one recovers and is held against `promises.py`, an own bookkeeping of commands and replies, and against a twin
that has seen every frame and no snapshot. Then it is stopped as well. All stops with STREAMS_SWEEP=full, a
sample otherwise.
"""

from __future__ import annotations

import errno
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest

import shard.core.boxes.unsealed
import shard.core.context
from shard.core.machine import Machine
from shard.storage.segments import FileSource, verify_segment
from shard.storage.segments.store import Name, SegmentStore
from streams.protocol.messages import commands
from tests.crash.life import Life, Reading, World, fingerprint, new_disk, read_all, recovered, replayed
from tests.crash.promises import BoxBook, Level
from tests.crash.script import BOXES, Script
from tests.crash.stops import States, Stop, stop_everywhere, stops_of
from tests.support.faultdisk import IS_FULL, MOMENTS, Crashed, FaultDisk, sweep

STEPS = 60
SEEDS = range(12)


@pytest.fixture(autouse=True)
def short_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk boxes reserve so few seqs that they run out of them all the time."""
    monkeypatch.setattr(shard.core.context, "RESERVE_SEQS", 8)


@pytest.fixture(autouse=True)
def small_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of a few records are sealed by age; those of one or two are kept."""
    monkeypatch.setattr(shard.core.boxes.unsealed, "SMALL_BYTES", 1_500)


@pytest.fixture(autouse=True)
def garbage_is_collected_rarely() -> Iterator[None]:
    """Lives leave much of it; to look for it as often as usual takes a quarter of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 1_000)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


# -- lives and their ends


def live(life: Life, seed: int) -> Life:
    """A whole life after recovery, with an end in order."""
    life.begin()
    Script(life, random.Random(f"script {seed}")).run(STEPS)
    life.end()
    return life


def ended(disk: FaultDisk, world: World, rng: random.Random, end: Level | None = None) -> FaultDisk:
    """The disk as the next life finds it, after a kill or a power cut."""
    end = end or (Level.KILL if rng.random() < 0.3 else Level.POWER_CUT)
    world.ended(end)
    return disk.kill() if end is Level.KILL else disk.crash(rng)


@cache
def history_of(seed: int) -> list[str]:
    """The operations of a whole life."""
    disk = new_disk()
    live(Life(disk, World()), seed)
    return disk.history


def begun(disk: FaultDisk, world: World, rng: random.Random) -> Life:
    """The next life: recovered, checked in every way, and serving."""
    twice = disk.kill()
    oldest_keys = world.oldest_keys()  # of all configs, also those that the end has taken
    again = found_on(twice, oldest_keys)
    if rng.random() < 0.5:
        # Recovery is over and nothing was written since: not even a power cut may make a difference now.
        assert found_on(twice.crash(rng), oldest_keys) == again
    life = Life(disk.kill(), world)
    assert fingerprint(life.machine, life.store, oldest_keys) == again, (
        "recovered twice, and found two states"
    )
    twin = replayed(world, life.found.last_lsn)
    assert fingerprint(twin, life.store, oldest_keys) == again, "a snapshot says other than the log"
    life.machine.check()
    life.begin()
    life.machine.check()
    compare(life, limit=rng.choice((1, 3, 1000)))
    world.end = Level.NOTHING
    return life


def found_on(disk: FaultDisk, oldest_keys: Mapping[int, int]) -> dict[str, object]:
    machine, _, _, store, _ = recovered(disk)
    return fingerprint(machine, store, oldest_keys)


def compare(life: Life, *, limit: int) -> None:
    """What readers get now is what was promised."""
    promises = life.world.promises
    books = promises.alive()
    assert sorted(life.machine.boxes) == sorted(books)
    for name, book in books.items():
        state = life.submit(commands.GetState(name))
        assert isinstance(state, commands.BoxState)
        assert state.config == book.config
        assert state.fencing_token == book.token
        reading = read_all(life, name, limit=limit)
        if book.is_memory:
            assert (state.head_seq, state.count) == (0, 0)
            promises.renewed(name, state.generation)
            continue
        assert state.generation == reading.generation == book.generation
        if reading.head_seq > book.head_seq:
            assert life.world.end is Level.POWER_CUT, f"{name}: a hole, and the machine did not go down"
            assert book.config.durability == "disk"
            book.holes.append((book.head_seq + 1, reading.head_seq))
        compare_records(book, reading)
        for key, (first_seq, last_seq, _, _) in list(book.keys.items()):
            if book.remembers(key, life.world.clock.now_ms):
                reply = Script(life, random.Random(0)).again(name, key)
                assert isinstance(reply, commands.AppendResult) and reply.deduped
                assert (reply.first_seq, reply.last_seq) == (first_seq, last_seq)


def compare_records(book: BoxBook, reading: Reading) -> None:
    name, expected = book.name, book.records.keys() - book.deleted
    for seq, record in reading.records.items():
        assert seq in expected, f"{name}: {seq} was deleted, or never written"
        assert record == book.records[seq].shown()
    for seq in expected - reading.records.keys():
        if book.compacted(seq):
            continue
        assert reading.gap_over(seq) in ("cap", "ttl", "mixed"), f"{name}: {seq} is missing without a word"
        assert seq < reading.earliest_seq
    for seq, data in book.known.items():
        assert seq <= reading.head_seq, f"{name}: {seq} was known, and can be given again"
        if seq in reading.records:
            assert reading.records[seq]["data"] == data, f"{name}: {seq} was given to another record"
        if seq not in book.records:
            assert reading.gap_over(seq), f"{name}: {seq} was known, is lost, and nobody tells"
    for gap in reading.gaps:
        if gap.reason == "crash":
            inside = [hole for hole in book.holes if hole[0] <= gap.gap_to and gap.gap_from <= hole[1]]
            assert inside, f"{name}: {gap} tells of a loss that was none"
    for first_seq, last_seq in book.holes:
        for seq in (first_seq, last_seq):
            assert reading.gap_over(seq), f"{name}: the hole at {seq} is not told of"
    # A tighter cap is one change and what it evicts another: a crash may leave the first without the second,
    # until the next write.
    capped_lsn = book.configs[-1][0]
    if book.config.cap_records and any(record.lsn > capped_lsn for record in book.records.values()):
        assert len(reading.records) <= book.config.cap_records
    for told in book.told:
        assert told.head_seq <= reading.head_seq, f"{name}: the head moved back"
        assert told.earliest_seq <= reading.earliest_seq, f"{name}: the floor moved back"
        assert not told.gone & reading.records.keys(), f"{name}: a record that was gone is back"


def goes_on(life: Life, seed: object) -> None:
    """The shard takes writes and shows them."""
    for name, config in BOXES.items():
        life.submit(commands.SetFence(name, ""))
        life.submit(commands.DeleteRecords(name, before_seq=1 << 60))
        script = Script(life, random.Random(f"goes on {seed}"))
        reply = life.submit(commands.Append(box=name, columns=script.columns(2), config=config, create=True))
        assert isinstance(reply, commands.AppendResult), reply
        life.commit()
        life.sync()
        reading = read_all(life, name, limit=10)
        assert list(reading.records) == [reply.first_seq, reply.last_seq]
        life.machine.check()


def tidied(life: Life) -> None:
    """When nothing is left to do, each segment is in one place, whole, and no file is there for nothing."""
    for _ in range(2):
        life.begin_snapshot()
        life.finish_snapshot()
    for _ in range(3):  # a piece that is under way, what it leaves to be done, and a look that finds nothing
        eventually_idle(life)
    disk, named, cold = life.disk, set(), set()
    for segment in life.machine.segments():
        name = Name.of(segment)
        (cold if segment.is_cold else named).add(f"/data/segments/{name.file}")
        copy = f"/cold/segments/{name.file}" if segment.is_cold else f"/data/segments/{name.file}"
        assert list(verify_segment(FileSource(disk, copy))) == []
    paths = set(disk.paths("/data/segments"))
    assert {path for path in paths if path.endswith(".seg")} == named
    # A move that was cut off may have left a stub, and a copy behind it, of what is not to be moved any more.
    assert {path for path in paths if not path.endswith(".seg")} <= {stub_of(path) for path in named | cold}
    assert {stub_of(path) for path in cold} <= paths
    copies = {path.replace("/cold/", "/data/") for path in disk.paths("/cold")}
    assert cold <= copies <= {path for path in named | cold if stub_of(path) in paths}


def eventually_idle(life: Life) -> None:
    for _ in range(5_000):
        if not life.do_upkeep():
            return
    raise AssertionError("upkeep never ends")


def stub_of(path: str) -> str:
    return path.removesuffix(".seg") + ".stub"


# -- the script itself


def test_the_script_uses_every_operation_and_every_kind_of_frame() -> None:
    operations, kinds, rotations, released = set(), set(), 0, 0
    done: Counter[str] = Counter()
    for seed in SEEDS:
        disk, world = new_disk(), World()
        life = live(Life(disk, world), seed)
        operations |= set(disk.history)
        kinds |= {kind for kind, _, _ in world.logged.values()}
        rotations += life.wal.rotations
        released += life.wal.files()[0].number - 1
        upkeep = life.upkeep
        done.update(
            sealed=upkeep.segments_sealed,
            kept=upkeep.batches_logged_again,
            rewritten=upkeep.segments_rewritten,
            moved=upkeep.segments_moved,
            compacted=upkeep.records_compacted,
            removed=life.removed,
        )
    assert all(done[what] >= len(SEEDS) for what in done), done
    assert operations >= {
        "create", "open", "close", "pwritev", "fdatasync", "fsync", "fsync_dir", "rename", "unlink", "mkdir",
        "listdir", "exists", "size", "rmdir",
    }  # fmt: skip
    assert kinds == {*range(1, 17), 18} - {9}, "SeqsLost (9) needs a crash"
    assert rotations > 5 * len(SEEDS) and released > len(SEEDS)


def test_the_same_seed_writes_the_same_bytes() -> None:
    runs = []
    for _ in range(2):
        disk, world = new_disk(), World()
        live(Life(disk, world), 1)
        runs.append((world.logged, disk.history, world.promises.kept))
    assert runs[0] == runs[1]


def test_what_the_log_says_is_what_the_machine_was() -> None:
    """No crash at all: every change of state went through a change that was logged."""
    for seed in range(20):
        disk, world = new_disk(), World()
        life = Life(disk, world)
        life.begin()
        script = Script(life, random.Random(seed))
        for _ in range(STEPS // 4):
            script.run(4)
            twin = replayed(world, life.machine.lsn)
            assert stored(life.machine, life.store, world) == stored(twin, life.store, world)


# -- the sweeps


def chosen(seed: int, sample: int, *, every: int = 1) -> list[Stop]:
    """Where the life of this seed is stopped."""
    return sweep(stops_of(history_of(seed))[::every], seed=seed, sample=sample)


def lead(
    seed: int, only: list[Stop], check: Callable[[Life | None, FaultDisk, World, random.Random], None]
) -> None:
    """Leads a life and has it checked what it would leave at these stops. No life: it had not begun."""
    disk, world = new_disk(), World()
    life: Life | None = None

    def run() -> None:
        nonlocal life
        life = Life(disk, world)
        live(life, seed)

    def look(left: FaultDisk, promised: World, stop: Stop) -> None:
        check(life, left, promised, random.Random(f"{seed} {stop}"))

    found = stop_everywhere(run, disk, world, look, only=only)
    assert disk.history == history_of(seed), "to look at it changes nothing"
    print(f"{found} states at {len(only)} stops")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shard_that_loses_its_power_at_any_operation_keeps_its_promises_and_goes_on(seed: int) -> None:
    def check(_: Life | None, disk: FaultDisk, world: World, rng: random.Random) -> None:
        world.ended(Level.POWER_CUT)
        life = begun(disk.crash(rng), world, rng)
        for _turn in range(2):
            disk = life.disk
            disk.crash_at(disk.operations + rng.randrange(150), rng.choice(MOMENTS))
            try:
                Script(life, random.Random(rng.random())).run(30)
            except Crashed:
                pass
            life = begun(ended(disk, world, rng), world, rng)
        goes_on(life, seed)
        tidied(life)

    lead(seed, chosen(seed, 7), check)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_that_is_killed_at_any_operation_loses_nothing_that_was_logged(seed: int) -> None:
    def check(life: Life | None, disk: FaultDisk, world: World, rng: random.Random) -> None:
        world.ended(Level.KILL)
        after = begun(disk.kill(), world, rng)
        if life is None:
            return
        assert after.found.last_lsn >= life.machine.logged_lsn
        assert not any(box.log.holes for box in after.machine.boxes.values())
        if after.found.last_lsn == life.machine.lsn:
            machine, _, _, store, _ = recovered(disk.kill())
            before, now = stored(life.machine, store, world), stored(machine, store, world)
            assert before == now, "the machine was in a state that the log does not know"

    lead(seed, chosen(seed, 5), check)


def stored(machine: Machine, store: SegmentStore, world: World) -> dict[str, object]:
    found = fingerprint(machine, store, world.oldest_keys())
    return {name: found[name] for name, box in machine.boxes.items() if not box.is_memory}


@pytest.mark.parametrize("seed", SEEDS if IS_FULL else SEEDS[:3])
def test_a_shard_stopped_at_any_operation_of_recovery_recovers_the_next_time(seed: int) -> None:
    """Every operation of every recovery: so the recoveries themselves are fewer, or all would take days."""
    states = States()

    def check(_: Life | None, disk: FaultDisk, world: World, rng: random.Random) -> None:
        trial = ended(disk, world, rng)

        def look(left: FaultDisk, promised: World, _: Stop) -> None:
            goes_on(begun(ended(left, promised, rng), promised, rng), seed)

        stop_everywhere(lambda: Life(trial, world).begin(), trial, world, look, states=states)
        assert trial.operations >= 8

    lead(seed, chosen(seed, 1, every=40), check)
    print(f"{len(states)} states in recoveries")


class Failure(OSError):
    """Knows whether anybody asked what it is. If not, another code would have done the same."""

    was_asked = False

    @property
    def errno(self) -> int:  # type: ignore[override]
        self.was_asked = True
        return int(self.args[0])


def failed_at(seed: int, at: int, failure: Failure) -> tuple[FaultDisk, World]:
    """A first life whose disk failed there. It ends, unless that was only zeros for the next file."""
    disk, world = new_disk(), World()
    disk.fail_at(at, failure)
    life: Life | None = None
    try:
        life = Life(disk, world)
        live(life, seed)
    except OSError as error:
        assert error.args == failure.args
    if life is not None and life.is_writing:
        refuses(life)
    return disk, world


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_that_fails_at_any_operation_breaks_no_promise(seed: int) -> None:
    """Neither if the power goes then, nor if the shard is started again at once, as the supervisor does, and
    reads what the kernel still has of its writes."""
    states, failures = States(), 0
    for at in sweep(range(len(history_of(seed))), seed=seed, sample=2):
        for code in (errno.EIO, errno.ENOSPC):
            failure = Failure(code, "failed")
            copies = states.new(*failed_at(seed, at, failure))
            failures += 1
            for end, then in ((Level.POWER_CUT, None), (Level.KILL, Level.POWER_CUT)) if copies else ():
                (disk, world), rng = copies(), random.Random(f"{seed} {at} {end}")
                try:
                    life = begun(ended(disk, world, rng, end), world, rng)
                    Script(life, random.Random(at)).run(5)
                    goes_on(begun(ended(life.disk, world, rng, then), world, rng), seed)
                except BaseException as error:
                    error.add_note(f"after {errno.errorcode[code]} at operation {at}, and {end.name}")
                    raise
            if not failure.was_asked:
                break
    print(f"{len(states)} states after {failures} failures")


def refuses(life: Life) -> None:
    """A failed log takes nothing; so no reply that waits for it ever leaves."""
    answers = life.answers
    script = Script(life, random.Random(0))
    life.submit(commands.Append(box="one more", columns=script.columns(1), config=BOXES["fsync"]))
    with pytest.raises(RuntimeError):
        life.commit()
    with pytest.raises(RuntimeError):
        life.wal.sync()
    assert life.answers == answers
