"""Goal: positions, floors, gaps and totals of one box are exact through any mix of losses.

Method: a `BoxLog` alone, with small batches; `check()` after each step. Random mixes are in `tests/model`.
"""

from __future__ import annotations

import pytest
from pyroaring import BitMap64

from shard.core.boxes import tail as tail_module
from shard.core.boxes.box_log import BoxLog
from streams.protocol.model.records import Batch, render
from tests.support.machines import columns

SIZE = len(b'{"$seq":1,"$ts":100,"data":0}')


def delete_before(log: BoxLog, seq: int) -> int:
    return log.delete_before(seq, cut_bytes=log.measure_before(seq))


def evict_before(log: BoxLog, seq: int, reason: str) -> int:
    cut_bytes, evicted_ts = log.measure_before(seq), log.newest_ts_before(seq)
    return log.evict_before(seq, reason, cut_bytes=cut_bytes, evicted_ts=evicted_ts)


def delete_seqs(log: BoxLog, seqs: BitMap64) -> int:
    live = BitMap64([seq for seq in seqs if log.is_live(seq)])
    return log.delete_seqs(live, log.measure_seqs(live))


def batch(first_seq: int, count: int, *, ts: int = 100) -> Batch:
    return render(columns(*range(count)), first_seq=first_seq, times=ts)


def filled(*counts: int) -> BoxLog:
    """A log of batches of these sizes, the first at ts 100, the next at 200, and so on."""
    log = BoxLog()
    for index, count in enumerate(counts, 1):
        log.append(batch(log.head_seq + 1, count, ts=100 * index))
        log.check()
    log.show(log.head_seq, log.last_ts)
    return log


def live(log: BoxLog) -> list[int]:
    return [seq for seq in range(log.head_seq + 2) if log.is_live(seq)]


def test_a_new_log_is_empty_and_says_where_it_would_begin() -> None:
    log = BoxLog()
    log.check()
    assert (log.head_seq, log.earliest_seq, log.evict_floor, log.count, log.bytes) == (0, 1, 0, 0, 0)
    assert log.oldest is None and log.first_seq_at(5) == 1 and log.span_at(1) is None
    assert next(log.spans(1), None) is None and log.visible_totals() == (0, 0)
    assert repr(log) == "<BoxLog 1..0..0, 0 live>"


def test_eviction_moves_both_floors_and_deletion_only_the_first_live_one() -> None:
    log = filled(3, 3, 3)
    assert delete_before(log, 3) == 2
    assert (log.earliest_seq, log.evict_floor) == (3, 0)
    assert evict_before(log, 5, "cap") == 2
    assert (log.earliest_seq, log.evict_floor, log.cap_floor, log.ttl_floor) == (5, 5, 5, 0)
    log.check()


def test_the_evict_floor_stops_at_the_last_live_record_that_was_lost() -> None:
    log = filled(6)
    delete_seqs(log, BitMap64([3, 4]))
    assert evict_before(log, 5, "cap") == 2
    assert (log.earliest_seq, log.evict_floor) == (5, 3)
    log.check()


def test_evicting_what_is_already_gone_moves_nothing() -> None:
    log = filled(4)
    delete_before(log, 3)
    assert evict_before(log, 3, "ttl") == 0
    assert (log.evict_floor, log.evicted_ts) == (0, 0)
    delete_seqs(log, BitMap64([3]))
    assert evict_before(log, 4, "cap") == 0
    assert log.evict_floor == 0


def test_evicting_or_deleting_past_the_head_empties_the_log_and_no_more() -> None:
    log = filled(2, 2)
    assert evict_before(log, 100, "ttl") == 4
    assert (log.earliest_seq, log.evict_floor, log.head_seq, log.evicted_ts) == (5, 5, 4, 200)
    assert delete_before(log, 2**64 - 1) == 0
    log.check()
    log.append(batch(5, 1, ts=300))
    assert log.earliest_seq == 5 and live(log) == [5]


def test_a_gap_says_why_it_is_there() -> None:
    log = filled(9)
    evict_before(log, 3, "cap")
    assert log.gap_reason(1) == "cap"
    evict_before(log, 5, "ttl")
    assert log.gap_reason(1) == "mixed"
    assert log.gap_reason(3) == "ttl"
    evict_before(log, 7, "cap")
    assert log.gap_reason(4) == "mixed"
    assert log.gap_reason(5) == "cap"


def test_a_record_in_the_middle_can_go_and_totals_follow() -> None:
    log = filled(4, 4)
    before = log.bytes
    gone = BitMap64([2, 6, 99])
    assert delete_seqs(log, gone) == 2
    assert delete_seqs(log, gone) == 0
    assert live(log) == [1, 3, 4, 5, 7, 8]
    assert log.count == 6 and log.bytes < before
    log.check()


