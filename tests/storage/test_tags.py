"""Goal: a tag finds its records and their sizes, all of them and no other, at the price of a few reads.

Method: segments of many shapes, compared with naive searches through their batches; reads are counted, bytes
weighed; mistakes are made on purpose in what is written, for verify to find. That every flipped bit is found
is in `test_segments`, and format 1 in `test_sorted_tags`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard.storage.files import Corrupt
from shard.storage.segments import (
    SegmentIndex,
    TagDirectory,
    build_index,
    copy_segment,
    find_tags,
    tag_columns,
    tag_records,
    tag_writer,
    verify_segment,
    walk_tags,
)
from shard.storage.segments.tag_writer import TagIndexBuilder
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch
from tests.support.faultdisk import FaultDisk
from tests.support.segments import (
    DIRECTORY,
    FOOTER_BYTES,
    Recorded,
    a_batch,
    a_mixed_lot,
    many,
    seqs_naively,
    sizes_naively,
    written,
)
from tests.support.tagged_segments import NOTHING, TAGS, check_found, distinctly_tagged, tagged_lots


@settings(max_examples=500 if os.environ.get("STREAMS_SWEEP") == "full" else 60, deadline=None)
@given(
    batches=tagged_lots(),
    texts=st.lists(TAGS, max_size=5),
    block_bytes=st.sampled_from([1, 60, 64 << 10]),
    hashed_max=st.sampled_from([2, 8192]),
    dense=st.sampled_from([0, 8, 1000]),
    hash_bits=st.sampled_from([0, 2, 32]),
)
def test_tags_are_found_as_a_naive_search_finds_them(
    batches: list[Batch],
    texts: list[str | None],
    block_bytes: int,
    hashed_max: int,
    dense: int,
    hash_bits: int,
) -> None:
    def poor_hash(name: bytes) -> int:
        return sum(name) % (1 << hash_bits) * 0x01010101 % (1 << 32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tag_writer, "TAG_BLOCK_BYTES", block_bytes)
        patch.setattr(tag_writer, "_HASHED_MAX", hashed_max)
        patch.setattr(tag_records, "_DENSE", dense)
        if hash_bits < 32:  # hashes that collide, and that occur where one ends and the next begins
            patch.setattr(tag_writer, "xxh32_intdigest", poor_hash)
            patch.setattr(tag_columns, "xxh32_intdigest", poor_hash)
        index, source = written(FaultDisk("/data"), batches)
        known = {tag for batch in batches for tag in batch.tag_list() or ()}
        prefixes = {tag[:length] for tag in known for length in range(len(tag) + 1)}
        for text in {*known, *prefixes, *(text or "" for text in texts)}:
            for match in (Match(text), Match(text, is_prefix=True)):
                check_found(source, index, match, batches)
        walked = list(walk_tags(source, index))
        assert list(verify_segment(source)) == []
    assert {tag for tag, _, _ in walked} == known - {""} and len(walked) == len(known - {""})
    for tag, seqs, sizes in walked:
        assert list(seqs) == seqs_naively(batches, Match(tag))
        assert list(sizes) == sizes_naively(batches, Match(tag))


def test_a_text_that_is_not_unicode_has_no_records() -> None:
    index, source = written(FaultDisk("/data"), a_mixed_lot())
    for is_prefix in (False, True):
        assert find_tags(source, index, Match("\ud800", is_prefix=is_prefix)) == NOTHING


def test_a_text_with_a_nul_has_no_records() -> None:
    index, source = written(FaultDisk("/data"), [a_batch(1, 3, tags=["a", "b", None])])
    for text in ("a\0b", "b\0", "\0b", "\0"):
        for is_prefix in (False, True):
            assert find_tags(source, index, Match(text, is_prefix=is_prefix)) == NOTHING


def test_no_tags_cost_no_read() -> None:
    index, file = written(FaultDisk("/data"), many(10))
    source = Recorded(file)
    assert find_tags(source, index, Match("a")) == NOTHING
    assert find_tags(source, index, Match("", is_prefix=True)) == NOTHING
    assert list(walk_tags(source, index)) == []
    assert source.reads == []


def tags_bytes(index: SegmentIndex) -> int:
    return index.file_bytes - FOOTER_BYTES - index.batches_end - 52 * len(index)


def test_ten_thousand_tags_of_one_record_each_cost_little() -> None:
    tagged = build_index(generation=7, serial=12, batches=distinctly_tagged(10_000))
    assert tagged.directory.tags == 10_000
    assert tags_bytes(tagged) / 10_000 <= 10 + len("user/000000")


def test_a_tag_that_every_record_has_costs_its_bytes_and_next_to_nothing_in_the_filter() -> None:
    batches = [a_batch(at, 100, tags=["all"] * 100) for at in range(0, 100_000, 100)]
    index, source = written(FaultDisk("/data"), batches)
    assert tags_bytes(index) < 100_000 * (4 + len("all") + 1) + 17 * len(batches)
    assert index.directory.tags == index.directory.blocks
    check_found(source, index, Match("all"), batches)


def test_an_exact_tag_reads_the_filter_and_one_block_and_a_prefix_blocks_whose_range_has_it() -> None:
    shuffled = distinctly_tagged(20_000)
    tags = [f"user/{at:06d}" for at in range(20_000)]
    rising = [a_batch(at, 100, tags=tags[at : at + 100]) for at in range(0, 20_000, 100)]
    for batches, match, block_reads in (
        (shuffled, Match("user/004711"), 1),
        (shuffled, Match("nobody"), 0),
        (shuffled, Match("zzz", is_prefix=True), 0),
        (rising, Match("user/0047", is_prefix=True), 1),
        (rising, Match("user/00471", is_prefix=True), 1),
    ):
        index, file = written(FaultDisk("/data"), batches)
        source = Recorded(file)
        check_found(source, index, match, batches)
        (directory, *blocks) = source.reads
        assert directory == (index.directory.offset, index.directory.length)
        assert len(blocks) == block_reads and all(length < 130_000 for _, length in blocks)
        assert all(offset >= index.batches_end + 52 * len(index) for offset, _ in blocks)


def test_a_walk_reads_the_directory_and_then_many_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = distinctly_tagged(20_000)
    index, file = written(FaultDisk("/data"), batches)
    monkeypatch.setattr("shard.storage.sources.READ_BYTES", 200_000)
    source = Recorded(file)
    assert len(list(walk_tags(source, index))) == 20_000
    assert len(source.reads) == 3 and max(length for _, length in source.reads) <= 200_000


# Mistakes of ours, with good checksums.

Parts = Generator[bytes, None, TagDirectory]


def _with_a_gap(encode: Callable[..., Parts]) -> Callable[..., Parts]:
    def with_a_gap(self: TagIndexBuilder, offset: int, generation: int) -> Parts:
        yield bytes(8)
        return (yield from encode(self, offset + 8, generation))

    return with_a_gap


def _without(attribute: str) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """An encoder that changes the last number of a column of the filter."""

    def wrap(encode: Callable[..., Parts]) -> Callable[..., Parts]:
        def encode_wrongly(self: TagIndexBuilder, offset: int, generation: int) -> Parts:
            if self._positions:
                self._end_block()
            getattr(self, attribute)[-1] ^= 1
            return (yield from encode(self, offset, generation))

        return encode_wrongly

    return wrap


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (_with_a_gap, "next tag block is not here"),
        (_without("_hashes"), "other hashes than its tags"),
        (_without("_least_ends"), "another range than its tags"),
    ],
)
def test_verify_finds_a_tag_index_out_of_place_and_a_wrong_filter(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Callable[..., Parts]], reason: str
) -> None:
    with monkeypatch.context() as context:
        context.setattr(tag_writer, "TAG_BLOCK_BYTES", 60)
        context.setattr(TagIndexBuilder, "encode", mistake(TagIndexBuilder.encode))
        _, source = written(FaultDisk("/data"), a_mixed_lot())
    assert reason in " ".join(problem.reason for problem in verify_segment(source))
    if mistake is _with_a_gap:
        with pytest.raises(Corrupt, match=reason):
            copy_segment(FaultDisk("/data"), DIRECTORY, source)


@pytest.mark.parametrize("column", ["_positions", "_strides", "_tags", None])
def test_verify_finds_tags_that_are_not_those_of_the_batches(column: str | None) -> None:
    add = TagIndexBuilder.add

    def add_wrongly(self: TagIndexBuilder, at: int, batch: Batch) -> None:
        if column is None and batch.first_seq == 6:
            return  # forgotten
        add(self, at, batch)
        if batch.first_seq == 8 and column == "_tags":
            self._tags[-1] = b"ac" + self._tags[-1][2:]
        elif batch.first_seq == 2**40 and column is not None and column != "_tags":
            getattr(self, column)[-1] += 1

    with patch.object(TagIndexBuilder, "add", add_wrongly):
        batches = [*a_mixed_lot(), a_batch(2**41, ts=3000)]
        _, source = written(FaultDisk("/data"), batches)
    reasons = [problem.reason for problem in verify_segment(source)]
    assert reasons and "are not those of the batches" in reasons[-1]
