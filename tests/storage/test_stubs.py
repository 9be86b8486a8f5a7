"""Goal: a stub says of its segment all that the segment says of itself, or that it is damaged.

Method: stubs of segments of many shapes on the real disk and on the fault disk; every byte of one flipped, it
is cut, renamed and forged; the disk stops or fails at every operation of writing one; a golden file.
"""

from __future__ import annotations

import errno
import random
import struct
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from shard.storage.cold import ColdSource, FolderCold, measure
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.segments import (
    FileSource,
    SegmentIndex,
    build_index,
    find_tags,
    list_segments,
    list_stubs,
    open_segment,
    open_stub,
    remove_leftovers,
    remove_segment,
    verify_segment,
    verify_stub,
    write_stub,
)
from streams.protocol.messages.commands import Match
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk
from tests.support.segments import (
    DIRECTORY,
    FOOTER_BYTES,
    GOLDEN,
    a_batch,
    a_mixed_lot,
    all_batches,
    bytes_of,
    many,
    written,
)

INDEX = build_index(generation=7, serial=12, batches=a_mixed_lot())


def stubbed(disk: DiskLike, index: SegmentIndex = INDEX, *, directory: str = DIRECTORY) -> FileSource:
    write_stub(disk, directory, index)
    return FileSource(disk, f"{directory}/{index.stub_name}")


