"""Goal: what was sealed is read back as it was, found by seq, time and tag, and nothing else is ever served.

Method: segments of many shapes on the real disk and on the fault disk, compared with the batches they were
made of and with naive searches; every byte of one flipped; forged ones with good checksums; a golden file.
"""

from __future__ import annotations

import errno
import os
import random
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from pyroaring import BitMap64
from xxhash import xxh3_64_intdigest

from shard.storage import segments
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.segments import (
    FileSource,
    SegmentIndex,
    Source,
    find_tags,
    layout,
    list_segments,
    open_segment,
    read_batches,
    remove_leftovers,
    remove_segment,
    verify_segment,
    write_segment,
)
from streams.protocol.appends import RecordLimits, parse_append
from streams.protocol.commands import Match
from streams.protocol.records import Batch, render
from tests.support.faultdisk import FaultDisk, sweep

DIRECTORY = "/data/segments"
GOLDEN = Path(__file__).parent / "golden"
FOOTER_BYTES = 128


# What the tests are written in.


def a_batch(
    first_seq: int,
    count: int = 1,
    *,
    ts: int | list[int] = 1_700_000_000_000,
    tags: Sequence[str | None] | None = None,
    nodes: Sequence[str | None] | None = None,
    metas: Sequence[bytes | None] | None = None,
    data: bytes = b'{"a":1}',
) -> Batch:
    """A batch as if a client had written it."""
    fields: dict[str, Sequence[object] | None] = {"data": [Raw(data)] * count, "tag": tags, "node": nodes}
    fields["meta"] = [Raw(meta) if meta else None for meta in metas] if metas else None
    used = {name: column for name, column in fields.items() if column}
    records = [dict(zip(used, values, strict=True)) for values in zip(*used.values(), strict=True)]
    columns = parse_append(msgspec.json.encode({"records": records}), RecordLimits()).columns
    return render(columns, first_seq=first_seq, times=array("q", ts) if isinstance(ts, list) else ts)


def a_mixed_lot() -> list[Batch]:
    """Few bytes, much variety: holes, own times, nodes, metas, tags that nobody, some and all have."""
    return [
        a_batch(5, ts=1000),
        a_batch(6, 2, ts=1000, tags=["a", None], nodes=["n", "m"]),
        a_batch(8, 3, ts=[1000, 1001, 1007], tags=["ab", "a", "ü/日本"], metas=[b'{"k":1}', None, None]),
        a_batch(900, 12, ts=1007, tags=["all"] * 12, nodes=["n"] * 12, data=b"[1,2]"),
        a_batch(2**40, 2, ts=2000, tags=["", "\U0001f40d"]),
    ]


