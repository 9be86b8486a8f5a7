"""Goal: a reader sees every loss that no client requested, once, and none that somebody asked for (§4)."""

from __future__ import annotations

import pytest

from shard.core.boxes import pages as pages_module
from streams.protocol.errors import BoxNotFound, InvalidRequest, NotFound
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Match, Tombstone
from streams.protocol.payloads.appends import RecordLimits, parse_append
from tests.support.machines import Driver, records_of, seqs_of


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_the_cursor_says_how_far_a_reader_is(driver: Driver) -> None:
    driver.append(*range(5))
    page = driver.read(limit=2)
    assert (seqs_of(page), page.next_from_seq, page.head_seq, page.records_scanned) == ([1, 2], 2, 5, 2)
    rest = driver.read(page.next_from_seq)
    assert (seqs_of(rest), rest.next_from_seq) == ([3, 4, 5], 5)
    end = driver.read(5)
    assert (end.records, end.next_from_seq, end.tombstone) == (b"", 5, None)


def test_a_page_may_end_between_two_writes(driver: Driver) -> None:
    driver.append(1, 2)
    driver.append(3)
    page = driver.read(limit=2)
    assert (seqs_of(page), page.next_from_seq) == ([1, 2], 2)


def test_a_page_ends_where_its_bytes_end_but_has_at_least_one_record(driver: Driver) -> None:
    driver.append("x" * 100, "y", "z")
    driver.append("w")
    assert driver.seqs(max_bytes=1) == [1]
    assert driver.seqs(1, max_bytes=70) == [2, 3]
    assert driver.seqs(1, max_bytes=100) == [2, 3, 4]
    assert driver.seqs(1, max_bytes=66) == [2, 3]


def test_eviction_is_told_and_deletion_is_not(driver: Driver) -> None:
    driver.put(cap_records=3)
    driver.append(1, 2, 3)
    driver.delete(2)
    assert driver.read().tombstone is None
    driver.append(4, 5)
    read = driver.read()
    assert read.tombstone == Tombstone(1, 2, "cap", 2, 3, 5)
    assert seqs_of(read) == [3, 4, 5]
    assert driver.read(1).tombstone == Tombstone(2, 2, "cap", 1, 3, 5)
    assert driver.read(2).tombstone is None


def test_a_gap_of_both_kinds_reaches_to_the_first_live_record(driver: Driver) -> None:
    driver.put(cap_records=4)
    driver.append(1, 2, 3, 4)
    driver.append(5)
    driver.delete(4)
    assert driver.read().tombstone == Tombstone(1, 3, "cap", 1, 4, 5)
    assert driver.read(1).tombstone is None, "between there were only deletes"


def test_a_gap_says_cap_or_ttl_or_mixed(driver: Driver) -> None:
    driver.put(cap_records=2, ttl_ms=100)
    driver.append(1, 2)
    driver.append(3)
    read = driver.read()
    assert read.tombstone is not None and read.tombstone.reason == "cap"
    driver.now_ms += 101
    driver.append(4)
    assert driver.read().tombstone == Tombstone(1, 3, "mixed", 3, 4, 4)
    assert driver.read(1).tombstone == Tombstone(2, 3, "ttl", 2, 4, 4)


def test_records_expire_when_they_are_strictly_older_than_the_ttl(driver: Driver) -> None:
    driver.put(ttl_ms=100)
    driver.append(1)
    driver.now_ms += 100
    assert driver.seqs() == [1]
    driver.now_ms += 1
    read = driver.read()
    assert (seqs_of(read), read.earliest_seq, read.next_from_seq) == ([], 2, 1)
    assert read.tombstone == Tombstone(1, 1, "ttl", 1, 2, 1)


def test_a_cursor_of_an_earlier_life_is_told_so(driver: Driver) -> None:
    driver.append(1, 2, 3)
    old = driver.state().generation
    driver.ask(commands.DeleteBox("b"))
    driver.append(4)
    assert driver.state().generation > old
    for read in (driver.read(3), driver.read(1, generation=old), driver.read(0, generation=old)):
        assert read.tombstone == Tombstone(1, 1, "recreated", 1, 1, 1)
        assert seqs_of(read) == [1]
    assert driver.read(1).tombstone is None
    assert driver.read(1, generation=driver.state().generation).tombstone is None


