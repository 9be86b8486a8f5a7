"""Goal: rows that are put are seen by nobody until a commit names them, then all at once, once (wire.md).

Method: commands to a machine with its log in a list; crashes are prefixes of that list.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shard.core import changes
from shard.core.machine import Machine
from shard.core.snapshot_facts import MarkFacts
from shard.core.transactions import commits, writers
from shard.core.transactions import state as txn
from shard.core.transactions.unrendered import NotRendered
from shard.transfer.shard_folders import parts_of
from streams.protocol.access.grants import ADMIN, ALL, READ, WRITE, Grant
from streams.protocol.errors import (
    BatchTooLarge,
    BoxFull,
    BoxNotFound,
    FencingTokenMismatch,
    Forbidden,
    InvalidRequest,
    NotFound,
    RecordTooLarge,
    Throttled,
    WriterConflict,
)
from streams.protocol.messages import bulk, commands, forwards
from streams.protocol.messages.routers import Route
from streams.protocol.payloads.packed import pack
from tests.support.machines import Driver, facts_of, put_of, records_of

T1 = bulk.Txn("w", 1, "q")


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def put(
    driver: Driver,
    rows: dict[str, list[bytes]],
    *,
    txn: bulk.Txn = T1,
    parcel: str = "p",
    chunk: int = 0,
    **options: Any,
) -> bulk.TxnPutReply:
    reply = driver.ask(put_command(rows, txn=txn, parcel=parcel, chunk=chunk, **options))
    assert isinstance(reply, bulk.TxnPutReply)
    return reply


def put_command(
    rows: dict[str, list[bytes]],
    *,
    txn: bulk.Txn = T1,
    parcel: str = "p",
    chunk: int = 0,
    **options: Any,
) -> bulk.TxnPut:
    data = [value for values in rows.values() for value in values]
    return put_of(txn, parcel, chunk, pack(list(rows), list(map(len, rows.values())), data, **options))


def commit(driver: Driver, *parcels: tuple[str, int], txn: bulk.Txn = T1) -> bulk.TxnCommitReply:
    reply = driver.ask(bulk.TxnCommit(txn, list(parcels)))
    assert isinstance(reply, bulk.TxnCommitReply)
    return reply


def datas(driver: Driver, box: str = "b") -> list[Any]:
    """All that a reader gets, page after page."""
    found: list[Any] = []
    page = driver.read(box=box)
    while True:
        found += [record["data"] for record in records_of(page)]
        if page.next_from_seq >= page.head_seq:
            return found
        page = driver.read(page.next_from_seq, box=box)


# -- what is seen


def test_rows_are_seen_when_they_are_committed_and_not_before(driver: Driver) -> None:
    driver.append(0)
    put(driver, {"b": [b"1", b"2"], "c": [b"3"]}, tag=[b"x", b"y", b"z"])
    assert datas(driver) == [0]
    assert "c" not in driver.machine.boxes
    driver.append(9)
    committed = commit(driver, ("p", 1))
    assert committed.boxes == [("b", 3, 4), ("c", 1, 1)] and committed.records == 3
    assert datas(driver) == [0, 9, 1, 2]
    assert records_of(driver.read(box="c", include_tags=True))[0]["$tag"] == "z"


def test_parcels_stand_in_the_order_of_the_commit_and_their_chunks_in_that_of_their_numbers(
    driver: Driver,
) -> None:
    put(driver, {"b": [b"1"]}, parcel="second", chunk=1)
    put(driver, {"b": [b"2"]}, parcel="first")
    put(driver, {"b": [b"3"]}, parcel="second")
    assert commit(driver, ("first", 1), ("second", 2)).boxes == [("b", 1, 3)]
    assert datas(driver) == [2, 3, 1]


def test_parcels_that_a_commit_does_not_name_are_dropped_with_earlier_epochs(driver: Driver) -> None:
    put(driver, {"b": [b'"zombie"']}, parcel="z")
    put(driver, {"b": [b'"older"']}, txn=bulk.Txn("w", 0, "q"))
    put(driver, {"b": [b'"later"']}, txn=bulk.Txn("w", 2, "q"))
    put(driver, {"b": [b'"other"']}, txn=bulk.Txn("v", 0))
    put(driver, {"b": [b"1"]})
    commit(driver, ("p", 1))
    assert sorted(driver.machine.txns.epochs) == [("v", 0), ("w", 2)]
    assert datas(driver) == [1]


def test_a_commit_is_answered_and_seen_when_it_is_on_the_disk_whatever_the_class(driver: Driver) -> None:
    for box, durability in (("f", "fsync"), ("d", "disk"), ("m", "memory")):
        driver.put(box, durability=durability)
        driver.append(0, box=box)
    assert driver.do(put_command({box: [b"1"] for box in "fdm"})).until_durable is False
    outcome = driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    assert outcome.until_durable and outcome.waits_for_lsn <= driver.machine.lsn
    assert outcome.wakes == ("m",)
    heads = {box: driver.machine.boxes[box].log.visible_seq for box in "fdm"}
    assert heads == {"f": 1, "d": 1, "m": 2}
    driver.logged()
    assert driver.machine.boxes["d"].log.visible_seq == 1
    assert set(driver.sync()) == {"f", "d"}
    assert datas(driver, "f") == datas(driver, "d") == datas(driver, "m") == [0, 1]


def test_times_tags_nodes_and_metas_are_those_of_an_append(driver: Driver) -> None:
    driver.put(timestamping={"mode": "client-prefer"})
    put(
        driver,
        {"b": [b"1", b"2"]},
        ts=[-1, 900],
        tag=[b"", b"t"],
        node=[b"n", b""],
        meta=[b"", b'{"m":1}'],
        default_node="d",
    )
    put(driver, {"b": [b"3"]}, chunk=1)
    commit(driver, ("p", 2))
    assert records_of(driver.read(include_tags=True)) == [
        {"$seq": 1, "$ts": 1000, "$node": "n", "data": 1},
        {"$seq": 2, "$ts": 1000, "$node": "d", "$tag": "t", "meta": {"m": 1}, "data": 2},
        {"$seq": 3, "$ts": 1000, "data": 3},
    ]


def test_many_small_chunks_become_few_batches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "BATCH_RECORDS", 10)
    for chunk in range(25):
        put(driver, {"b": [b"%d" % chunk]}, chunk=chunk)
    commit(driver, ("p", 25))
    assert [batch.count for batch in driver.machine.boxes["b"].log.tail] == [10, 10, 5]
    assert datas(driver) == list(range(25))


# -- repeating


def test_what_is_repeated_changes_nothing(driver: Driver) -> None:
    first = put(driver, {"b": [b"1"]})
    assert put(driver, {"b": [b'"another body"']}) == bulk.TxnPutReply(False, True, first.held_bytes)
    commit(driver, ("p", 1))
    lsn = driver.machine.lsn
    assert commit(driver, ("p", 1)).is_done
    assert put(driver, {"b": [b"1"]}, parcel="again").is_done
    assert commit(driver, txn=bulk.Txn("w", 0, "q")).is_done
    assert driver.machine.lsn == lsn and datas(driver) == [1]


def test_a_repeat_is_told_so_only_when_that_cannot_vanish(driver: Driver) -> None:
    held = driver.do(put_command({"b": [b"1"]}))
    assert driver.do(put_command({"b": [b"1"]})).waits_for_lsn == held.waits_for_lsn
    driver.sync()
    assert driver.do(put_command({"b": [b"1"]})).waits_for_lsn == 0
    committed = driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    tellers: list[commands.Command] = [
        bulk.TxnCommit(T1, [("p", 1)]),
        put_command({"b": [b"1"]}),
        put_command({"b": [b"1"]}, txn=bulk.Txn("w", 5, "another")),
        bulk.TxnList(),
    ]
    for command in tellers:
        outcome = driver.do(command)
        assert (outcome.waits_for_lsn, outcome.until_durable) == (committed.waits_for_lsn, True)


def test_a_commit_without_parcels_marks_the_epoch(driver: Driver) -> None:
    assert commit(driver) == bulk.TxnCommitReply(False, 0, [])
    assert commit(driver).is_done


def test_another_query_is_told_that_the_writer_is_taken_unless_it_resets(driver: Driver) -> None:
    put(driver, {"b": [b"1"]})
    commit(driver, ("p", 1))
    other = bulk.Txn("w", 0, "restarted")
    for command in (put_command({"b": [b"2"]}, txn=other), bulk.TxnCommit(other, [])):
        with pytest.raises(WriterConflict) as refused:
            driver.ask(command)
        assert refused.value.detail == {"writer": "w", "query": "q", "epoch": 1}
    reset = bulk.Txn("w", 0, "restarted", True)
    put(driver, {"b": [b"2"]}, txn=reset)
    assert not commit(driver, ("p", 1), txn=reset).is_done
    assert commit(driver, ("p", 1), txn=reset).is_done
    assert datas(driver) == [1, 2]


OLD, NEW, TAKES_OVER = bulk.Txn("w", 5, "old"), bulk.Txn("w", 5, "new"), bulk.Txn("w", 5, "new", True)


def refused_by(driver: Driver, txn: bulk.Txn) -> None:
    """Every command of this query is a conflict."""
    for command in (put_command({"b": [b"1"]}, txn=txn), bulk.TxnCommit(txn, [("p", 1)])):
        with pytest.raises(WriterConflict) as refused:
            driver.ask(command)
        assert refused.value.detail["query"] == "new"


def test_a_repeated_put_of_a_run_whose_writer_was_taken_over_is_a_conflict(driver: Driver) -> None:
    put(driver, {"b": [b'"old"']}, txn=OLD)
    assert put(driver, {"b": [b'"old"']}, txn=OLD).is_repeat
    assert not put(driver, {"b": [b'"new"']}, txn=TAKES_OVER).is_repeat, "though its names are the same"
    assert put(driver, {"b": [b'"new"']}, txn=TAKES_OVER).is_repeat
    kept = driver.machine.keep_held(driver.machine.lsn)
    assert kept is not None
    driver.keep(kept)
    driver.sync()
    for survivor in (driver, driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        refused_by(survivor, OLD)
        refused_by(survivor, bulk.Txn("w", 6, "old"))
    commit(driver, ("p", 1), txn=TAKES_OVER)
    refused_by(driver, OLD)
    assert datas(driver) == ["new"]


def test_a_writer_with_a_mark_that_was_taken_over_refuses_its_old_run_at_once(driver: Driver) -> None:
    commit(driver, txn=bulk.Txn("w", 4, "old"))
    put(driver, {"b": [b"1"]}, txn=OLD)
    put(driver, {"b": [b"2"]}, txn=bulk.Txn("w", 0, "new", True))
    refused_by(driver, OLD)


def test_rows_of_an_old_run_are_not_taken_for_those_of_the_new_one(driver: Driver) -> None:
    put(driver, {"b": [b'"old"']}, txn=OLD)
    commit(driver, txn=bulk.Txn("w", 1, "new", True))
    assert not put(driver, {"b": [b'"new"']}, txn=NEW).is_repeat
    commit(driver, ("p", 1), txn=NEW)
    assert datas(driver) == ["new"]


# -- refusals


def test_a_commit_of_what_is_not_held_is_refused_and_leaves_what_is(driver: Driver) -> None:
    put(driver, {"b": [b"1"]})
    for parcels in ([("p", 1), ("never", 1)], [("p", 2)], [("p", 0)]):
        with pytest.raises(NotFound, match="chunks are held"):
            commit(driver, *parcels)
    assert commit(driver, ("p", 1)).records == 1


def refused_by_reject(driver: Driver) -> None:
    driver.put("z", cap_records=1, discard="reject")
    driver.append(0, box="z")


def refused_by_a_cap(driver: Driver) -> None:
    driver.put("z", cap_bytes=10)


def refused_by_a_fence(driver: Driver) -> None:
    driver.put("z")
    driver.ask(commands.SetFence("z", "token"))


def refused_for_want_of_times(driver: Driver) -> None:
    driver.put("z", timestamping={"mode": "client-require"})


def refused_by_the_number_of_boxes(driver: Driver) -> None:
    driver.machine.boxes_max = 1


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (refused_by_reject, BoxFull),
        (refused_by_a_cap, RecordTooLarge),
        (refused_by_a_fence, FencingTokenMismatch),
        (refused_for_want_of_times, InvalidRequest),
        (refused_by_the_number_of_boxes, Throttled),
    ],
)
def test_what_one_box_refuses_nobody_gets(driver: Driver, prepare: Any, error: type[Exception]) -> None:
    put(driver, {"b": [b"1"], "z": [b"2"]})
    prepare(driver)
    before = facts_of(driver.machine)
    for dry in (True, False):
        with pytest.raises(error):
            driver.ask(bulk.TxnCommit(T1, [("p", 1)], dry))
        assert facts_of(driver.machine) == before


def test_what_is_logged_behind_a_commit_is_nothing_that_its_answer_waits_for(driver: Driver) -> None:
    put(driver, {"b": [b"1"], "c": [b"2"]})
    outcome = driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    kinds = [type(change) for lsn, change in outcome.changes if lsn > outcome.waits_for_lsn]
    assert outcome.afterthoughts and kinds == [changes.BatchKept] * 2


def test_rows_of_small_transactions_stay_in_memory_and_those_of_others_do_not(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(txn, "SMALL_RECORDS", 3)
    put(driver, {"b": [b"1", b"2"]})
    epoch = driver.machine.txns.epochs["w", 1]
    assert all(chunk.message is not None for chunk in epoch.chunks())
    put(driver, {"b": [b"3", b"4"]}, chunk=1)
    assert all(chunk.message is None for chunk in epoch.chunks()) and epoch.loaded_bytes == 0
    put(driver, {"b": [b"5"]}, chunk=2)
    assert all(chunk.message is None for chunk in epoch.chunks())
    monkeypatch.setattr(txn, "LOADED_MAX", 10)
    put(driver, {"b": [b"6"]}, txn=bulk.Txn("v", 1))
    assert driver.machine.txns._loaded_bytes == 0
    commit(driver, ("p", 3))
    commit(driver, ("p", 1), txn=bulk.Txn("v", 1))
    assert datas(driver) == [1, 2, 3, 4, 5, 6]


def test_a_commit_makes_room_in_a_capped_box_once(driver: Driver) -> None:
    driver.put(cap_records=4)
    driver.append(1, 2, 3)
    put(driver, {"b": [b"4", b"5"]})
    put(driver, {"b": [b"6"]}, chunk=1)
    commit(driver, ("p", 2))
    assert datas(driver) == [3, 4, 5, 6]
    read = driver.read()
    assert read.tombstone is not None and read.tombstone.reason == "cap"


def test_a_commit_into_a_capped_box_fetches_what_it_must_measure_first(driver: Driver) -> None:
    driver.put(cap_bytes=200)
    driver.append(1, 2, 3)
    driver.seal()
    driver.forget()
    put(driver, {"b": [b"4"]})
    outcome = driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    assert isinstance(outcome.reply, bulk.TxnCommitReply)
    driver.sync()
    assert datas(driver)[-1] == 4


def test_boxes_that_may_not_be_made_are_told_at_the_put(driver: Driver) -> None:
    with pytest.raises(BoxNotFound):
        put(driver, {"b": [b"1"]}, create=False)
    driver.put(auto_create=False)
    put(driver, {"b": [b"1"]}, create=False)
    driver.ask(commands.DeleteBox("b"))
    with pytest.raises(BoxNotFound):
        put(driver, {"b": [b"1"]}, chunk=1)
    with pytest.raises(BoxNotFound):  # it is gone since
        commit(driver, ("p", 1))
    put(driver, {"b": [b"2"]}, parcel="says-so", create=True)
    driver.ask(bulk.TxnAbort(T1, ["p"]))
    assert commit(driver, ("says-so", 1)).boxes == [("b", 1, 1)]


def test_what_is_held_takes_memory_for_its_pieces_and_not_for_its_rows(driver: Driver) -> None:
    """Far more than `bytes_max` is held and committed at once."""
    driver.machine.txns.bytes_max = 10_000
    value = b'"%b"' % (b"x" * 100_000)
    for number in range(8):
        put(driver, {"b": [value]}, chunk=number)
    put(driver, {"b": [value]}, txn=bulk.Txn("v", 1))
    assert driver.machine.txns.bytes > 9 * len(value) and driver.machine.txns.memory < 10_000
    commit(driver, ("p", 8))
    while driver.render(bytes_max=1):
        pass
    assert driver.state().count == 8
    assert driver.machine.txns.memory == sum(c.memory for c in driver.machine.txns.epochs["v", 1].chunks())


def test_what_is_known_of_held_rows_is_bounded_for_an_epoch_and_for_all(driver: Driver) -> None:
    driver.machine.txns.bytes_max = 2_000
    for number in range(3):
        put(driver, {"b": [b"1"]}, chunk=number)
    with pytest.raises(BatchTooLarge, match="more rows in each chunk"):
        put(driver, {"b": [b"1"]}, chunk=3)
    other = bulk.Txn("v", 1)
    with pytest.raises(Throttled) as refused:
        put(driver, {"b": [b"1"]}, txn=other)
    assert refused.value.detail["limit"] == "txn_bytes"
    driver.ask(bulk.TxnAbort(T1))
    put(driver, {"b": [b"1"]}, txn=other)


def test_writers_that_are_remembered_are_bounded_and_an_operator_may_forget_some(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MARKS_MAX", 2)
    for writer in ("w1", "w2"):
        commit(driver, txn=bulk.Txn(writer, 1))
    put(driver, {"b": [b"1"]}, txn=bulk.Txn("w1", 2))
    for command in (put_command({"b": [b"1"]}, txn=bulk.Txn("w3", 1)), bulk.TxnCommit(bulk.Txn("w3", 1), [])):
        with pytest.raises(Throttled, match="streams txn forget") as refused:
            driver.ask(command)
        assert refused.value.detail["limit"] == "txn_writers"
    forgotten = driver.ask(bulk.TxnAbort(bulk.Txn("w1", 0), forgets=True))
    assert isinstance(forgotten, bulk.TxnAbortReply) and forgotten.is_forgotten and forgotten.parcels == 1
    put(driver, {"b": [b"1"]}, txn=bulk.Txn("w3", 1))
    driver = driver.after_power_cut()
    assert list(driver.machine.txns.marks) == ["w2"] and sorted(driver.machine.txns.epochs) == [("w3", 1)]


def test_the_last_epoch_of_a_writer_is_known_for_good(driver: Driver) -> None:
    put(driver, {"b": [b"1"]})
    commit(driver, ("p", 1))
    driver.now_ms += 10 * txn.OLD_MARK_MS
    commit(driver, txn=bulk.Txn("another", 1))
    assert commit(driver, ("p", 1)).is_done and put(driver, {"b": [b"1"]}).is_done
    driver = driver.after_power_cut()
    assert commit(driver, ("p", 1)).is_done
    assert datas(driver) == [1]


def test_marks_of_old_logs_expire_as_they_did(driver: Driver) -> None:
    made = driver.machine.lsn
    driver.machine.apply(changes.TxnCommitted("old", 1, "", driver.now_ms, [], []), made + 1)
    driver.now_ms += txn.OLD_MARK_MS + 1
    driver.machine.apply(changes.TxnCommitted("new", 1, "", driver.now_ms, [], [], once=False), made + 2)
    assert list(driver.machine.txns.marks) == ["new"]


def test_writers_that_are_used_once_are_never_refused_and_forgotten_after_a_day(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "MARKS_MAX", 1)
    commit(driver, txn=bulk.Txn("kept", 1))
    for number in range(50):
        once = bulk.Txn(f"save-{number}", 1, once=True)
        put(driver, {"b": [b"%d" % number]}, txn=once)
        commit(driver, ("p", 1), txn=once)
    assert commit(driver, ("p", 1), txn=once).is_done
    assert datas(driver) == list(range(50))
    driver = driver.after_power_cut()
    driver.now_ms += txn.ONCE_MS + 1
    commit(driver, txn=bulk.Txn("save-last", 1, once=True))
    assert list(driver.machine.txns.marks) == ["kept", "save-last"]
    with pytest.raises(NotFound):  # a commit that comes again after all writes nothing twice
        commit(driver, ("p", 1), txn=once)


def test_marks_of_writers_that_are_used_once_are_bounded_and_the_newest_stay(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(txn, "ONCE_MAX", 3)
    for number in range(5):
        commit(driver, txn=bulk.Txn(f"save-{number}", 1, once=True))
    assert list(driver.machine.txns.marks) == ["save-2", "save-3", "save-4"]


def test_a_new_attempt_drops_what_the_one_before_has_put_and_refuses_it_from_then_on(driver: Driver) -> None:
    first, second = (bulk.Txn("w", 1, "q", attempt=name) for name in ("first", "second"))
    put(driver, {"b": [b"1"]}, txn=first, parcel="p1")
    put(driver, {"b": [b"2"]}, txn=first, parcel="p2")
    held = driver.machine.txns.bytes
    put(driver, {"b": [b"3"]}, txn=second, parcel="p3")
    assert driver.machine.txns.bytes < held
    driver = driver.after_power_cut()
    with pytest.raises(WriterConflict, match="replaced by a later attempt"):
        put(driver, {"b": [b"4"]}, txn=first, parcel="p1", chunk=1)
    with pytest.raises(WriterConflict, match="replaced by a later attempt"):
        commit(driver, ("p1", 1), txn=first)
    put(driver, {"b": [b"5"]}, txn=second, parcel="p3", chunk=1)
    commit(driver, ("p3", 2), txn=second)
    assert datas(driver) == [3, 5]


def test_an_attempt_that_was_replaced_neither_drops_nor_commits_rows_of_the_later_one(driver: Driver) -> None:
    first, second = (bulk.Txn("w", 1, "q", attempt=name) for name in ("first", "second"))
    put(driver, {"b": [b"1"]}, txn=first)
    put(driver, {"b": [b"2"]}, txn=second)
    assert driver.ask(bulk.TxnAbort(first)) == bulk.TxnAbortReply(0, 0)
    with pytest.raises(WriterConflict, match="replaced by a later attempt"):
        commit(driver, ("p", 1), txn=first)
    commit(driver, ("p", 1), txn=second)
    assert datas(driver) == [2]


def test_only_its_key_and_an_admin_of_all_boxes_forget_a_writer(driver: Driver) -> None:
    own = bulk.Caller("k1", Grant(scopes=WRITE))
    driver.ask(bulk.TxnCommit(T1, [], caller=own))
    strangers = (bulk.Caller("k2", Grant(scopes=WRITE)), bulk.Caller("a", Grant(scopes=ALL, prefixes=("b",))))
    for stranger in strangers:
        with pytest.raises(Forbidden):
            driver.ask(bulk.TxnAbort(T1, forgets=True, caller=stranger))
    assert driver.ask(bulk.TxnAbort(T1, forgets=True, caller=own)) == bulk.TxnAbortReply(0, 0, True)
    assert driver.ask(bulk.TxnAbort(T1, forgets=True, caller=own)) == bulk.TxnAbortReply(0, 0, False)
    driver.ask(bulk.TxnCommit(T1, [], caller=own))
    admin = bulk.Caller("a", Grant(scopes=ALL))
    assert driver.ask(bulk.TxnAbort(T1, forgets=True, caller=admin)) == bulk.TxnAbortReply(0, 0, True)


# -- dropping


def test_an_abort_drops_some_parcels_or_all(driver: Driver) -> None:
    for parcel in ("p1", "p2", "p3"):
        put(driver, {"b": [b"1"]}, parcel=parcel)
    aborted = driver.ask(bulk.TxnAbort(T1, ["p1", "never"]))
    assert aborted.parcels == 1 and aborted.bytes > 0
    assert driver.ask(bulk.TxnAbort(T1, ["never"])) == bulk.TxnAbortReply(0, 0)
    assert driver.ask(bulk.TxnAbort(T1)).parcels == 2
    assert driver.ask(bulk.TxnAbort(T1)) == bulk.TxnAbortReply(0, 0)
    assert driver.machine.txns.bytes == 0


def test_what_nobody_puts_to_expires(driver: Driver) -> None:
    ttl_ms = driver.machine.txns.ttl_ms
    put(driver, {"b": [b"1"]}, txn=bulk.Txn("old", 1))
    driver.now_ms += 10
    put(driver, {"b": [b"1"]}, txn=bulk.Txn("young", 1))
    put(driver, {"b": [b"1"]}, txn=bulk.Txn("old", 1), chunk=1)
    driver.now_ms += 10
    driver.keep(driver.machine.keep_held(driver.machine.lsn) or pytest.fail("nothing is kept"))
    put(driver, {"b": [b"1"]}, txn=bulk.Txn("old", 1), chunk=2)
    assert driver.machine.next_deadline_ms() is not None
    driver.now_ms += ttl_ms - 10
    driver.tick()
    assert list(driver.machine.txns.epochs) == [("old", 1)]
    driver.now_ms += 10
    driver.tick()
    assert not driver.machine.txns.epochs and driver.machine.txns.next_expiry_ms() is None
    with pytest.raises(NotFound):
        commit(driver, ("p", 3), txn=bulk.Txn("old", 1))


def test_a_list_tells_what_is_held_and_what_was_committed(driver: Driver) -> None:
    put(driver, {"b": [b"1", b"2"]})
    commit(driver, txn=bulk.Txn("v", 3, "q"))
    state = driver.ask(bulk.TxnList())
    assert state.marks == [bulk.CommittedEpoch("v", 3, "q", 1000)]
    (held,) = state.pending
    assert (held.writer, held.parcels, held.chunks, held.records) == ("w", 1, 1, 2)
    assert held.expires_ms == 1000 + driver.machine.txns.ttl_ms
    assert driver.ask(bulk.TxnList("w")).marks == [] and driver.ask(bulk.TxnList("v")).pending == []


def test_a_tick_lets_a_few_expire_and_the_next_one_more(driver: Driver) -> None:
    for number in range(20):
        put(driver, {"b": [b"1"]}, txn=bulk.Txn(f"w{number}", 1))
    driver.now_ms += driver.machine.txns.ttl_ms
    driver.tick()
    assert 0 < len(driver.machine.txns.epochs) < 20
    assert driver.machine.next_deadline_ms() == driver.now_ms
    driver.tick()
    assert not driver.machine.txns.epochs


def test_routers_of_a_box_in_memory_take_what_a_commit_brings(driver: Driver) -> None:
    driver.put("m", durability="memory")
    life = driver.state("m").generation
    driver.ask(
        forwards.AttachEndpoint(
            box="m", origin="r#1", life=life, position=0, route=Route(source="m", dest="x")
        )
    )
    put(driver, {"m": [b"1"]})
    assert set(driver.do(bulk.TxnCommit(T1, [("p", 1)])).wakes) == {"m", forwards.RELAY}


# -- whose a transaction is

A, B = bulk.Caller("a", Grant(READ | WRITE)), bulk.Caller("b", Grant(READ | WRITE))


def by(caller: bulk.Caller, command: Any) -> Any:
    return msgspec.structs.replace(command, caller=caller)


def refused(driver: Driver, command: Any) -> None:
    epochs, marks, lsn = dict(driver.machine.txns.epochs), dict(driver.machine.txns.marks), driver.machine.lsn
    with pytest.raises(Forbidden, match="belongs to another key"):
        driver.ask(command)
    assert (driver.machine.txns.epochs, driver.machine.txns.marks) == (epochs, marks)
    assert driver.machine.lsn == lsn


def everything_of(caller: bulk.Caller, *, reset: bool = False) -> list[Any]:
    """All that changes the transactions of the writer, of this epoch and of a later one."""
    found: list[Any] = []
    for epoch in (1, 5):
        txn = bulk.Txn("w", epoch, "q", reset)
        found += [put_command({"b": [b"9"]}, txn=txn, parcel="x"), bulk.TxnCommit(txn, [])]
    return [by(caller, command) for command in found]


def test_a_transaction_belongs_to_the_key_that_began_it(driver: Driver) -> None:
    driver.ask(by(A, put_command({"b": [b"1"]})))
    for command in (*everything_of(B), *everything_of(B, reset=True), by(B, bulk.TxnAbort(T1))):
        refused(driver, command)
    assert driver.ask(by(B, bulk.TxnList())) == bulk.TxnState([], [])
    driver.ask(by(A, put_command({"b": [b"2"]}, parcel="x")))
    assert driver.ask(by(A, bulk.TxnAbort(T1, ["x"]))).parcels == 1
    driver.ask(by(A, put_command({"b": [b"2"]}, chunk=1)))
    assert driver.ask(by(A, bulk.TxnCommit(T1, [("p", 2)]))).records == 2
    # The mark says which epochs count as written: with it, another key could make later ones vanish.
    for command in (*everything_of(B), *everything_of(B, reset=True)):
        refused(driver, command)
    assert driver.ask(by(B, bulk.TxnList())).marks == []
    assert len(driver.ask(by(A, bulk.TxnList())).marks) == 1
    assert driver.ask(by(A, bulk.TxnCommit(bulk.Txn("w", 2, "q"), []))).is_done is False


def test_an_admin_of_all_its_boxes_may_abort_a_transaction_of_another_key(driver: Driver) -> None:
    driver.ask(by(A, put_command({"in.b": [b"1"], "out.b": [b"2"]})))
    for grant in (Grant(READ | WRITE), Grant(ALL, ("in.",)), Grant(WRITE, ("in.", "out."))):
        refused(driver, by(bulk.Caller("b", grant), bulk.TxnAbort(T1)))
    admin = bulk.Caller("b", Grant(WRITE | ADMIN, ("in.", "out.")))
    assert driver.ask(by(admin, bulk.TxnAbort(T1))).parcels == 1


def test_an_admin_takes_a_writer_over_with_reset_and_its_old_key_is_refused_then(driver: Driver) -> None:
    driver.ask(by(A, put_command({"b": [b"1"]})))
    driver.ask(by(A, bulk.TxnCommit(T1, [("p", 1)])))
    admin, confined = bulk.Caller("b", Grant()), bulk.Caller("b", Grant(ALL, ("b",)))
    for command in (*everything_of(admin), *everything_of(confined, reset=True)):
        refused(driver, command)
    driver.ask(by(A, put_command({"b": [b"2"]}, txn=bulk.Txn("w", 2, "q"), parcel="of-a")))
    taken = bulk.Txn("w", 2, "q", True)
    assert driver.ask(by(admin, bulk.TxnCommit(bulk.Txn("w", 1, "q", True), []))).is_done
    driver.ask(by(admin, put_command({"b": [b"2"]}, txn=taken)))
    assert driver.machine.txns.bytes_of("b") == driver.machine.txns.bytes > 0
    driver.machine.check()
    driver.ask(by(admin, bulk.TxnCommit(taken, [("p", 1)])))
    refused(driver, by(A, put_command({"b": [b"3"]}, txn=bulk.Txn("w", 3, "q"))))
    assert len(driver.ask(by(admin, bulk.TxnList())).marks) == 1


def test_a_process_of_the_servers_user_may_do_everything_and_keys_do_not_reach_what_it_began(
    driver: Driver,
) -> None:
    driver.ask(by(A, put_command({"b": [b"1"]})))
    driver.ask(put_command({"b": [b"2"]}, chunk=1))
    assert driver.machine.txns.owners_of("w") == {"a"}
    assert commit(driver, ("p", 2)).records == 2
    assert driver.machine.txns.owners_of("w") == {"a"}
    put(driver, {"b": [b"3"]}, txn=bulk.Txn("v", 1))
    with pytest.raises(Forbidden):
        driver.ask(by(A, bulk.TxnAbort(bulk.Txn("v", 1))))


def test_the_owner_is_the_same_after_a_crash_and_from_a_snapshot(driver: Driver) -> None:
    driver.ask(by(A, put_command({"b": [b"1"]})))
    kept = driver.machine.keep_held(driver.machine.lsn)
    assert kept is not None
    driver.keep(kept)
    driver.ask(by(A, bulk.TxnCommit(bulk.Txn("v", 1), [])))
    for other in (driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        assert other.machine.txns.owners_of("w") == other.machine.txns.owners_of("v") == {"a"}
        refused(other, by(B, bulk.TxnCommit(T1, [("p", 1)])))
        assert other.ask(by(A, bulk.TxnCommit(T1, [("p", 1)]))).records == 1


def test_what_was_begun_before_transactions_had_owners_is_open_to_every_key(driver: Driver) -> None:
    old = put_command({"b": [b"1"]})
    held = changes.TxnHeld("w", 1, "q", "p", 0, driver.now_ms, old.rows_head, old.body)
    driver.commit(held)
    driver.commit(changes.TxnCommitted("v", 1, "", driver.now_ms, [], []))
    assert [each.writer for each in driver.ask(by(B, bulk.TxnList())).pending] == ["w"]
    assert driver.ask(by(B, bulk.TxnCommit(T1, [("p", 1)]))).records == 1
    refused(driver, by(A, bulk.TxnCommit(bulk.Txn("w", 2, "q"), [])))
    assert driver.ask(by(A, bulk.TxnCommit(bulk.Txn("v", 1), []))).is_done


# -- crashes


def test_a_crash_inside_a_commit_leaves_all_of_it_or_nothing(driver: Driver) -> None:
    driver.append(0)
    put(driver, {"b": [b"1"], "c": [b"2"], "d": [b"3"]})
    driver.sync()
    before = driver.machine.lsn
    driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    (at,) = [lsn for lsn, frame in enumerate(driver.log, 1) if frame.kind == 51]
    assert driver.machine.lsn > at > before
    for lsn in range(before, driver.machine.lsn + 1):
        other = driver.reborn(lsn)
        other.start("boot")
        seen = {box: datas(other, box) for box in ("b", "c", "d") if box in other.machine.boxes}
        if lsn < at:
            assert not any(values != [0] for box, values in seen.items() if values)
            assert commit(other, ("p", 1)).records == 3
        else:
            assert seen == {"b": [0, 1], "c": [2], "d": [3]}
            assert commit(other, ("p", 1)).is_done
        # What the crash cut off has been made good: a snapshot names frames that hold the batches.
        again = other.reborn(state=other.machine.snapshot())
        assert facts_of(again.machine) == facts_of(other.machine)


def test_rows_that_are_held_stay_when_their_log_is_to_go(driver: Driver) -> None:
    put(driver, {"b": [b"1"]})
    held = driver.machine.txns.oldest_lsn
    assert held is not None and driver.machine.snapshot().held == [held]
    assert driver.machine.keep_held(held - 1) is None
    outcome = driver.machine.keep_held(held)
    assert outcome is not None and isinstance(outcome.changes[0][1], changes.TxnKept)
    driver.keep(outcome)
    assert driver.machine.txns.oldest_lsn == driver.machine.lsn
    other = driver.reborn(state=driver.machine.snapshot())
    assert commit(other, ("p", 1)).records == 1


def test_rows_that_are_gone_are_not_rendered(driver: Driver) -> None:
    """What a commit brought was deleted before it was rendered."""
    put(driver, {"b": [b"1"], "c": [b"2"], "d": [b"3"]})
    before = driver.machine.lsn
    driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    (at,) = [lsn for lsn, frame in enumerate(driver.log, 1) if frame.kind == 51 and lsn > before]
    other = driver.reborn(at)
    other.start("boot")
    other.delete(2, box="b")
    other.ask(commands.DeleteBox("c"))
    assert other.render() and not other.render()
    assert not other.machine.txns.commits and other.machine.txns.memory == 0
    assert (datas(other, "b"), datas(other, "d")) == ([], [3])


# -- commits whose rows are rendered afterwards


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction is small."""
    monkeypatch.setattr(txn, "SMALL_RECORDS", 0)
    monkeypatch.setattr(commits, "BATCH_RECORDS", 3)


