"""The checker of a load finds what is lost, doubled, reordered, invented or returned, and nothing else.

Method: what readers and workers would see is written down by hand, and by hypothesis as any way to spoil a
good log.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from loadtests import shapes
from loadtests.checking import (
    DESCRIPTIONS_MAX,
    GAPS_MAX,
    Faults,
    Jobs,
    Ledger,
    ProducerCounts,
    Reader,
    settle,
    slope_per_hour,
)


def records(*numbers: tuple[str, int], first_seq: int = 1) -> list[dict[str, Any]]:
    return [{"$seq": seq, "data": {"p": p, "n": n}} for seq, (p, n) in enumerate(numbers, first_seq)]


def read(*numbers: tuple[str, int], first_seq: int = 1, from_seq: int = 0) -> Faults:
    faults = Faults()
    Reader("b", faults, from_seq=from_seq).page(records(*numbers, first_seq=first_seq))
    return faults


def test_producers_that_take_turns_are_fine() -> None:
    assert not read(("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2))


def test_a_number_that_is_passed_over_is_lost() -> None:
    assert read(("a", 0), ("a", 3)).counts == {"lost": 2}
    assert read(("a", 1)).counts == {"lost": 1}, "the first of a box is number 0"


def test_a_number_that_comes_again_is_doubled() -> None:
    assert read(("a", 0), ("a", 1), ("a", 0)).counts == {"doubled": 1}


def test_a_number_that_comes_late_is_reordered_and_not_lost() -> None:
    faults = read(("a", 0), ("a", 2), ("a", 1))
    assert +faults.counts == {"reordered": 1} and "number 1 of a where 3 was due" in faults.descriptions[-1]


def test_a_seq_that_is_passed_over_is_lost_and_one_that_goes_back_is_reordered() -> None:
    faults = Faults()
    reader = Reader("b", faults)
    reader.page([{"$seq": 3, "data": {"p": "a", "n": 0}}, {"$seq": 2, "data": {"p": "a", "n": 1}}])
    assert faults.counts == {"lost": 2, "reordered": 1}
    assert reader.seq == 3


def test_a_reader_from_the_middle_takes_the_first_number_as_it_comes() -> None:
    assert not read(("a", 7), ("a", 8), first_seq=11, from_seq=10)
    assert read(("a", 7), ("a", 9), first_seq=11, from_seq=10).counts == {"lost": 1}


def test_a_tombstone_is_a_loss_of_all_it_spans() -> None:
    faults = Faults()
    Reader("b", faults).add_gap({"gap_from": 3, "gap_to": 7, "reason": "cap"})
    assert faults.counts == {"lost": 5} and faults


@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=30),
    st.data(),
)
def test_any_one_thing_that_is_spoilt_is_found(order: list[str], data: st.DataObject) -> None:
    counts = dict.fromkeys("abc", 0)
    numbers: list[tuple[str, int]] = []
    for producer in order:
        numbers.append((producer, counts[producer]))
        counts[producer] += 1
    sent = {producer: ProducerCounts(count, count) for producer, count in counts.items()}

    def faults_of(told: list[tuple[str, int]]) -> Faults:
        faults = Faults()
        reader = Reader("b", faults)
        reader.page(records(*told))
        settle(reader, sent, faults)
        return faults

    assert not faults_of(numbers)
    at = data.draw(st.integers(0, len(numbers) - 1))
    assert +faults_of(numbers[:at] + numbers[at + 1 :]).counts == {"lost": 1}
    assert +faults_of([*numbers, numbers[at]]).counts == {"doubled": 1}
    to = data.draw(st.integers(0, len(numbers) - 1))
    moved = numbers[:at] + numbers[at + 1 :]
    moved.insert(to, numbers[at])
    kept_order = all([x for x in moved if x[0] == p] == [x for x in numbers if x[0] == p] for p in "abc")
    assert bool(faults_of(moved).counts["reordered"]) is not kept_order


def test_in_the_end_acked_records_must_be_there_and_unanswered_ones_may() -> None:
    def settled(found: int, sent: ProducerCounts) -> dict[str, int]:
        faults = Faults()
        reader = Reader("b", faults)
        reader.page(records(*(("a", number) for number in range(found))))
        settle(reader, {"a": sent}, faults)
        return dict(faults.counts)

    assert settled(5, ProducerCounts(5, 5)) == {}
    assert settled(5, ProducerCounts(8, 5)) == {} and settled(8, ProducerCounts(8, 5)) == {}
    assert settled(4, ProducerCounts(8, 5)) == {"lost": 1}
    assert settled(9, ProducerCounts(8, 5)) == {"invented": 1}


def test_records_of_a_stranger_are_invented() -> None:
    faults = Faults()
    reader = Reader("b", faults)
    reader.page(records(("x", 0)))
    settle(reader, {}, faults)
    assert faults.counts == {"invented": 1}


def test_what_a_reader_remembers_of_gaps_and_what_is_told_is_bounded() -> None:
    faults = Faults()
    reader = Reader("b", faults)
    reader.page(records(*(("a", number) for number in range(2 * GAPS_MAX, 0, -1))))
    assert len(faults.descriptions) == DESCRIPTIONS_MAX
    reader.page(records(("a", 3 * GAPS_MAX), first_seq=3 * GAPS_MAX))
    assert len(reader._gaps) <= GAPS_MAX


def test_ledgers_of_several_processes_add_up() -> None:
    here, there = Ledger(), Ledger()
    here.of("b", "a").sent_count = 10
    there.of("b", "z").sent_count = there.of("b", "z").acked_count = 7
    here.update(there.as_json())
    there.of("b", "z").acked_count = 5
    here.update(there.as_json())
    assert here.as_json() == {"b": {"a": [10, 0], "z": [7, 5]}} and here.acked_records() == 5


def jobs(*, may_return: bool = False) -> tuple[Jobs, Faults]:
    faults = Faults()
    return Jobs("q", faults, may_return=may_return), faults


def test_a_job_that_was_done_never_comes_back() -> None:
    for may_return in (False, True):
        queue, faults = jobs(may_return=may_return)
        queue.on_claim("w", "a", 0)
        queue.on_ack_sent("a", 0)
        queue.on_ack("a", 0)
        assert not faults and queue.jobs_done() == 1
        queue.on_claim("v", "a", 0)
        assert faults.counts == {"returned": 1}


def test_a_leased_job_is_given_to_another_only_where_leases_may_be_void() -> None:
    for may_return, found in ((False, {"returned": 2}), (True, {})):
        queue, faults = jobs(may_return=may_return)
        queue.on_claim("w", "a", 0)
        queue.on_claim("v", "a", 0)
        queue.on_ack_sent("a", 0)
        queue.on_skip("w", "a", 0)
        queue.on_ack("a", 0)
        assert dict(faults.counts) == found


def test_a_job_is_done_or_waits_in_the_end() -> None:
    queue, faults = jobs()
    queue.on_claim("w", "a", 0)
    queue.on_ack("a", 0)
    queue.settle({"a": BitMap([1, 2])}, {"a": ProducerCounts(3, 3)})
    assert not faults
    queue.settle({"a": BitMap([1])}, {"a": ProducerCounts(3, 3)})
    assert +faults.counts == {"lost": 1}
    queue.settle({"a": BitMap([0, 1, 2])}, {"a": ProducerCounts(3, 3)})
    assert faults.counts["returned"] == 1
    queue.settle({"a": BitMap([1, 2, 3])}, {"a": ProducerCounts(3, 3)})
    assert faults.counts["invented"] == 1


def test_a_job_whose_ack_has_no_answer_may_be_done_or_not() -> None:
    queue, faults = jobs(may_return=True)
    for number in (0, 1):
        queue.on_claim("w", "a", number)
        queue.on_ack_sent("a", number)
    queue.on_skip("w", "a", 1, was_repeated=True)
    queue.settle({}, {"a": ProducerCounts(2, 2)})
    assert not faults
    queue.on_skip("w", "a", 0)
    queue.settle({}, {"a": ProducerCounts(2, 2)})
    assert faults.counts == {"lost": 1}


def test_jobs_done_in_two_processes_are_found() -> None:
    (here, faults), (there, _) = jobs(), jobs()
    for queue in (here, there):
        queue.on_claim("w", "a", 4)
        queue.on_ack("a", 4)
    there.on_ack_sent("a", 5)
    here.update(there.news())
    assert faults.counts == {"returned": 1} and 5 in here.maybe_done_jobs["a"]
    assert there.news()["done"] == {}, "told once"


def test_slopes() -> None:
    assert slope_per_hour([]) == slope_per_hour([(5, 1)]) == slope_per_hour([(5, 1), (5, 2)]) == 0
    assert slope_per_hour([(0, 10), (10, 20), (20, 30)]) == pytest.approx(3600)


def test_shapes_rise_peak_and_end() -> None:
    def users(shape: Any) -> list[int | None]:
        told = [shape(at, users=40, seconds=100.0) for at in range(0, 110, 10)]
        return [None if each is None else each[0] for each in told]

    assert users(shapes.steady) == [40] * 10 + [None]
    assert users(shapes.ramp) == [5, 5, 10, 15, 20, 25, 25, 30, 35, 40, None]
    assert users(shapes.spike) == [10, 10, 10, 10, 40, 40, 40, 10, 10, 10, None]
