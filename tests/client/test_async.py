"""The client for tasks, under trio and under asyncio: the same walk through all its parts.

What each part does in detail is tested on the twin for threads, which is the same text.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

import streams
from streams.client.errors import AnswerLost, Closed, NotJson, WriteOverCap
from streams.protocol.errors import BoxFull, BoxNotFound
from streams.testing import Server

LOOPS: dict[str, Callable[[Callable[[], Awaitable[None]]], None]] = {
    "trio": trio.run,
    "asyncio": lambda work: asyncio.run(work()),  # type: ignore[arg-type, return-value]
}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    return LOOPS[request.param]


def test_append_read_follow_and_groups(run: Any, server: Server, name: str) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            box = client.box(name)
            with pytest.raises(BoxNotFound):
                await box.state()
            await box.append_batch([0, 1, 2])
            assert [item.data async for item in box.read(group="g")] == [0, 1, 2]  # type: ignore[union-attr]
            assert [item.data for item in await box.tail(2)] == [1, 2]  # type: ignore[union-attr]
            found: list[Any] = []
            async with anyio.create_task_group() as group:

                async def follow() -> None:
                    async for item in box.follow(1):
                        found.append(item.data)  # type: ignore[union-attr]
                        if len(found) == 3:
                            return

                group.start_soon(follow)
                await box.append(3)
            assert found == [1, 2, 3]
            assert [listed.box async for listed in client.boxes(name)] == [name]

    run(walk)


def test_a_producer_settles_its_tickets(run: Any, server: Server, name: str) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            box = client.box(name)
            async with box.producer(batch_records=100) as producer:
                tickets = [await producer.submit(n) for n in range(1000)]
                assert [await ticket.wait() for ticket in tickets] == list(range(1, 1001))
            await box.configure(cap_records=1000, discard="reject")
            with pytest.raises(BoxFull):
                async with box.producer() as producer:
                    await producer.submit(1000)

    run(walk)


def test_what_was_submitted_goes_even_when_the_block_fails(run: Any, server: Server, name: str) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            with pytest.raises(ZeroDivisionError):
                async with client.box(name).producer(linger_ms=3_600_000) as producer:
                    ticket = await producer.submit("before")
                    raise ZeroDivisionError
            assert await ticket.wait() == 1
            assert [item.data for item in await client.box(name).tail()] == ["before"]  # type: ignore[union-attr]

    run(walk)


def test_a_producer_that_is_told_to_end_says_what_it_does_not_know(
    run: Any, server: Server, name: str
) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            with anyio.CancelScope() as scope:
                async with client.box(name).producer(linger_ms=3_600_000) as producer:
                    ticket = await producer.submit(1)
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
            assert ticket.is_settled
            with pytest.raises((Closed, AnswerLost)):
                await ticket.wait()

    run(walk)


def test_a_worker_works_and_gives_back_what_it_has_when_it_is_told_to_end(
    run: Any, server: Server, name: str
) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            queue = client.queue(name)
            await queue.create(lease_ms=600_000)
            await queue.append_batch(list(range(20)))
            done: list[int] = []

            async def handle(job: streams.Job) -> None:
                done.append(job.data)
                if len(done) == 20:
                    worker.stop()

            worker = queue.worker(handle, concurrency=4)
            await worker.run()
            assert sorted(done) == list(range(20))

            await queue.append_batch(["good", "bad"])

            async def fail(job: streams.Job) -> None:
                assert job.data == "good"

            worker = queue.worker(fail, concurrency=4)
            await worker.run(drain=True)
            assert (worker.statistics().done, worker.statistics().failed) == (1, 1)
            await queue.delete(before_seq=100)

            await queue.append("held")
            with anyio.CancelScope() as scope:

                async def hold(job: streams.Job) -> None:
                    scope.cancel()
                    await anyio.sleep_forever()

                await queue.worker(hold).run()
            assert [job.data for job in await queue.claim("next", wait_ms=20_000)] == ["held"]

    run(walk)


LEFT_EARLY = """
import asyncio, sys
import streams

async def work(url, box):
    async with streams.AsyncClient(url) as client:
        await client.box(box).append_batch([1, 2])
        async for _ in client.watch({box: 0}):
            break
        async for _ in client.box(box).follow(0):
            break

asyncio.run(work(*sys.argv[1:]))
"""


def test_leaving_a_watch_early_under_asyncio_prints_nothing(server: Server, name: str) -> None:
    command = [sys.executable, "-W", "default", "-c", LEFT_EARLY, server.url, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_batch_over_the_cap_says_so(run: Any, server: Server, name: str) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            await client.box(name).create(cap_records=2)
            with pytest.raises(WriteOverCap, match="cap_records 2"):
                await client.box(name).append_batch([1, 2, 3])
            with pytest.raises(NotJson, match=r"records\[1\].data: "):
                await client.box(name).append_batch([1, {2}])

    run(walk)
