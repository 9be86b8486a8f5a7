"""Goal: what a parcel becomes, what an outbox sends next, and what of both outlives a restart (v0 §6.1).

Method: two machines with their logs and a carrier without sockets between them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch as replaced

import pytest

from shard.core.boxes import box_log
from shard.core.machine import Machine
from shard.core.routers import copy_sources as origins
from shard.core.routers import outbox
from shard.core.routers.outbox import Load, Outbox
from shard.core.routers.router_outbox import RouterOutbox
from streams.protocol import wire
from streams.protocol.errors import (
    BoxFull,
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    RouterNotFound,
    Throttled,
)
from streams.protocol.messages import commands, forwards
from streams.protocol.messages.forwards import Collect, Forward, ForwardHead, ForwardReply, ReportDelivery
from streams.protocol.messages.requests import decode_command
from streams.protocol.model.matches import Match
from streams.protocol.payloads.appends import RecordLimits
from tests.support.carrying import ORIGIN, bring, carry_all, collect, copies, forward_of, tie
from tests.support.machines import Driver, patch, records_of


@pytest.fixture
def source() -> Driver:
    driver = Driver()
    driver.start("boot")
    driver.put("from", durability="fsync")
    return driver


@pytest.fixture
def dest() -> Driver:
    driver = Driver()
    driver.start("boot")
    driver.put("to", durability="fsync")
    return driver


def the_outbox(driver: Driver, box: str = "from", origin: str = ORIGIN) -> RouterOutbox:
    found = driver.machine.boxes[box].outboxes[origin]
    assert isinstance(found, RouterOutbox)
    return found


def head(**fields: Any) -> ForwardHead:
    known = {"box": "to", "origin": "q!", "life": 1, "after": 0, "upto": 1, "count": 1}
    return ForwardHead(**{**known, **fields})


def record(number: int) -> bytes:
    return b'{"$seq":%d,"$ts":5,"data":%d}' % (number, number)


# -- what a parcel becomes


def test_a_source_is_told_of_copies_in_a_disk_box_when_they_are_synced_and_readers_have_them_before(
    dest: Driver,
) -> None:
    """A source with a confirmation never sends again, and a power cut takes what was only logged."""
    dest.put("to", durability="disk")
    dest.append(0, box="to")  # reserves seqs, which waits for the disk itself
    dest.sync()
    parcel = Forward(head(bind=True), record(1))
    first = dest.do(parcel)
    assert first.until_durable and first.waits_for_lsn > dest.machine.durable_lsn
    assert dest.machine.shows_when_logged and dest.logged() == ["to"]
    assert dest.machine.boxes["to"].log.visible_seq == 2 and not dest.machine.shows_when_logged
    again = dest.do(parcel)
    assert again.until_durable and again.waits_for_lsn == first.waits_for_lsn, "a repeat says no more"
    dest.sync()
    assert dest.do(parcel).waits_for_lsn == 0
    assert copies(dest) == [0, 1]


def test_a_small_batch_into_a_disk_box_asks_for_no_sync_while_few_are_in_flight(
    source: Driver, dest: Driver
) -> None:
    """Readers of the destination see it when it is logged. Its reply waits for the next sync all the same."""
    dest.put("to", durability="disk")
    dest.append(0, box="to")
    dest.put("synced", durability="fsync")
    tie(source, dest)
    tie(source, dest, dest="synced", origin="synced#2")
    patience: list[bool] = []
    for number in range(outbox.PATIENT_BATCHES_MAX + 2):
        source.append(number, box="from")
        for given in collect(source):
            outcome = dest.do(forward_of(given))
            assert outcome.until_durable, "a source is told of durable copies only"
            if given.parcel.dest == "to":
                patience.append(outcome.is_patient)
            else:
                assert not outcome.is_patient, "its readers wait for the disk"
    assert patience == [True] * outbox.PATIENT_BATCHES_MAX + [False] * 2
    source.append("x" * outbox.PATIENT_BYTES_MAX, box="from")
    assert all(forward_of(given).head.is_urgent for given in collect(source))


def test_a_parcel_is_appended_where_its_origin_stands_and_nowhere_else(dest: Driver) -> None:
    first = Forward(head(bind=True), record(1))
    assert dest.ask(first).position == 1
    assert dest.ask(first).position == 1, "a repeat"
    ahead = dest.ask(Forward(head(after=5, upto=6), record(6)))
    assert (ahead.position, ahead.total) == (1, 1), "the source is told where it stands"
    assert dest.ask(Forward(head(after=1, upto=9), record(2))).position == 9
    assert copies(dest) == [1, 2]


def test_an_origin_is_taken_up_only_where_that_is_asked_for(dest: Driver) -> None:
    with pytest.raises(RouterNotFound):
        dest.ask(Forward(head(), record(1)))
    assert dest.ask(Forward(head(bind=True, after=70, upto=71), record(1))).position == 71


def test_a_missing_box_is_made_only_where_that_is_asked_for(dest: Driver) -> None:
    with pytest.raises(BoxNotFound):
        dest.ask(Forward(head(box="new", bind=True), record(1)))
    config = patch(durability="fsync")
    dest.ask(Forward(head(box="new", bind=True, create=True, config=config), record(1)))
    assert dest.state("new").config.durability == "fsync"
    assert copies(dest, "new") == [1]


def test_a_refused_parcel_makes_no_box(dest: Driver) -> None:
    config = patch(cap_bytes=1)
    outcome = dest.do(Forward(head(box="new", bind=True, create=True, config=config), record(1)))
    assert not outcome.changes and "new" not in dest.machine.boxes


def test_an_empty_parcel_moves_the_origin(dest: Driver) -> None:
    assert dest.ask(Forward(head(bind=True, count=0, upto=20_000), b"")).position == 20_000
    assert copies(dest) == []
    again = dest.reborn()
    assert again.machine.boxes["to"].origins["q!"].position == 20_000
    empty = dest.do(Forward(head(box="new", bind=True, create=True, count=0), b""))
    assert [type(change).__name__ for _, change in empty.changes] == ["BoxCreated", "OriginMoved"]


def test_the_answer_waits_for_the_class_of_the_destination(dest: Driver) -> None:
    outcome = dest.do(Forward(head(bind=True), record(1)))
    assert outcome.until_durable and outcome.waits_for_lsn == dest.machine.lsn
    repeat = dest.do(Forward(head(bind=True), record(1)))
    assert repeat.until_durable and repeat.waits_for_lsn == dest.machine.lsn, "nor does a repeat overtake it"
    dest.sync()
    dest.put("mem", durability="memory")
    outcome = dest.do(Forward(head(box="mem", bind=True), record(1)))
    assert outcome.waits_for_lsn == 0 and outcome.wakes == ("mem",)


def test_a_full_or_fenced_box_refuses(dest: Driver) -> None:
    dest.put("to", cap_records=1, discard="reject")
    dest.ask(Forward(head(bind=True), record(1)))
    with pytest.raises(BoxFull):
        dest.ask(Forward(head(after=1, upto=2), record(2)))
    dest.ask(commands.SetFence("to", "mine"))
    with pytest.raises(FencingTokenMismatch):
        dest.ask(Forward(head(after=1, upto=2), record(2)))
    assert dest.machine.boxes["to"].origins["q!"].position == 1


def test_a_capped_box_evicts_for_copies_and_keeps_within_its_cap(dest: Driver) -> None:
    dest.put("to", cap_records=2)
    for number in range(1, 5):
        dest.ask(Forward(head(bind=True, after=number - 1, upto=number), record(number)))
    assert copies(dest) == [3, 4]
    again = dest.reborn()
    again.start("boot")
    assert copies(again) == [3, 4]


def test_another_life_of_the_source_begins_anew_and_says_so(dest: Driver) -> None:
    dest.ask(Forward(head(bind=True, life=5, upto=30), record(1)))
    stale = dest.ask(Forward(head(bind=True, life=4, after=30, upto=31), record(2)))
    assert (stale.life, stale.position) == (5, 30), "an earlier life has nothing to say"
    dest.ask(Forward(head(bind=True, life=6), record(3)))
    page = dest.read(1, box="to")
    assert page.tombstone is not None and page.tombstone.reason == "source_trim"
    assert copies(dest) == [1, 3]


def test_a_life_that_sent_nothing_ends_in_silence(dest: Driver) -> None:
    dest.ask(forwards.AttachEndpoint(box="to", origin=ORIGIN, life=5, position=0))
    dest.ask(Forward(head(origin=ORIGIN, life=6), record(1)))
    assert dest.read(0, box="to").tombstone is None


def test_origins_are_bounded_and_routers_are_never_forgotten(dest: Driver) -> None:
    with replaced.object(origins, "ORIGINS_MAX", 3):
        dest.ask(forwards.AttachEndpoint(box="to", origin="r#1", life=1, position=0))
        for name in ("a!", "b!"):
            dest.ask(Forward(head(origin=name, bind=True), record(1)))
        dest.ask(Forward(head(origin="a!", after=1, upto=2), record(2)))
        dest.ask(Forward(head(origin="c!", bind=True), record(1)))
        assert list(dest.machine.boxes["to"].origins) == ["r#1", "a!", "c!"], "b! had been still for longest"
        for number in (2, 3):
            dest.ask(forwards.AttachEndpoint(box="to", origin=f"r#{number}", life=1, position=0))
        with pytest.raises(Throttled) as refused:
            dest.ask(Forward(head(origin="d!", bind=True), record(1)))
        assert refused.value.detail == {"limit": "origins"}
        with pytest.raises(Throttled):
            dest.ask(forwards.AttachEndpoint(box="to", origin="r#9", life=1, position=0))


# -- loss


def test_what_the_source_lost_is_one_seq_of_the_destination(dest: Driver) -> None:
    dest.ask(Forward(head(bind=True), record(1)))
    dest.ask(Forward(head(after=1, upto=9, lost=7), record(9)))
    assert dest.seqs(box="to") == [1]
    page = dest.read(1, box="to")
    assert page.tombstone == commands.Tombstone(2, 2, "source_trim", 7, 1, 3)
    assert [each["$seq"] for each in records_of(page)] == [3]
    assert dest.state("to").count == 2
    for again in (dest.reborn(), dest.reborn(state=dest.machine.snapshot())):
        again.start("boot")
        assert again.read(1, box="to").tombstone == page.tombstone, "also after a restart"


def test_a_loss_before_nothing_is_told_with_the_next_record(dest: Driver) -> None:
    dest.ask(Forward(head(bind=True, count=0, upto=5, lost=2), b""))
    dest.ask(Forward(head(after=5, upto=8, lost=1), record(8)))
    assert dest.read(0, box="to").tombstone == commands.Tombstone(1, 1, "source_trim", 3, 2, 2)


def test_a_loss_that_is_not_durable_yet_is_not_told_yet(dest: Driver) -> None:
    dest.ask(Forward(head(bind=True), record(1)))
    dest.do(dest.write("staged", box="to"))
    dest.do(Forward(head(after=1, upto=9, lost=7), record(9)))
    page = dest.machine.handle(commands.ReadBox(box="to", from_seq=0), dest.now_ms).reply
    assert isinstance(page, commands.DiffResult)
    assert (page.head_seq, page.tombstone, len(records_of(page))) == (1, None, 1)
    at_head = dest.machine.handle(commands.ReadBox(box="to", from_seq=1), dest.now_ms).reply
    assert isinstance(at_head, commands.DiffResult) and at_head.tombstone is None


def test_holes_are_bounded_and_the_oldest_passes_its_count_on(dest: Driver) -> None:
    with replaced.object(box_log, "HOLES_MAX", 2):
        for number in range(1, 4):
            dest.ask(Forward(head(bind=True, after=number - 1, upto=number, lost=number), record(number)))
        first = dest.read(0, box="to")
        assert [each["$seq"] for each in records_of(first)] == [2] and first.tombstone is None
        second = dest.read(2, box="to")
        assert second.tombstone is not None and second.tombstone.missed_estimate == 3
        assert copies(dest) == [1, 2, 3]


def test_a_crash_after_a_trim_is_told_apart(dest: Driver) -> None:
    dest.put("disk", durability="disk")
    dest.ask(Forward(head(box="disk", bind=True, lost=2), record(1)))
    again = dest.after_power_cut()
    reasons = []
    cursor = 0
    while True:
        page = again.read(cursor, box="disk")
        reasons += [page.tombstone.reason] if page.tombstone is not None else []
        if page.next_from_seq == page.head_seq:
            break
        cursor = page.next_from_seq
    assert reasons == ["source_trim", "crash"]


# -- what an outbox sends


def test_a_router_copies_what_readers_may_see(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.do(source.write(1, box="from"))
    assert collect(source) == [], "it is not durable yet"
    assert forwards.RELAY in source.sync(), "the carrier is woken"
    carry_all(source, dest)
    assert copies(dest) == [1]
    assert the_outbox(source).lag == 0


def test_an_append_to_a_memory_box_wakes_the_carrier(source: Driver, dest: Driver) -> None:
    source.put("from2", durability="memory")
    tie(source, dest, source="from2")
    assert source.do(source.write(1, box="from2")).wakes == ("from2", forwards.RELAY)
    assert source.do(source.write(2, box="from2")).wakes == ("from2", forwards.RELAY)
    carry_all(source, dest)
    assert copies(dest) == [1, 2]


def test_parcels_are_bounded_in_records_and_bytes(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.append(*range(10), box="from")
    with replaced.object(outbox, "BATCH_RECORDS_MAX", 4):
        the_outbox(source).records_max = 4
        sizes = [forward_of(parcel).head.count for _ in range(3) for parcel in collect(source)]
    assert sizes == [4, 4, 2]
    the_outbox(source).records_max = 100
    with replaced("shard.core.routers.router_outbox.BATCH_BYTES_MAX", 100):
        sizes = [forward_of(parcel).head.count for _ in range(4) for parcel in collect(source, 2)]
    assert sizes == [3, 3, 3, 1], "a new carrier gets everything again"


def test_one_record_is_sent_however_large_it_is(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.append("x" * 1000, 2, box="from")
    source.append("y" * 1000, box="from")
    with replaced("shard.core.routers.router_outbox.BATCH_BYTES_MAX", 150):
        carry_all(source, dest)
    assert copies(dest) == ["x" * 1000, 2, "y" * 1000]


def test_few_parcels_are_out_at_a_time_and_room_comes_with_answers(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    the_outbox(source).records_max = 1
    count = outbox.OUTBOX_BATCHES_MAX + 6
    source.append(*range(count), box="from")
    parcels = [parcel for _ in range(count) for parcel in collect(source)]
    assert len(parcels) == outbox.OUTBOX_BATCHES_MAX
    assert the_outbox(source).done_position == 0 and the_outbox(source).lag == count
    source.do(bring(dest, parcels[0]))
    assert len(collect(source)) == 1


def test_bytes_out_are_bounded_for_each_outbox(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    the_outbox(source).records_max = 1
    with replaced.object(outbox, "OUTBOX_BYTES_MAX", 60):
        source.append("x" * 30, "y" * 30, "z" * 30, box="from")
        parcels = [parcel for _ in range(5) for parcel in collect(source)]
        assert len(parcels) == 1
        source.do(bring(dest, parcels[0]))
        assert len(collect(source)) == 1


def test_bytes_out_are_bounded_for_the_whole_shard(source: Driver, dest: Driver) -> None:
    for number in range(3):
        tie(source, dest, origin=f"copy#{number}")
    source.append("x" * 100, box="from")
    with replaced.object(outbox, "BYTES_IN_FLIGHT_MAX", 150):
        parcels = collect(source)
        assert len(parcels) == 2, "the first does not fill it, the second does"
        assert collect(source) == []
        source.do(bring(dest, parcels[0]))
        assert len(collect(source)) == 1
    assert source.machine.forwarding.outboxes.statistics() == {"parcels_out": 2, "parcel_bytes_out": 262}


def test_parcels_out_are_bounded_for_the_whole_shard(source: Driver, dest: Driver) -> None:
    for number in range(3):
        tie(source, dest, origin=f"copy#{number}")
    source.append(1, box="from")
    with replaced.object(outbox, "BATCHES_IN_FLIGHT_MAX", 2):
        parcels = collect(source)
        assert len(parcels) == 2 and collect(source) == []
        source.do(bring(dest, parcels[0]))
        assert [parcel.parcel.origin for parcel in collect(source)] == ["copy#2"], "each in its turn"


def test_one_answer_looks_at_so_many_records_and_the_others_have_their_turn(
    source: Driver, dest: Driver
) -> None:
    for number in range(3):
        tie(source, dest, origin=f"copy#{number}")
    source.append(*range(10), box="from")
    with replaced.object(outbox, "COLLECT_EXAMINE_MAX", 15):
        assert [given.parcel.origin for given in collect(source)] == ["copy#0", "copy#1"]
        assert [given.parcel.origin for given in collect(source)] == ["copy#2"]


def test_deleted_records_are_passed_over_and_a_filter_is_obeyed(source: Driver, dest: Driver) -> None:
    tie(source, dest, filter=Match("u-", is_prefix=True))
    source.append({"data": 1, "tag": "u-1"}, {"data": 2, "tag": "u-2"}, {"data": 3, "tag": "v"}, box="from")
    source.append(4, 5, box="from")
    source.append({"data": 6, "tag": "v"}, {"data": 7, "tag": "u-3"}, {"data": 8, "tag": "u-4"}, box="from")
    source.delete(tag="u-2", box="from")
    carry_all(source, dest)
    assert copies(dest) == [1, 7, 8]
    page = dest.read(0, box="to", include_tags=True)
    assert [each["$tag"] for each in records_of(page)] == ["u-1", "u-3", "u-4"]


def test_a_batch_without_live_records_is_passed_over(source: Driver, dest: Driver) -> None:
    source.append({"data": 1, "tag": "x"}, box="from")
    source.append({"data": 2, "tag": "y"}, box="from")
    source.append({"data": 3, "tag": "x"}, box="from")
    source.delete(tag="y", box="from")
    tie(source, dest, filter=Match("x"))
    carry_all(source, dest)
    assert copies(dest) == [1, 3]


def test_a_long_stretch_of_nothing_is_sent_as_a_position(source: Driver, dest: Driver) -> None:
    tie(source, dest, filter=Match("rare"))
    with (
        replaced.object(outbox, "EXAMINE_MAX", 5),
        replaced("shard.core.routers.router_outbox.EXAMINE_MAX", 5),
    ):
        for number in range(12):
            source.append(number, box="from")
        parcels = collect(source)
        labels = [forward_of(parcel).head for parcel in parcels]
        assert [(label.count, label.upto) for label in labels] == [(0, 5)]
        carry_all(source, dest, carrier=2)
    assert dest.machine.boxes["to"].origins[ORIGIN].position == 10
    assert the_outbox(source).done_position == 12, "what is left was seen, and need not be sent"


def test_what_is_lost_while_nothing_is_sent_is_not_forgotten(source: Driver, dest: Driver) -> None:
    source.put("from", cap_records=2)
    source.append(1, 2, box="from")
    tie(source, dest, filter=Match("x"))
    source.append(3, 4, box="from")
    assert collect(source) == []
    source.append({"data": 5, "tag": "x"}, box="from")
    carry_all(source, dest)
    assert copies(dest) == [5]
    tombstone = dest.read(0, box="to").tombstone
    assert tombstone is not None and tombstone.missed_estimate == 2


def test_a_loss_at_the_source_goes_down_the_chain(source: Driver, dest: Driver) -> None:
    source.put("from", cap_records=1)
    source.append(1, box="from")
    source.append(2, box="from")
    tie(source, dest)
    carry_all(source, dest)
    third = Driver()
    third.start("boot")
    third.put("end")
    tie(dest, third, source="to", dest="end", origin="next#2")
    carry_all(dest, third)
    tombstone = third.read(0, box="end").tombstone
    assert tombstone is not None and (tombstone.reason, tombstone.missed_estimate) == ("source_trim", 1)


def test_a_record_is_copied_16_times_and_no_more(source: Driver) -> None:
    source.put("back")
    tie(source, source, dest="back", origin="there#1")
    tie(source, source, source="back", dest="from", origin="back#2")
    source.append("ping", box="from")
    source.copy_all_locally()
    assert (source.state("from").head_seq, source.state("back").head_seq) == (9, 8)


def test_parcels_do_not_mix_hops(source: Driver, dest: Driver) -> None:
    dest.append("own", box="to")
    tie(source, dest)
    source.append("copy", box="from")
    carry_all(source, dest)
    dest.append("own again", box="to")
    end = Driver()
    end.start("boot")
    end.put("end")
    tie(dest, end, source="to", dest="end", origin="next#2")
    hops = [forward_of(parcel).head.hops for _ in range(3) for parcel in collect(dest)]
    assert hops == [1, 2, 1]


def test_nodes_stay_behind_when_asked(source: Driver, dest: Driver) -> None:
    tie(source, dest, preserve_node=False, preserve_tag=False)
    source.append({"data": 1, "node": "n", "tag": "t", "meta": {"m": 1}}, {"data": 2}, box="from")
    carry_all(source, dest)
    first, second = records_of(dest.read(0, box="to", include_tags=True))
    assert set(first) == {"$seq", "$ts", "meta", "data"} and set(second) == {"$seq", "$ts", "data"}


# -- what comes back


def test_a_smaller_parcel_is_tried_at_once_and_a_pause_comes_with_one_record(
    source: Driver, dest: Driver
) -> None:
    dest.put("to", cap_records=3, discard="reject")
    tie(source, dest)
    source.append(*range(8), box="from")
    tried = []
    while source.machine.forwarding.outboxes.next_retry_ms() is None:
        for parcel in collect(source):
            tried.append(forward_of(parcel).head.count)
            source.do(bring(dest, parcel))
    assert tried[:3] == [8, 4, 2] and tried[-1] == 1
    assert copies(dest) == [0, 1, 2]
    assert the_outbox(source).last_error.startswith("box_full: ")
    assert "blocked" in repr(the_outbox(source))


def test_pauses_double_up_to_a_bound_and_end_with_success(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.append(1, box="from")
    pauses = []
    for _ in range(12):
        (parcel,) = collect(source)
        outcome = source.do(parcel.refused("shard_unavailable"))
        assert outcome.wakes == (forwards.RELAY,)
        due = source.machine.next_deadline_ms()
        assert due is not None
        pauses.append(due - source.now_ms)
        assert collect(source) == []
        assert source.tick().wakes == ()
        source.now_ms = due
        assert source.tick().wakes == (forwards.RELAY,)
    assert pauses == [20, 40, 80, 160, 320, 640, 1280, 2000, 2000, 2000, 2000, 2000]
    assert the_outbox(source).last_error == "shard_unavailable"
    carry_all(source, dest)
    assert (the_outbox(source).failures, the_outbox(source).last_error) == (0, "")


def test_several_failures_of_one_moment_are_one(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    the_outbox(source).records_max = 1
    source.append(1, 2, 3, box="from")
    for parcel in [*collect(source), *collect(source), *collect(source)]:
        source.do(parcel.refused("shard_unavailable"))
    assert the_outbox(source).failures == 1
    carry_all(source, dest)
    assert copies(dest) == [1, 2, 3]


def test_answers_that_overtake_each_other_count_once(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    the_outbox(source).records_max = 1
    source.append(1, 2, 3, box="from")
    carried = [bring(dest, parcel) for _ in range(3) for parcel in collect(source)]
    for each in reversed(carried):
        source.do(each)
    assert (the_outbox(source).total, the_outbox(source).position) == (3, 3)
    source.do(carried[0])
    assert the_outbox(source).total == 3, "a second answer to one parcel says nothing"


def test_a_position_is_saved_now_and_then(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    kinds = []
    for number in range(4):
        source.append(number, box="from")
        (parcel,) = collect(source)
        kinds.append([type(change).__name__ for _, change in source.do(bring(dest, parcel)).changes])
        source.now_ms += 300
    assert kinds == [["OutboxMoved"], [], ["OutboxMoved"], []]
    again = source.reborn()
    again.start("boot")
    assert the_outbox(again).position == 3
    assert carry_all(again, dest) == 1, "one exchange to learn that all is there"
    assert (the_outbox(again).position, the_outbox(again).total) == (4, 4)
    assert copies(dest) == [0, 1, 2, 3]


def test_a_memory_destination_is_sent_what_follows_and_the_total_goes_on(source: Driver) -> None:
    dest = Driver()
    dest.start("boot")
    dest.put("to", durability="memory")
    tie(source, dest)
    source.append(1, 2, box="from")
    carry_all(source, dest)
    for state in (None, dest.machine.snapshot()):
        again = dest.reborn(state=state)
        again.start("boot")
        assert copies(again) == []
    source.append(3, box="from")
    carry_all(source, again)
    assert copies(again) == [3]
    assert the_outbox(source).total == 3


def test_a_memory_source_begins_anew(dest: Driver) -> None:
    source = Driver()
    source.start("boot")
    source.put("from", durability="memory")
    tie(source, dest)
    source.append(1, 2, box="from")
    carry_all(source, dest)
    for state in (None, source.machine.snapshot()):
        again = source.reborn(state=state)
        again.now_ms += 1
        again.start("boot")
    again.append(3, box="from")
    carry_all(again, dest)
    assert copies(dest) == [1, 2, 3]
    page = dest.read(2, box="to")
    assert page.tombstone is not None and page.tombstone.reason == "source_trim"


def test_a_late_answer_for_an_outbox_that_is_gone_is_dropped(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.append(1, box="from")
    (parcel,) = collect(source)
    source.ask(forwards.DetachEndpoint("from", ORIGIN))
    reply = source.ask(bring(dest, parcel))
    assert reply == forwards.ReportDeliveryReply(False)
    assert source.ask(ReportDelivery(1, 99)) == forwards.ReportDeliveryReply(False)


def test_an_outbox_that_is_gone_sends_nothing(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.append(1, box="from")
    source.ask(commands.DeleteBox("from"))
    assert collect(source) == []


def test_a_question_waits_when_there_is_nothing(source: Driver) -> None:
    assert source.do(Collect(1, 1000)).reply is None
    assert source.do(Collect(1)).reply == forwards.CollectReply(1, [])


def test_an_answer_to_a_parcel_of_an_earlier_life_is_not_taken_for_another(
    source: Driver, dest: Driver
) -> None:
    dest.put("other")
    tie(source, dest)
    tie(source, dest, origin="other#2", dest="other")
    source.append(1, 2, 3, box="from")
    old = [bring(dest, parcel) for parcel in collect(source)]
    again = source.reborn()
    again.start("boot")
    new = collect(again)
    assert {parcel.number for parcel in new} == {carried.number for carried in old}
    for carried in old:
        assert again.ask(carried) == forwards.ReportDeliveryReply(False)
    carry_all(again, dest, carrier=2)
    assert copies(dest) == copies(dest, "other") == [1, 2, 3]


def test_a_destination_that_knows_another_life_blocks(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    source.append(1, box="from")
    (parcel,) = collect(source)
    source.do(ReportDelivery(parcel.shard_life, parcel.number, ForwardReply(99_999, 50, 0, 1)))
    assert the_outbox(source).position == 0, "positions of two lives do not compare"
    assert the_outbox(source).last_error == "seq_mismatch"


def test_a_destination_that_lost_its_end_is_sent_it_again(source: Driver) -> None:
    dest = Driver()
    dest.start("boot")
    dest.put("to", durability="disk")
    tie(source, dest)
    dest.append("x", box="to")
    source.append(1, 2, box="from")
    (parcel,) = collect(source)
    source.do(bring(dest, parcel, sync=False))
    assert the_outbox(source).position == 2
    again = dest.after_power_cut()
    source.append(3, box="from")
    carry_all(source, again)
    assert copies(again) == ["x", 1, 2, 3]
    assert (the_outbox(source).position, the_outbox(source).total) == (3, 3)


def test_a_source_that_knows_less_than_the_destination_catches_up(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    the_outbox(source).records_max = 1
    source.append(1, 2, 3, box="from")
    parcels = [parcel for _ in range(3) for parcel in collect(source)]
    for parcel in parcels:
        bring(dest, parcel)
    (first, *_) = collect(source, carrier=2)
    source.do(bring(dest, first))
    assert (the_outbox(source).position, the_outbox(source).sent_position) == (3, 3)


def test_a_parcel_that_is_full_between_two_stretches_ends_there(source: Driver, dest: Driver) -> None:
    tie(source, dest, filter=Match("x"))
    tags = ("x", "y", "x", "y", "x")
    source.append(*({"data": at, "tag": tag} for at, tag in enumerate(tags)), box="from")
    the_outbox(source).records_max = 2
    (parcel,) = collect(source)
    assert (forward_of(parcel).head.count, forward_of(parcel).head.upto) == (2, 4)
    source.do(bring(dest, parcel))
    carry_all(source, dest)
    assert copies(dest) == [0, 2, 4]
    assert not Match("x").accepts("")


def test_an_outbox_must_say_what_it_sends() -> None:
    bare = Outbox(source="a", origin="o", dest="b", generation=1, position=0)
    with pytest.raises(NotImplementedError):
        bare.recreate(box_log.BoxLog(), 2)
    with pytest.raises(NotImplementedError):
        bare.next_records(0, 1)
    with pytest.raises(NotImplementedError):
        bare.batch_head(Load(0), 0)


# -- ties


def test_ties_are_repeatable_and_the_first_position_counts(source: Driver, dest: Driver) -> None:
    source.append(1, 2, box="from")
    route = tie(source, dest, from_seq=1)
    life = source.state("from").generation
    again = dest.ask(forwards.AttachEndpoint(box="to", origin=ORIGIN, life=life, position=2))
    assert again == forwards.AttachEndpointReply(life, 1)
    again = source.ask(forwards.AttachEndpoint(box="from", origin=ORIGIN, life=life, position=2, route=route))
    assert again == forwards.AttachEndpointReply(life, 1)
    assert not source.do(
        forwards.AttachEndpoint(box="from", origin=ORIGIN, life=life, position=0, route=route)
    ).changes


def test_a_position_beyond_the_head_or_of_another_life_is_brought_in(source: Driver, dest: Driver) -> None:
    source.append(1, 2, box="from")
    life = source.state("from").generation
    route = tie(source, dest)
    far = source.ask(forwards.AttachEndpoint(box="from", origin="far#2", life=life, position=70, route=route))
    other = source.ask(
        forwards.AttachEndpoint(box="from", origin="other#3", life=life - 1, position=2, route=route)
    )
    assert (far.position, other.position) == (2, 0)


def test_a_newer_route_replaces_an_older_one_where_it_stands_and_not_the_reverse(
    source: Driver, dest: Driver
) -> None:
    tie(source, dest, filter=Match("x"), revision=2)
    source.append({"data": 1, "tag": "x"}, {"data": 2, "tag": "y"}, box="from")
    carry_all(source, dest)
    tie(source, dest, filter=Match("y"), revision=3)
    tie(source, dest, filter=Match("x"), revision=2)
    source.append({"data": 3, "tag": "x"}, {"data": 4, "tag": "y"}, box="from")
    carry_all(source, dest)
    assert copies(dest) == [1, 4]
    assert the_outbox(source).total == 2


def test_untying_is_repeatable_and_forgets_both_ends(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    assert source.ask(forwards.DetachEndpoint("from", ORIGIN)) == forwards.DetachEndpointReply(True)
    assert source.ask(forwards.DetachEndpoint("from", ORIGIN)) == forwards.DetachEndpointReply(False)
    assert dest.ask(forwards.DetachEndpoint("to", ORIGIN)) == forwards.DetachEndpointReply(True)
    assert dest.ask(forwards.DetachEndpoint("gone", ORIGIN)) == forwards.DetachEndpointReply(False)
    with pytest.raises(RouterNotFound):
        dest.ask(Forward(head(origin=ORIGIN), record(1)))
    for driver, box in ((source, "from"), (dest, "to")):
        again = driver.reborn()
        assert not again.machine.boxes[box].outboxes and not again.machine.boxes[box].origins


def test_a_tie_needs_its_box(source: Driver) -> None:
    with pytest.raises(BoxNotFound):
        source.ask(forwards.AttachEndpoint(box="gone", origin=ORIGIN, life=1, position=0))


def test_an_answer_about_a_tie_waits_until_it_is_durable(source: Driver, dest: Driver) -> None:
    outcome = dest.do(forwards.AttachEndpoint(box="to", origin=ORIGIN, life=1, position=0))
    assert outcome.until_durable and outcome.waits_for_lsn == dest.machine.lsn
    repeat = dest.do(forwards.AttachEndpoint(box="to", origin=ORIGIN, life=1, position=0))
    assert repeat.until_durable and repeat.waits_for_lsn == dest.machine.lsn
    dest.sync()
    assert dest.do(forwards.ListEndpoints()).waits_for_lsn == 0


def test_ties_are_listed_when_they_have_changed(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    ties = source.ask(forwards.ListEndpoints())
    assert (ties.sources, ties.dests, ties.is_same) == ([("from", ORIGIN)], [], False)
    assert dest.ask(forwards.ListEndpoints()).dests == [("to", ORIGIN)]
    assert source.ask(forwards.ListEndpoints(ties.version)).is_same
    source.append(1, box="from")
    carry_all(source, dest)
    assert source.ask(forwards.ListEndpoints(ties.version)).is_same, "copying is no change of ties"
    source.ask(commands.DeleteBox("from"))
    assert source.ask(forwards.ListEndpoints(ties.version)).sources == []


def test_a_deleted_box_says_which_routers_it_had(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    dest.ask(Forward(head(bind=True), record(1)))
    gone = dest.ask(commands.DeleteBox("to"))
    assert gone.routers_removed == [ORIGIN], "dead letters are no routers"
    assert source.ask(commands.DeleteBox("from")).routers_removed == [ORIGIN]


def test_an_outbox_says_how_far_it_is(source: Driver, dest: Driver) -> None:
    assert not source.ask(forwards.GetOutbox("from", ORIGIN)).is_tied
    assert not source.ask(forwards.GetOutbox("gone", ORIGIN)).is_tied
    tie(source, dest)
    source.append(1, 2, box="from")
    carry_all(source, dest)
    state = source.ask(forwards.GetOutbox("from", ORIGIN))
    assert state == forwards.OutboxState(is_tied=True, forwarded_total=2, position=2)


def test_a_head_that_is_no_head_is_refused() -> None:
    for op in (wire.OP_FORWARD, wire.OP_COLLECT, wire.OP_REPORT_DELIVERY, wire.OP_FORWARDING):
        with pytest.raises(InvalidRequest, match="head"):
            decode_command(op, b"\xc1", b"", RecordLimits())
    command = decode_command(
        wire.OP_FORWARDING, forwards.encode(forwards.DetachEndpoint("b", "o")), b"", RecordLimits()
    )
    assert command == forwards.DetachEndpoint("b", "o")


def test_everything_says_what_it_is(source: Driver, dest: Driver) -> None:
    tie(source, dest)
    assert repr(source.machine.forwarding) == (
        "<Forwarding <Outboxes 1 waiting, 0 local, 0 copy batches in flight>>"
    )
    assert repr(the_outbox(source)) == "<Outbox copy#1 to to at 0, 0 in flight, ok>"
    assert repr(Machine().routers) == "<Routers 0 up to number 0>"
    assert ForwardReply(1, 2, 3, 4).position == 2
