"""Goal: a write is atomic, conditional, remembered by its key, and held to the caps of its box (§3)."""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.boxes import appliers, handlers, key_expiry
from shard.core.boxes import box as box_module
from shard.core.machine import Machine
from streams.protocol.errors import (
    BoxFull,
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    RecordTooLarge,
    SeqMismatch,
    Throttled,
)
from streams.protocol.messages import commands
from tests.support.machines import Driver, patch, records_of


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_the_first_record_of_a_box_has_seq_one_and_seqs_have_no_gaps(driver: Driver) -> None:
    first = driver.append("a", "b")
    assert (first.first_seq, first.last_seq, first.head_seq, first.created) == (1, 2, 2, True)
    second = driver.append("c")
    assert (second.first_seq, second.last_seq, second.created, second.deduped) == (3, 3, False, False)
    assert [record["data"] for record in records_of(driver.read())] == ["a", "b", "c"]


def test_a_write_may_be_told_not_to_create_a_box(driver: Driver) -> None:
    with pytest.raises(BoxNotFound):
        driver.append(1, create=False)
    assert not driver.machine.boxes and not driver.log
    driver.append(1, create=True, config=patch(cap_records=5))
    assert driver.state().config.cap_records == 5
    driver.append(1, create=True, config=patch(cap_records=9))
    assert driver.state().config.cap_records == 5, "a config is used only by the write that creates"


def test_a_box_that_must_not_come_back_by_itself_comes_back_when_told_to(driver: Driver) -> None:
    driver.put(auto_create=False)
    driver.ask(commands.DeleteBox("b"))
    with pytest.raises(BoxNotFound):
        driver.append(1)
    assert driver.append(1, create=True).created
    driver.ask(commands.DeleteBox("b"))
    assert driver.append(1).created, "the box that was deleted last had no such wish"


def test_names_that_must_not_come_back_are_remembered_up_to_a_number(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appliers, "NOT_RECREATED_MAX", 2)
    for box in ("x", "y", "z"):
        driver.put(box, auto_create=False)
        driver.ask(commands.DeleteBox(box))
    assert driver.append(1, box="x").created
    with pytest.raises(BoxNotFound):
        driver.append(1, box="z")


def test_no_more_boxes_than_allowed() -> None:
    driver = Driver(Machine(boxes_max=1))
    driver.append(1)
    with pytest.raises(Throttled) as caught:
        driver.append(1, box="other")
    assert caught.value.detail == {"limit": "boxes"}
    with pytest.raises(Throttled):
        driver.put("other")


# -- conditions


def test_match_seq_lets_one_writer_win(driver: Driver) -> None:
    driver.append(1, match_seq=1)
    with pytest.raises(SeqMismatch) as caught:
        driver.append(2, match_seq=1)
    assert caught.value.detail == {"next_seq": 2}
    assert driver.append(2, match_seq=2).first_seq == 2
    with pytest.raises(SeqMismatch):
        driver.append(1, box="new", match_seq=2)
    assert "new" not in driver.machine.boxes, "a write that is refused creates nothing"


def test_a_fence_keeps_the_replaced_writer_out(driver: Driver) -> None:
    driver.append(1, fencing_token="any")  # a box without a fence takes every token
    assert driver.ask(commands.SetFence("b", "t1")) == commands.SetFenceReply("b", "t1")
    for token in (None, "any", ""):
        with pytest.raises(FencingTokenMismatch):
            driver.append(2, fencing_token=token)
    driver.append(2, fencing_token="t1")
    assert driver.state().fencing_token == "t1"
    with pytest.raises(FencingTokenMismatch):
        driver.ask(commands.SetFence("b", "t2", if_token="t0"))
    driver.ask(commands.SetFence("b", "t2", if_token="t1"))
    driver.ask(commands.SetFence("b", ""))
    driver.append(3)
    with pytest.raises(BoxNotFound):
        driver.ask(commands.SetFence("nowhere", "t"))


def test_setting_the_fence_that_is_set_logs_nothing(driver: Driver) -> None:
    driver.append(1)
    driver.ask(commands.SetFence("b", "t"))
    assert driver.do(commands.SetFence("b", "t")).changes == []


def test_a_snapshot_in_the_stream_is_one_step(driver: Driver) -> None:
    driver.append("a", "b", "c")
    driver.append("snapshot", match_seq=4, trim_before_seq=4)
    assert driver.seqs() == [4]
    assert driver.read().tombstone is None, "what was trimmed was asked for"
    with pytest.raises(InvalidRequest, match="trim_before_seq"):
        driver.append("x", trim_before_seq=6)
    assert driver.seqs() == [4], "nothing is trimmed by a write that is refused"
    driver.append("y", trim_before_seq=5)
    assert driver.seqs() == [5]


