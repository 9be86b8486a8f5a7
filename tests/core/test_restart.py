"""Goal: a restart changes nothing that was promised, whether from the log alone or from a snapshot too.

Method: the same question before and after; the log is cut and snapshots are taken at random in `tests/model`.
"""

from __future__ import annotations

import pytest

from shard.core.machine import Machine
from streams.protocol.errors import BoxNotFound, FencingTokenMismatch
from streams.protocol.messages import bulk, commands, queues
from streams.protocol.payloads.packed import pack
from tests.support.machines import Driver, facts_of, put_of, records_of


def both_ways(driver: Driver) -> list[Driver]:
    """The driver after a restart from the log, and from a snapshot."""
    survivors = [driver.reborn(), driver.reborn(state=driver.machine.snapshot())]
    for survivor in survivors:
        survivor.start("boot")
    return survivors


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def test_tombstones_keep_their_reason(driver: Driver) -> None:
    for box, config in (("cap", {"cap_records": 2}), ("ttl", {"ttl_ms": 10}), ("mixed", {"cap_records": 2})):
        driver.put(box, durability="fsync", **config)
        driver.append(1, 2, box=box)
    driver.append(3, box="cap")
    driver.append(3, box="mixed")
    driver.now_ms += 11
    driver.append(3, box="ttl")
    driver.put("mixed", ttl_ms=10)
    for survivor in both_ways(driver):
        for box in ("cap", "ttl", "mixed"):
            before, after = driver.read(box=box), survivor.read(box=box)
            assert after == before
            assert after.tombstone is not None and after.tombstone.reason == box


def test_keys_fences_and_barred_names_are_remembered(driver: Driver) -> None:
    driver.put(durability="fsync")
    driver.append("a", "b", idempotency_key="k")
    driver.ask(commands.SetFence("b", "t"))
    driver.put("barred", auto_create=False)
    driver.ask(commands.DeleteBox("barred"))
    for survivor in both_ways(driver):
        again = survivor.append("a", "b", idempotency_key="k")
        assert again.deduped and (again.first_seq, again.last_seq) == (1, 2)
        with pytest.raises(FencingTokenMismatch):
            survivor.append("c")
        with pytest.raises(BoxNotFound):
            survivor.append(1, box="barred")
        assert survivor.append("c", fencing_token="t").first_seq == 3


def test_generations_go_on_where_they_were_even_if_the_clock_went_back(driver: Driver) -> None:
    driver.now_ms = 90_000
    driver.append(1)
    driver.ask(commands.DeleteBox("b"))
    driver.now_ms = 5
    for survivor in both_ways(driver):
        survivor.append(1)
        assert survivor.state().generation == 90_001 * 1024


def test_records_deleted_in_the_middle_stay_deleted(driver: Driver) -> None:
    driver.put(durability="fsync")
    for index in range(4):
        driver.append({"data": index, "tag": "x"}, {"data": index, "tag": "y" if index == 2 else "x"}, index)
    driver.delete(tag="y")
    driver.delete(3)
    driver.delete(6, "x")
    assert driver.seqs() == [3, 6, 7, 9, 10, 11, 12]
    for survivor in both_ways(driver):
        assert facts_of(survivor.machine)["boxes"] == facts_of(driver.machine)["boxes"]
        assert survivor.read() == driver.read()
        assert survivor.delete(tag="x").deleted == 3
        assert survivor.seqs() == [3, 6, 9, 12]


def test_a_snapshot_is_not_touched_by_what_comes_after(driver: Driver) -> None:
    driver.append({"data": 1, "tag": "x"}, 2, idempotency_key="k")
    state = driver.machine.snapshot()
    before = repr(state)
    driver.delete(tag="x")
    driver.append(3, idempotency_key="k2")
    driver.ask(commands.DeleteBox("b"))
    assert repr(state) == before


def test_a_snapshot_needs_no_frame_before_the_oldest_live_batch(driver: Driver) -> None:
    driver.append(1)
    driver.append(2)
    driver.put("memory", durability="memory")
    driver.append(1, box="memory")
    lsn = driver.machine.lsn
    assert driver.machine.snapshot().needs_lsn == 3
    driver.delete(2)
    assert driver.machine.snapshot().needs_lsn == 4
    driver.delete(9)
    assert driver.machine.snapshot().needs_lsn == driver.machine.lsn + 1 > lsn


