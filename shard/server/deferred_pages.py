"""Queues requests for pages of one connection until there is memory for their answers.

Bounds: `REQUESTS_MAX` requests, and `BYTES_MAX` bytes of requests.
"""

from __future__ import annotations

from streams.protocol import wire

#: As many requests as a gateway has in flight on one link.
REQUESTS_MAX = 20_000
#: A request for a page is some hundred bytes, unless a client tries to exhaust the memory.
BYTES_MAX = 16 * 1024 * 1024


class DeferredPages:
    __slots__ = ("_bytes", "_requests")

    def __init__(self) -> None:
        #: By id, in the order of arrival.
        self._requests: dict[int, wire.Message] = {}
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<DeferredPages {len(self._requests)} requests, {self._bytes} B>"

    def __len__(self) -> int:
        return len(self._requests)

    def fits(self, message: wire.Message) -> bool:
        return len(self._requests) < REQUESTS_MAX and self._bytes + _size(message) <= BYTES_MAX

    def put(self, message: wire.Message) -> None:
        self._requests[message.id] = message
        self._bytes += _size(message)

    def pop(self) -> wire.Message:
        """Remove and return the oldest request."""
        message = self._requests.pop(next(iter(self._requests)))
        self._bytes -= _size(message)
        return message

    def remove(self, id: int) -> wire.Message | None:
        message = self._requests.pop(id, None)
        if message is not None:
            self._bytes -= _size(message)
        return message

    def clear(self) -> None:
        self._requests.clear()
        self._bytes = 0


def _size(message: wire.Message) -> int:
    return len(message.head) + len(message.body)
