"""Offsets: what the next micro-batch takes and how it is cut. Properties, by hypothesis; needs no Spark."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streams.spark.offsets import (
    BoxHead,
    Cursor,
    Offset,
    SeqRange,
    bytes_to_records,
    from_json,
    next_end,
    pending_counts,
    plan_tasks,
    ranges,
    recreated_gaps,
    to_json,
)

BOXES = st.sampled_from([f"box.{n}" for n in range(6)])
PLACES = st.builds(Cursor, gen=st.integers(1, 2), seq=st.integers(0, 50))
OFFSETS = st.dictionaries(BOXES, PLACES)


def ahead(start: Offset, heads: Offset) -> Offset:
    """Heads that a server could have after `start`: in the same life a box never shrinks."""
    return {
        box: Cursor(head.gen, start[box].seq + head.seq)
        if box in start and start[box].gen == head.gen
        else head
        for box, head in heads.items()
    }


@given(OFFSETS)
def test_an_offset_comes_back_from_the_checkpoint_as_it_was(offset: Offset) -> None:
    assert from_json(json.loads(json.dumps(to_json(offset)))) == offset


@given(OFFSETS, OFFSETS)
def test_without_a_limit_all_there_is_is_taken_and_boxes_that_are_gone_keep_their_place(
    start: Offset, heads: Offset
) -> None:
    heads = ahead(start, heads)
    end = next_end(start, heads, None)
    assert {box: end[box] for box in heads} == heads
    assert {box: end[box] for box in end if box not in heads} == {
        box: place for box, place in start.items() if box not in heads
    }


@given(OFFSETS, OFFSETS, st.integers(1, 300))
def test_a_limit_is_kept_used_up_and_leaves_nobody_out(start: Offset, heads: Offset, limit: int) -> None:
    heads = ahead(start, heads)
    waiting = pending_counts(start, heads)
    taken = pending_counts(start, next_end(start, heads, limit))
    assert sum(taken.values()) == min(limit, sum(waiting.values()))
    assert all(0 < taken[box] <= waiting[box] for box in taken)
    if limit >= len(waiting):
        assert taken.keys() == waiting.keys()


@given(OFFSETS, OFFSETS, st.integers(1, 40))
def test_batch_after_batch_covers_every_record_once(start: Offset, heads: Offset, limit: int) -> None:
    heads = ahead(start, heads)
    seen: Counter[tuple[str, int, int]] = Counter()
    at = start
    while pending_counts(at, heads):
        end = next_end(at, heads, limit)
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
    start = {"big": Cursor(1, 0), "small": Cursor(1, 0)}
    end = next_end(start, {"big": Cursor(1, 1_000_000), "small": Cursor(1, 3)}, 100)
    assert end["small"].seq >= 1 and end["big"].seq >= 90


def test_a_box_made_anew_is_read_from_its_beginning_and_told_as_loss() -> None:
    start, end = (
        {"a": Cursor(1, 40), "b": Cursor(1, 4)},
        {"a": Cursor(2, 50), "b": Cursor(1, 9), "new": Cursor(1, 2)},
    )
    assert ranges(start, end) == [SeqRange("a", 2, 0, 50), SeqRange("b", 1, 4, 9), SeqRange("new", 1, 0, 2)]
    (loss,) = recreated_gaps(start, end)
    assert (loss.box, loss.first, loss.last, loss.reason) == ("a", 41, None, "recreated")
    assert str(loss) == (
        "a was deleted and created again: records of the deleted box from 41 on are lost (recreated)"
    )


@given(
    st.lists(
        st.builds(SeqRange, box=BOXES, gen=st.just(1), after=st.integers(0, 100), to=st.integers(0, 300))
    ),
    st.integers(1, 120),
    st.integers(1, 9),
)
def test_a_plan_covers_its_ranges_exactly(seq_ranges: list[SeqRange], size: int, least: int) -> None:
    seq_ranges = [each for each in seq_ranges if each.after < each.to]
    tasks = plan_tasks(seq_ranges, partition_records=size, min_partitions=least)

    def seqs(each: SeqRange) -> list[tuple[str, int]]:
        return [(each.box, seq) for seq in range(each.after + 1, each.to + 1)]

    plan = Counter(pair for task in tasks for each in task for pair in seqs(each))
    assert plan == Counter(pair for each in seq_ranges for pair in seqs(each))
    assert all(task for task in tasks)
    assert all(sum(map(len, task)) <= size + size // 10 * len(task) for task in tasks)
    assert plan_tasks(seq_ranges, partition_records=size, min_partitions=least) == tasks


def test_a_long_box_is_cut_and_short_ones_are_packed() -> None:
    assert len(plan_tasks([SeqRange("a", 1, 0, 1000)], partition_records=250, min_partitions=1)) == 4
    assert len(plan_tasks([SeqRange("a", 1, 0, 1000)], partition_records=5000, min_partitions=8)) == 8
    many = [SeqRange(f"b{n}", 1, 0, 10) for n in range(100)]
    assert len(plan_tasks(many, partition_records=500, min_partitions=1)) == 2
    assert plan_tasks([], partition_records=500, min_partitions=4) == []


def test_large_records_and_many_cores_make_more_tasks() -> None:
    wanted = [SeqRange("a", 1, 0, 100_000)]
    one = plan_tasks(wanted, partition_records=250_000, min_partitions=None)
    assert [len(task[0]) for task in one] == [100_000]
    by_bytes = plan_tasks(
        wanted,
        partition_records=250_000,
        min_partitions=None,
        partition_bytes=16 << 20,
        sizes={"a": 10_000.0},
    )
    assert all(sum(map(len, task)) * 10_000 <= 1.2 * (16 << 20) for task in by_bytes)
    assert sum(len(each) for task in by_bytes for each in task) == 100_000
    assert len(plan_tasks(wanted, partition_records=250_000, min_partitions=None, cores=4)) == 4
    few = [SeqRange("a", 1, 0, 1000)]
    assert len(plan_tasks(few, partition_records=250_000, min_partitions=None, cores=4)) == 1, "not worth it"
    huge = plan_tasks(few, partition_records=10, min_partitions=None, partition_bytes=10, sizes={"a": 1e9})
    assert len(huge) == 1000, "a task has at least one record"


def test_bytes_become_records_by_their_mean_size() -> None:
    head = BoxHead(gen=1, earliest_seq=1, head_seq=100, evict_floor=1, count=100, bytes=10_000)
    assert head.cursor == Cursor(1, 100) and head.start == Cursor(1, 0)
    assert bytes_to_records({}, {"a": head}, 1000) == 10
    assert bytes_to_records({}, {"a": head}, 1) == 1
    assert bytes_to_records({"a": Cursor(1, 100)}, {"a": head}, 1000) == 1
