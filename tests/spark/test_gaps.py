"""Messages and parts of gaps. Needs no Spark."""

from __future__ import annotations

import pickle

from streams.spark.gaps import Gap, GapError, tombstone_gap

LOST = Gap("orders", 3, 9, "cap", 7)


def test_the_error_names_the_exact_range_and_both_ways_on() -> None:
    error = GapError.of(LOST)
    assert "orders has lost records 3 to 9 (cap, about 7 records)" in error.message
    assert "onGap=emit" in error.message and "startingOffsets" in error.message
    assert error.detail == {"box": "orders", "gap_from": 3, "gap_to": 9, "reason": "cap", "missed": 7}


def test_the_error_survives_the_way_from_a_task_to_the_driver() -> None:
    error = pickle.loads(pickle.dumps(GapError.of(LOST)))
    assert (error.message, error.detail) == (GapError.of(LOST).message, GapError.of(LOST).detail)


def test_a_reader_is_told_of_the_part_that_it_misses() -> None:
    assert LOST.within(1, 20) is LOST
    assert LOST.within(5, 20) == Gap("orders", 5, 9, "cap", None)
    assert LOST.within(1, 4) == Gap("orders", 3, 4, "cap", None)
    assert LOST.within(10, 20) is None and LOST.within(1, 2) is None


def test_a_tombstone_is_read_as_it_is() -> None:
    tombstone = {
        "gap_from": 3,
        "gap_to": 9,
        "reason": "cap",
        "missed_estimate": 7,
        "earliest_seq": 10,
        "head_seq": 12,
    }
    assert tombstone_gap("orders", tombstone) == LOST
    assert str(tombstone_gap("orders", {"gap_from": 1, "gap_to": 2, "reason": "ttl"})) == (
        "orders has lost records 1 to 2 (ttl)"
    )