def test_what_is_trimmed_makes_room_in_a_full_box(driver: Driver) -> None:
    driver.put(cap_records=3, discard="reject")
    driver.append(1, 2, 3)
    with pytest.raises(BoxFull):
        driver.append(4)
    driver.append(4, trim_before_seq=2)
    assert driver.seqs() == [2, 3, 4]
    driver.put(discard="old")
    driver.append(5, 6, trim_before_seq=3)
    read = driver.read()
    assert driver.seqs(3) == [4, 5, 6]
    assert read.tombstone is not None and read.tombstone.reason == "cap"


# -- idempotency


def test_a_repeated_key_is_answered_with_the_first_seqs(driver: Driver) -> None:
    driver.append("a", "b", idempotency_key="k")
    driver.append("c")
    again = driver.append("anything", idempotency_key="k", match_seq=99, fencing_token="wrong")
    assert (again.first_seq, again.last_seq, again.head_seq) == (1, 2, 3)
    assert again.deduped and not again.created
    assert driver.seqs() == [1, 2, 3]


def test_a_key_lasts_as_long_as_its_window(driver: Driver) -> None:
    driver.put(idempotency_window_ms=100)
    driver.append("a", idempotency_key="k")
    driver.now_ms += 100
    driver.append("another", box="b")
    assert driver.append("a", idempotency_key="k").deduped
    driver.now_ms += 1
    again = driver.append("a", idempotency_key="k")
    assert not again.deduped and again.first_seq == 3
    driver.now_ms += 50
    assert driver.append("a", idempotency_key="k").first_seq == 3, "the window begins with the new write"


def test_keys_that_have_lapsed_are_forgotten_by_later_writes(driver: Driver) -> None:
    driver.put(idempotency_window_ms=100)
    for key in ("k1", "k2"):
        driver.append("a", idempotency_key=key)
        driver.now_ms += 60
    assert driver.machine.statistics()["idempotency_keys"] == 2
    driver.append("b")
    assert driver.machine.statistics()["idempotency_keys"] == 1
    driver.now_ms += 500
    driver.append("b")
    assert driver.machine.statistics()["idempotency_keys"] == 0


def test_a_shard_with_too_many_keys_takes_keyed_writes_again_when_old_keys_lapse(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "KEYS_MAX", 3)
    driver.put("idle", idempotency_window_ms=100)
    for key in ("k1", "k2", "k3"):
        driver.append("a", box="idle", idempotency_key=key)
    with pytest.raises(Throttled, match="idempotency"):
        driver.append("a", idempotency_key="k")
    assert driver.append("a", box="idle", idempotency_key="k1").deduped, "none is forgotten early"
    driver.now_ms += 101
    assert driver.append("a", idempotency_key="k").first_seq == 1, "though nobody writes to the idle box"
    assert driver.machine.keys_kept == 1


def test_keys_lapse_by_time_alone_in_bounded_steps(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_expiry, "STEP_KEYS", 4)
    driver.put(idempotency_window_ms=1_000_000)
    for key in range(6):
        driver.append("a", idempotency_key=f"k{key}")
        driver.append("a", box="other", idempotency_key=f"k{key}")
    driver.put(idempotency_window_ms=100)
    driver.put("other", idempotency_window_ms=100)
    driver.now_ms += 101 + key_expiry.SLACK_MS
    left = []
    while (due_ms := driver.machine.next_deadline_ms()) is not None and due_ms <= driver.now_ms:
        driver.tick()
        left.append(driver.machine.keys_kept)
    assert left == [8, 4, 0]


def test_lapsed_keys_are_dropped_after_a_restart_too(driver: Driver) -> None:
    driver.put(idempotency_window_ms=100)
    driver.append("a", idempotency_key="k")
    for again in (driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        assert again.append("a", idempotency_key="k").deduped
        again.now_ms += 101 + key_expiry.SLACK_MS
        again.tick()
        assert again.machine.keys_kept == 0


def test_one_write_after_a_pause_does_not_drop_all_lapsed_keys_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "APPEND_KEYS_MAX", 2)
    driver.put(idempotency_window_ms=100)
    for key in range(6):
        driver.append("a", idempotency_key=f"k{key}")
    driver.now_ms += 101
    driver.append("b", idempotency_key="k")
    assert driver.machine.keys_kept == 5


def test_a_deleted_box_leaves_nothing_to_lapse(driver: Driver) -> None:
    driver.append("a", idempotency_key="k")
    driver.ask(commands.DeleteBox("b"))
    driver.now_ms += 1_000_000
    driver.tick()
    assert driver.machine.next_deadline_ms() is None


