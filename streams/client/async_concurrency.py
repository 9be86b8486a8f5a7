"""Primitives to wait and to run functions concurrently, for tasks of trio and asyncio.

`concurrency.py` has the same classes and functions for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def asleep(seconds: float) -> None:
    await anyio.sleep(seconds)


class AsyncFlag:
    """An event that is set once. Any number of tasks can wait for it."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return True if it was set in time."""
        with anyio.move_on_after(timeout_s):
            await self._event.wait()
        return self._event.is_set()


class AsyncBell:
    """A signal that can be sent (`ring`) any number of times. A wait ends at once if the bell was rung since
    the last wait ended."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        with anyio.move_on_after(timeout_s):
            await self._event.wait()
        if self._event.is_set():
            self._event = anyio.Event()


class AsyncCrew:
    """A group of tasks. The block ends when all tasks have ended; the first failure cancels the others and is
    raised."""

    def __init__(self) -> None:
        self._group = anyio.create_task_group()

    async def __aenter__(self) -> AsyncCrew:
        await self._group.__aenter__()
        return self

    def start(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> None:
        self._group.start_soon(work, *args)

    def cancel(self) -> None:
        """Cancel all tasks."""
        self._group.cancel_scope.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise


def ashield(seconds: float) -> AbstractContextManager[object]:
    """Run a block for up to `seconds` even when the task is cancelled, to release what it holds."""
    return anyio.move_on_after(seconds, shield=True)


async def ain_thread(work: Callable[..., T], *args: Any) -> T:
    """Run a blocking call in a thread, so that other tasks continue."""
    return await anyio.to_thread.run_sync(lambda: work(*args))
