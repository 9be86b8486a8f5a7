"""Goal: after a restore, outputs of acks are in their queue or in their box, once, or their loss is reported
(v0 §24).

Method: as in `test_reconcile.py`, with the two shards captured at different moments.
"""

from __future__ import annotations

from typing import Any

from streams.protocol.messages.commands import DeleteBox
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


def ack_into(world: World, box: str, *seqs: int) -> None:
    queue = world.owner("jobs")
    queue.claim(max=len(seqs), box="jobs")
    outputs: dict[str, Any] = {box: list(seqs)}
    queue.ack_with_outputs(*seqs, key=f"k{seqs}", box="jobs", **outputs)


def test_a_box_that_never_had_outputs_loses_none(world: World) -> None:
    """The outputs of a queue share one sequence of positions, so those for the second box begin at 3."""
    add(world, 1, 2, 3, box="jobs")
    ack_into(world, "first", 1, 2)
    world.carry()
    ack_into(world, "second", 3)
    world.restore()
    world.carry()
    assert world.recount("first") == ([1, 2], []) and world.recount("second") == ([3], [])


def test_nor_does_one_that_exists_and_has_none_yet(world: World) -> None:
    add(world, 1, 2, 3, box="jobs")
    add(world, 0, box="second")
    ack_into(world, "first", 1, 2)
    world.carry()
    ack_into(world, "second", 3)
    world.restore()
    world.carry()
    assert world.recount("second") == ([0, 3], [])


def test_only_the_outputs_of_a_box_count_as_its_losses(world: World) -> None:
    add(world, *range(1, 8), box="jobs")
    add(world, 0, box="second")
    ack_into(world, "first", 1, 2, 3)
    ack_into(world, "second", 4)
    world.carry()
    world.capture(1)
    ack_into(world, "first", 5, 6)
    ack_into(world, "second", 7)
    world.carry()
    world.restore()
    world.carry()
    assert world.recount("first") == ([1, 2, 3], [("source_trim", 2)])
    assert world.recount("second") == ([0, 4], [("source_trim", 1)])


def test_a_loss_of_all_outputs_is_reported(world: World) -> None:
    """The box exists and does not know the queue yet."""
    add(world, *range(1, 6), box="jobs")
    add(world, 0, box="second")
    ack_into(world, "first", 1, 2)
    world.carry()
    world.capture(1)
    ack_into(world, "second", 3, 4)
    world.carry()
    world.restore()
    world.carry()
    assert world.recount("second") == ([0], [("source_trim", 2)])
    ack_into(world, "second", 5)
    world.carry()
    assert world.recount("second") == ([0, 5], [("source_trim", 2)])


def test_a_box_that_was_created_again_has_lost_nothing(world: World) -> None:
    add(world, 1, 2, box="jobs")
    add(world, 0, box="second")
    ack_into(world, "second", 1)
    world.carry()
    world.owner("second").ask(DeleteBox("second", False))
    add(world, 10, box="second")
    world.restore()
    ack_into(world, "second", 2)
    world.carry()
    assert world.recount("second") == ([10, 2], [])


def test_a_loss_is_reported_if_no_box_has_an_output(world: World) -> None:
    """A restore compares its shards only if a box refers to another one."""
    add(world, 1, box="jobs")
    add(world, 0, box="second")
    world.capture(1)
    ack_into(world, "second", 1)
    world.carry()
    world.restore()
    assert world.recount("second") == ([0], [("source_trim", 1)])
