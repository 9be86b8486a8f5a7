"""Goal: an ack with outputs deletes its jobs and plans their outputs in one change, and each output appears
in its box once (v0 §24).

Method: two machines with their logs, and a carrier between them that the test is. One machine alone for boxes
of one shard.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core import changes
from shard.core.queues import output_queue, outputs
from streams.protocol.errors import (
    BoxNotEmpty,
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    LeaseLost,
    RecordTooLarge,
    Throttled,
)
from streams.protocol.messages import commands, queues
from streams.protocol.payloads.appends import check_idempotency_key
from tests.support.carrying import bring, carry_all, collect, copies
from tests.support.jobs import QueueDriver
from tests.support.machines import Driver, facts_of, patch, records_of, recovered


@pytest.fixture
def source() -> QueueDriver:
    driver = QueueDriver()
    driver.start("boot")
    driver.put(type="queue", durability="fsync")
    return driver


@pytest.fixture
def dest() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def pending(driver: Driver, box: str = "b") -> int:
    state = driver.state(box)
    assert state.queue is not None
    return state.queue.outputs_pending


def test_outputs_appear_in_their_boxes_in_order(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2, 3)
    source.claim(max=3)
    reply = source.ack_with_outputs(
        1, 2, done=[{"data": 1.0, "tag": "t", "node": "n", "meta": {"m": 1}}, 2], more=["x"]
    )
    assert (reply.acked, reply.skipped, reply.ready, reply.in_flight, reply.deduped) == (2, [], 0, 1, False)
    assert source.state().count == 1 and pending(source) == 3
    carry_all(source, dest)
    first, second = records_of(dest.read(box="done", include_tags=True))
    assert (first["data"], first["$tag"], first["$node"], first["meta"]) == (1.0, "t", "n", {"m": 1})
    assert second["data"] == 2 and copies(dest, "more") == ["x"]
    assert pending(source) == 0
    source.ack_with_outputs(3, key="k2", done=[3], more=["y"])
    carry_all(source, dest)
    assert (copies(dest, "done"), copies(dest, "more")) == ([1.0, 2, 3], ["x", "y"])


def test_ack_and_plan_are_one_change(source: QueueDriver) -> None:
    source.append(1)
    source.claim()
    outcome = source.do(source.outputs_of(1, done=["a"]))
    assert [type(change) for _, change in outcome.changes] == [changes.OutputsPlanned]
    assert outcome.until_durable, "the reply waits as any ack of an fsync queue"


def test_a_job_that_is_not_held_changes_nothing(source: QueueDriver) -> None:
    source.append(1, 2)
    source.claim(max=2)
    source.ack(2)
    lsn = source.machine.lsn
    with pytest.raises(LeaseLost) as refusal:
        source.ack_with_outputs(1, 2, done=["a"])
    assert refusal.value.detail["skipped"] == [2]
    with pytest.raises(LeaseLost):
        source.ack_with_outputs(1, node="other", done=["a"])
    assert source.machine.lsn == lsn and source.totals() == (0, 1, 0)


def test_a_repeat_answers_the_same_and_adds_nothing(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2)
    source.claim(max=2)
    source.ack_with_outputs(1, 2, done=["a"])
    lsn = source.machine.lsn
    repeat = source.ack_with_outputs(1, 2, done=["a"])
    assert (repeat.acked, repeat.skipped, repeat.deduped, source.machine.lsn) == (2, [], True, lsn)
    again = source.after_kill()
    assert again.ack_with_outputs(1, 2, done=["a"]).deduped
    carry_all(again, dest, carrier=2)
    assert copies(dest, "done") == ["a"]
    again.now_ms += 200_000
    with pytest.raises(LeaseLost):  # the window is over, and the jobs are gone
        again.ack_with_outputs(1, 2, done=["a"])


def test_the_key_of_an_append_is_not_the_key_of_an_ack(source: QueueDriver) -> None:
    source.append(1, idempotency_key="k")
    source.claim()
    assert not source.ack_with_outputs(1, done=["a"]).deduped


def test_a_repeat_is_known_without_its_boxes(source: QueueDriver) -> None:
    source.append(1)
    source.claim()
    command = source.outputs_of(1, done=["a"])
    source.ask(command)
    only = {name: getattr(command, name) for name in command.__struct_fields__} | {"only_repeats": True}
    assert source.ask(queues.AckWithOutputs(**only)).deduped
    with pytest.raises(LeaseLost):
        source.ask(queues.AckWithOutputs(**only | {"idempotency_key": "other"}))


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_nothing_leaves_before_its_plan_is_durable(durability: str, dest: Driver) -> None:
    source = QueueDriver()
    source.start("boot")
    source.put(type="queue", durability=durability)
    source.append(1)
    source.claim()
    source.do(source.outputs_of(1, done=["a"]))
    source.logged()
    assert collect(source) == []
    source.sync()
    assert len(collect(source)) == 1


def test_a_power_cut_loses_ack_and_outputs_together() -> None:
    source = QueueDriver()
    source.start("boot")
    source.put(type="queue", durability="disk")
    source.append(1)
    source.claim()
    lsn = source.machine.lsn
    source.do(source.outputs_of(1, done=["a"]))
    before, after = recovered(source.log[:lsn]), recovered(source.log)
    assert before.boxes["b"].log.count == 1 and before.boxes["b"].outputs is None
    kept = after.boxes["b"].outputs
    assert after.boxes["b"].log.count == 0 and kept is not None and kept.pending_count == 1


def test_an_answer_that_is_lost_doubles_nothing(source: QueueDriver, dest: Driver) -> None:
    source.append(1)
    source.claim()
    source.ack_with_outputs(1, done=["a"])
    (batch,) = collect(source)
    bring(dest, batch)
    again = source.after_kill()
    assert pending(again) == 1
    carry_all(again, dest, carrier=2)
    assert copies(dest, "done") == ["a"] and pending(again) == 0
    assert facts_of(again.after_kill().machine)["boxes"] == facts_of(again.after_kill().machine)["boxes"]


def test_a_snapshot_has_the_pending_outputs(source: QueueDriver, dest: Driver) -> None:
    source.append(*range(6))
    source.claim(max=6)
    source.ack_with_outputs(1, 2, done=["a", {"data": "b", "tag": "t"}])
    source.ack_with_outputs(3, key="k2", other=["c"])
    state = source.machine.snapshot()
    other = recovered(source.log, state)
    assert facts_of(other) == facts_of(recovered(source.log))
    assert other.boxes["b"].outputs is not None and other.boxes["b"].outputs.pending_count == 3


def test_a_full_box_holds_its_outputs_back(source: QueueDriver, dest: Driver) -> None:
    dest.put("done", cap_records=1, discard="reject")
    source.append(1)
    source.claim()
    source.ack_with_outputs(1, done=["a", "b"], other=["c"])
    for _ in range(3):
        for batch in collect(source):
            source.do(bring(dest, batch))
    assert (copies(dest, "done"), copies(dest, "other"), pending(source)) == (["a"], ["c"], 1)
    state = source.state().queue
    assert state is not None and str(state.outputs_error).startswith("box_full: ")
    dest.put("done", cap_records=9)
    carry_all(source, dest)
    assert (copies(dest, "done"), pending(source)) == (["a", "b"], 0)
    state = source.state().queue
    assert state is not None and not state.outputs_error


def test_pending_outputs_are_bounded(source: QueueDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "BYTES_MAX", 300)
    source.append(1, 2)
    source.claim(max=2)
    source.ack_with_outputs(1, done=["x" * 300])
    with pytest.raises(Throttled) as refusal:
        source.ack_with_outputs(2, key="k2", done=["y"])
    assert refusal.value.detail["limit"] == "outputs_pending" and source.totals() == (0, 1, 0)


def test_so_are_the_outputs_of_a_shard(source: QueueDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "SHARD_BYTES_MAX", 300)
    source.put("other", type="queue")
    for box in ("b", "other"):
        source.append(1, box=box)
        source.claim(box=box)
    source.ack_with_outputs(1, done=["x" * 300])
    with pytest.raises(Throttled):
        source.ack_with_outputs(1, box="other", done=["y"])
    source.ask(commands.DeleteBox("b", False))
    source.ack_with_outputs(1, box="other", done=["y"])


def test_idle_destinations_are_forgotten_and_no_position_comes_twice(
    source: QueueDriver, dest: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queue, "DESTS_MAX", 2)
    monkeypatch.setattr(outputs, "DESTS_MAX", 2)
    source.append(*range(12))
    source.claim(max=12)
    for seq, box in enumerate("xyzxyzyx", 1):
        source.ack_with_outputs(seq, key=f"k{seq}", **{box: [seq]})
        carry_all(source, dest)
    assert [copies(dest, box) for box in "xyz"] == [[1, 4, 8], [2, 5, 7], [3, 6]]
    source.ack_with_outputs(9, key="k9", x=[9], y=[9])
    with pytest.raises(Throttled, match="wait for 2 boxes"):
        source.ack_with_outputs(10, key="k10", z=[10])
    assert facts_of(source.after_kill().machine)["boxes"] == facts_of(source.after_kill().machine)["boxes"]


def test_large_outputs_go_in_several_batches(
    source: QueueDriver, dest: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queue, "BATCH_BYTES_MAX", 150)
    source.append(*range(4))
    source.claim(max=4)
    source.ack_with_outputs(1, done=[1, 2, 3, 4, 5])
    source.ack_with_outputs(2, key="k2", done=["x" * 400, 6])
    assert carry_all(source, dest) > 2
    assert copies(dest, "done") == [1, 2, 3, 4, 5, "x" * 400, 6]


def test_outputs_inside_one_shard(source: QueueDriver) -> None:
    """Also into the queue itself: the next step of a saga."""
    source.put("done", durability="fsync")
    source.append(1)
    source.claim()
    source.ack_with_outputs(1, done=["a"], b=["next"])
    source.copy_all_locally()
    assert copies(source, "done") == ["a"]
    (job,) = source.claim()
    assert (job["data"], pending(source)) == ("next", 0)
    again = source.after_kill()
    assert copies(again, "done") == ["a"] and again.totals() == (1, 0, 0)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_an_output_is_pending_until_readers_see_it(source: QueueDriver, durability: str) -> None:
    """In its box on the same shard, too: a state of the queue and one of the box never both miss it."""

    def counts() -> tuple[int, int]:
        boxes = [source.do(commands.GetState(box, False)).reply for box in ("done", "b")]
        assert isinstance(boxes[0], commands.BoxState) and isinstance(boxes[1], commands.BoxState)
        return boxes[0].count, boxes[1].queue.outputs_pending  # type: ignore[union-attr]

    source.put("done", durability=durability)
    source.append(*range(20))
    source.claim(max=20)
    source.sync()
    for seq in range(1, 20):
        source.do(source.outputs_of(seq, key=f"k{seq}", done=[seq]))
        for progress in (source.logged, source.sync) * 3:
            assert sum(counts()) >= seq
            source.copy_locally(is_early=True)
            assert sum(counts()) >= seq
            progress()
        assert counts() == (seq, 0)
    assert copies(source, "done") == list(range(1, 20))


def test_arrived_outputs_are_confirmed_while_nothing_may_be_copied(source: QueueDriver) -> None:
    """The disk is nearly full, so the relay has what is to be copied."""
    source.put("done", durability="fsync")
    source.append(1)
    source.claim()
    source.ask(source.outputs_of(1, done=["a"]))
    copier = source.machine.local_copies
    source.copy_locally()
    assert not copier.can_confirm
    source.sync()
    assert copier.can_confirm and pending(source) == 1
    source.keep(copier.confirm(source.now_ms))
    assert (copies(source, "done"), pending(source)) == (["a"], 0)


def test_job_fields_of_outputs(source: QueueDriver, dest: Driver) -> None:
    """Unlike copies of a router, outputs are new jobs: they keep their time."""
    queue = QueueDriver()
    queue.start("boot")
    queue.put("next", type="queue")
    source.append(1)
    source.claim()
    source.ack_with_outputs(
        1,
        next=[
            {"data": 1, "delay_ms": 5_000, "ordering_key": "k"},
            {"data": 2, "job_priority": 3},
        ],
    )
    carry_all(source, queue)
    (job,) = queue.claim(max=5, box="next")
    assert (job["data"], job["$job_priority"]) == (2, 3)
    queue.now_ms += 5_000
    (job,) = queue.claim(max=5, box="next")
    assert (job["data"], job["$ordering_key"]) == (1, "k")
    source.append(1)
    source.claim()
    command = source.outputs_of(2, key="k2", log=[{"data": 1, "delay_ms": 1}])
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    with pytest.raises(InvalidRequest, match="is a log"):
        source.ask(queues.AckWithOutputs(**fields | {"log_boxes": frozenset(["log"])}))


def test_a_queue_that_is_deleted_when_empty_waits_for_its_outputs(source: QueueDriver, dest: Driver) -> None:
    source.put(delete_on_empty_ms=1_000)
    source.append(1)
    source.claim()
    source.ack_with_outputs(1, done=["a"])
    source.now_ms += 10_000
    source.tick()
    assert "b" in source.machine.boxes
    carry_all(source, dest)
    source.tick()
    assert "b" not in source.machine.boxes and copies(dest, "done") == ["a"]


def test_a_queue_that_is_created_again_has_its_own_positions(source: QueueDriver, dest: Driver) -> None:
    for _ in range(2):
        source.append(1)
        source.claim()
        source.ack_with_outputs(1, done=["a"])
        carry_all(source, dest)
        source.ask(commands.DeleteBox("b", False))
        source.put(type="queue")
    assert copies(dest, "done") == ["a", "a"]


def test_a_queue_in_memory_sends_its_outputs_at_once(dest: Driver) -> None:
    source = QueueDriver()
    source.start("boot")
    source.put(type="queue", durability="memory")
    source.append(1, 2)
    source.claim(max=2)
    outcome = source.do(source.outputs_of(1, done=["a"]))
    assert outcome.changes == [] and "" in outcome.wakes
    carry_all(source, dest)
    assert copies(dest, "done") == ["a"] and pending(source) == 0
    source.ack_with_outputs(2, key="k2", done=["b"])
    source.put(durability="fsync")
    again = source.after_kill()
    carry_all(again, dest, carrier=2)
    assert copies(dest, "done") == ["a", "b"]


def test_a_hold_keeps_outputs_in_their_source(source: QueueDriver, dest: Driver) -> None:
    source.append(1, 2)
    source.claim(max=2)
    source.ack_with_outputs(1, done=["a"])
    (batch,) = collect(source)
    report = bring(dest, batch)
    source.machine.moves.pause()
    source.do(report)
    source.ack_with_outputs(2, key="k2", done=["b"])
    assert collect(source) == [] and pending(source) == 2
    source.keep(source.machine.let_moves_go(source.now_ms))
    carry_all(source, dest)
    assert copies(dest, "done") == ["a", "b"] and pending(source) == 0


# -- checks of a box before the ack


def check(driver: Driver, box: str = "done", **fields: Any) -> Any:
    return driver.ask(queues.CheckOutput(**{"box": box, "bytes": 9, "record_bytes": 9, **fields}))


def test_a_box_says_before_what_it_would_refuse_for_good(dest: Driver) -> None:
    assert check(dest) == queues.CheckOutputReply("done", False) and "done" not in dest.machine.boxes
    dest.put("q", type="queue")
    assert check(dest, "q").is_queue
    dest.put("ram", durability="memory")
    with pytest.raises(InvalidRequest, match="memory"):
        check(dest, "ram")
    dest.put("small", cap_bytes=8)
    with pytest.raises(RecordTooLarge):
        check(dest, "small")
    dest.ask(commands.SetFence("q", "token", None))
    with pytest.raises(FencingTokenMismatch):
        check(dest, "q")
    dest.put("gone", auto_create=False)
    dest.ask(commands.DeleteBox("gone", False))
    with pytest.raises(BoxNotFound):
        check(dest, "gone")


def test_a_queue_with_pending_outputs_is_not_empty(source: QueueDriver, dest: Driver) -> None:
    source.append(1)
    source.claim()
    source.ack_with_outputs(1, done=["a"])
    with pytest.raises(BoxNotEmpty, match="1 outputs"):
        source.ask(commands.DeleteBox("b", True))
    carry_all(source, dest)
    source.ask(commands.DeleteBox("b", True))
    assert copies(dest, "done") == ["a"]


def test_a_key_of_an_append_never_names_an_ack(source: QueueDriver) -> None:
    source.append(1, idempotency_key="ack: k")
    source.claim()
    assert not source.ack_with_outputs(1, done=["a"]).deduped
    with pytest.raises(InvalidRequest, match="NUL"):
        check_idempotency_key("\0ack k")


@pytest.mark.parametrize("first", ["disk", "fsync"])
def test_a_change_of_class_strands_no_outputs(source: QueueDriver, dest: Driver, first: str) -> None:
    source.put(durability=first)
    source.append(1, 2)
    source.claim(max=2)
    source.do(source.outputs_of(1, done=["a"]))
    source.do(commands.PutBox("b", patch(durability="memory")))
    source.do(source.outputs_of(2, key="k2", done=["b"]))
    assert collect(source) == [], "neither the first plan nor the change of class is durable"
    source.sync()
    carry_all(source, dest)
    assert copies(dest, "done") == ["a", "b"] and pending(source) == 0


@pytest.mark.parametrize("is_local", [False, True])
def test_a_queue_that_becomes_a_log_gets_its_outputs(
    source: QueueDriver, dest: Driver, is_local: bool
) -> None:
    other = source if is_local else dest
    other.put("next", type="queue")
    source.append(1)
    source.claim()
    source.do(source.outputs_of(1, next=[{"data": 1, "delay_ms": 5_000, "ordering_key": "k"}]))
    other.ask(commands.DeleteBox("next", False))
    other.put("next")
    source.copy_all_locally()
    carry_all(source, other)
    assert copies(other, "next") == [1] and pending(source) == 0
    recovered(other.log)


def test_outputs_wait_for_a_box_that_may_not_be_created(source: QueueDriver, dest: Driver) -> None:
    dest.put("kept")
    dest.put("gone", auto_create=False)
    source.append(1)
    source.claim()
    source.ack_with_outputs(1, kept=["a"], gone=["b"])
    dest.ask(commands.DeleteBox("gone", False))
    for batch in collect(source):
        source.do(bring(dest, batch))
    state = source.state().queue
    assert state is not None and state.outputs_pending == 1 and str(state.outputs_error).startswith("box_not")
    again = source.after_kill()
    dest.put("gone")
    carry_all(again, dest, carrier=2)
    assert (copies(dest, "kept"), copies(dest, "gone"), pending(again)) == (["a"], ["b"], 0)
