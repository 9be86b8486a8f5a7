"""The broker for Dramatiq, with a real worker process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import streams
from streams.testing import Server
from tests.brokers.conftest import Notes, running_worker
from tests.support.crashing import eventually

#: Of the app, in seconds.
LEASE_S = 0.6


@pytest.fixture(scope="module")
def actors(server: Server) -> Iterator[Any]:
    from tests.brokers import dramatiq_app

    words = ("dramatiq", "tests.brokers.dramatiq_app", "--processes", "1", "--threads", "1", "--skip-logging")
    with running_worker(*words):
        yield dramatiq_app
    dramatiq_app.broker.close()


@pytest.fixture
def queue(client: streams.Client) -> streams.Queue:
    return client.queue("dramatiq.default")


def test_a_message_with_a_delay_of_many_leases_waits_at_the_server_and_runs_once(
    actors: Any, queue: streams.Queue, notes: Notes
) -> None:
    actors.add.send(0, 0)
    notes.named("add")  # the worker is ready
    due = time.time() + 4 * LEASE_S
    actors.add.send_with_options(args=(20, 22), delay=round(4 * LEASE_S * 1000))
    counts = queue.state().queue
    assert counts is not None and counts.delayed == 1
    actors.add.send(1, 1)
    starts = {item["result"]: item["at"] for item in notes.named("add", "add", "add")}
    assert starts.keys() == {0, 2, 42}
    assert starts[42] >= due - 0.05
    actors.broker.join("default", timeout=30_000)
    assert len(notes.items) == 3


def test_a_message_that_takes_longer_than_its_lease_runs_once(actors: Any, notes: Notes) -> None:
    actors.takes_longer_than_its_lease.send(3 * LEASE_S)
    actors.broker.join("default", timeout=30_000)
    assert [item["task"] for item in notes.named("slow", "slow end")] == ["slow", "slow end"]


def test_a_message_that_fails_is_retried_and_one_that_always_does_is_a_dead_letter(
    actors: Any, client: streams.Client, queue: streams.Queue, notes: Notes
) -> None:
    actors.fails_twice.send()
    assert [item["retries"] for item in notes.named(*["fails_twice"] * 3)] == [0, 1, 2]
    actors.fails_always.send()
    notes.named("fails_always")
    dead = client.queue("dramatiq.default.XQ")
    eventually(lambda: dead.exists() and dead.state().count == 1)
    (letter,) = dead.tail()
    assert isinstance(letter, streams.Record)
    assert (letter.tag, letter.meta["$dead_letter_from"]) == ("fails_always", "dramatiq.default")
    assert "ValueError: never" in letter.meta["$dead_letter_error"]
    actors.broker.join("default", timeout=30_000)
    assert queue.requeue("dramatiq.default.XQ") == 1
    assert len(notes.named("fails_always", "fails_always")) == 2


def test_the_highest_priority_goes_first(actors: Any, client: streams.Client, notes: Notes) -> None:
    words = client.queue("dramatiq.words")
    words.create()
    words.pause()
    for word, priority in (("low", 0), ("high", 9), ("middle", 5)):
        actors.says.send_with_options(args=(word,), broker_priority=priority)
    words.resume()
    assert [item["word"] for item in notes.named("says", "says", "says")] == ["high", "middle", "low"]


def test_flush_deletes_delayed_messages_too(actors: Any, client: streams.Client) -> None:
    actors.broker.declare_queue("unattended")
    message = actors.says.message("x").copy(queue_name="unattended")
    actors.broker.enqueue(message)
    actors.broker.enqueue(message, delay=3_600_000)
    actors.broker.flush("unattended")
    assert client.queue("dramatiq.unattended").state().count == 0
