"""The body of a request whose handler reads it as it arrives, over Hypercorn.

Bounds: one piece at a time is passed to the handler.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import trio

from gateway.requests.request import BodyBroken


class IncomingBody:
    """Passes the body of a request to its handler as it arrives, one piece at a time."""

    def __init__(self, *, ends_with_client: bool) -> None:
        """`ends_with_client`: True if the answer ends when the client disconnects, as in HTTP/2. A client of
        HTTP/1.1 may have closed only its sending side: it gets the rest of its answer."""
        self.ends_with_client = ends_with_client
        self._send, self._receive = trio.open_memory_channel[bytes](0)
        self._is_whole = False

    def __repr__(self) -> str:
        return f"<IncomingBody {'whole' if self._is_whole else 'open'}>"

    def __aiter__(self) -> IncomingBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._is_whole:
                raise StopAsyncIteration from None
            raise BodyBroken("the request ended in the middle of its body") from None

    async def put(self, message: Any) -> None:
        """Wait until the handler has read the piece. Drops it if the handler has stopped reading."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if message["body"]:
                await self._send.send(message["body"])
        if not message.get("more_body", False):
            self._is_whole = True
            self._send.close()

    def break_off(self) -> None:
        """End the body early: the client has disconnected or has broken the framing of its body."""
        self._send.close()

    def close(self) -> None:
        """Stop reading: the handler needs no more of the body."""
        self._receive.close()
