"""Goal: a bit that flips anywhere in the files of a shard is found before anything of it is served; repair
leaves out what is damaged, makes nothing up, and tells of everything that it leaves out.

Method: folders with random histories on the fault disk; a bit of any file is flipped, at places drawn by a
seed (many more of them with STREAMS_SWEEP=full). Held against: recovery and reading as a shard does them,
`verify_shard`, and `repair_shard`, whose result is compared record by record with what was there, and with
everything that was ever written.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import pytest

from shard.core.changes import (
    BatchAppended,
    BatchKept,
    BoxConfigured,
    BoxCreated,
    BoxDeleted,
    BoxRestated,
    RecordsDeleted,
    RecordsEvicted,
)
from shard.offline.repair import CannotRepair, Loss, RepairResult, repair_shard
from shard.offline.verify import Scope, VerifyResult, verify_shard
from shard.storage import frames
from shard.storage.files import Corrupt, remove_tree
from shard.storage.salvage import FrameGap, salvage
from shard.storage.segments import write_stub
from shard.storage.segments.index import open_segment
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.sources import FileSource
from shard.storage.wal import CHECKSUM_BYTES, FRAME_HEAD, Frame
from shard.transfer.shard_folders import read_shard
from streams.protocol.messages.commands import DeleteBox
from tests.support.faultdisk import FaultDisk, sweep
from tests.support.folders import FILE_BYTES, contents, write_folder
from tests.support.machines import Driver, decoded, random_history

SEEDS = range(8)
ONE, NEW = "/data/one", "/data/new"


class Before(NamedTuple):
    disk: FaultDisk
    driver: Driver
    contents: dict[str, Any]
    #: Of each file.
    sizes: dict[str, int]


@cache
def before(seed: int) -> Before:
    disk = FaultDisk("/data")
    driver = random_history(seed, 90)
    driver.stop()
    write_folder(disk, ONE, driver, snapshots=((), (0.5,), (0.4, 0.7), (0.3, 1.0))[seed % 4])
    sizes = {path: disk.size(path) for path in files_of(disk)}
    return Before(disk, driver, contents(disk.kill(), ONE), sizes)


def files_of(disk: FaultDisk, path: str = ONE) -> list[str]:
    found: list[str] = []
    for name in disk.listdir(path):
        inner = f"{path}/{name}"
        found += files_of(disk, inner) if disk.is_dir(inner) else [inner]
    return found


def every_flip() -> list[tuple[int, str, int]]:
    """(seed, file, byte): so many of each file that small ones are looked at as closely as large ones."""
    points = []
    for seed in SEEDS:
        for path, size in before(seed).sizes.items():
            rng = random.Random(f"{seed} {path}")
            points += [(seed, path, rng.randrange(size)) for _ in range(min(size, 60))]
    return points


def flipped(seed: int, path: str, at: int) -> FaultDisk:
    disk = before(seed).disk.kill()
    disk.flip(path, at, 1 << random.Random(f"{seed} {path} {at}").randrange(8))
    return disk


def verified(disk: FaultDisk, directory: str = ONE) -> VerifyResult:
    store = SegmentStore(disk, f"{directory}/segments")
    return verify_shard(disk, Scope(directory, directory, store, lambda slot: True))


def repaired(disk: FaultDisk) -> RepairResult:
    remove_tree(disk, NEW)
    return repair_shard(disk, ONE, NEW, shard=0, boot_id="boot", now_ms=10**6, file_bytes=FILE_BYTES)


def test_a_flipped_bit_is_found_before_it_is_served_and_named() -> None:
    detected = 0
    for seed, path, at in sweep(every_flip(), seed=51, sample=500):
        disk = flipped(seed, path, at)
        try:
            served = contents(disk, ONE)
        except Corrupt as damage:
            assert (
                damage.path == path
                and 0 <= damage.offset <= disk.size(path)
                and "streams repair" in str(damage)
            )
            detected += 1
        else:
            assert served == before(seed).contents, f"{path} at {at}: something else is served"
    assert detected > 100


def test_verify_finds_whatever_could_be_served_or_lost() -> None:
    for seed, path, at in sweep(every_flip(), seed=52, sample=300):
        disk = flipped(seed, path, at)
        found = verified(disk).problems
        assert all(problem.path == path for problem in found), found
        if not found:  # behind the end of the log, or in a segment that nobody names
            assert contents(disk, ONE) == before(seed).contents
            named = [f"{ONE}/segments/{each}" for each in _named(disk)]
            assert path not in named and not path.endswith(".snap")


def _named(disk: FaultDisk) -> list[str]:
    return [Name.of(segment).file for segment in read_shard(disk, ONE).segments()]


def test_a_whole_folder_has_no_problems() -> None:
    for seed in SEEDS:
        disk, driver, found, _ = before(seed)
        report = verified(disk.kill())
        assert report.problems == []
        assert report.boxes == len(found) == len(driver.machine.boxes)
        assert report.records == sum(len(box.get("live", ())) for box in found.values())


# -- repair


def ever_written(driver: Driver) -> dict[tuple[int, int], bytes]:
    """(generation, seq) -> text of everything that the log ever held."""
    texts: dict[tuple[int, int], bytes] = {}
    for frame in driver.log:
        change = decoded(frame)
        if isinstance(change, BatchAppended | BatchKept):
            batch = change.batch
            for index in range(batch.count):
                text = batch.text_as(index, index, tags=True, meta=True, data=True)
                texts[change.generation, batch.first_seq + index] = bytes(text)
    return texts


def test_a_delete_by_tag_behind_a_damaged_seal_is_applied_to_what_is_left() -> None:
    """It was made for segments that the repair may not know."""
    for damaged in (0, 1):
        driver, disk = Driver(), FaultDisk()
        driver.start("boot")
        driver.put(durability="fsync")
        seals = []
        for _ in range(2):
            for number in range(5):
                driver.append(*({"data": [number], "tag": tag} for tag in ("a", "b", "c")))
            driver.seal()
            seals.append(driver.machine.boxes["b"].log.segments[-1].to_bytes())
        driver.delete(tag="b")
        driver.append("last")
        driver.stop()
        write_folder(disk, ONE, driver, snapshots=())
        (path,) = [path for path in files_of(disk) if seals[damaged] in disk.read_all(path)]
        at = disk.read_all(path).index(seals[damaged])
        for byte in range(8):  # more than a checksum can tell
            disk.flip(path, at + 60 + byte, 1)
        found = repaired(disk)
        live = contents(disk, NEW)["b"]["live"]
        assert [seq for seq in live if seq % 3 == 2] == [], "what was deleted stays deleted"
        assert found.records == len(live) == 21


#: Of these a damaged frame takes the effect, and there is no way to know it.
TAKES_AWAY = (RecordsDeleted, RecordsEvicted, BoxDeleted, BoxCreated, BoxConfigured, BoxRestated)


def damaged_kinds(seed: int, disk: FaultDisk) -> list[type]:
    """What was in the frames that cannot be read now, and may matter."""
    driver = before(seed).driver
    whole = {found.lsn for found in salvage(disk, f"{ONE}/wal") if isinstance(found, Frame)}
    last = max(whole, default=0)
    return [
        type(decoded(frame)) for frame in driver.log if frame.lsn not in whole and frame.lsn <= max(last, 1)
    ]


def told_of(losses: list[Loss], generation: int, seq: int) -> bool:
    return any(loss.generation == generation and loss.first_seq <= seq <= loss.last_seq for loss in losses)


def test_repair_loses_only_what_is_damaged_and_tells_of_it() -> None:
    losses = 0
    for seed, path, at in sweep(every_flip(), seed=53, sample=300):
        disk = flipped(seed, path, at)
        _, driver, expected, _ = before(seed)
        try:
            found = repaired(disk)
        except CannotRepair as error:
            assert path.endswith(".snap") and "no snapshot" in str(error)
            continue
        after = contents(disk, NEW)
        assert verified(disk, NEW).problems == []
        losses += len(found.losses)
        kinds = damaged_kinds(seed, disk)
        texts = ever_written(driver)
        for name, box in expected.items():
            if "live" not in box:
                continue
            again = after.get(name, {})
            if again.get("generation") != box["generation"] or "live" not in again:
                assert any(kind in TAKES_AWAY for kind in kinds), f"{name} is gone"
                continue
            for seq, text in again["live"].items():
                assert texts[box["generation"], seq] == text, "a record was made up"
                if seq not in box["live"]:
                    assert any(kind in TAKES_AWAY or kind is BatchAppended for kind in kinds), (
                        f"{seq} is back"
                    )
            for seq in box["live"].keys() - again["live"].keys():
                assert told_of(found.losses, box["generation"], seq) or any(k in TAKES_AWAY for k in kinds)
                holes = [first <= seq <= last for first, last in again["holes"]]
                assert any(holes) or seq < max(again["positions"][3:]), f"{name} {seq} is lost without a word"
            assert again["positions"][0] >= box["positions"][0], "a seq could be given again"
        if not found.losses and not kinds and path.endswith((".seg", ".snap")):
            assert after == expected
    assert losses > 20


def test_repair_of_a_whole_folder_changes_nothing() -> None:
    for seed in SEEDS:
        expected = before(seed).contents
        disk = before(seed).disk.kill()
        found = repaired(disk)
        assert (found.losses, found.notes) == ([], [])
        assert contents(disk, NEW) == expected


# -- repair, case by case


def folder(driver: Driver, **more: Any) -> FaultDisk:
    disk = FaultDisk("/data")
    write_folder(disk, ONE, driver, **more)
    return disk


def flip_text(disk: FaultDisk, path: str, text: bytes) -> None:
    disk.flip(path, disk.peek(path).index(text), 255)  # one bit could be put right


def wal_of(disk: FaultDisk, text: bytes) -> str:
    return next(path for path in files_of(disk, f"{ONE}/wal") if text in disk.peek(path))


def written(*texts: str, box: str = "b") -> Driver:
    driver = Driver()
    for text in texts:
        driver.append(text, box=box)
    return driver


def test_a_damaged_frame_loses_its_batch_and_no_other() -> None:
    driver = written("first", "second", "third")
    driver.append("other", box="c")
    driver.stop()
    disk = folder(driver)
    flip_text(disk, wal_of(disk, b"second"), b"second")
    found = repaired(disk)
    assert [(loss.box, loss.first_seq, loss.last_seq) for loss in found.losses] == [("b", 2, 2)]
    after = contents(disk, NEW)
    assert list(after["b"]["live"]) == [1, 3] and after["b"]["holes"] == [(2, 2)]
    assert list(after["c"]["live"]) == [1] and after["c"]["holes"] == [], "the bytes say whose it was"


def test_the_last_batch_of_a_box_is_told_too_and_its_seq_is_not_given_again() -> None:
    driver = written("first", "second")
    driver.append("other", box="c")
    driver.stop()
    disk = folder(driver)
    flip_text(disk, wal_of(disk, b"second"), b"second")
    repaired(disk)
    after = contents(disk, NEW)
    assert (list(after["b"]["live"]), after["b"]["holes"]) == ([1], [(2, 2)])
    assert after["b"]["positions"][0] == 2


def test_a_frame_that_does_not_say_whose_it_was_may_be_of_any_box() -> None:
    driver = written("first", "second")
    driver.append("other", box="c")
    driver.append("again", box="c")
    driver.stop()
    disk = folder(driver)
    path = wal_of(disk, b"second")
    at = disk.peek(path).index(b"second")
    for offset in range(16):  # all of its head and its generation, and what comes next
        disk.flip(path, at - 150 + offset * 8, 255)
    found = repaired(disk)
    after = contents(disk, NEW)
    assert list(after["c"]["live"]) == [1, 2] and after["c"]["holes"] == [], (
        "later batches tell that it has all"
    )
    assert list(after["b"]["live"]) in ([1], [])
    assert after["b"]["holes"] and after["b"]["positions"][0] > 2
    assert all(loss.box == "b" for loss in found.losses)


def test_a_delete_behind_the_damage_still_counts() -> None:
    driver = written("first", "second", "third")
    driver.append({"data": "gone", "tag": "x"}, {"data": "stays"})
    driver.delete(tag="x")
    driver.delete(before_seq=2)
    driver.stop()
    disk = folder(driver)
    flip_text(disk, wal_of(disk, b"second"), b"second")
    repaired(disk)
    assert list(contents(disk, NEW)["b"]["live"]) == [3, 5]


def test_a_box_that_was_made_again_behind_the_damage_is_the_new_one() -> None:
    driver = written("old")
    driver.stop()
    driver.ask(DeleteBox("b"))
    lsn = driver.machine.lsn
    driver.append("new")
    driver.stop()
    disk = folder(driver)
    path = f"{ONE}/wal/000000000001.wal"
    gone = next(f for f in salvage(disk, f"{ONE}/wal") if isinstance(f, Frame) and f.lsn == lsn)
    disk.flip(path, gone.offset + 20)
    repaired(disk)
    (live,) = contents(disk, NEW)["b"]["live"].values()
    assert b"new" in live


def test_records_of_a_box_whose_creation_is_damaged_are_told_by_its_generation() -> None:
    driver = written("first")
    driver.append("second")
    generation = driver.machine.boxes["b"].generation
    driver.stop()
    disk = folder(driver)
    flip_text(disk, wal_of(disk, b"auto_create"), b"auto_create")
    found = repaired(disk)
    assert contents(disk, NEW) == {}
    assert [(loss.box, loss.generation, loss.first_seq) for loss in found.losses] == [
        ("", generation, 1),
        ("", generation, 2),
    ]


def test_a_damaged_batch_named_by_the_snapshot_is_lost_between_its_neighbours() -> None:
    driver = written("first", "second", "third")
    driver.stop()
    disk = folder(driver, snapshots=(1.0,))
    flip_text(disk, wal_of(disk, b"second"), b"second")
    found = repaired(disk)
    assert [(loss.first_seq, loss.last_seq) for loss in found.losses] == [(2, 2)]
    assert contents(disk, NEW)["b"]["holes"] == [(2, 2)]


def test_a_damaged_frame_that_nobody_needs_costs_nothing() -> None:
    driver = written("first", "second")
    driver.seal()
    driver.append("third")
    driver.stop()
    disk = folder(driver, snapshots=(1.0,))
    expected = contents(disk, ONE)
    flip_text(disk, wal_of(disk, b"second"), b"second")
    with pytest.raises(Corrupt):
        contents(disk, ONE)
    assert repaired(disk).losses == []
    assert contents(disk, NEW) == expected


def test_a_missing_log_file_loses_what_was_in_it() -> None:
    driver = Driver()
    for number in range(60):
        driver.append(f"{number}" * 60)
    driver.stop()
    disk = folder(driver)
    paths = files_of(disk, f"{ONE}/wal")
    assert len(paths) > 3
    disk.unlink(paths[1])
    found = repaired(disk)
    after = contents(disk, NEW)["b"]
    ((first, last),) = after["holes"]
    assert sorted(after["live"]) == [*range(1, first), *range(last + 1, 61)]
    assert [(loss.first_seq, loss.last_seq) for loss in found.losses] == [(first, last)]


def segment_files(disk: FaultDisk) -> list[str]:
    return [path for path in files_of(disk, f"{ONE}/segments") if path.endswith(".seg")]


def sealed() -> Driver:
    driver = Driver()
    for text in ("first", "second", "third"):
        driver.append({"data": text, "tag": f"t-{text}"}, {"data": f"{text} too", "tag": "u"})
    driver.seal()
    driver.append("fourth")
    driver.stop()
    return driver


@pytest.mark.parametrize("snapshots", [(), (1.0,)])
def test_a_damaged_batch_of_a_segment_is_lost_alone(snapshots: tuple[float, ...]) -> None:
    driver = sealed()
    disk = folder(driver, snapshots=snapshots)
    (path,) = segment_files(disk)
    flip_text(disk, path, b"second too")
    found = repaired(disk)
    assert [(loss.box, loss.first_seq, loss.last_seq) for loss in found.losses] == [("b", 3, 4)]
    after = contents(disk, NEW)["b"]
    assert (list(after["live"]), after["holes"]) == ([1, 2, 5, 6, 7], [(3, 4)])


def test_damaged_tags_cost_no_record() -> None:
    driver = sealed()
    disk = folder(driver)
    expected = contents(disk, ONE)
    (path,) = segment_files(disk)
    at = disk.peek(path).rindex(b"t-second")
    disk.flip(path, at)
    assert verified(disk).problems
    found = repaired(disk)
    assert found.losses == [] and "rewritten" in found.notes[-1]
    assert contents(disk, NEW) == expected


@pytest.mark.parametrize("snapshots", [(), (1.0,)])
@pytest.mark.parametrize("has_stub", [False, True])
def test_a_segment_without_its_index_is_lost_unless_a_stub_has_it(
    snapshots: tuple[float, ...], has_stub: bool
) -> None:
    driver = sealed()
    disk = folder(driver, snapshots=snapshots)
    expected = contents(disk, ONE)
    (path,) = segment_files(disk)
    if has_stub:
        write_stub(disk, f"{ONE}/segments", open_segment(FileSource(disk, path)))
    disk.flip(path, disk.size(path) - 20)
    found = repaired(disk)
    after = contents(disk, NEW)
    if has_stub:
        assert found.losses == [] and after == expected
    else:
        assert found.losses[0].first_seq == 1
        assert (list(after["b"]["live"]), after["b"]["holes"]) == ([7], [(1, 6)])


@pytest.mark.parametrize("snapshots", [(), (1.0,)])
def test_a_missing_segment_is_lost_and_told(snapshots: tuple[float, ...]) -> None:
    disk = folder(sealed(), snapshots=snapshots)
    (path,) = segment_files(disk)
    disk.unlink(path)
    assert any("missing" in problem.reason for problem in verified(disk).problems)
    repaired(disk)
    after = contents(disk, NEW)["b"]
    assert (list(after["live"]), after["holes"]) == ([7], [(1, 6)])


def test_a_damaged_snapshot_costs_nothing_while_another_is_whole() -> None:
    driver = written("first", "second", "third")
    driver.stop()
    disk = folder(driver, snapshots=(0.5, 1.0))
    expected = contents(disk, ONE)
    newest = files_of(disk, f"{ONE}/snapshot")[-1]
    disk.flip(newest, 60)
    (problem,) = verified(disk).problems
    assert problem.path == newest and problem.is_harmless
    found = repaired(disk)
    assert found.losses == [] and newest in found.notes[0]
    assert contents(disk, NEW) == expected


def test_without_a_snapshot_the_log_is_enough_if_it_is_all_there() -> None:
    driver = written("first", "second")
    driver.stop()
    disk = folder(driver, snapshots=(1.0,))
    expected = contents(disk, ONE)
    (path,) = files_of(disk, f"{ONE}/snapshot")
    disk.flip(path, 60)
    (problem,) = verified(disk).problems
    assert not problem.is_harmless
    assert repaired(disk).losses == []
    assert contents(disk, NEW) == expected
    for log in files_of(disk, f"{ONE}/wal"):
        disk.unlink(log)
    with pytest.raises(CannotRepair, match="does not begin at lsn 1"):
        repaired(disk)


def test_a_torn_tail_is_no_damage() -> None:
    driver = written("first", "second")
    disk = FaultDisk("/data")
    write_folder(disk, ONE, driver)
    (path,) = files_of(disk, f"{ONE}/wal")
    handle = disk.open(path, writable=True)
    disk.pwritev(handle, [b"\1half a frame that never was promised"], disk.size(path))
    disk.fsync(handle)
    assert verified(disk).problems == []
    assert not [found for found in salvage(disk, f"{ONE}/wal") if isinstance(found, FrameGap)]
    assert repaired(disk).losses == []


def test_a_frame_of_a_later_version_is_not_passed_over() -> None:
    driver = written("first")
    driver.stop()
    disk = folder(driver)
    real = frames._PLAIN_DECODERS.pop(11)
    try:
        with pytest.raises(CannotRepair, match="use the server version that wrote it"):
            repaired(disk)
        assert "kind 11" in verified(disk).problems[0].reason
    finally:
        frames._PLAIN_DECODERS[11] = real


def test_a_box_that_is_another_shards_is_told() -> None:
    driver = written("first")
    driver.stop()
    disk = folder(driver)
    scope = Scope(ONE, ONE, SegmentStore(disk, f"{ONE}/segments"), lambda slot: False)
    (problem,) = verify_shard(disk, scope).problems
    assert "which another shard owns" in problem.reason


def test_a_damaged_frame_of_a_seal_costs_nothing_while_the_file_is_there() -> None:
    driver = written("first", "second")
    driver.seal()
    lsn = driver.machine.lsn
    driver.append("third")
    driver.seal()
    driver.append("fourth")
    driver.stop()
    disk = folder(driver)
    expected = contents(disk, ONE)["b"]
    (frame,) = [f for f in salvage(disk, f"{ONE}/wal") if isinstance(f, Frame) and f.lsn == lsn]
    disk.flip(f"{ONE}/wal/{frame.file:012d}.wal", frame.offset + 24)
    copy = disk.kill()
    repaired(copy)
    after = contents(copy, NEW)["b"]
    assert after["live"] == expected["live"]
    for path in segment_files(copy)[:1]:
        copy.unlink(path)
    found = repaired(copy)
    assert {(loss.first_seq, loss.last_seq) for loss in found.losses} >= {(1, 1), (2, 2)}
    assert list(contents(copy, NEW)["b"]["live"]) == [3, 4]


@pytest.mark.parametrize(
    ("lost", "left"), [("first", [3, 4, 5]), ("second", [1, 2, 5]), ("third", [1, 2, 3, 4])]
)
def test_what_a_box_brings_along_from_memory_is_told_if_it_is_damaged(lost: str, left: list[int]) -> None:
    driver = Driver()
    driver.put(durability="memory")
    for text in ("first", "second"):
        driver.append(text, f"{text} too")
    driver.put(durability="fsync")
    driver.append("third")
    driver.stop()
    disk = folder(driver)
    flip_text(disk, wal_of(disk, lost.encode()), lost.encode())
    found = repaired(disk)
    after = contents(disk, NEW)["b"]
    assert list(after["live"]) == left
    assert all(told_of(found.losses, after["generation"], seq) for seq in {1, 2, 3, 4, 5} - set(left))
    assert after["positions"][0] >= 5


def test_a_flipped_bit_of_the_log_costs_no_other_box_anything() -> None:
    """Wherever in the frame of a large batch it is: head, generation, columns, records, checksum."""
    driver = Driver()
    for box in ("a", "b", "c", "big"):
        driver.append("first", box=box)
    driver.append(*("x" * 50 for _ in range(300)), box="big")
    driver.stop()
    clean = folder(driver)
    path = wal_of(clean, b"x" * 50)
    (frame,) = (
        each
        for each in salvage(clean, f"{ONE}/wal")
        if isinstance(each, Frame) and len(each.content) > 10_000
    )
    end = frame.offset + FRAME_HEAD.size + (len(frame.content) + 7 & ~7) + CHECKSUM_BYTES
    whole = 0
    points = [*range(frame.offset, frame.offset + 160), *range(end - 24, end)]
    for at in sweep([(at, bit) for at in points for bit in range(8)], seed=54, sample=150):
        disk = folder(driver)
        disk.flip(path, at[0], 1 << at[1])
        found = repaired(disk)
        lost = [(loss.box, loss.first_seq) for loss in found.losses]
        assert lost in ([], [("big", 2)]), (at, found.losses)
        if lost:
            assert found.losses[0].last_seq >= 301, (at, found.losses)
        else:
            whole += 1
            assert list(contents(disk, NEW)["big"]["live"]) == list(range(1, 302))
    assert whole > 10, "a head and a checksum can be had from the rest"


def test_a_batch_lost_before_seqs_that_a_power_cut_took_is_told_too() -> None:
    driver = Driver()
    driver.start("boot")
    for text in ("first", "second"):
        driver.append(text)
    driver = driver.reborn(driver.machine.durable_lsn)
    driver.start("another boot")  # which takes the seqs from 3 on
    driver.stop()
    disk = folder(driver)
    whole = contents(folder(driver), ONE)["b"]["holes"]
    assert whole and whole[0][0] == 3
    path = wal_of(disk, b"second")
    at = disk.peek(path).index(b"second")
    for offset in range(16):  # nothing says whose it was
        disk.flip(path, at - 150 + offset * 8, 255)
    found = repaired(disk)
    after = contents(disk, NEW)
    assert found.losses and {loss.last_seq for loss in found.losses} == {2}
    assert after["b"]["holes"][-1][1] == whole[-1][1]
    assert after["b"]["positions"][0] == whole[-1][1], "no seq is given again"