@pytest.mark.usefixtures("large")
def test_a_large_commit_is_decided_by_one_frame_and_needs_none_of_its_rows(driver: Driver) -> None:
    driver.append(0)
    for number in range(5):
        put(driver, {"b": [b"%d" % number] * 2, "c": [b"1"]}, chunk=number)
    outcome = driver.do(bulk.TxnCommit(T1, [("p", 5)]))
    assert [type(change) for _, change in outcome.changes][-1] is changes.TxnCommitted
    assert outcome.waits_for_lsn == driver.machine.lsn and not outcome.needs
    assert driver.machine.boxes["b"].log.visible_seq == 1
    driver.sync()
    assert driver.ask(bulk.TxnList()).rendering == [bulk.UnrenderedCommit("w", 1, 15)]
    state = driver.state()
    assert (state.head_seq, state.count) == (11, 11)
    driver.append(9)  # others go on behind it
    assert driver.seqs(11) == [12]
    while driver.render(bytes_max=1):
        pass
    assert datas(driver) == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 9]
    assert not driver.machine.txns.commits and driver.machine.txns.memory == 0


@pytest.mark.usefixtures("large")
def test_readers_and_writers_that_need_rows_of_a_commit_wait_until_they_are_rendered(driver: Driver) -> None:
    driver.append(0)
    for number in range(4):
        put(driver, {"b": [b"%d" % number] * 3}, chunk=number, tag=[b"t"] * 3)
    commit(driver, ("p", 4))
    waiting: list[commands.Command] = [
        commands.ReadBox(box="b", from_seq=4),
        commands.GetRecord("b", 5),
        commands.Scan(box="b", from_seq=4),
        commands.DeleteRecords("b", 7, None),
        commands.DeleteRecords("b", None, commands.Match("t")),
    ]
    for command in waiting:
        outcome = driver.machine.handle(command, driver.now_ms)
        assert outcome.reply is None and isinstance(outcome.needs[0], NotRendered)
        assert not outcome.changes
    assert driver.seqs() == [1], "what there is leaves at once"
    driver.render(bytes_max=1)
    assert driver.seqs() == [1, 2, 3, 4]
    assert driver.read(4).next_from_seq == 7
    driver.delete(tag="t")
    assert driver.seqs() == [1]