def test_deleting_the_first_records_one_by_one_moves_the_first_live_seq() -> None:
    log = filled(3, 3)
    delete_seqs(log, BitMap64([2]))
    delete_seqs(log, BitMap64([1]))
    assert log.earliest_seq == 3 and len(log.deleted_seqs) == 0
    delete_seqs(log, BitMap64([3, 4]))
    assert log.earliest_seq == 5
    log.check()


def test_a_floor_through_the_middle_of_a_batch_counts_only_what_was_live() -> None:
    log = filled(6, 2)
    delete_seqs(log, BitMap64([2, 3, 5]))
    assert delete_before(log, 5) == 2
    assert (log.earliest_seq, log.count) == (6, 3)
    log.check()


def test_a_floor_that_leaves_only_deleted_records_of_a_batch_takes_it_whole() -> None:
    log = filled(4, 2)
    delete_seqs(log, BitMap64([3, 4]))
    assert delete_before(log, 3) == 2
    assert (log.earliest_seq, live(log)) == (5, [5, 6])
    log.check()


def test_a_batch_that_is_entirely_deleted_lets_go_of_its_payload() -> None:
    log = filled(2, 4, 2)
    delete_seqs(log, BitMap64([3, 4, 5, 6]))
    log.check()
    assert log.tail.batches[1].blob == b"" and log.tail.batches[1].live_bytes == 0
    assert live(log) == [1, 2, 7, 8]


@pytest.mark.parametrize("cut", [3, 4, 5, 6, 7, 8])
def test_a_floor_can_cut_through_a_batch_without_payload(cut: int) -> None:
    """Failed before: the husk of a deleted batch was asked for sizes it no longer has."""
    log = filled(2, 4, 2)
    delete_seqs(log, BitMap64([3, 4, 5, 6]))
    assert evict_before(log, cut, "cap") == 2 + (cut == 8)
    assert log.earliest_seq == (8 if cut == 8 else 7)
    assert log.evict_floor == (8 if cut == 8 else 3)
    log.check()


def test_husks_at_the_front_go_with_the_floor() -> None:
    log = filled(1, 1, 1, 1)
    delete_seqs(log, BitMap64([2, 3]))
    assert delete_before(log, 2) == 1
    assert (log.earliest_seq, live(log)) == (4, [4])
    log.check()
    log = filled(1, 1, 1, 1)
    delete_seqs(log, BitMap64([2]))
    assert delete_before(log, 4) == 2
    log.check()


def test_many_husks_are_cut_out_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_COMPACT_AT", 3)
    log = filled(*[2] * 10)
    delete_seqs(log, BitMap64([5, 6, 9, 10]))
    assert len(log.tail.batches) == 10
    delete_seqs(log, BitMap64(range(11, 17)))
    assert len(log.tail.batches) < 10
    assert live(log) == [1, 2, 3, 4, 7, 8, 17, 18, 19, 20]
    assert log.span_at(9) is None and next(log.spans(9)) is next(log.spans(17))
    assert len(log.deleted_seqs) == 0, "nor is anything remembered of them"
    log.check()
    assert evict_before(log, 18, "cap") == 7
    assert (log.evict_floor, log.earliest_seq) == (18, 18)
    log.check()


def test_the_front_is_cut_off_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_COMPACT_AT", 4)
    log = filled(*[2] * 7)
    delete_before(log, 7)
    assert len(log.tail.batches) == 7 and log.tail.batches[0].count == 1, "payloads go at once, slots later"
    delete_before(log, 9)
    assert len(log.tail.batches) == 3
    assert live(log) == list(range(9, 15))
    log.check()
    assert log.first_seq_at(550) == 11 and log.ts_of(9) == 500


def test_what_was_cut_out_is_not_taken_for_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_COMPACT_AT", 2)
    log = filled(*[2] * 6)
    for gone in (range(5, 9), range(11, 13)):
        delete_seqs(log, BitMap64(gone))
    log.check()
    assert live(log) == [1, 2, 3, 4, 9, 10]
    assert list(log.live_of(BitMap64(range(20)))) == live(log)
    assert list(log.live_of(BitMap64([6, 9, 12, 15]))) == [9]
    assert list(log.live_of(BitMap64())) == []


# -- questions


def test_times_find_their_first_seq() -> None:
    log = filled(2, 2, 2)
    assert [log.first_seq_at(ts) for ts in (0, 100, 101, 200, 300, 301)] == [1, 1, 3, 3, 5, 7]


