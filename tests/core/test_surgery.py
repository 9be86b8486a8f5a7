"""Goal: a log whose end was cut off holds exactly what it held up to there; one that lost batches tells of
exactly those.

Method: random histories with seals, deletes and evictions; cuts at every seq and losses of any batches are
compared with what was live before.
"""

from __future__ import annotations

import random

import pytest

from shard.core.boxes.box import Box
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.holes import Hole
from shard.core.boxes.offline_edits import (
    add_holes,
    cut_after,
    live_runs,
    recount,
    remeasure,
    replace_segment,
)
from streams.protocol.messages.commands import Tombstone
from tests.support import machines
from tests.support.machines import Driver, live_texts, parts_of, random_history, seqs_of

SEEDS = range(12 * machines.SWEEP_FACTOR)


def stored_boxes(driver: Driver) -> list[Box]:
    return [box for box in driver.machine.boxes.values() if not box.is_memory and box.log.head_seq]


def stand_in_for(box: Box, upto_seq: int) -> object:
    """A segment with what is live up to there in the one that is cut through, if there is such a one."""
    for segment in box.log.segments:
        if segment.first_seq <= upto_seq < segment.last_seq:
            runs = live_runs(box.log, segment, upto_seq)
            live = [
                part
                for at, stretches in runs.items()
                for part in parts_of(machines.SHELF.read(segment, at), stretches)
            ]
            if live:
                box.last_serial += 1
                return machines.SHELF.write(box.generation, box.last_serial, live)
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_above_a_cut_never_was_and_the_rest_is_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    driver = random_history(seed, 80)
    for box in stored_boxes(driver):
        log = box.log
        seq = rng.randint(log.earliest_seq - 1, log.head_seq)
        before = {at: text for at, (_, text) in live_texts(driver.machine, box.name, seq).items()}
        keys = {key for key, entry in box.keys.items() if entry.last_seq <= seq}
        holes = [(h.first_seq, min(h.last_seq, seq)) for h in log.holes if h.first_seq <= seq]
        floors = (log.cap_floor, log.ttl_floor)
        cut_after(box, seq, last_ts=7, replacement=stand_in_for(box, seq))  # type: ignore[arg-type]
        log.check()
        assert {at: text for at, (_, text) in live_texts(driver.machine, box.name).items()} == before
        assert (log.head_seq, log.visible_seq, log.last_ts, log.count) == (seq, seq, 7, len(before))
        assert log.earliest_seq == min(before, default=seq + 1)
        assert (log.cap_floor, log.ttl_floor) == floors
        assert keys == set(box.keys)
        assert [(hole.first_seq, hole.last_seq) for hole in log.holes] == holes


def lose(box: Box, lost: dict[int, set[int]]) -> list[tuple[int, int]]:
    """Loses these batches, by the serials of their segments, and writes those segments anew."""
    holes = remeasure(box.log, machines.SHELF.read, lost)
    for segment in [each for each in box.log.segments if each.serial in lost]:
        live = [
            part
            for at, stretches in live_runs(box.log, segment).items()
            for part in parts_of(machines.SHELF.read(segment, at), stretches)
        ]
        box.last_serial += 1
        stand_in = machines.SHELF.write(box.generation, box.last_serial, live)
        replace_segment(box.log, segment, stand_in)
    box.log.check()
    return holes


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_batches_become_holes_and_nothing_else_is_touched(seed: int) -> None:
    rng = random.Random(seed)
    driver = random_history(1000 + seed, 80)
    for box in stored_boxes(driver):
        before = {at: text for at, (_, text) in live_texts(driver.machine, box.name).items()}
        lost = {
            segment.serial: set(rng.sample(range(len(segment)), rng.randint(0, len(segment))))
            for segment in box.log.segments
        }
        gone = {
            seq
            for segment in box.log.segments
            for at in lost[segment.serial]
            for seq in before
            if segment.first_seqs[at] <= seq < segment.first_seqs[at] + segment.counts[at]
        }
        holes = lose(box, lost)
        assert {seq for first, last in holes for seq in range(first, last + 1)} == gone
        after = {at: text for at, (_, text) in live_texts(driver.machine, box.name).items()}
        assert after == {seq: text for seq, text in before.items() if seq not in gone}
        told = {seq for hole in box.log.holes for seq in range(hole.first_seq, hole.last_seq + 1)}
        assert gone <= told


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_dead_is_found_again_from_floors_and_deletes_alone(seed: int) -> None:
    driver = random_history(2000 + seed, 80)
    for box in stored_boxes(driver):
        log = box.log
        before = (log.count, log.bytes, log.earliest_seq, live_texts(driver.machine, box.name))
        for segment in log.segments:  # as if nothing were known of it
            segment._dead.clear()
            segment.front = 0
        log.count = log.bytes = -1
        assert remeasure(log, machines.SHELF.read) == []
        log.check()
        assert (log.count, log.bytes, log.earliest_seq, live_texts(driver.machine, box.name)) == before