@pytest.mark.usefixtures("large")
def test_a_commit_goes_on_after_a_crash_at_any_frame_of_it_and_from_any_snapshot(driver: Driver) -> None:
    driver.put("c", timestamping={"mode": "client-prefer"})
    driver.append(0)
    for number in range(6):
        rows = {"b": [b"%d" % number] * (number + 1), "c": [b"%d" % number] * 2}
        size = number + 3
        put(
            driver,
            rows,
            chunk=number // 2,
            parcel="pq"[number % 2],
            ts=[-1] * (number + 1) + [500 - 10 * number, 400 + 100 * number],
            tag=[b"t%d" % number] * size,
            meta=[b'{"m":%d}' % number] * size,
        )
    commit(driver, ("q", 3), ("p", 3))
    states = [driver.machine.snapshot()]
    driver.append(9)
    at = driver.machine.lsn
    batches = 1
    while driver.render(bytes_max=400, batches_max=batches):
        batches = batches % 3 + 1
        states.append(driver.machine.snapshot())
    expected = facts_of(driver.machine)["boxes"]
    assert datas(driver) == [0, *[1] * 2, *[3] * 4, *[5] * 6, 0, *[2] * 3, *[4] * 5, 9]
    for state in [None, *states]:
        for lsn in range(max(at, state.lsn if state else 0), driver.machine.lsn + 1):
            other = driver.reborn(lsn, state)
            other.start("boot")
            while other.render(bytes_max=700):
                pass
            found = facts_of(other.machine)["boxes"]
            for box in "bc":
                texts = [text for _, text in expected[box]["live"].values()]
                assert [text for _, text in found[box]["live"].values()] == texts
                assert found[box]["totals"] == expected[box]["totals"]
            assert other.machine.txns.memory == 0