def test_totals_leave_out_what_is_not_visible_yet() -> None:
    log = filled(2, 2)
    visible = (log.count, log.bytes)
    log.append(batch(5, 3, ts=300))
    assert log.visible_totals() == visible
    delete_seqs(log, BitMap64([2, 6]))
    assert log.visible_totals()[0] == 3
    log.show(7, 300)
    assert log.visible_totals() == (log.count, log.bytes) and log.visible_ts == 300


def test_what_lies_below_a_seq_is_counted_exactly() -> None:
    log = filled(3, 3)
    delete_seqs(log, BitMap64([2, 5]))
    for seq in range(8):
        below = [at for at in (1, 3, 4, 6) if at < seq]
        assert log.live_before(seq) == (len(below), SIZE * len(below))


def test_caps_put_the_floor_just_past_what_must_go() -> None:
    log = filled(3, 3)
    assert log.floor_for_caps(0, 0) == 0 and log.floor_for_caps(6, 6 * SIZE) == 0
    assert [log.floor_for_caps(cap, 0) for cap in (5, 4, 3, 2, 1)] == [2, 3, 4, 5, 6]
    assert [log.floor_for_caps(0, cap * SIZE) for cap in (5, 4, 3, 2, 1)] == [2, 3, 4, 5, 6]
    assert log.floor_for_caps(0, 6 * SIZE - 1) == 2
    assert log.floor_for_caps(5, 3 * SIZE) == 4 and log.floor_for_caps(2, 5 * SIZE) == 5
    assert log.floor_for_caps(3, 3 * SIZE) == 4 and log.floor_for_caps(3, 2 * SIZE + 1) == 5
    delete_seqs(log, BitMap64([2, 4]))
    assert [log.floor_for_caps(cap, 0) for cap in (4, 3, 2, 1)] == [0, 2, 4, 6]
    assert log.floor_for_caps(1, 0, extra=1, extra_bytes=SIZE) == 7
    assert log.floor_for_caps(2, 0, extra=1 - 2, above=4) == 6, "two below the mark are as good as gone"
    assert log.floor_for_caps(1, 0, extra=9) == 7, "when nothing is left to give, everything goes"


# -- holes


def test_a_hole_is_skipped_for_ever_and_remembered() -> None:
    log = filled(2)
    log.lose(3, 10)
    log.check()
    assert (log.head_seq, log.visible_seq, log.earliest_seq) == (10, 10, 1)
    log.append(batch(11, 1, ts=200))
    assert live(log) == [1, 2, 11]
    assert [(hole.first_seq, hole.last_seq) for hole in log.holes] == [(3, 10)]
    assert log.hole_after(0) is log.holes[0] and log.hole_after(9) is log.holes[0]
    assert log.hole_after(10) is None
    assert repr(log.holes[0]) == "<Hole 3..10>"


def test_holes_side_by_side_are_one() -> None:
    log = BoxLog()
    log.lose(1, 4)
    assert log.earliest_seq == 5
    log.lose(5, 9)
    log.check()
    assert [(hole.first_seq, hole.last_seq) for hole in log.holes] == [(1, 9)]


def test_a_hole_for_copies_that_never_came_keeps_its_own_count() -> None:
    log = filled(2)
    log.lose(3, 3, 40)
    log.lose(4, 6)
    log.lose(7, 7, 2)
    log.check()
    found = [(hole.first_seq, hole.last_seq, hole.reason, hole.missed_after(0)) for hole in log.holes]
    assert found == [(3, 3, "source_trim", 40), (4, 6, "crash", 3), (7, 7, "source_trim", 2)]
    assert log.visible_seq == 7


def test_a_hole_is_forgotten_only_when_a_loss_beyond_it_is_told_anyway() -> None:
    log = filled(2)
    log.lose(3, 10)
    log.append(batch(11, 2, ts=200))
    delete_before(log, 12)
    assert len(log.holes) == 1, "a delete is silent, so the hole must still be told of"
    evict_before(log, 13, "cap")
    assert log.holes == []
    log.check()


def test_batches_given_back_must_agree_with_the_snapshot() -> None:
    live_log = filled(3, 3)
    delete_seqs(live_log, BitMap64([2]))
    log = BoxLog()
    log.head_seq, log.last_ts, log.earliest_seq = 6, 200, 1
    log.count, log.bytes, log.deleted_seqs = live_log.count, live_log.bytes, BitMap64([2])
    log.hydrate(batch(1, 3))
    log.hydrate(batch(4, 3, ts=200))
    log.end_hydration()
    log.show(6, 200)
    log.check()
    assert live(log) == live(live_log)
    assert delete_before(log, 5) == 3, "the first batch goes whole, the second in part"
    log.check()