@pytest.fixture(params=["real", "fault"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DiskLike, str]:
    return (Disk(), f"{tmp_path}/segments") if request.param == "real" else (FaultDisk("/data"), DIRECTORY)


@pytest.mark.parametrize(
    "batches",
    [[a_batch(1)], a_mixed_lot(), many(10_000), [a_batch(0), a_batch(2**64 - 1, tags=["end"])]],
    ids=["one record", "much variety", "ten thousand batches", "the last seq there is"],
)
def test_the_index_of_a_stub_is_that_of_its_segment(
    place: tuple[DiskLike, str], batches: list[object]
) -> None:
    disk, directory = place
    index, segment = written(disk, batches, directory=directory)  # type: ignore[arg-type]
    stub = stubbed(disk, index, directory=directory)
    assert open_stub(stub) == index == open_segment(segment)
    assert list(verify_stub(stub)) == []
    assert stub.size() == 64 + 52 * len(index) + FOOTER_BYTES
    assert stub.read(64 + 52 * len(index), FOOTER_BYTES) == segment.read(
        index.file_bytes - FOOTER_BYTES, FOOTER_BYTES
    )


def test_a_stub_is_enough_to_read_a_segment_that_is_elsewhere(tmp_path: Path) -> None:
    disk = Disk()
    index, local = written(disk, a_mixed_lot(), directory=f"{tmp_path}/segments")
    disk.mkdir(f"{tmp_path}/cold")
    store = FolderCold(f"{tmp_path}/cold", disk)
    store.put(f"segments/{index.name}", local.name, **measure(disk, local.name)._asdict())
    stub = stubbed(disk, index, directory=f"{tmp_path}/segments")
    remove_segment(disk, f"{tmp_path}/segments", index.name)
    assert list_segments(disk, f"{tmp_path}/segments") == []

    known = open_stub(stub)
    source = ColdSource(store, f"segments/{known.name}", known.file_bytes)
    assert bytes_of(all_batches(source, known)) == bytes_of(a_mixed_lot())
    assert list(find_tags(source, known, Match("a")).seqs) == [6, 9]
    assert list(verify_segment(source)) == []


def test_stubs_and_segments_are_listed_apart_and_removed_by_name(place: tuple[DiskLike, str]) -> None:
    disk, directory = place
    assert list_stubs(disk, directory) == []
    index, _ = written(disk, a_mixed_lot(), directory=directory)
    others = [
        build_index(generation=generation, serial=serial, batches=[a_batch(first_seq)])
        for generation, serial, first_seq in ((10, 1, 1), (9, 2, 50), (9, 3, 1))
    ]
    for each in (*others, index):
        write_stub(disk, directory, each)
    names = [each.stub_name for each in (index, others[2], others[1], others[0])]
    assert names[0] == "7/00000000000000000005-000000000012.stub"
    for foreign in ("1-2.stub", f"{names[0][2:]}.bak"):
        disk.close(disk.create(f"{directory}/7/{foreign}"))
    disk.close(disk.create(f"{directory}/{names[0]}.tmp"))
    assert list_stubs(disk, directory) == names
    assert list_segments(disk, directory) == [index.name]
    assert remove_leftovers(disk, directory) == [f"{names[0]}.tmp"]
    remove_segment(disk, directory, names[0])
    remove_segment(disk, directory, names[0])
    if isinstance(disk, FaultDisk):
        disk = disk.crash(random.Random(1))
    assert list_stubs(disk, directory) == names[1:]
    assert list_segments(disk, directory) == [index.name]


# Damage.


def test_every_flipped_bit_of_a_stub_is_found() -> None:
    disk = FaultDisk("/data")
    stub = stubbed(disk)
    for at in range(stub.size()):
        for bit in range(8):
            disk.flip(stub.name, at, 1 << bit)
            with pytest.raises(Corrupt) as caught:
                open_stub(stub)
            assert caught.value.path == stub.name and 0 <= caught.value.offset < stub.size()
            assert len(list(verify_stub(stub))) == 1
            disk.flip(stub.name, at, 1 << bit)
    assert open_stub(stub) == INDEX


def test_a_stub_that_was_cut_or_has_grown_is_damaged() -> None:
    disk = FaultDisk("/data")
    stub = stubbed(disk)
    whole = disk.peek(stub.name)
    handle = disk.open(stub.name, writable=True)
    for content in (
        *(whole[:size] for size in range(len(whole))),
        whole + bytes(8),
        whole + whole[-FOOTER_BYTES:],
    ):
        disk.truncate(handle, 0)
        disk.pwritev(handle, [content], 0)
        with pytest.raises(Corrupt):
            open_stub(stub)


def test_neither_is_taken_for_the_other_nor_for_one_of_another_name() -> None:
    disk = FaultDisk("/data")
    _, segment = written(disk, a_mixed_lot())
    stub = stubbed(disk)
    contents = {source: disk.peek(source.name) for source in (segment, stub)}
    another = INDEX.stub_name.replace("12.stub", "13.stub")
    for name, content, read in (
        (INDEX.name, contents[stub], open_segment),
        (INDEX.stub_name, contents[segment], open_stub),
        (another, contents[stub], open_stub),
    ):
        handle = disk.create(f"{DIRECTORY}/{name}")
        disk.pwritev(handle, [content], 0)
        with pytest.raises(Corrupt, match=r"the header (belongs|does not belong) to") as caught:
            read(FileSource(disk, f"{DIRECTORY}/{name}"))
        assert caught.value.offset == 0
    with pytest.raises(Corrupt, match="this is not the name of a stub"):
        open_stub(segment)
    with pytest.raises(Corrupt, match="this is not the name of a segment"):
        open_segment(stub)


def test_verify_finds_a_stub_whose_batches_are_out_of_order() -> None:
    """With checksums that match: not a worn disk but a mistake of ours."""
    disk = FaultDisk("/data")
    stub = stubbed(disk)
    content = bytearray(disk.peek(stub.name))
    # The third batch, by its first seq, would come before the second.
    struct.pack_into("<Q", content, 64 + 2 * 8, 5)
    footer = len(content) - FOOTER_BYTES
    struct.pack_into("<Q", content, footer + 48, xxh3_64_intdigest(bytes(content[64:footer]), 7))
    struct.pack_into("<Q", content, footer + 120, xxh3_64_intdigest(bytes(content[footer:-8]), 7))
    disk.pwritev(disk.open(stub.name, writable=True), [content], 0)
    assert "not in order" in next(verify_stub(stub)).reason


# Crashes and failures.


def operations_of_a_stub(disk: FaultDisk) -> range:
    before = disk.operations
    stubbed(disk)
    return range(before, disk.operations)


def test_a_crash_at_any_operation_leaves_a_whole_stub_or_none() -> None:
    met = set()
    for at in operations_of_a_stub(FaultDisk("/data")):
        for moment in MOMENTS:
            for seed in range(6):
                disk = FaultDisk("/data")
                disk.crash_at(at, moment)
                with pytest.raises(Crashed):
                    stubbed(disk)
                after = disk.kill() if seed == 0 else disk.crash(random.Random(seed))
                found = list_stubs(after, DIRECTORY)
                met.add(len(found))
                for name in found:
                    assert open_stub(FileSource(after, f"{DIRECTORY}/{name}")) == INDEX
                remove_leftovers(after, DIRECTORY)
                again = stubbed(after)
                after = after.crash(random.Random(seed))
                assert open_stub(FileSource(after, again.name)) == INDEX
                assert remove_leftovers(after, DIRECTORY) == []
    assert met == {0, 1}, "the sweep has seen both endings"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_failure_at_any_operation_leaves_no_stub_or_the_one_that_was_there(is_there: bool) -> None:
    probe = FaultDisk("/data")
    if is_there:
        stubbed(probe)
    for at in operations_of_a_stub(probe):
        disk = FaultDisk("/data")
        if is_there:
            stubbed(disk)
        error = OSError(errno.ENOSPC, "full")
        disk.fail_at(at, error)
        with pytest.raises(OSError) as caught:
            stubbed(disk)
        assert caught.value is error
        assert list_stubs(disk, DIRECTORY) == [INDEX.stub_name] * is_there
        assert remove_leftovers(disk, DIRECTORY) == []
        if is_there:
            after = disk.crash(random.Random(at))
            assert open_stub(FileSource(after, f"{DIRECTORY}/{INDEX.stub_name}")) == INDEX


# The format.


def test_the_golden_stub_of_format_one_is_read_and_still_written_from_a_segment_of_format_one() -> None:
    folder = f"{GOLDEN}/segments-v1"
    (name,) = list_stubs(Disk(), folder)
    (segment,) = list_segments(Disk(), folder)
    index = open_segment(FileSource(Disk(), f"{folder}/{segment}"))
    source = FileSource(Disk(), f"{folder}/{name}")
    assert open_stub(source) == index and list(verify_stub(source)) == []
    disk = FaultDisk("/data")
    assert disk.peek(stubbed(disk, index).name) == (GOLDEN / "segments-v1" / name).read_bytes()


def test_the_golden_stub_of_format_two_is_read_and_written() -> None:
    (name,) = list_stubs(Disk(), f"{GOLDEN}/segments-v2")
    assert name == INDEX.stub_name
    source = FileSource(Disk(), f"{GOLDEN}/segments-v2/{name}")
    assert open_stub(source) == INDEX and list(verify_stub(source)) == []
    disk = FaultDisk("/data")
    assert disk.peek(stubbed(disk).name) == (GOLDEN / "segments-v2" / name).read_bytes()