def test_an_orderly_stop_is_remembered_until_the_next_start(driver: Driver) -> None:
    assert not driver.machine.stopped_clean
    driver.stop()
    for survivor in (driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        assert survivor.machine.stopped_clean and survivor.machine.boot_id == "boot"
        survivor.start("boot-2")
        assert not survivor.machine.stopped_clean and survivor.machine.boot_id == "boot-2"


# -- a system clock that is behind the log, because it was ahead when that was written, or is wrong now


HOUR_MS = 3_600_000


def set_back(driver: Driver, ms: int) -> list[Driver]:
    """The driver after restarts with a system clock that was set back, each followed by one more restart."""
    survivors = [driver.reborn(), driver.reborn(state=driver.machine.snapshot())]
    for survivor in list(survivors):
        survivor.now_ms -= ms
        survivor.start("boot")
        survivors.append(survivor.reborn())
        survivors.append(survivor.reborn(state=survivor.machine.snapshot()))
        survivors[-1].start("boot")
    return survivors


def test_leases_and_delays_end_in_time_after_a_restart_with_a_clock_that_was_set_back() -> None:
    driver = Driver(now_ms=10 * HOUR_MS)
    driver.start("boot")
    driver.put(type="queue", leases_durable=True, lease_ms=30_000)
    driver.append("held", "nacked", "free")
    driver.now_ms += 1000
    held, nacked = (driver.ask(queues.Claim(box="b", node="n", max=1)).jobs[0][0] for _ in range(2))
    driver.ask(queues.Nack(box="b", node="n", seqs=[nacked], delay_ms=60_000))
    for survivor in set_back(driver, HOUR_MS):
        survivor.now_ms += 29_999
        assert [seq for seq, _ in survivor.ask(queues.Claim(box="b", node="m", max=9)).jobs] == [3]
        survivor.now_ms += 2
        survivor.tick()
        assert [seq for seq, _ in survivor.ask(queues.Claim(box="b", node="m", max=9)).jobs] == [held]
        survivor.now_ms += 30_000
        assert nacked in [seq for seq, _ in survivor.ask(queues.Claim(box="b", node="m", max=9)).jobs]


def test_keys_reservations_and_empty_boxes_do_not_last_longer_for_a_clock_that_was_set_back() -> None:
    driver = Driver(now_ms=10 * HOUR_MS)
    driver.start("boot")
    driver.put(durability="disk", idempotency_window_ms=1000)
    driver.append("a", idempotency_key="k")
    driver.put("empty", delete_on_empty_ms=1000)
    for survivor in set_back(driver, HOUR_MS):
        assert survivor.append("a", idempotency_key="k").deduped
        survivor.now_ms += 20_000
        while (due_ms := survivor.machine.next_deadline_ms()) is not None and due_ms <= survivor.now_ms:
            survivor.tick()
        assert survivor.machine.keys_kept == 0
        assert "empty" not in survivor.machine.boxes
        assert survivor.machine.boxes["b"].reserved_seq == 1
        assert not survivor.append("a", idempotency_key="k").deduped


def test_what_is_held_for_a_transaction_expires_in_time_after_a_clock_that_was_set_back() -> None:
    driver = Driver(now_ms=10 * HOUR_MS, make=lambda: Machine(txn_ttl_ms=60_000))
    driver.start("boot")
    driver.do(put_of(bulk.Txn("w", 1, "q"), "p", 0, pack(["b"], [1], [b"1"])))
    driver.sync()
    for survivor in set_back(driver, HOUR_MS):
        survivor.now_ms += 60_001
        survivor.tick()
        assert not survivor.machine.txns.epochs


def test_records_keep_their_times_after_a_clock_that_was_set_back() -> None:
    driver = Driver(now_ms=10 * HOUR_MS)
    driver.start("boot")
    driver.put(durability="fsync", ttl_ms=1000)
    driver.append("a")
    for survivor in set_back(driver, HOUR_MS):
        survivor.append("b", box="other")
        assert records_of(survivor.read(box="other"))[0]["$ts"] == 9 * HOUR_MS
        survivor.append("b")
        assert [record["$ts"] for record in records_of(survivor.read())] == [10 * HOUR_MS] * 2
