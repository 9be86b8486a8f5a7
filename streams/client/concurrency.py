"""Primitives to wait and to run functions concurrently, for threads.

The client is written once, for tasks. Its twin for threads is generated from it, by removing `Async` and
`await`. The parts that differ are here and, with the same names, in `async_concurrency.py`. Shared state is
guarded by a plain lock in both. The lock is never held during a wait, so it does not block an event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


def sleep(seconds: float) -> None:
    time.sleep(seconds)


class Flag:
    """An event that is set once. Any number of threads can wait for it."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True if it was set in time."""
        return self._event.wait(timeout_s)


class Bell:
    """A signal that can be sent (`ring`) any number of times. A wait ends at once if the bell was rung since
    the last wait ended."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float | None = None) -> None:
        self._event.wait(timeout_s)
        self._event.clear()


class Crew:
    """Threads that end with the block, which waits for them. The first failure is raised there. A thread
    cannot be cancelled: the owner has a flag that its work checks."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None

    def __enter__(self) -> Crew:
        return self

    def start(self, work: Callable[..., Any], *args: object) -> None:
        thread = threading.Thread(target=self._run, args=(work, args), daemon=True, name=f"streams {work!r}")
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _run(self, work: Callable[..., Any], args: tuple[object, ...]) -> None:
        try:
            work(*args)
        except BaseException as failure:
            self._failure = self._failure or failure

    def cancel(self) -> None:
        """Does nothing: the owner has a flag for its threads."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.join()
        if self._failure is not None and error is None:
            raise self._failure


def shield(seconds: float) -> AbstractContextManager[object]:
    """Does nothing, because threads are not cancelled; see `ashield`."""
    return nullcontext()


def in_thread(work: Callable[..., T], *args: Any) -> T:
    """A thread may block."""
    return work(*args)
