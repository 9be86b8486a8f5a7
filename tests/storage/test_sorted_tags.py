"""Goal: segments of format 1, which nothing writes any more, give every tag its records and sizes.

Method: segments of many shapes, compared with naive searches through their batches; reads are counted, bytes
weighed; mistakes are made on purpose in what is written, for verify to find. That every flipped bit is found
is in `test_segments`.
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable, Generator, Iterator
from typing import Any

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
    small_steps,
    verify_segment,
    walk_tags,
    writer,
)
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch
from tests.support import sorted_tag_writer as tag_writer
from tests.support.faultdisk import FaultDisk
from tests.support.segments import (
    DIRECTORY,
    FOOTER_BYTES,
    Recorded,
    a_batch,
    a_mixed_lot,
    many,
    records_of,
    seqs_naively,
    sizes_naively,
    written,
)
from tests.support.sorted_tag_writer import SortedTagBuilder
from tests.support.tagged_segments import NOTHING, TAGS, check_found, distinctly_tagged, tagged_lots


@pytest.fixture(autouse=True)
def _format_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "TagIndexBuilder", SortedTagBuilder)


@settings(max_examples=500 if os.environ.get("STREAMS_SWEEP") == "full" else 60, deadline=None)
@given(
    batches=tagged_lots(),
    texts=st.lists(TAGS, max_size=5),
    block_bytes=st.sampled_from([1, 60, 16 << 10]),
    sort_max=st.sampled_from([2, 4, 2000]),
)
def test_tags_are_found_as_a_naive_search_finds_them(
    batches: list[Batch], texts: list[str | None], block_bytes: int, sort_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tag_writer, "TAG_BLOCK_BYTES", block_bytes)
        patch.setattr(small_steps, "COPY_MAX", 3)
        patch.setattr(small_steps, "SORT_MAX", sort_max)
        index, source = written(FaultDisk("/data"), batches)
        known = {tag for batch in batches for tag in batch.tag_list() or ()}
        prefixes = {tag[:length] for tag in known for length in range(len(tag) + 1)}
        for text in {*known, *prefixes, *(text or "" for text in texts)}:
            for match in (Match(text), Match(text, is_prefix=True)):
                check_found(source, index, match, batches)
        walked = list(walk_tags(source, index))
    assert [tag for tag, _, _ in walked] == sorted(known - {""})
    for tag, seqs, sizes in walked:
        assert list(seqs) == seqs_naively(batches, Match(tag))
        assert list(sizes) == sizes_naively(batches, Match(tag))
    assert list(verify_segment(source)) == []


@pytest.mark.parametrize(("data_bytes", "width"), [(1, 1), (200, 1), (300, 2), (60_000, 2), (70_000, 4)])
def test_sizes_are_as_wide_as_the_largest_of_a_block_needs(data_bytes: int, width: int) -> None:
    batches = [a_batch(at, 2, tags=["a", "b"]) for at in range(0, 200, 2)]
    batches.append(a_batch(500, tags=["b"], data=b"1" * data_bytes))
    index, source = written(FaultDisk("/data"), batches)
    plain = build_index(generation=7, serial=12, batches=batches[:-1])
    grown = tags_bytes(index) - tags_bytes(plain)
    # Two hundred sizes and one more; and the seq 500, which may cost a few bytes in its bitmap.
    assert 200 * (width - 1) <= grown <= 200 * (width - 1) + 24
    for match in (Match("a"), Match("b"), Match("", is_prefix=True)):
        check_found(source, index, match, batches)


def tags_bytes(index: SegmentIndex) -> int:
    return index.file_bytes - FOOTER_BYTES - index.batches_end - 52 * len(index)


def test_bitmaps_and_plain_seqs_stand_side_by_side_in_a_block() -> None:
    """Every order of the two kinds, found from every tag to every other."""
    rng = random.Random(5)
    for _ in range(20):
        runs = [(f"t{at:02d}", rng.choice([1, 2, 3, 200])) for at in range(12)]
        tags = [tag for tag, count in runs for _ in range(count)]
        batches = [
            a_batch(at, len(tags[at : at + 100]), tags=tags[at : at + 100]) for at in range(0, len(tags), 100)
        ]
        index, source = written(FaultDisk("/data"), batches)
        assert index.directory.blocks == 1
        for prefix in ("t", "t0", "t1", *(tag for tag, _ in runs)):
            check_found(source, index, Match(prefix, is_prefix=True), batches)
            check_found(source, index, Match(prefix), batches)
        assert list(verify_segment(source)) == []


def test_many_names_and_many_seqs_are_put_in_order_by_small_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def sorted_and_noted(items: Any) -> list[Any]:
        nonlocal largest
        result = sorted(items)
        largest = max(largest, len(result))
        return result

    monkeypatch.setattr(small_steps, "sorted", sorted_and_noted, raising=False)
    batches = distinctly_tagged(30_000)
    index, source = written(FaultDisk("/data"), batches)
    everything = find_tags(source, index, Match("user/", is_prefix=True))
    assert list(everything.seqs) == list(range(30_000))
    assert list(everything.sizes) == sizes_naively(batches, Match("user/", is_prefix=True))
    assert [tag for tag, _, _ in walk_tags(source, index)] == [f"user/{at:06d}" for at in range(30_000)]
    assert 0 < largest <= 2 * small_steps.SORT_MAX


def test_a_text_that_is_not_unicode_has_no_records() -> None:
    index, source = written(FaultDisk("/data"), a_mixed_lot())
    for is_prefix in (False, True):
        assert find_tags(source, index, Match("\ud800", is_prefix=is_prefix)) == NOTHING


def test_no_tags_cost_no_read() -> None:
    index, file = written(FaultDisk("/data"), many(10))
    source = Recorded(file)
    assert find_tags(source, index, Match("a")) == NOTHING
    assert find_tags(source, index, Match("", is_prefix=True)) == NOTHING
    assert list(walk_tags(source, index)) == []
    assert source.reads == []


def test_ten_thousand_tags_of_one_record_each_cost_little() -> None:
    tagged = build_index(generation=7, serial=12, batches=distinctly_tagged(10_000))
    assert tagged.directory.tags == 10_000
    assert tags_bytes(tagged) / 10_000 <= 18 + len("user/000000")


def test_a_tag_that_every_record_has_costs_a_byte_for_each_size_and_next_to_nothing_else() -> None:
    batches = [a_batch(at, 100, tags=["all"] * 100) for at in range(0, 100_000, 100)]
    index, source = written(FaultDisk("/data"), batches)
    assert tags_bytes(index) < 100_000 + 200
    check_found(source, index, Match("all"), batches)


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
        check_found(source, index, match, batches)
        (directory, *blocks) = source.reads
        assert directory == (index.directory.offset, index.directory.length)
        assert len(blocks) <= 1 and all(length <= blocks_max * 17_000 for _, length in blocks)
        assert all(offset >= index.batches_end + 52 * len(index) for offset, _ in blocks)


def test_a_walk_reads_the_directory_and_then_many_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = distinctly_tagged(10_000)
    index, file = written(FaultDisk("/data"), batches)
    monkeypatch.setattr("shard.storage.sources.READ_BYTES", 100_000)
    source = Recorded(file)
    walk = walk_tags(source, index)
    assert next(walk)[0] == "user/000000" and len(source.reads) == 2
    walked = {tag: (list(seqs), list(sizes)) for tag, seqs, sizes in walk}
    expected = {tag: ([seq], [len(text)]) for seq, tag, text in records_of(batches)}
    assert {"user/000000": expected["user/000000"], **walked} == expected
    assert len(source.reads) == 5 and max(length for _, length in source.reads) <= 100_000


# Mistakes of ours, with good checksums.


@pytest.mark.parametrize(
    "wrong",
    [{"a": []}, {"b": [6, 40]}, {"a": [6, 41, 10, 40]}, {"a": [6, 41, 9, 42]}, {"all": [900, 50] * 12}],
)
def test_verify_finds_tags_that_are_not_those_of_the_batches(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, list[int]]
) -> None:
    add_correctly = SortedTagBuilder.add

    def add_wrongly(self: SortedTagBuilder, at: int, batch: Batch) -> None:
        add_correctly(self, at, batch)
        if batch.first_seq == 2**40:
            self._entries_of.update({tag: array("Q", entries) for tag, entries in wrong.items()})

    with monkeypatch.context() as patch:
        patch.setattr(SortedTagBuilder, "add", add_wrongly)
        _, source = written(FaultDisk("/data"), a_mixed_lot())
    reasons = [problem.reason for problem in verify_segment(source)]
    assert reasons and all("not right" in reason or "are listed" in reason for reason in reasons)


def test_verify_finds_one_wrong_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(batch: Batch) -> list[int]:
        return [batch.size(at, at) + (at == 1) for at in range(batch.count)]

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "sizes", one_more)
        _, source = written(FaultDisk("/data"), a_mixed_lot()[2:3])
    assert [problem.reason for problem in verify_segment(source)] == [
        "seqs or sizes of tag b'a' are not right"
    ]


def test_verify_finds_a_tag_index_out_of_order_or_out_of_place_and_copy_one_with_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks_right, encode_right = tag_writer._encode_blocks, SortedTagBuilder.encode
    Parts = Generator[bytes, None, TagDirectory]

    def with_a_gap(self: SortedTagBuilder, offset: int, generation: int) -> Parts:
        yield bytes(8)
        return (yield from encode_right(self, offset + 8, generation))

    def with_a_gap_at_the_end(self: SortedTagBuilder, offset: int, generation: int) -> Parts:
        places: list[TagDirectory] = []

        def gathered() -> Iterator[bytes]:
            places.append((yield from encode_right(self, offset, generation)))

        *blocks, directory = gathered()
        yield from (*blocks, bytes(8), directory)
        return places[0]._replace(offset=places[0].offset + 8)

    mistakes: dict[str, tuple[object, str, Callable[..., object]]] = {
        "comes after": (tag_writer, "_encode_blocks", lambda tags: reversed(list(blocks_right(tags)))),
        "another first name": (
            tag_writer,
            "_encode_blocks",
            lambda tags: [(b"0", block) for _, block in blocks_right(tags)],
        ),
        "next tag block is not here": (SortedTagBuilder, "encode", with_a_gap),
        "tag directory does not follow here": (SortedTagBuilder, "encode", with_a_gap_at_the_end),
    }
    for reason, (owner, name, mistake) in mistakes.items():
        with monkeypatch.context() as patch:
            patch.setattr(tag_writer, "TAG_BLOCK_BYTES", 60)
            patch.setattr(owner, name, mistake)
            _, source = written(FaultDisk("/data"), a_mixed_lot())
        assert reason in " ".join(problem.reason for problem in verify_segment(source))
        if name == "encode":
            with pytest.raises(Corrupt, match=reason):
                copy_segment(FaultDisk("/data"), DIRECTORY, source)
