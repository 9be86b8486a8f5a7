"""Goal: what was sealed is read back as it was, found by seq and time, and nothing else is ever served.

Method: segments of many shapes on the real disk and on the fault disk, compared with the batches they were
made of; every byte of one flipped; forged ones with good checksums; a golden file. Tags are in
`test_tags`, stubs in `test_stubs`.
"""

from __future__ import annotations

import errno
import random
import struct
import sys
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from shard.storage import segments, sources
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.segments import (
    FileSource,
    build_index,
    copy_segment,
    find_tags,
    layout,
    list_segments,
    open_segment,
    open_stub,
    read_batches,
    remove_leftovers,
    remove_segment,
    small_steps,
    tag_writer,
    verify_segment,
    walk_tags,
    write_segment,
    write_stub,
    writer,
)
from shard.storage.segments.store import Name, SegmentStore
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch
from tests.support.faultdisk import FaultDisk, sweep
from tests.support.segments import (
    DIRECTORY,
    FOOTER_BYTES,
    GOLDEN,
    Recorded,
    a_batch,
    a_mixed_lot,
    all_batches,
    bytes_of,
    many,
    seqs_naively,
    sizes_naively,
    written,
)


@pytest.fixture(params=["real", "fault"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DiskLike, str]:
    return (Disk(), f"{tmp_path}/segments") if request.param == "real" else (FaultDisk("/data"), DIRECTORY)


# Round trips.

SHAPES = {
    "one batch of one record": [a_batch(1)],
    "one large batch": [a_batch(1, 5_000, data=b'"%s"' % (b"x" * 1000))],
    "large and small in turn": [
        a_batch(at * 100, at % 50 + 1, data=b"1" * at * 10 or b"0") for at in range(1, 60)
    ],
    "much variety": a_mixed_lot(),
    "every length modulo eight": [a_batch(at, data=b"1" * at) for at in range(1, 25)],
    "the last seq there is": [a_batch(0), a_batch(2**64 - 1, tags=["end"])],
    "ten thousand batches": many(10_000),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_sealed_is_read_back(place: tuple[DiskLike, str], shape: str) -> None:
    disk, directory = place
    batches = SHAPES[shape]
    index, source = written(disk, iter(batches), directory=directory)
    assert open_segment(source) == index
    assert bytes_of(all_batches(source, index)) == bytes_of(batches)
    assert list(verify_segment(source)) == []
    assert disk.size(source.name) == index.file_bytes
    assert index.records == sum(batch.count for batch in batches)
    assert index.record_bytes == sum(batch.live_bytes for batch in batches)
    assert (index.first_seq, index.last_seq) == (batches[0].first_seq, batches[-1].last_seq)
    assert list_segments(disk, directory) == [index.name]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_index_is_known_without_writing(shape: str) -> None:
    batches = SHAPES[shape]
    index = build_index(generation=7, serial=12, batches=batches)
    disk = FaultDisk("/data")
    assert written(disk, batches)[0] == index
    assert open_segment(FileSource(disk, f"{DIRECTORY}/{index.name}")) == index
    assert layout(batches) == index.offsets


def test_the_name_says_generation_first_seq_and_serial() -> None:
    assert written(FaultDisk("/data"), [a_batch(42)])[0].name == "7/00000000000000000042-000000000012.seg"


def test_batches_are_let_go_of_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the run that is being written holds a batch, so a generator need not have them all."""
    monkeypatch.setattr(small_steps, "STEP_BYTES", 1 << 16)
    monkeypatch.setattr(writer, "SYNC_BYTES", 1 << 17)
    disk = FaultDisk("/data")
    taken = 0

    def source_of_batches() -> Iterable[Batch]:
        nonlocal taken
        for batch in (a_batch(at, data=b"1" * 10_000) for at in range(1, 101)):
            taken += len(batch.blob)
            yield batch
            if disk.exists(temporary):
                assert taken - disk.size(temporary) < 3 << 16

    temporary = f"{DIRECTORY}/7/00000000000000000001-000000000012.tmp"
    index, source = written(disk, source_of_batches())
    assert disk.history.count("pwritev") > 10 and disk.history.count("fdatasync") > 5
    assert list(verify_segment(source)) == [] and len(index) == 100


def test_a_write_pauses_after_every_step_and_no_step_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_steps, "STEP_BYTES", 2000)
    for batches, steps_min in (
        ([a_batch(at, data=b"1" * 150) for at in range(100)], 10),
        ([a_batch(at, 5, tags=[f"{at} {n}" for n in range(5)]) for at in range(0, 10_000, 5)], 30),
        ([a_batch(1, data=b"1" * 5000), a_batch(2)], 2),
    ):
        disk = FaultDisk("/data")
        pauses: list[int] = []
        index = write_segment(disk, DIRECTORY, generation=7, serial=12, batches=batches, pause=pauses.append)
        assert len(pauses) == disk.history.count("pwritev") >= steps_min
        assert sum(pauses) == index.file_bytes and min(pauses) > 0
        largest = max(*map(len, bytes_of(batches)), len(index) * 52, tag_writer.TAG_BLOCK_BYTES)
        assert max(pauses) < 2000 + 64 + largest


def test_a_step_has_few_batches_however_small_they_are() -> None:
    disk = FaultDisk("/data")
    pauses: list[int] = []
    batches = many(3 * writer.STEP_BATCHES)
    write_segment(disk, DIRECTORY, generation=7, serial=12, batches=batches, pause=pauses.append)
    # Three of batches and no empty one behind them, then batch index and footer; there are no tags.
    assert len(pauses) == 5 and pauses[1] == pauses[2] == sum(
        -(-len(content) // 8) * 8 for content in bytes_of(batches[-writer.STEP_BATCHES :])
    )


@pytest.mark.parametrize("copied", [False, True])
def test_a_pause_that_raises_ends_the_write_and_leaves_nothing(copied: bool) -> None:
    class Stop(Exception):
        pass

    elsewhere = written(FaultDisk("/data"), a_mixed_lot())[1]
    for allowed in range(3):
        disk = FaultDisk("/data")
        pauses: list[int] = []

        def pause(written_bytes: int, pauses: list[int] = pauses, allowed: int = allowed) -> None:
            if len(pauses) == allowed:
                raise Stop
            pauses.append(written_bytes)

        with pytest.raises(Stop):
            if copied:
                copy_segment(disk, DIRECTORY, elsewhere, pause=pause)
            else:
                write_segment(disk, DIRECTORY, generation=7, serial=12, batches=a_mixed_lot(), pause=pause)
        assert len(pauses) == allowed
        assert list_segments(disk, DIRECTORY) == [] == remove_leftovers(disk, DIRECTORY)


def test_memory_per_batch_is_at_most_sixty_bytes() -> None:
    disk = FaultDisk("/data")
    built, source = written(disk, many(10_000))
    for index in (built, open_segment(source)):
        columns = [
            value for name in index.__struct_fields__ if isinstance(value := getattr(index, name), array)
        ]
        assert len(columns) == 8
        assert sum(map(sys.getsizeof, columns)) / 10_000 <= 60


def test_a_segment_without_batches_or_with_batches_out_of_order_is_our_mistake() -> None:
    disk = FaultDisk("/data")
    for batches in ([], [a_batch(5, 3), a_batch(7)], [a_batch(5, ts=2), a_batch(6, ts=1)]):
        with pytest.raises(AssertionError):
            written(disk, batches)
    assert list_segments(disk, DIRECTORY) == []


def test_an_index_shows_its_state_in_one_line() -> None:
    shown = repr(build_index(generation=7, serial=12, batches=a_mixed_lot()))
    assert "seqs 5..1099511627777, 20 records in 5 batches, 5 tags" in shown


# Looking up.


def test_seqs_and_holes_are_found_in_their_batch() -> None:
    batches = a_mixed_lot()
    index = build_index(generation=7, serial=12, batches=batches)
    for seq in (*range(1000), 2**40 - 1, 2**40, 2**40 + 1, 2**40 + 2, 2**63):
        holders = [at for at, batch in enumerate(batches) if batch.first_seq <= seq <= batch.last_seq]
        behind = [at for at, batch in enumerate(batches) if batch.last_seq >= seq]
        assert index.at(seq) == (holders[0] if holders else None)
        assert index.from_seq(seq) == (behind[0] if behind else len(batches))


def test_the_first_batch_from_a_time_on_is_found() -> None:
    batches = a_mixed_lot()
    index = build_index(generation=7, serial=12, batches=batches)
    for ts in (-1, 0, 999, 1000, 1001, 1002, 1007, 1008, 1999, 2000, 2001):
        behind = [at for at, batch in enumerate(batches) if batch.last_ts >= ts]
        assert index.from_ts(ts) == (behind[0] if behind else len(batches))


def test_any_range_of_batches_can_be_read(place: tuple[DiskLike, str]) -> None:
    disk, directory = place
    batches = [a_batch(at * 3, at % 3 + 1, data=b"1" * (at % 40 + 1)) for at in range(200)]
    index, source = written(disk, batches, directory=directory)
    rng = random.Random(1)
    for _ in range(200):
        first = rng.randrange(200)
        last = rng.randrange(first, 200)
        assert bytes_of(read_batches(source, index, first, last)) == bytes_of(batches[first : last + 1])


def test_a_range_is_one_read_and_ends_where_the_bytes_allow() -> None:
    batches = [a_batch(at, data=b"1" * 1000) for at in range(50)]
    index, file = written(FaultDisk("/data"), batches)
    one = index.offsets[1] - index.offsets[0]
    for bytes_max, count in (
        (0, 1),
        (1, 1),
        (one, 1),
        (2 * one - 1, 1),
        (2 * one, 2),
        (10 * one, 10),
        (1 << 20, 40),
    ):
        source = Recorded(file)
        found = read_batches(source, index, 10, 49, bytes_max=bytes_max)
        assert bytes_of(found) == bytes_of(batches[10 : 10 + count])
        assert len(source.reads) == 1


def test_more_than_a_step_is_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [a_batch(at, data=b"1" * 1000) for at in range(50)]
    index, file = written(FaultDisk("/data"), batches)
    monkeypatch.setattr(sources, "READ_BYTES", 10_000)
    source = Recorded(file)
    assert bytes_of(read_batches(source, index, 0, 49, bytes_max=1 << 20)) == bytes_of(batches)
    assert 5 <= len(source.reads) <= 7 and max(length for _, length in source.reads) <= 10_000


def test_many_threads_read_one_segment(tmp_path: Path) -> None:
    batches = [a_batch(at, tags=[f"t{at % 7}"]) for at in range(500)]
    index, source = written(Disk(), batches, directory=f"{tmp_path}/segments")
    expected = bytes_of(batches)

    def look(seed: int) -> bool:
        first = random.Random(seed).randrange(490)
        found = read_batches(source, index, first, first + 9)
        tagged = find_tags(source, index, Match(f"t{seed % 7}"))
        return bytes_of(found) == expected[first : first + 10] and list(tagged.seqs) == list(
            range(seed % 7, 500, 7)
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(look, range(400)))


# Copies.


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_is_the_same_byte_for_byte(place: tuple[DiskLike, str], shape: str) -> None:
    disk, directory = place
    index, elsewhere = written(FaultDisk("/data"), SHAPES[shape])
    pauses: list[int] = []
    assert copy_segment(disk, directory, elsewhere, pause=pauses.append) == index
    source = FileSource(disk, f"{directory}/{index.name}")
    assert source.read(0, index.file_bytes + 1) == elsewhere.read(0, index.file_bytes)
    assert sum(pauses) == index.file_bytes and max(pauses) <= max(small_steps.STEP_BYTES, 52 * len(index))
    assert copy_segment(disk, directory, elsewhere) == index, "it may be copied again"


def test_a_copy_is_read_in_large_steps_and_written_in_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_steps, "STEP_BYTES", 1000)
    index, elsewhere = written(
        FaultDisk("/data"), [a_batch(at, 10, tags=["t"] * 10) for at in range(0, 500, 10)]
    )
    source = Recorded(elsewhere)
    pauses: list[int] = []
    copy_segment(FaultDisk("/data"), DIRECTORY, source, pause=pauses.append)
    assert len(source.reads) == 6, "header, footer, batch index; batches, tag directory, tag blocks"
    assert len(pauses) > 30 and sum(pauses) == index.file_bytes


def test_nothing_damaged_is_ever_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tag_writer, "TAG_BLOCK_BYTES", 60)
    there, here = FaultDisk("/data"), FaultDisk("/data")
    index, source = written(there, a_mixed_lot())
    for at in range(index.file_bytes):
        there.flip(source.name, at, 1 << at % 8)
        with pytest.raises(Corrupt) as caught:
            copy_segment(here, DIRECTORY, source)
        assert caught.value.path == source.name
        there.flip(source.name, at, 1 << at % 8)
        assert list_segments(here, DIRECTORY) == []
    assert copy_segment(here, DIRECTORY, source) == index
    assert remove_leftovers(here, DIRECTORY) == []


def test_a_copy_that_cannot_replace_a_segment_leaves_it() -> None:
    disk = FaultDisk("/data")
    index, source = written(disk, a_mixed_lot())
    before = disk.operations
    copy_segment(disk, DIRECTORY, source)
    for at in range(disk.operations - before):
        disk.fail_at(disk.operations + at, OSError(errno.EIO, "no"))
        with pytest.raises(OSError):
            copy_segment(disk, DIRECTORY, source)
        assert list_segments(disk, DIRECTORY) == [index.name] and list(verify_segment(source)) == []
        assert remove_leftovers(disk, DIRECTORY) == []


# Damage.


def test_every_flipped_bit_is_found_and_nothing_wrong_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tag_writer, "TAG_BLOCK_BYTES", 30)
    disk = FaultDisk("/data")
    batches = a_mixed_lot()
    index, source = written(disk, batches)
    assert index.directory.blocks > 2
    matches = [Match(tag) for tag in ("a", "ab", "ü/日本", "all", "\U0001f40d", "c")]
    matches += [Match(prefix, is_prefix=True) for prefix in ("", "a", "z")]
    expected = {match: (seqs_naively(batches, match), sizes_naively(batches, match)) for match in matches}
    every_tag = list(walk_tags(source, index))

    def damages_met_by_readers() -> int:
        damages = 0
        try:
            assert open_segment(source) == index
        except Corrupt as damage:
            assert damage.path == source.name and 0 <= damage.offset < index.file_bytes
            damages += 1
        for at, batch in enumerate(batches):
            try:
                assert bytes_of(read_batches(source, index, at, at)) == bytes_of([batch])
            except Corrupt as damage:
                assert (damage.path, damage.offset) == (source.name, index.offsets[at])
                damages += 1
        for match in matches:
            try:
                found = find_tags(source, index, match)
                assert (list(found.seqs), list(found.sizes)) == expected[match]
            except Corrupt:
                damages += 1
        walked = []
        try:
            for each in walk_tags(source, index):
                walked.append(each)
        except Corrupt:
            damages += 1
        assert walked == every_tag[: len(walked)]
        return damages

    assert damages_met_by_readers() == 0
    # Each byte has its turn by default, with one of its bits; on request all bits have.
    for turn in sweep(range(8), seed=3, sample=1):
        for at in range(index.file_bytes):
            bits = 1 << (at + turn) % 8
            disk.flip(source.name, at, bits)
            assert damages_met_by_readers() > 0, (at, bits)
            problems = list(verify_segment(source))
            assert problems and all(problem.path == source.name for problem in problems), (at, bits)
            disk.flip(source.name, at, bits)
    assert list(verify_segment(source)) == []


def test_a_damaged_batch_does_not_hide_the_next_one_from_verify() -> None:
    disk = FaultDisk("/data")
    index, source = written(disk, many(10))
    for at in (2, 3, 7):
        disk.flip(source.name, index.offsets[at] + 60)
    assert [problem.offset for problem in verify_segment(source)] == [index.offsets[at] for at in (2, 3, 7)]
    assert len(read_batches(source, index, 4, 6)) == 3


def test_a_segment_cut_anywhere_is_damaged() -> None:
    disk = FaultDisk("/data")
    index, source = written(disk, a_mixed_lot())
    handle = disk.open(source.name, writable=True)
    for size in reversed(range(index.file_bytes)):
        disk.truncate(handle, size)
        with pytest.raises(Corrupt):
            open_segment(source)
    with pytest.raises(Corrupt) as caught:
        read_batches(source, index, 0, 0)
    assert caught.value.offset == 0 or "missing" in caught.value.reason


def test_a_segment_with_bytes_behind_its_end_is_damaged() -> None:
    disk = FaultDisk("/data")
    index, source = written(disk, a_mixed_lot())
    whole = disk.peek(source.name)
    for more in (b"\0", b"\0" * 8, whole[-FOOTER_BYTES:]):
        disk.pwritev(disk.open(source.name, writable=True), [more], index.file_bytes)
        with pytest.raises(Corrupt):
            open_segment(source)


@pytest.mark.parametrize(
    "name",
    [
        "7/00000000000000000005-000000000013.seg",
        "7/00000000000000000006-000000000012.seg",
        "8/00000000000000000005-000000000012.seg",
        "7/5-12.seg",
    ],
)
def test_a_segment_under_another_name_is_damaged(name: str) -> None:
    disk = FaultDisk("/data")
    content = disk.peek(written(disk, a_mixed_lot())[1].name)
    disk.mkdir(f"{DIRECTORY}/8")
    disk.pwritev(disk.create(f"{DIRECTORY}/{name}"), [content], 0)
    with pytest.raises(Corrupt) as caught:
        open_segment(FileSource(disk, f"{DIRECTORY}/{name}"))
    assert caught.value.path.endswith(name) and caught.value.offset == 0
    assert "`streams verify`" in str(caught.value)


def test_a_segment_of_a_later_format_is_refused_by_its_number() -> None:
    disk = FaultDisk("/data")
    _, source = written(disk, a_mixed_lot())
    head = bytearray(disk.peek(source.name)[:56])
    head[8] = 3
    forge(disk, source, 0, bytes(head) + struct.pack("<Q", xxh3_64_intdigest(bytes(head), 7)))
    with pytest.raises(Corrupt, match="of format 3, this server reads 2 and older"):
        open_segment(source)


def forge(disk: FaultDisk, source: FileSource, offset: int, content: bytes) -> None:
    """Put bytes into a segment and make the checksums of its batch index and footer good again."""
    handle = disk.open(source.name, writable=True)
    disk.pwritev(handle, [content], offset)
    data = bytearray(disk.peek(source.name))
    footer = len(data) - FOOTER_BYTES
    (batches,) = struct.unpack_from("<I", data, footer + 12)
    (index_offset,) = struct.unpack_from("<Q", data, footer + 40)
    index = bytes(data[index_offset : index_offset + 52 * batches])
    struct.pack_into("<Q", data, footer + 48, xxh3_64_intdigest(index, 7))
    struct.pack_into("<Q", data, footer + 120, xxh3_64_intdigest(bytes(data[footer:-8]), 7))
    disk.pwritev(handle, [data], 0)
    disk.fsync(handle)


@pytest.mark.parametrize("column", range(8))
def test_verify_and_copy_find_an_index_that_says_another_thing_than_the_batches(column: int) -> None:
    """With checksums that match: not a worn disk but a mistake of ours."""
    disk = FaultDisk("/data")
    index, source = written(disk, many(5, records=3))
    widths = (8, 8, 8, 8, 8, 4, 4, 4)
    at = index.batches_end + 5 * sum(widths[:column]) + 2 * widths[column]
    forge(disk, source, at, bytes([disk.peek(source.name)[at] ^ 1]))
    assert list(verify_segment(source))
    if column in (1, 2, 3):  # places, checksums and order; the rest says nothing to one who only copies
        with pytest.raises(Corrupt):
            copy_segment(FaultDisk("/data"), DIRECTORY, source)


# Failing disks, and the directory.


@pytest.mark.parametrize("operation", ["open", "pread"])
def test_a_disk_that_cannot_read_is_told_as_it_is(operation: str) -> None:
    disk = FaultDisk("/data")
    index, source = written(disk, a_mixed_lot())
    for attempt in (
        lambda: open_segment(source),
        lambda: read_batches(source, index, 0, 2),
        lambda: find_tags(source, index, Match("a")),
        lambda: list(walk_tags(source, index)),
        lambda: copy_segment(disk, DIRECTORY, source),
        lambda: list(verify_segment(source)),
    ):
        error = OSError(errno.EIO, "cannot")
        disk.fail_next(operation, error)
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value is error
        attempt()


def test_segments_are_listed_by_generation_and_seq_and_foreign_names_are_passed_over(
    place: tuple[DiskLike, str],
) -> None:
    disk, directory = place
    assert list_segments(disk, directory) == [] == remove_leftovers(disk, directory)
    names = []
    for generation in (9, 10):
        for serial, first_seq in ((3, 1), (2, 50)):
            batches = [a_batch(first_seq)]
            index = write_segment(disk, directory, generation=generation, serial=serial, batches=batches)
            names.append(index.name)
    disk.mkdir(f"{directory}/lost+found")
    for name in ("notes.txt", "1-2.seg", "00000000000000000001-000000000003.seg.bak"):
        disk.close(disk.create(f"{directory}/9/{name}"))
    disk.close(disk.create(f"{directory}/9/00000000000000000009-000000000009.tmp"))
    assert list_segments(disk, directory) == names
    assert remove_leftovers(disk, directory) == ["9/00000000000000000009-000000000009.tmp"]
    assert remove_leftovers(disk, directory) == []
    assert list_segments(disk, directory) == names


def test_a_removed_segment_stays_away_and_may_be_removed_again(place: tuple[DiskLike, str]) -> None:
    disk, directory = place
    index, _ = written(disk, [a_batch(1)], directory=directory)
    remove_segment(disk, directory, index.name)
    remove_segment(disk, directory, index.name)
    remove_segment(disk, directory, "99/00000000000000000001-000000000003.seg")
    if isinstance(disk, FaultDisk):
        disk = disk.crash(random.Random(1))
    assert list_segments(disk, directory) == []


# The format.


def test_the_golden_segment_of_format_one_is_read() -> None:
    (name,) = list_segments(Disk(), f"{GOLDEN}/segments-v1")
    source = FileSource(Disk(), f"{GOLDEN}/segments-v1/{name}")
    batches = a_mixed_lot()
    index = open_segment(source)
    assert list(verify_segment(source)) == []
    assert index.version == 1
    assert bytes_of(all_batches(source, index)) == bytes_of(batches)
    for match in (Match("a"), Match("all"), Match("a", is_prefix=True), Match("ü", is_prefix=True)):
        found = find_tags(source, index, match)
        assert list(found.seqs) == seqs_naively(batches, match)
        assert list(found.sizes) == sizes_naively(batches, match)


def test_the_golden_segment_of_format_one_is_copied_and_gets_a_stub_byte_for_byte() -> None:
    (name,) = list_segments(Disk(), f"{GOLDEN}/segments-v1")
    golden = (GOLDEN / "segments-v1" / name).read_bytes()
    disk = FaultDisk("/data")
    index = copy_segment(disk, DIRECTORY, FileSource(Disk(), f"{GOLDEN}/segments-v1/{name}"))
    assert disk.peek(f"{DIRECTORY}/{index.name}") == golden
    write_stub(disk, DIRECTORY, index)
    assert open_stub(FileSource(disk, f"{DIRECTORY}/{index.stub_name}")) == index


def test_the_golden_segment_of_format_two_is_read_and_written() -> None:
    (name,) = list_segments(Disk(), f"{GOLDEN}/segments-v2")
    source = FileSource(Disk(), f"{GOLDEN}/segments-v2/{name}")
    batches = a_mixed_lot()
    index = open_segment(source)
    assert segments.FORMAT_VERSION == index.version == 2
    assert list(verify_segment(source)) == []
    assert index == build_index(generation=7, serial=12, batches=batches)
    disk = FaultDisk("/data")
    assert disk.peek(written(disk, batches)[1].name) == (GOLDEN / "segments-v2" / name).read_bytes()
    for match in (Match("a"), Match("all"), Match("a", is_prefix=True), Match("ü", is_prefix=True)):
        found = find_tags(source, index, match)
        assert list(found.seqs) == seqs_naively(batches, match)
        assert list(found.sizes) == sizes_naively(batches, match)


# Reads of a reader that catches up.


class AheadDisk(FaultDisk):
    """A disk that takes down what it was asked to load ahead, as (offset, length)."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.ahead: list[tuple[int, int]] = []

    def read_ahead(self, handle: int, length: int, offset: int) -> None:
        self.ahead.append((offset, length))


def test_the_first_read_of_a_segment_opens_it_twice_and_the_next_ones_once() -> None:
    disk = AheadDisk("/data")
    store = SegmentStore(disk, DIRECTORY)
    name = Name.of(store.write(7, 12, many(50)))
    for opens in (2, 1, 1):
        before = disk.history.count("open")
        store.read(name, 3, bytes_max=1)
        assert disk.history.count("open") - before == opens
    assert disk.ahead == []


def test_a_large_read_begins_to_load_as_much_behind_it() -> None:
    disk = AheadDisk("/data")
    store = SegmentStore(disk, DIRECTORY)
    name = Name.of(store.write(7, 12, [a_batch(at, data=b"1" * 100_000) for at in range(20)]))
    batches = store.read(name, 0, bytes_max=1 << 20)
    index = store.index_of(name)
    length = index.offsets[len(batches)] - index.offsets[0]
    assert disk.ahead == [(index.offsets[len(batches)], length)]