@pytest.mark.usefixtures("large")
def test_a_box_that_is_deleted_or_trimmed_meanwhile_does_not_stop_a_commit(driver: Driver) -> None:
    for number in range(4):
        put(driver, {box: [b"%d" % number] for box in "bcd"}, chunk=number)
    commit(driver, ("p", 4))
    driver.render(bytes_max=1)
    driver.ask(commands.DeleteBox("c"))
    driver.append(9, box="b")
    driver.delete(5, box="b")  # all rows of the commit, and none by half
    while driver.render(bytes_max=1):
        pass
    assert (datas(driver, "b"), datas(driver, "d")) == ([9], [0, 1, 2, 3])
    assert driver.machine.txns.memory == 0


def test_partial_marks_leave_out_the_boxes_that_have_the_epoch(driver: Driver) -> None:
    """Shards that came together did not agree: one had committed the epoch."""
    slot = txn.slot_of("b")
    slots = (1 << slot).to_bytes(512, "little")
    state = Machine().snapshot()
    state.marks = [MarkFacts("w", 1, "q", 5, slots), MarkFacts("w", 0, "q", 6, b"\xff" * 512)]
    other = driver.reborn(0, state)
    put(other, {"b": [b"1"], "c": [b"2"]})
    assert commit(other, ("p", 1)).boxes == [("c", 1, 1)]
    assert commit(other, ("p", 1)).is_done
    assert [mark.is_partial for mark in other.ask(bulk.TxnList()).marks] == [False]