def test_a_key_that_is_used_again_does_not_keep_older_ones_alive(driver: Driver) -> None:
    driver.put(idempotency_window_ms=100)
    driver.append("a", idempotency_key="k1")
    driver.append("a", idempotency_key="k2")
    driver.now_ms += 101
    driver.append("a", idempotency_key="k1")
    assert driver.machine.statistics()["idempotency_keys"] == 1


def test_a_window_of_nothing_remembers_nothing(driver: Driver) -> None:
    driver.put(idempotency_window_ms=0)
    assert driver.append("a", idempotency_key="k").first_seq == 1
    assert driver.append("a", idempotency_key="k").first_seq == 2


def test_keys_are_of_a_box_and_go_with_it(driver: Driver) -> None:
    driver.append("a", idempotency_key="k")
    assert not driver.append("a", box="other", idempotency_key="k").deduped
    driver.ask(commands.DeleteBox("b"))
    assert driver.append("a", idempotency_key="k").created


def test_when_too_many_keys_are_remembered_writers_are_told_to_wait(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "KEYS_MAX", 1)
    driver.append("a", idempotency_key="k1")
    with pytest.raises(Throttled) as caught:
        driver.append("a", idempotency_key="k2")
    assert caught.value.detail == {"limit": "idempotency_keys"}
    assert driver.append("a", idempotency_key="k1").deduped
    assert driver.append("a").first_seq == 2


# -- caps


def test_a_full_box_evicts_the_oldest_or_refuses(driver: Driver) -> None:
    driver.put(cap_records=3)
    driver.append(1, 2)
    driver.append(3, 4)
    assert driver.seqs(1) == [2, 3, 4]
    driver.put(discard="reject")
    with pytest.raises(BoxFull) as caught:
        driver.append(5)
    assert caught.value.detail["count"] == 3
    assert driver.seqs(1) == [2, 3, 4]


def test_a_box_is_capped_by_bytes_too(driver: Driver) -> None:
    size = len(b'{"$seq":1,"$ts":1000,"data":1}')
    driver.put(cap_bytes=2 * size)
    for number in range(1, 5):
        driver.append(number)
    assert driver.seqs(2) == [3, 4] and driver.state().bytes == 2 * size


@pytest.mark.parametrize("discard", ["old", "reject"])
@pytest.mark.parametrize("cap", [{"cap_records": 2}, {"cap_bytes": 80}])
def test_a_write_larger_than_the_whole_box_is_too_large_not_too_late(
    driver: Driver, discard: str, cap: dict[str, int]
) -> None:
    driver.put(discard=discard, **cap)
    with pytest.raises(RecordTooLarge):
        driver.append(1, 2, 3)
    assert driver.state().head_seq == 0


def test_expired_records_make_room_before_a_full_box_refuses(driver: Driver) -> None:
    driver.put(cap_records=2, discard="reject", ttl_ms=10)
    driver.append(1, 2)
    driver.now_ms += 11
    assert driver.append(3).first_seq == 3


def test_a_refusal_may_still_carry_what_has_expired(driver: Driver) -> None:
    driver.put(ttl_ms=10)
    driver.append(1)
    driver.now_ms += 11
    outcome = driver.do(driver.write(2, match_seq=1))
    assert isinstance(outcome.reply, SeqMismatch)
    assert [type(change).__name__ for _, change in outcome.changes] == ["RecordsEvicted"]
    assert outcome.waits_for_lsn == driver.machine.lsn


# -- times


def times(driver: Driver, **options: Any) -> list[int]:
    return [record["$ts"] for record in records_of(driver.read(**options))]


def test_times_never_go_back_even_if_the_clock_does(driver: Driver) -> None:
    driver.append(1)
    driver.now_ms -= 500
    driver.append(2)
    assert times(driver) == [1000, 1000]


def test_client_times_follow_the_mode_of_the_box(driver: Driver) -> None:
    driver.put(timestamping={"mode": "client-prefer"})
    driver.append({"data": 1, "ts": 500}, {"data": 2}, {"data": 3, "ts": 9999})
    assert times(driver) == [500, 1000, 1000]
    driver.put(timestamping={"mode": "client-require", "uncapped": True})
    with pytest.raises(InvalidRequest, match=r"records\[1\]\.ts"):
        driver.append({"data": 1, "ts": 5000}, {"data": 2})
    driver.append({"data": 1, "ts": 5000})
    driver.put(timestamping={"mode": "arrival"})
    driver.append({"data": 1, "ts": 1})
    assert times(driver) == [500, 1000, 1000, 5000, 5000]
