"""The Taskiq tasks of the tests. They write what they do into the box `done`."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from taskiq import SmartRetryMiddleware

import streams
from streams.brokers.taskiq import TaskiqBroker

URL = os.environ["TEST_STREAMS_URL"]

broker = TaskiqBroker(URL, lease_s=0.6, claim_max=1).with_middlewares(SmartRetryMiddleware(default_delay=0.1))


async def note(name: str, **facts: Any) -> None:
    async with streams.AsyncClient(URL) as client:
        await client.box("done").append({"task": name, "at": time.time(), **facts})


@broker.task(task_name="add")
async def add(a: int, b: int) -> None:
    await note("add", result=a + b)


@broker.task(task_name="slow")
async def takes_longer_than_its_lease(seconds: float) -> None:
    await note("slow")
    await asyncio.sleep(seconds)  # the work itself; the test waits for its end
    await note("slow end")


attempts: list[int] = []


@broker.task(task_name="fails_twice", retry_on_error=True, max_retries=5)
async def fails_twice() -> None:
    attempts.append(1)
    await note("fails_twice", retries=len(attempts) - 1)
    if len(attempts) < 3:
        raise ValueError("not yet")


@broker.task(task_name="says")
async def says(word: str) -> None:
    await note("says", word=word)
