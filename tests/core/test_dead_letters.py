"""Goal: a job that was delivered too often moves to its dead letter box, once, and can be moved back (§8).

Method: two machines with their logs, and a carrier between them that the test is.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core import changes
from shard.core.queues import move_queue as moves
from streams.protocol.errors import BoxNotFound, NotAQueue
from streams.protocol.messages import queues
from streams.protocol.messages.forwards import RELAY, DetachEndpoint, DetachEndpointReply
from streams.protocol.messages.replies import QueueTotals
from streams.protocol.model import binary_records
from streams.protocol.model.records import render_binary
from tests.support.carrying import bring, carry_all, collect
from tests.support.jobs import QueueDriver
from tests.support.machines import Driver, records_of


@pytest.fixture
def source() -> QueueDriver:
    driver = QueueDriver()
    driver.start("boot")
    driver.put(type="queue", max_deliveries=2, dead_letter="dead", durability="fsync")
    return driver


@pytest.fixture
def dest() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def wear_out(driver: QueueDriver, *seqs: int, times: int = 2) -> None:
    for _ in range(times):
        claimed = [job["$seq"] for job in driver.claim(max=len(seqs))]
        assert claimed == list(seqs)
        driver.nack(*seqs)


def letters(driver: Driver, box: str = "dead") -> list[dict[str, Any]]:
    return records_of(driver.read(box=box, include_tags=True))


def test_the_delivery_after_the_last_moves_the_job_instead(source: QueueDriver, dest: Driver) -> None:
    source.append({"data": 1.0, "tag": "t", "meta": {"m": 1}, "node": "p"}, 2)
    wear_out(source, 1, 2)
    assert source.claim(max=5) == []
    assert source.totals() == (0, 0, 2), "on the way they count as delayed"
    assert carry_all(source, dest) == 1
    first, second = letters(dest)
    stamp = {
        "$dead_letter_from": "b",
        "$dead_letter_deliveries": 2,
        "$dead_letter_src_seq": 1,
        "$dead_letter_node": "w",
        "$dead_letter_ts": 1000,
    }
    assert (first["data"], first["$tag"], first["$node"], first["meta"]) == (1.0, "t", "p", {"m": 1, **stamp})
    assert (second["data"], "$tag" in second, second["meta"]["$dead_letter_src_seq"]) == (2, False, 2)
    state = source.state()
    assert (state.count, state.queue) == (0, QueueTotals(0, 0, 0, 2))


def test_other_jobs_are_given_out_by_the_claim_that_meets_dead_ones(
    source: QueueDriver, dest: Driver
) -> None:
    source.append(1, 2, 3)
    wear_out(source, 1)
    assert [job["$seq"] for job in source.claim(max=2)] == [2, 3]
    assert carry_all(source, dest) == 1
    assert [letter["data"] for letter in letters(dest)] == [1]


def test_without_a_dead_letter_box_a_job_is_delivered_for_ever(source: QueueDriver) -> None:
    source.put(dead_letter=None)
    source.append(1)
    wear_out(source, 1, times=7)
    assert source.claim()[0]["deliveries"] == 8


def test_nothing_leaves_before_its_position_is_on_the_disk(source: QueueDriver, dest: Driver) -> None:
    source.append(1)
    wear_out(source, 1)
    source.do(queues.Claim(box="b", node="w"))
    assert collect(source) == []
    source.logged()
    assert collect(source) == []
    assert "" in source.sync(), "the carrier is told"
    assert len(collect(source)) == 1


def test_an_answer_that_is_lost_doubles_nothing(source: QueueDriver, dest: Driver) -> None:
    source.append(1)
    wear_out(source, 1)
    source.claim()
    (parcel,) = collect(source)
    bring(dest, parcel)
    again = source.after_kill()
    assert again.totals() == (0, 0, 1)
    carry_all(again, dest, carrier=2)
    assert len(letters(dest)) == 1
    assert again.state().queue == QueueTotals(0, 0, 0, 1)
    assert again.after_kill().state().queue == again.state().queue


def test_no_parcel_overtakes_the_first(
    source: QueueDriver, dest: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box that has never heard of the line begins where the first parcel that comes begins."""
    monkeypatch.setattr("shard.core.routers.outbox.BATCH_RECORDS_MAX", 1)
    source.append(1, 2, 3)
    wear_out(source, 1, 2, 3)
    source.claim()
    (first,) = collect(source)
    assert collect(source) == []
    source.do(bring(dest, first))
    (second,) = collect(source)
    survivor = source.after_kill()
    bring(dest, second)
    carry_all(survivor, dest, carrier=2)
    assert [letter["data"] for letter in letters(dest)] == [1, 2, 3]


