"""Goal: after a restore, outputs of acks are in their queue or in their box, once, or their loss is reported
(v0 §24).

Method: as in `test_reconcile.py`, with the two shards captured at different moments.
"""

from __future__ import annotations

from tests.storage.test_reconcile import World, add, world

__all__ = ["world"]


def ack(world: World, seq: int, *outputs: object) -> None:
    queue = world.owner("jobs")
    queue.claim(box="jobs")
    queue.ack_with_outputs(seq, key=f"k{seq}", box="jobs", results=list(outputs))


def test_pending_outputs_are_restored_and_arrive_once(world: World) -> None:
    add(world, 1, 2, box="jobs")
    ack(world, 1, "a", "b")
    world.restore()
    world.carry()
    assert (world.data("jobs"), world.data("results")) == ([2], ["a", "b"])
    assert world.owner("jobs").state("jobs").queue.outputs_pending == 0  # type: ignore[union-attr]


def test_outputs_that_arrived_before_both_captures_do_not_come_again(world: World) -> None:
    add(world, 1, 2, box="jobs")
    ack(world, 1, "a")
    world.carry()
    world.restore()
    world.carry()
    ack(world, 2, "b")
    world.carry()
    assert world.data("results") == ["a", "b"]


def test_positions_of_outputs_that_the_source_does_not_know_are_not_given_twice(world: World) -> None:
    add(world, 1, 2, box="jobs")
    world.capture(0)
    ack(world, 1, "a")
    world.carry()
    world.restore()
    world.carry()
    ack(world, 1, "again")
    ack(world, 2, "b")
    world.carry()
    assert world.data("results") == ["a", "again", "b"], "twice, and never not at all"


def test_outputs_that_had_left_before_their_queue_was_captured_are_reported(world: World) -> None:
    add(world, 1, 2, box="jobs")
    ack(world, 1, "a")
    world.carry()
    world.capture(1)
    ack(world, 2, "b")
    world.carry()
    world.restore()
    world.carry()
    assert world.recount("results") == (["a"], [("source_trim", 1)])