def test_a_cursor_beyond_an_empty_box_is_told_so(driver: Driver) -> None:
    driver.put()
    assert driver.read(5).tombstone == Tombstone(1, 0, "recreated", 0, 1, 0)
    assert driver.read(0).tombstone is None


# -- filters


def test_records_of_the_readers_own_nodes_are_left_out(driver: Driver) -> None:
    driver.append(1, node="a")
    driver.append({"data": 2, "node": "a"}, {"data": 3, "node": "b"}, {"data": 4}, {"data": 5, "node": "a"})
    driver.append(6, 7, node="b")
    driver.append(8)
    assert driver.seqs(nodes=frozenset({"a"})) == [3, 4, 6, 7, 8]
    assert driver.seqs(nodes=frozenset({"a", "b"})) == [4, 8]
    assert driver.read(nodes=frozenset({"a", "b"})).next_from_seq == 8
    driver.put(dedupe_node=False)
    assert driver.seqs(nodes=frozenset({"a", "b"})) == list(range(1, 9))


def test_a_reader_may_ask_for_some_tags_only(driver: Driver) -> None:
    driver.append(1)
    driver.append(
        {"data": 2, "tag": "u-1"}, {"data": 3}, {"data": 4, "tag": "u-2"}, {"data": 5, "tag": "u-2"}
    )
    assert driver.seqs(match=Match("u-2")) == [4, 5]
    assert driver.seqs(match=Match("u-", is_prefix=True)) == [2, 4, 5]
    assert driver.seqs(match=Match("u-", is_prefix=True), limit=1) == [2]
    assert driver.seqs(match=Match("u-", is_prefix=True), limit=2) == [2, 4]
    assert driver.read(match=Match("none")).next_from_seq == 5


def test_filters_work_together(driver: Driver) -> None:
    driver.append({"data": 1, "tag": "t", "node": "a"}, {"data": 2, "tag": "t"}, {"data": 3, "node": "a"})
    assert driver.seqs(nodes=frozenset({"a"}), match=Match("t")) == [2]


def test_a_read_that_skips_a_lot_answers_with_what_it_has(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "EXAMINE_MAX", 4)
    driver.append(*({"data": index, "tag": "t" if index == 9 else ""} for index in range(6)))
    driver.append(*({"data": index, "tag": "t"} for index in range(4)))
    driver.append({"data": 1, "tag": "t"})
    cursor, found, reads = 0, [], 0
    while cursor < 11:
        page = driver.read(cursor, match=Match("t"))
        assert page.next_from_seq > cursor and page.records_scanned <= 4
        cursor, reads = page.next_from_seq, reads + 1
        found += seqs_of(page)
    assert found == [7, 8, 9, 10, 11] and reads == 3


def test_a_read_that_has_seen_enough_stops_between_two_stretches(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "EXAMINE_MAX", 2)
    driver.append(*({"data": index, "tag": "x" if index == 2 else "y"} for index in range(5)))
    driver.delete(tag="x")
    page = driver.read()
    assert seqs_of(page) == [1, 2] and page.next_from_seq == 3


def test_a_reader_may_leave_out_parts_and_ask_for_tags(driver: Driver) -> None:
    driver.append({"data": 1, "tag": "t", "meta": {"m": 1}, "node": "n"})
    whole = {"$seq": 1, "$ts": 1000, "$node": "n", "$tag": "t", "meta": {"m": 1}, "data": 1}
    assert records_of(driver.read(include_tags=True)) == [whole]
    assert records_of(driver.read()) == [{k: v for k, v in whole.items() if k != "$tag"}]
    lean = driver.read(include_tags=True, include_meta=False, include_data=False)
    assert records_of(lean) == [{k: v for k, v in whole.items() if k.startswith("$")}]


# -- by time


