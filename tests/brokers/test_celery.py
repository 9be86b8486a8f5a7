"""Celery over the transport `streams://`: a real worker with a pool of processes."""

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
def tasks(server: Server) -> Iterator[Any]:
    from tests.brokers import celery_app

    words = ("celery", "-A", "tests.brokers.celery_app", "worker", "--pool", "prefork", "-c", "1")
    with running_worker(*words):
        yield celery_app
    celery_app.app.close()


@pytest.fixture
def queue(client: streams.Client) -> streams.Queue:
    return client.queue("celery.celery")


def test_tasks_run_and_their_results_come_back(tasks: Any, queue: streams.Queue) -> None:
    results = [tasks.add.delay(number, 1) for number in range(5)]
    assert [result.get(timeout=30) for result in results] == [1, 2, 3, 4, 5]
    eventually(lambda: queue.state().count == 0)


def test_an_eta_of_many_leases_waits_at_the_server_and_runs_once(
    tasks: Any, queue: streams.Queue, notes: Notes
) -> None:
    eta = time.time() + 4 * LEASE_S
    result = tasks.add.apply_async((20, 22), countdown=4 * LEASE_S)
    counts = queue.state().queue
    # No worker holds it, so no lease has to last that long, and the worker is free for other tasks.
    assert counts is not None and (counts.delayed, counts.in_flight, counts.ready) == (1, 0, 0)
    assert tasks.add.delay(1, 1).get(timeout=30) == 2
    assert result.get(timeout=30) == 42
    starts = {item["result"]: item["at"] for item in notes.named("add", "add")}
    assert starts.keys() == {2, 42}
    assert starts[42] >= eta - 0.05
    eventually(lambda: queue.state().count == 0)
    assert len(notes.items) == 2


def test_an_eta_in_three_hours_is_a_delayed_job(tasks: Any, queue: streams.Queue) -> None:
    before_ms = time.time() * 1000
    tasks.says.apply_async(("later",), countdown=3 * 3600, ignore_result=True)
    counts = queue.state().queue
    assert counts is not None and (counts.delayed, counts.in_flight) == (1, 0)
    (record,) = queue.page(include_tags=True, limit=10).records
    assert record.tag == "tests.brokers.celery_app.says"
    facts = queue.client.get(f"{queue.path}/records/{record.seq}", dict[str, Any])["record"]
    assert abs(facts["$deliver_at"] - before_ms - 3 * 3_600_000) < 60_000
    assert queue.delete(record.tag).deleted == 1


def test_a_task_that_takes_longer_than_its_lease_runs_once(
    tasks: Any, queue: streams.Queue, notes: Notes
) -> None:
    result = tasks.takes_longer_than_its_lease.delay(3 * LEASE_S)
    result.get(timeout=30)
    eventually(lambda: queue.state().count == 0)
    assert [item["task"] for item in notes.named("slow", "slow end")] == ["slow", "slow end"]


def test_the_highest_priority_goes_first(tasks: Any, notes: Notes) -> None:
    tasks.takes_longer_than_its_lease.delay(0.5)
    notes.named("slow")
    for word, priority in (("low", 0), ("high", 9), ("middle", 5)):
        tasks.says.apply_async((word,), priority=priority, ignore_result=True)
    words = [item["word"] for item in notes.named("says", "says", "says")]
    assert words == ["high", "middle", "low"]


def test_a_retry_with_a_countdown_runs_until_the_task_succeeds(tasks: Any, notes: Notes) -> None:
    tasks.fails_twice.delay().get(timeout=30)
    assert [item["retries"] for item in notes.named(*["fails_twice"] * 3)] == [0, 1, 2]


def test_a_task_whose_process_died_runs_again(tasks: Any, notes: Notes) -> None:
    tasks.dies_once.delay().get(timeout=30)
    assert [item["redelivered"] for item in notes.named("dies_once", "dies_once")] == [False, True]


def test_remote_control_reaches_the_worker(tasks: Any) -> None:
    replies = eventually(lambda: tasks.app.control.inspect(timeout=1).ping())
    assert list(replies.values()) == [{"ok": "pong"}]


def test_a_backlog_is_counted_and_purged(tasks: Any, client: streams.Client) -> None:
    for number in range(3):
        tasks.says.apply_async((str(number),), queue="unattended", countdown=number * 3600)
    with tasks.app.connection_for_write() as connection:
        channel = connection.default_channel
        assert channel.queue_declare("unattended", passive=True).message_count == 1
        assert channel.queue_purge("unattended") == 3
    assert client.queue("celery.unattended").state().count == 0