def test_jobs_on_their_way_are_remembered_by_a_snapshot(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2, 3)
    wear_out(source, 1, 2)
    source.claim()
    source.delete(2)
    state = source.machine.snapshot()
    survivor = source.reborn(state=state)
    assert collect(survivor) == []
    survivor.start("boot")
    carry_all(survivor, dest)
    assert [letter["data"] for letter in letters(dest)] == [2], "what was deleted meanwhile does not arrive"
    assert survivor.machine.boxes["b"].queue.dead_lettered == 1  # type: ignore[union-attr]


def test_a_line_keeps_its_destination_when_the_queue_gets_another(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2)
    wear_out(source, 1)
    source.claim(node="x")  # takes 2; 1 is on its way
    source.put(dead_letter="other")
    source.nack(2, node="x")
    source.claim(node="x")
    source.nack(2, node="x")
    assert source.claim(node="x") == []
    carry_all(source, dest)
    assert [letter["data"] for letter in letters(dest, "dead")] == [1]
    assert [letter["data"] for letter in letters(dest, "other")] == [2]


def test_a_full_dead_letter_box_holds_letters_back_and_loses_none(source: QueueDriver, dest: Driver) -> None:
    dest.put("dead", cap_records=1, discard="reject")
    source.append(1, 2)
    wear_out(source, 1, 2)
    source.claim(max=2)
    for _ in range(3):
        for parcel in collect(source):
            source.do(bring(dest, parcel))
    assert [letter["data"] for letter in letters(dest)] == [1]
    assert source.totals() == (0, 0, 1)
    dest.delete(2, box="dead")
    carry_all(source, dest)
    assert [letter["data"] for letter in letters(dest)] == [2]


def test_a_deleted_queue_sends_nothing_more(source: QueueDriver, dest: Driver) -> None:
    from streams.protocol.messages import commands

    source.append(1)
    wear_out(source, 1)
    source.claim()
    (parcel,) = collect(source)
    source.ask(commands.DeleteBox("b"))
    source.do(bring(dest, parcel))
    source.put(type="queue", max_deliveries=1, dead_letter="dead", durability="fsync")
    source.append("second life")
    wear_out(source, 1, times=1)
    source.claim()
    carry_all(source, dest)
    assert [letter["data"] for letter in letters(dest)] == [1, "second life"]
    assert dest.read(box="dead").tombstone is None, "another life of the queue is no loss"


def test_a_queue_in_memory_has_dead_letters_too(source: QueueDriver, dest: Driver) -> None:
    source.put("m", type="queue", max_deliveries=1, dead_letter="dead", durability="memory")
    source.append(1, box="m")
    source.claim(box="m")
    source.nack(1, box="m")
    outcome = source.do(queues.Claim(box="m", node="w"))
    assert "" in outcome.wakes
    carry_all(source, dest)
    assert [letter["data"] for letter in letters(dest)] == [1]
    assert source.state("m").queue.dead_lettered == 1  # type: ignore[union-attr]
    source.claim(box="m")
    reborn = source.after_kill()
    assert reborn.machine.boxes["m"].moves == {}