def test_boxes_that_are_several_epochs_ahead_stay_so_until_the_others_are_there(driver: Driver) -> None:
    """A restored backup has its shards as of moments that may be many epochs apart."""
    slots = (1 << txn.slot_of("b")).to_bytes(512, "little")
    others = ((1 << 4096) - 1 - (1 << txn.slot_of("b"))).to_bytes(512, "little")
    state = Machine().snapshot()
    state.marks = [MarkFacts("w", 3, "q", 5, slots), MarkFacts("w", 0, "q", 6, others)]
    other = driver.reborn(0, state)
    for epoch in (1, 2, 3, 4):
        mine = bulk.Txn("w", epoch, "q")
        put(other, {"b": [b"1"], "c": [b"2"]}, txn=mine)
        committed = commit(other, ("p", 1), txn=mine)
        assert [box for box, *_ in committed.boxes] == (["c"] if epoch < 4 else ["b", "c"])
        marks = other.ask(bulk.TxnList()).marks
        expected = [(3, True), (epoch, False)] if epoch < 3 else [(epoch, False)]
        assert [(mark.epoch, mark.is_partial) for mark in marks] == expected


@pytest.mark.usefixtures("large")
def test_a_snapshot_with_its_batches_names_nothing_that_only_the_log_has(driver: Driver) -> None:
    driver.append(0)
    put(driver, {"c": [b"1"]})
    driver.do(bulk.TxnCommit(T1, [("p", 1)]))
    put(driver, {"c": [b"2"]}, txn=bulk.Txn("w", 2, "q"))
    assert driver.machine.snapshot().commits and driver.machine.snapshot().held
    parts = parts_of(driver.machine, keep=lambda box: box.name == "b")
    assert (parts.state.commits, parts.state.held) == ([], []), "rows that are rendered from the log"
    assert [mark.writer for mark in parts.state.marks] == ["w"]