def test_a_reader_may_start_at_a_time(driver: Driver) -> None:
    for _ in range(3):
        driver.append(1, 2)
        driver.now_ms += 100
    assert driver.seqs(from_ts=0) == [1, 2, 3, 4, 5, 6]
    assert driver.seqs(from_ts=1001) == [3, 4, 5, 6]
    assert driver.seqs(from_ts=1200) == [5, 6]
    assert driver.read(from_ts=9999).next_from_seq == 6
    assert driver.read(from_ts=0).tombstone is None


def test_a_reader_who_starts_at_a_time_that_was_lost_is_told(driver: Driver) -> None:
    driver.put(cap_records=2)
    for _ in range(4):
        driver.append(1)
        driver.now_ms += 100
    read = driver.read(from_ts=1100)
    assert read.tombstone is not None and read.tombstone.reason == "cap"
    assert seqs_of(read) == [3, 4]
    assert driver.read(from_ts=1101).tombstone is None


def test_a_loss_on_its_way_to_the_disk_is_told_to_a_reader_by_time(driver: Driver) -> None:
    """Failed before: the floor of staged writes hid the loss of the record that was visible."""
    driver.put(cap_records=1, durability="fsync")
    driver.append(1)
    driver.do(driver.write(2))
    driver.do(driver.write(3))
    outcome = driver.do(commands.ReadBox(box="b", from_ts=0))
    assert isinstance(outcome.reply, commands.DiffResult)
    assert outcome.reply.tombstone == Tombstone(1, 1, "cap", 1, 2, 1)
    assert outcome.waits_for_lsn == driver.machine.lsn and outcome.until_durable


# -- one record, the tail, waiting


def test_one_record_is_shown_whole_while_it_lives(driver: Driver) -> None:
    driver.append({"data": 1, "tag": "t"}, {"data": 2})
    assert driver.ask(commands.GetRecord("b", 1)).record == b'{"$seq":1,"$ts":1000,"$tag":"t","data":1}'
    driver.delete(2)
    for seq in (0, 1, 3):
        with pytest.raises(NotFound):
            driver.ask(commands.GetRecord("b", seq))


def test_the_tail_outlives_its_records(driver: Driver) -> None:
    driver.put()
    assert driver.ask(commands.GetTail("b")) == commands.Tail("b", 0, 1, None)
    driver.append(1)
    driver.delete(9)
    assert driver.ask(commands.GetTail("b")) == commands.Tail("b", 1, 2, 1000)


def test_a_read_with_nothing_to_show_may_wait(driver: Driver) -> None:
    driver.append(1)
    assert driver.do(commands.ReadBox(box="b", from_seq=1, wait_ms=1)).reply is None
    assert driver.do(commands.ReadBox(box="b", from_seq=1)).reply is not None
    assert driver.do(commands.ReadBox(box="b", from_seq=0, wait_ms=1)).reply is not None
    assert driver.do(commands.ReadBox(box="b", from_seq=9, wait_ms=1)).reply is not None, (
        "a tombstone is news"
    )


def test_nothing_is_read_from_a_box_that_is_not_there(driver: Driver) -> None:
    for command in (
        commands.ReadBox(box="b"),
        commands.GetState("b"),
        commands.GetRecord("b", 1),
        commands.GetTail("b"),
        commands.DeleteRecords("b", 1),
    ):
        with pytest.raises(BoxNotFound):
            driver.ask(command)
    assert not driver.machine.boxes


def test_whatever_was_taken_can_be_read_in_every_form(driver: Driver) -> None:
    """Data nested as deep as a write just takes is decoded again for `include_tags`, with less stack left."""
    for depth in range(900, 1100):
        body = b'{"records":[{"data":' + b"[" * depth + b"]" * depth + b',"tag":"t"}]}'
        try:
            written = parse_append(body, RecordLimits())
        except InvalidRequest:
            break
        driver.ask(commands.Append(box="b", columns=written.columns))
        driver.machine.handle(
            commands.ReadBox(box="b", from_seq=driver.state().head_seq - 1, include_tags=True), 0
        )
