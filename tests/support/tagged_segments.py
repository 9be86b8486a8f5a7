"""Batches with tags of many shapes, and a check of what a segment finds by tag against a naive search."""

from __future__ import annotations

import random
from array import array

from hypothesis import strategies as st

from shard.storage.segments import SegmentIndex, Source, TaggedRecords, find_tags
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch
from tests.support.segments import a_batch, seqs_naively, sizes_naively

NOTHING = TaggedRecords(array("Q"), array("I"))

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
        data = b"1" * draw(st.sampled_from([1, 1, 1, 300, 70_000]))
        batches.append(a_batch(seq, len(tags), tags=tags if any(tags) else None, data=data))
        seq += len(tags) + draw(st.sampled_from([0, 0, 1, 70_000, 2**33]))
    return batches


def check_found(source: Source, index: SegmentIndex, match: Match, batches: list[Batch]) -> None:
    found = find_tags(source, index, match)
    assert list(found.seqs) == seqs_naively(batches, match)
    assert list(found.sizes) == sizes_naively(batches, match)
    assert (found.seqs.typecode, found.sizes.typecode) == ("Q", "I")


def distinctly_tagged(count: int) -> list[Batch]:
    tags = [f"user/{at:06d}" for at in range(count)]
    random.Random(2).shuffle(tags)
    return [a_batch(at, 100, tags=tags[at : at + 100]) for at in range(0, count, 100)]