def test_a_reader_is_told_of_a_loss_in_the_middle_and_reads_on() -> None:
    driver = Driver()
    for text in "abcde":
        driver.append(text, text)
    driver.seal()
    box = driver.machine.boxes["b"]
    assert lose(box, {1: {1, 2}}) == [(3, 4), (5, 6)]
    assert [(hole.first_seq, hole.last_seq) for hole in box.log.holes] == [(3, 6)]

    def read(from_seq: int) -> tuple[list[int], Tombstone | None]:
        reply = driver.read(from_seq)
        return seqs_of(reply), reply.tombstone

    assert read(0) == ([1, 2], None), "one tombstone an answer: the hole is for the next one"
    assert read(2) == ([7, 8, 9, 10], Tombstone(3, 6, "crash", 4, 1, 10))
    assert read(4) == ([7, 8, 9, 10], Tombstone(5, 6, "crash", 2, 1, 10))
    assert read(6) == ([7, 8, 9, 10], None)


def test_a_lost_beginning_is_told_too() -> None:
    driver = Driver()
    for text in "abc":
        driver.append(text)
    driver.seal(batches=1)
    driver.seal(batches=1)
    box = driver.machine.boxes["b"]
    assert lose(box, {1: {0}}) == [(1, 1)]
    assert (box.log.earliest_seq, len(box.log.segments)) == (2, 1)
    reply = driver.read()
    assert reply.tombstone == Tombstone(1, 1, "crash", 1, 2, 3) and seqs_of(reply) == [2, 3]
    # The facts carry it to the next life.
    twin = Box.from_facts(box.facts())
    assert [(hole.first_seq, hole.last_seq) for hole in twin.log.holes] == [(1, 1)]


def test_holes_are_kept_in_order_and_neighbours_are_one() -> None:
    log = BoxLog()
    log.holes = [Hole(10, 20), Hole(40, 40)]
    add_holes(log, [(30, 31), (21, 25), (1, 1), (39, 39), (2**40, 2**41)])
    found = [(hole.first_seq, hole.last_seq) for hole in log.holes]
    assert found == [(1, 1), (10, 25), (30, 31), (39, 40), (2**40, 2**41)]
    empty = BoxLog()
    add_holes(empty, [])
    assert empty.holes == []


def test_a_recount_drops_batches_in_which_nothing_is_live() -> None:
    driver = Driver()
    driver.append({"data": 1, "tag": "x"}, {"data": 2, "tag": "y"}, {"data": 3, "tag": "y"})
    driver.append({"data": 4, "tag": "y"})
    driver.delete(tag="x")
    box = driver.machine.boxes["b"]
    cut_after(box, 1, last_ts=5)
    box.log.check()
    assert (box.log.count, box.log.bytes, box.log.earliest_seq) == (0, 0, 2)
    recount(box.log)
    assert (box.log.count, box.log.bytes, box.log.earliest_seq) == (0, 0, 2)


def test_a_batch_whose_live_records_are_all_above_the_cut_has_no_part_in_what_stays() -> None:
    driver = Driver()
    driver.append({"data": 0})
    driver.append({"data": 1, "tag": "x"}, {"data": 2})
    driver.seal()
    driver.delete(tag="x")
    box = driver.machine.boxes["b"]
    (segment,) = box.log.segments
    assert live_runs(box.log, segment, 2) == {0: [(0, 0)]}
    assert live_runs(box.log, segment) == {0: [(0, 0)], 1: [(1, 1)]}


def test_a_batch_that_was_dead_anyway_leaves_no_hole() -> None:
    driver = Driver()
    driver.append({"data": 0})
    driver.append({"data": 1, "tag": "x"}, {"data": 2, "tag": "x"})
    driver.append({"data": 3, "tag": "x"}, {"data": 4}, {"data": 5, "tag": "x"})
    driver.seal()
    driver.delete(tag="x")
    box = driver.machine.boxes["b"]
    assert lose(box, {1: {1}}) == []
    assert box.log.holes == [] and box.log.count == 2
