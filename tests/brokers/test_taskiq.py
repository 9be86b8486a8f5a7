"""The broker for Taskiq, with a real worker process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import streams
from streams.testing import Server
from tests.brokers.conftest import Notes, running_worker
from tests.support.crashing import eventually

#: Of the app, in seconds.
LEASE_S = 0.6

Run = Callable[[Callable[[], Coroutine[Any, Any, object]]], None]


@pytest.fixture(scope="module")
def tasks(server: Server) -> Iterator[Any]:
    from tests.brokers import taskiq_app

    words = (
        "taskiq",
        "worker",
        "tests.brokers.taskiq_app:broker",
        "--workers",
        "1",
        "--max-async-tasks",
        "1",
    )
    with running_worker(*words):
        yield taskiq_app


@pytest.fixture
def run(tasks: Any) -> Run:
    """Run something with a started broker of its own, as a program that sends tasks does."""

    def run(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        async def main() -> None:
            await tasks.broker.startup()
            try:
                await work()
            finally:
                await tasks.broker.shutdown()

        asyncio.run(main())

    return run


@pytest.fixture
def queue(client: streams.Client) -> streams.Queue:
    return client.queue("taskiq.default")


def test_a_task_with_a_delay_of_many_leases_waits_at_the_server_and_runs_once(
    tasks: Any, run: Run, queue: streams.Queue, notes: Notes
) -> None:
    async def send() -> None:
        await tasks.add.kicker().with_labels(delay=4 * LEASE_S).kiq(20, 22)
        await tasks.add.kiq(1, 1)

    run(lambda: tasks.add.kiq(0, 0))
    notes.named("add")  # the worker is ready
    due = time.time() + 4 * LEASE_S
    run(send)
    counts = queue.state().queue
    assert counts is not None and counts.delayed == 1
    starts = {item["result"]: item["at"] for item in notes.named("add", "add", "add")}
    assert starts.keys() == {0, 2, 42}
    assert starts[42] >= due - 0.05
    eventually(lambda: queue.state().count == 0)
    assert len(notes.items) == 3


def test_a_task_that_takes_longer_than_its_lease_runs_once(
    tasks: Any, run: Run, queue: streams.Queue, notes: Notes
) -> None:
    run(lambda: tasks.takes_longer_than_its_lease.kiq(3 * LEASE_S))
    eventually(lambda: queue.state().count == 0)
    assert [item["task"] for item in notes.named("slow", "slow end")] == ["slow", "slow end"]


def test_a_task_that_fails_is_retried(tasks: Any, run: Run, notes: Notes) -> None:
    run(lambda: tasks.fails_twice.kiq())
    assert [item["retries"] for item in notes.named(*["fails_twice"] * 3)] == [0, 1, 2]


def test_the_highest_priority_goes_first(tasks: Any, run: Run, queue: streams.Queue, notes: Notes) -> None:
    async def send() -> None:
        for word, priority in (("low", 0), ("high", 9), ("middle", 5)):
            await tasks.says.kicker().with_labels(priority=priority).kiq(word)

    queue.pause()
    run(send)
    queue.resume()
    assert [item["word"] for item in notes.named("says", "says", "says")] == ["high", "middle", "low"]


def test_a_listener_that_stops_gives_back_what_it_did_not_start(
    server: Server, client: streams.Client
) -> None:
    from taskiq.message import BrokerMessage

    from streams.brokers.taskiq import TaskiqBroker

    async def main() -> None:
        broker = TaskiqBroker(server.url, queue="unattended", claim_max=5)
        broker.is_worker_process = True
        await broker.startup()
        for number in range(3):
            await broker.kick(
                BrokerMessage(task_id=f"{number}", task_name="x", message=b"%d" % number, labels={})
            )
        listener = broker.listen()
        message = await anext(listener)
        assert message.data == b"0"
        await listener.aclose()
        state = (await broker.queue.state()).queue
        assert state is not None and (state.ready, state.in_flight) == (2, 1)
        ack = message.ack()
        assert ack is not None
        await ack
        await broker.shutdown()

    asyncio.run(main())
    state = client.queue("taskiq.unattended").state()
    assert state.count == 2
