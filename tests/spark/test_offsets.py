"""Offsets: what the next micro-batch takes and how it is cut. Properties, by hypothesis; needs no Spark."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streams.spark.offsets import (
    Head,
    Offset,
    Place,
    Range,
    admit,
    bytes_to_records,
    dump,
    load,
    losses,
    pending,
    plan,
    ranges,
)

BOXES = st.sampled_from([f"box.{n}" for n in range(6)])
PLACES = st.builds(Place, gen=st.integers(1, 2), seq=st.integers(0, 50))
OFFSETS = st.dictionaries(BOXES, PLACES)


def ahead(start: Offset, heads: Offset) -> Offset:
    """Heads that a server could have after `start`: in the same life a box never shrinks."""
    return {
        box: Place(head.gen, start[box].seq + head.seq)
        if box in start and start[box].gen == head.gen
        else head
        for box, head in heads.items()
    }


@given(OFFSETS)
def test_an_offset_comes_back_from_the_checkpoint_as_it_was(offset: Offset) -> None:
    assert load(json.loads(json.dumps(dump(offset)))) == offset


@given(OFFSETS, OFFSETS)
def test_without_a_limit_all_there_is_is_taken_and_boxes_that_are_gone_keep_their_place(
    start: Offset, heads: Offset
) -> None:
    heads = ahead(start, heads)
    end = admit(start, heads, None)
    assert {box: end[box] for box in heads} == heads
    assert {box: end[box] for box in end if box not in heads} == {
        box: place for box, place in start.items() if box not in heads
    }


@given(OFFSETS, OFFSETS, st.integers(1, 300))
def test_a_limit_is_kept_used_up_and_leaves_nobody_out(start: Offset, heads: Offset, limit: int) -> None:
    heads = ahead(start, heads)
    waiting = pending(start, heads)
    taken = pending(start, admit(start, heads, limit))
    assert sum(taken.values()) == min(limit, sum(waiting.values()))
    assert all(0 < taken[box] <= waiting[box] for box in taken)
    if limit >= len(waiting):
        assert taken.keys() == waiting.keys()


@given(OFFSETS, OFFSETS, st.integers(1, 40))
def test_batch_after_batch_covers_every_record_once(start: Offset, heads: Offset, limit: int) -> None:
    heads = ahead(start, heads)
    seen: Counter[tuple[str, int, int]] = Counter()
    at = start
    while pending(at, heads):
        end = admit(at, heads, limit)
        for each in ranges(at, end):
            seen.update((each.box, each.gen, seq) for seq in range(each.after + 1, each.to + 1))
        at = end
    expected = {
        (each.box, each.gen, seq)
        for each in ranges(start, heads)
        for seq in range(each.after + 1, each.to + 1)
    }
    assert set(seen) == expected and set(seen.values()) <= {1}


def test_a_small_box_does_not_starve_behind_a_big_one() -> None:
    start = {"big": Place(1, 0), "small": Place(1, 0)}
    end = admit(start, {"big": Place(1, 1_000_000), "small": Place(1, 3)}, 100)
    assert end["small"].seq >= 1 and end["big"].seq >= 90


def test_a_box_made_anew_is_read_from_its_beginning_and_told_as_loss() -> None:
    start, end = (
        {"a": Place(1, 40), "b": Place(1, 4)},
        {"a": Place(2, 50), "b": Place(1, 9), "new": Place(1, 2)},
    )
    assert ranges(start, end) == [Range("a", 2, 0, 50), Range("b", 1, 4, 9), Range("new", 1, 0, 2)]
    (loss,) = losses(start, end)
    assert (loss.box, loss.first, loss.last, loss.reason) == ("a", 41, None, "recreated")
    assert str(loss) == (
        "a was deleted and created again: records from 41 on of the deleted box are lost (recreated)"
    )


@given(
    st.lists(st.builds(Range, box=BOXES, gen=st.just(1), after=st.integers(0, 100), to=st.integers(0, 300))),
    st.integers(1, 120),
    st.integers(1, 9),
)
def test_a_plan_covers_its_ranges_exactly(wanted: list[Range], size: int, least: int) -> None:
    wanted = [each for each in wanted if each.after < each.to]
    tasks = plan(wanted, partition_records=size, min_partitions=least)

    def seqs(each: Range) -> list[tuple[str, int]]:
        return [(each.box, seq) for seq in range(each.after + 1, each.to + 1)]

    planned = Counter(pair for task in tasks for each in task for pair in seqs(each))
    assert planned == Counter(pair for each in wanted for pair in seqs(each))
    assert all(task for task in tasks)
    assert all(sum(map(len, task)) <= size + size // 10 * len(task) for task in tasks)
    assert plan(wanted, partition_records=size, min_partitions=least) == tasks


def test_a_long_box_is_cut_and_short_ones_are_packed() -> None:
    assert len(plan([Range("a", 1, 0, 1000)], partition_records=250, min_partitions=1)) == 4
    assert len(plan([Range("a", 1, 0, 1000)], partition_records=5000, min_partitions=8)) == 8
    many = [Range(f"b{n}", 1, 0, 10) for n in range(100)]
    assert len(plan(many, partition_records=500, min_partitions=1)) == 2
    assert plan([], partition_records=500, min_partitions=4) == []


def test_large_records_and_many_cores_make_more_tasks() -> None:
    wanted = [Range("a", 1, 0, 100_000)]
    one = plan(wanted, partition_records=250_000, min_partitions=None)
    assert [len(task[0]) for task in one] == [100_000]
    by_bytes = plan(
        wanted,
        partition_records=250_000,
        min_partitions=None,
        partition_bytes=16 << 20,
        sizes={"a": 10_000.0},
    )
    assert all(sum(map(len, task)) * 10_000 <= 1.2 * (16 << 20) for task in by_bytes)
    assert sum(len(each) for task in by_bytes for each in task) == 100_000
    assert len(plan(wanted, partition_records=250_000, min_partitions=None, cores=4)) == 4
    few = [Range("a", 1, 0, 1000)]
    assert len(plan(few, partition_records=250_000, min_partitions=None, cores=4)) == 1, "not worth it"
    huge = plan(few, partition_records=10, min_partitions=None, partition_bytes=10, sizes={"a": 1e9})
    assert len(huge) == 1000, "a task has at least one record"


def test_bytes_become_records_by_their_mean_size() -> None:
    head = Head(gen=1, earliest_seq=1, head_seq=100, evict_floor=1, count=100, bytes=10_000)
    assert head.place == Place(1, 100) and head.start == Place(1, 0)
    assert bytes_to_records({}, {"a": head}, 1000) == 10
    assert bytes_to_records({}, {"a": head}, 1) == 1
    assert bytes_to_records({"a": Place(1, 100)}, {"a": head}, 1000) == 1