def test_an_origin_that_only_memory_knew_can_be_dropped_and_the_log_replayed(
    source: QueueDriver, dest: Driver
) -> None:
    dest.put("dead", durability="memory")
    source.append(1)
    wear_out(source, 1)
    source.claim()
    carry_all(source, dest)
    (origin,) = dest.machine.boxes["dead"].origins
    assert dest.ask(DetachEndpoint("dead", origin)) == DetachEndpointReply(True)
    again = dest.reborn()
    again.start("boot")
    assert not again.machine.boxes["dead"].origins


# -- and back


def back(dest: Driver, count: int = 100, to: str = "b", box: str = "dead") -> queues.PlanRequeueReply:
    reply = dest.ask(queues.PlanRequeue(box, to, count))
    assert isinstance(reply, queues.PlanRequeueReply)
    return reply


def test_a_claim_that_begins_to_wait_wakes_the_carrier_of_a_queue_in_memory() -> None:
    """Failed before: the letter lay there until something else woke the carrier."""
    driver = Driver()
    driver.put(type="queue", durability="memory", max_deliveries=1, dead_letter="dead", lease_ms=100)
    driver.append(1)
    driver.ask(queues.Claim(box="b", node="n"))
    driver.now_ms += 101
    outcome = driver.do(queues.Claim(box="b", node="n", wait_ms=20_000))
    assert outcome.reply is None and outcome.wakes == (RELAY,)


def test_dead_letters_move_back_as_they_were(source: QueueDriver, dest: Driver) -> None:
    source.append({"data": 1, "tag": "t", "meta": {"m": 1}}, 2, 3)
    wear_out(source, 1, 2, 3)
    source.claim(max=3)
    carry_all(source, dest)
    assert back(dest, 2) == queues.PlanRequeueReply("dead", 2, 2)
    assert back(dest, 5) == queues.PlanRequeueReply("dead", 1, 3), "what is on its way is not sent twice"
    assert dest.do(queues.AwaitMoves("dead", "b", 3, 500)).reply is None
    assert dest.ask(queues.AwaitMoves("dead", "b", 3)) == queues.AwaitMovesReply(3)
    carry_all(dest, source)
    assert dest.ask(queues.AwaitMoves("dead", "b", 3, 500)) == queues.AwaitMovesReply(0)
    assert letters(dest) == []
    first, second, third = source.claim(max=5)
    assert (first["$seq"], first["data"], first["$tag"], first["meta"], first["deliveries"]) == (
        4,
        1,
        "t",
        {"m": 1},
        1,
    )
    assert (second["data"], third["data"], "meta" in second) == (2, 3, False)


def test_only_letters_of_this_queue_move_back(source: QueueDriver, dest: Driver) -> None:
    dest.append({"data": 1, "meta": {"$dead_letter_from": "another"}}, {"data": 2}, box="dead")
    assert back(dest) == queues.PlanRequeueReply("dead", 0, 0)
    assert dest.ask(queues.AwaitMoves("dead", "b", 0, 500)) == queues.AwaitMovesReply(0)


def test_a_dead_letter_box_that_is_a_queue_keeps_what_its_workers_have(
    source: QueueDriver, dest: Driver
) -> None:
    other = QueueDriver()
    other.start("boot")
    other.put("dead", type="queue")
    source.append(1, 2)
    wear_out(source, 1, 2)
    source.claim(max=2)
    carry_all(source, other)
    other.claim(box="dead")
    assert back(other).planned == 1
    assert other.totals("dead") == (0, 1, 1)
    carry_all(other, source)
    assert [job["data"] for job in source.claim(max=5)] == [2]
    assert other.state("dead").queue.dead_lettered == 0  # type: ignore[union-attr]


def test_a_requeue_asks_for_a_queue_and_a_box(source: QueueDriver, dest: Driver) -> None:
    assert source.ask(queues.RequireQueue("b")) == queues.RequireQueueReply("b")
    source.append(1, box="log")
    with pytest.raises(NotAQueue):
        source.ask(queues.RequireQueue("log"))
    with pytest.raises(BoxNotFound):
        back(dest, box="none")