def many(count: int, *, records: int = 1) -> list[Batch]:
    return [a_batch(1 + at * records + at // 2, records, ts=10 * at) for at in range(count)]


def written(
    disk: DiskLike, batches: Iterable[Batch], *, directory: str = DIRECTORY, generation: int = 7
) -> tuple[SegmentIndex, FileSource]:
    index = write_segment(disk, directory, generation=generation, serial=12, batches=batches)
    return index, FileSource(disk, f"{directory}/{index.name}")


def bytes_of(batches: Iterable[Batch]) -> list[bytes]:
    return [b"".join(batch.to_parts()) for batch in batches]


def all_batches(source: Source, index: SegmentIndex) -> list[Batch]:
    found: list[Batch] = []
    while len(found) < len(index):
        found += read_batches(source, index, len(found), len(index) - 1)
    return found


def seqs_naively(batches: Iterable[Batch], match: Match) -> list[int]:
    return [
        seq
        for batch in batches
        for seq, tag in enumerate(batch.tag_list() or (), batch.first_seq)
        if match.accepts(tag)
    ]


class Recorded:
    """A source that takes down what was asked of it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = source.name
        self.reads: list[tuple[int, int]] = []

    def size(self) -> int:
        return self._source.size()

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self._source.read(offset, length)


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
    index = SegmentIndex.build(generation=7, serial=12, batches=batches)
    disk = FaultDisk("/data")
    assert written(disk, batches)[0] == index
    assert open_segment(FileSource(disk, f"{DIRECTORY}/{index.name}")) == index
    assert layout(batches) == index.offsets


def test_the_name_says_generation_first_seq_and_serial() -> None:
    assert written(FaultDisk("/data"), [a_batch(42)])[0].name == "7/00000000000000000042-000000000012.seg"


def test_batches_are_let_go_of_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the run that is being written holds a batch, so a generator need not have them all."""
    monkeypatch.setattr(segments, "STEP_BYTES", 1 << 16)
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
    assert disk.history.count("pwritev") > 10
    assert list(verify_segment(source)) == [] and len(index) == 100


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
    shown = repr(SegmentIndex.build(generation=7, serial=12, batches=a_mixed_lot()))
    assert "seqs 5..1099511627777, 20 records in 5 batches, 5 tags" in shown


# Looking up.


def test_seqs_and_holes_are_found_in_their_batch() -> None:
    batches = a_mixed_lot()
    index = SegmentIndex.build(generation=7, serial=12, batches=batches)
    for seq in (*range(1000), 2**40 - 1, 2**40, 2**40 + 1, 2**40 + 2, 2**63):
        holders = [at for at, batch in enumerate(batches) if batch.first_seq <= seq <= batch.last_seq]
        behind = [at for at, batch in enumerate(batches) if batch.last_seq >= seq]
        assert index.at(seq) == (holders[0] if holders else None)
        assert index.from_seq(seq) == (behind[0] if behind else len(batches))


def test_the_first_batch_from_a_time_on_is_found() -> None:
    batches = a_mixed_lot()
    index = SegmentIndex.build(generation=7, serial=12, batches=batches)
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
    monkeypatch.setattr(segments, "STEP_BYTES", 10_000)
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
        return bytes_of(found) == expected[first : first + 10] and list(tagged) == list(
            range(seed % 7, 500, 7)
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(look, range(400)))


# Tags.

TAGS = st.one_of(
    st.none(),
    st.sampled_from(["a", "ab", "abc", "b", "a/1", "a/10", "ü", "üb", "日本", "\U0001f40d", "\uffff"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6),
)


@st.composite
def tagged_lots(draw: st.DrawFn) -> list[Batch]:
    batches = []
    seq = draw(st.integers(0, 2**40))
    for tags in draw(st.lists(st.lists(TAGS, min_size=1, max_size=20), min_size=1, max_size=8)):
        batches.append(a_batch(seq, len(tags), tags=tags if any(tags) else None))
        seq += len(tags) + draw(st.sampled_from([0, 0, 1, 70_000, 2**33]))
    return batches


@settings(max_examples=500 if os.environ.get("STREAMS_SWEEP") == "full" else 60, deadline=None)
@given(
    batches=tagged_lots(), texts=st.lists(TAGS, max_size=5), block_bytes=st.sampled_from([1, 60, 16 << 10])
)
def test_tags_are_found_as_a_naive_search_finds_them(
    batches: list[Batch], texts: list[str | None], block_bytes: int
) -> None:
    disk = FaultDisk("/data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "TAG_BLOCK_BYTES", block_bytes)
        index, source = written(disk, batches)
    known = {tag for batch in batches for tag in batch.tag_list() or ()}
    prefixes = {tag[:length] for tag in known for length in range(len(tag) + 1)}
    for text in {*known, *prefixes, *(text or "" for text in texts)}:
        for match in (Match(text), Match(text, is_prefix=True)):
            assert list(find_tags(source, index, match)) == seqs_naively(batches, match)
    assert list(verify_segment(source)) == []


def test_a_text_that_is_not_unicode_has_no_records() -> None:
    index, source = written(FaultDisk("/data"), a_mixed_lot())
    for is_prefix in (False, True):
        assert not find_tags(source, index, Match("\ud800", is_prefix=is_prefix))


def test_no_tags_cost_no_read() -> None:
    index, file = written(FaultDisk("/data"), many(10))
    source = Recorded(file)
    assert not find_tags(source, index, Match("a")) and not find_tags(
        source, index, Match("", is_prefix=True)
    )
    assert source.reads == []


def distinctly_tagged(count: int) -> list[Batch]:
    tags = [f"user/{at:06d}" for at in range(count)]
    random.Random(2).shuffle(tags)
    return [a_batch(at, 100, tags=tags[at : at + 100]) for at in range(0, count, 100)]


def test_ten_thousand_tags_of_one_record_each_cost_little() -> None:
    tagged = SegmentIndex.build(generation=7, serial=12, batches=distinctly_tagged(10_000))
    tags_bytes = tagged.file_bytes - FOOTER_BYTES - tagged.batches_end - 52 * len(tagged)
    assert tagged.directory.tags == 10_000
    assert tags_bytes / 10_000 <= 18 + len("user/000000")


def test_a_tag_that_every_record_has_costs_next_to_nothing() -> None:
    batches = [a_batch(at, 100, tags=["all"] * 100) for at in range(0, 100_000, 100)]
    index, source = written(FaultDisk("/data"), batches)
    assert index.file_bytes - FOOTER_BYTES - index.batches_end - 52 * len(index) < 200
    assert find_tags(source, index, Match("all")) == BitMap64(range(100_000))


def test_an_exact_tag_reads_the_directory_and_one_block_and_a_prefix_only_what_it_spans() -> None:
    batches = distinctly_tagged(10_000)
    index, file = written(FaultDisk("/data"), batches)
    for match, blocks_max in (
        (Match("user/004711"), 1),
        (Match("nobody"), 1),
        (Match("zzz"), 1),
        (Match("user/0047", is_prefix=True), 2),
        (Match("user/00", is_prefix=True), 100),
    ):
        source = Recorded(file)
        assert list(find_tags(source, index, match)) == seqs_naively(batches, match)
        (directory, *blocks) = source.reads
        assert directory == (index.directory.offset, index.directory.length)
        assert len(blocks) <= 1 and all(length <= blocks_max * 17_000 for _, length in blocks)
        assert all(offset >= index.batches_end + 52 * len(index) for offset, _ in blocks)


# Damage.


def test_every_flipped_bit_is_found_and_nothing_wrong_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "TAG_BLOCK_BYTES", 60)
    disk = FaultDisk("/data")
    batches = a_mixed_lot()
    index, source = written(disk, batches)
    assert index.directory.blocks > 2
    matches = [Match(tag) for tag in ("a", "ab", "ü/日本", "all", "\U0001f40d", "c")]
    matches += [Match(prefix, is_prefix=True) for prefix in ("", "a", "z")]
    expected = {match: BitMap64(seqs_naively(batches, match)) for match in matches}

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
                assert find_tags(source, index, match) == expected[match]
            except Corrupt:
                damages += 1
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
    head[8] = 2
    forge(disk, source, 0, bytes(head) + struct.pack("<Q", xxh3_64_intdigest(bytes(head), 7)))
    with pytest.raises(Corrupt, match="of format 2, this server reads 1"):
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
def test_verify_finds_an_index_that_says_another_thing_than_the_batches(column: int) -> None:
    """With checksums that match: not a worn disk but a mistake of ours."""
    disk = FaultDisk("/data")
    index, source = written(disk, many(5, records=3))
    widths = (8, 8, 8, 8, 8, 4, 4, 4)
    at = index.batches_end + 5 * sum(widths[:column]) + 2 * widths[column]
    forge(disk, source, at, bytes([disk.peek(source.name)[at] ^ 1]))
    assert list(verify_segment(source))


@pytest.mark.parametrize("wrong", [{"a": []}, {"b": [6]}, {"a": [6, 10]}, {"all": list(range(900, 911))}])
def test_verify_finds_tags_that_are_not_those_of_the_batches(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, list[int]]
) -> None:
    right = segments._take_tags

    def take_wrongly(batch: Batch, seqs_of: dict[str, list[int]]) -> None:
        right(batch, seqs_of)
        if batch.first_seq == 2**40:
            seqs_of.update(wrong)

    disk = FaultDisk("/data")
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_take_tags", take_wrongly)
        _, source = written(disk, a_mixed_lot())
    assert list(verify_segment(source))


def test_verify_finds_a_tag_index_that_is_out_of_order_or_out_of_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks_right, tags_right = segments._encode_blocks, segments._encode_tags
    mistakes: dict[str, tuple[str, object]] = {
        "comes after": ("_encode_blocks", lambda tags: reversed(list(blocks_right(tags)))),
        "another first name": (
            "_encode_blocks",
            lambda tags: [(b"0", block) for _, block in blocks_right(tags)],
        ),
        "next tag block is not here": ("_encode_tags", lambda tags, at, seed: with_a_gap(tags, at, seed)),
    }

    def with_a_gap(tags: dict[str, list[int]], at: int, seed: int) -> object:
        blocks, directory = tags_right(tags, at + 8, seed)
        return [bytes(8), *blocks], directory

    for reason, (name, mistake) in mistakes.items():
        with monkeypatch.context() as patch:
            patch.setattr(segments, "TAG_BLOCK_BYTES", 60)
            patch.setattr(segments, name, mistake)
            _, source = written(FaultDisk("/data"), a_mixed_lot())
        assert reason in " ".join(problem.reason for problem in verify_segment(source))


# Failing disks, and the directory.


@pytest.mark.parametrize("operation", ["open", "pread"])
def test_a_disk_that_cannot_read_is_told_as_it_is(operation: str) -> None:
    disk = FaultDisk("/data")
    index, source = written(disk, a_mixed_lot())
    for attempt in (
        lambda: open_segment(source),
        lambda: read_batches(source, index, 0, 2),
        lambda: find_tags(source, index, Match("a")),
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
    assert index == SegmentIndex.build(generation=7, serial=12, batches=batches)
    assert bytes_of(all_batches(source, index)) == bytes_of(batches)
    for match in (Match("a"), Match("all"), Match("a", is_prefix=True), Match("ü", is_prefix=True)):
        assert list(find_tags(source, index, match)) == seqs_naively(batches, match)


def test_format_one_is_still_written_as_the_golden_segment_has_it() -> None:
    (name,) = list_segments(Disk(), f"{GOLDEN}/segments-v1")
    disk = FaultDisk("/data")
    assert segments.FORMAT_VERSION == 1
    assert disk.peek(written(disk, a_mixed_lot())[1].name) == (GOLDEN / "segments-v1" / name).read_bytes()
