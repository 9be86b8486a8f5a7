"""The exchanges of a connection: each runs the app with a queue of its own, which ends with it.

Hypercorn leaves on a queue what an exchange has not taken when it is over; when that is full, the whole
connection waits for ever for somebody to take from it. Here it is dropped.

Bounds: `INPUT_BYTES_MAX` for each exchange, and Hypercorn's number of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.task_group import TaskGroup
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)

#: Input of one exchange that its app has not taken. A read is more than half of it, so it holds one or two.
INPUT_BYTES_MAX = 160 * 1024


class Exchanges(TaskGroup):
    """Starts the app for each exchange of a connection, with a queue that ends with it."""

    def __init__(self, nursery: trio.Nursery | None) -> None:
        self._nursery = nursery

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        queue = InputQueue(config.max_app_queue_size)

        async def run(
            scope: Scope,
            _receive: ASGIReceiveCallable,
            send: ASGISendCallable,
            sync_spawn: Callable[..., Any],
            call_soon: Callable[..., Any],
        ) -> None:
            try:
                await app(scope, queue.take, send, sync_spawn, call_soon)
            finally:
                queue.close()

        await super().spawn_app(run, config, scope, send)  # type: ignore[arg-type]
        return queue.put


class InputQueue:
    """Input of one exchange on its way to the app, bounded in messages and in bytes. Once the exchange is
    over, input is dropped."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._messages: deque[ASGIReceiveEvent] = deque()
        self._bytes = 0
        self._is_closed = False
        self._has_more = trio.lowlevel.ParkingLot()
        self._has_room = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<InputQueue {len(self._messages)} messages, {self._bytes} B>"

    async def put(self, message: ASGIReceiveEvent) -> None:
        size = _body_bytes(message)
        while not self._is_closed and (
            len(self._messages) >= self._messages_max
            or (self._messages and self._bytes + size > INPUT_BYTES_MAX)
        ):
            await self._has_room.park()
        if not self._is_closed:
            self._messages.append(message)
            self._bytes += size
            self._has_more.unpark()

    async def take(self) -> ASGIReceiveEvent:
        if self._messages:
            await trio.lowlevel.checkpoint()
        while not self._messages:
            await self._has_more.park()
        message = self._messages.popleft()
        self._bytes -= _body_bytes(message)
        self._has_room.unpark_all()
        return message

    def close(self) -> None:
        self._is_closed = True
        self._messages.clear()
        self._bytes = 0
        self._has_room.unpark_all()


def _body_bytes(message: Any) -> int:
    return len(message.get("body", b""))
