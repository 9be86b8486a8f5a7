"""Goal: whichever way boxes go to other shards, an epoch is marked for exactly the boxes that have it."""

from __future__ import annotations

import random

import pytest

from shard.core.snapshot_facts import MarkFacts
from shard.core.transactions.state import Mark
from shard.transfer.transaction_marks import MarkMerge, owners_of
from streams.protocol.model.slots import SLOTS, slot_of

BOXES = [f"box-{number}" for number in range(60)]


def even(shards: int) -> list[int]:
    return owners_of([(SLOTS * at // shards, SLOTS * (at + 1) // shards, at) for at in range(shards)])


def moved(old: list[int], new: list[int], marks: dict[int, list[MarkFacts]]) -> dict[int, list[MarkFacts]]:
    merge = MarkMerge(old, new)
    for shard, facts in marks.items():
        merge.add(shard, facts)
    return {shard: merge.of(shard) for shard in set(new)}


def committed(owners: list[int], marks: dict[int, list[MarkFacts]]) -> dict[str, int]:
    """The last epoch that each box has."""
    found = {}
    for box in BOXES:
        known = [
            Mark(fact.epoch, fact.query, fact.at_ms, fact.slots)
            for fact in marks.get(owners[slot_of(box)], [])
            if fact.writer == "w"
        ]
        found[box] = max((mark.epoch for mark in known if mark.covers(box)), default=0)
    return found


def test_shards_that_agree_make_a_shard_that_is_marked_as_a_whole() -> None:
    marks = {shard: [MarkFacts("w", 5, "q", 100 + shard)] for shard in range(4)}
    assert moved(even(4), even(1), marks) == {0: [MarkFacts("w", 5, "q", 103)]}
    assert moved(even(4), even(2), marks)[0] == [MarkFacts("w", 5, "q", 101)]
    assert moved(even(2), even(4), {0: marks[0]}) == {0: [marks[0][0]], 1: [marks[0][0]], 2: [], 3: []}


@pytest.mark.parametrize("seed", range(20))
def test_every_box_keeps_the_epoch_that_it_has_through_any_number_of_moves(seed: int) -> None:
    rng = random.Random(seed)
    shards = rng.randrange(1, 6)
    owners = even(shards)
    marks = {
        shard: [MarkFacts("w", rng.randrange(1, 4), "q", rng.randrange(100)), MarkFacts("v", 1, "", 7)]
        for shard in range(shards)
        if rng.random() < 0.8
    }
    expected = committed(owners, marks)
    for _ in range(4):
        shards = rng.randrange(1, 6)
        target = even(shards) if rng.random() < 0.5 else [rng.randrange(shards) for _ in range(SLOTS)]
        marks, owners = moved(owners, target, marks), target
        assert committed(owners, marks) == expected
        for facts in marks.values():
            assert [fact.at_ms for fact in facts] == sorted(fact.at_ms for fact in facts)