def test_letters_wait_for_a_queue_that_is_gone(source: QueueDriver, dest: Driver) -> None:
    from streams.protocol.messages import commands

    source.append(1)
    wear_out(source, 1)
    source.claim()
    carry_all(source, dest)
    back(dest)
    source.ask(commands.DeleteBox("b"))
    (parcel,) = collect(dest)
    answer = bring(source, parcel)
    assert answer.code == "box_not_found"
    dest.do(answer)
    source.put(type="queue")
    carry_all(dest, source)
    assert [job["data"] for job in source.claim()] == [1]


def test_jobs_beyond_a_thousand_that_died_at_once_go_with_the_next_claims(
    source: QueueDriver, dest: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.core.queues.queue.EXHAUSTED_MAX", 2)
    source.append(1, 2, 3, 4)
    wear_out(source, 1, 2, 3)
    assert [job["$seq"] for job in source.claim(max=1)] == [4], "two dead ones are in the way, and go"
    source.claim()
    carry_all(source, dest)
    assert [letter["data"] for letter in letters(dest)] == [1, 2, 3]


def test_letters_on_their_way_back_are_remembered_by_a_snapshot(source: QueueDriver, dest: Driver) -> None:
    letter = {"data": 1, "meta": {"$dead_letter_from": "b"}}
    for _ in range(3):
        dest.append(letter, box="dead")
    dest.do(dest.write(letter, box="dead"))  # not visible yet, so not a letter yet
    assert back(dest, 2).planned == 2
    survivor = dest.reborn(state=dest.machine.snapshot())
    survivor.start("boot")
    assert back(survivor, 9) == queues.PlanRequeueReply("dead", 2, 4)
    carry_all(survivor, source)
    assert len(source.claim(max=9)) == 4
    assert letters(survivor) == []


def test_a_line_is_known_by_its_origin_and_a_letter_by_its_meta(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2)
    wear_out(source, 1, 2)
    source.claim()
    strange = {"data": 0, "meta": {"$dead_letter_from": 7, "$dead_letter_src_seq": "x"}}
    dest.append(strange, "plain", box="dead")
    carry_all(source, dest)
    generation = source.machine.boxes["b"].generation
    box = dest.machine.boxes["dead"]
    assert [moves.move_queue_of(origin) for origin in box.origins] == [
        moves.MoveQueueName("b", generation, True)
    ]
    assert moves.move_queue_of("requeued of a b 7") == ("a b", 7, False)
    assert moves.move_queue_of("copy#1") is None
    first, second = box.log.tail.batches
    assert moves.letters_in(first, [(0, 1)]) == [], "a client may write what it wants"
    assert moves.letters_in(second, [(0, 1)]) == [(3, "b", 1), (4, "b", 2)]
    binary = render_binary([binary_records.tail_of([], b"x")], first_seq=1, times=1)
    assert moves.letters_in(binary, [(0, 0)]) == []


def test_positions_that_a_restore_gave_away_are_passed_over(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2)
    generation = source.machine.boxes["b"].generation
    source.commit(changes.MovesPlanned(generation, "dead", True, [0, 0], [0, 0], [0, 0]))
    source.sync()
    wear_out(source, 1, 2)
    source.claim()
    carry_all(source, dest)
    assert [letter["data"] for letter in letters(dest)] == [1, 2]
    assert source.state().count == 0


def test_moves_that_are_held_neither_leave_nor_end(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2, 3)
    wear_out(source, 1)
    source.claim()
    source.machine.moves.pause()
    assert collect(source) == [], "one that was in line already does not leave either"
    source.keep(source.machine.let_moves_go(source.now_ms))
    (given,) = collect(source)
    source.machine.moves.pause()
    assert source.do(bring(dest, given)).wakes == (RELAY, "b")
    assert source.state().count == 3, "it has arrived, and is here too"
    assert collect(source) == []
    outcome = source.keep(source.machine.let_moves_go(source.now_ms))
    assert outcome.wakes == (RELAY, "b")
    source.sync()
    assert source.state().count == 2
    carry_all(source, dest)
    assert source.keep(source.machine.let_moves_go(source.now_ms)).wakes == (RELAY,)
