"""The body of an HTTP/1.1 request that is handled while it arrives: wire bytes in, bytes of the body out.

The handler pulls: the socket is read only when the handler asks for more, so TCP flow control stops the
client of a handler that waits.

Bounds: one read of the connection, and at most as many decoded bytes. The length of the whole body has no
limit; its framing has one (`ChunkedBody`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from gateway.http.edge_rules import CHUNKED, FrontLimits
from gateway.http.h1 import ChunkedBody
from gateway.requests.request import BodyBroken
from streams.protocol.errors import InvalidRequest


class IncomingBody:
    """An async iterator over the pieces of a body. Raises `BodyBroken` behind the last good piece."""

    __slots__ = ("_chunked_body", "_error", "_missing", "_receive", "_wire", "is_whole", "rest")

    def __init__(
        self, receive: Callable[[], Awaitable[bytes]], first: bytes, length: int, limits: FrontLimits
    ) -> None:
        """`receive` returns the next bytes of the connection, or raises `BodyBroken`. `first` came with the
        head; `length` is the length of the body, or `CHUNKED`."""
        self._receive = receive
        self._wire = first
        self._chunked_body = ChunkedBody(limits, is_bounded=False) if length == CHUNKED else None
        self._missing = length
        self._error: BodyBroken | None = None
        #: True when the body is complete. `rest` then holds the bytes behind it.
        self.is_whole = False
        self.rest = b""

    def __repr__(self) -> str:
        return f"<IncomingBody {'whole' if self.is_whole else 'broken' if self._error else 'open'}>"

    def __aiter__(self) -> IncomingBody:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if self._error is not None:
                raise self._error
            chunked_body = self._chunked_body
            if chunked_body is not None and chunked_body.is_behind:
                await trio.lowlevel.checkpoint()
            piece = self._next_piece() if chunked_body is None else self._next_chunks(chunked_body)
            if piece:
                return piece
            if self.is_whole:
                raise StopAsyncIteration
            if self._error is None and not (chunked_body is not None and chunked_body.is_behind):
                self._wire = await self._receive()

    def _next_piece(self) -> bytes:
        data, self._wire = self._wire, b""
        piece = data[: self._missing]
        self._missing -= len(piece)
        if not self._missing and not self.is_whole:
            self.is_whole, self.rest = True, data[len(piece) :]
        return piece

    def _next_chunks(self, body: ChunkedBody) -> bytes:
        data, self._wire = self._wire, b""
        if (data or body.is_behind) and not body.is_complete:
            try:
                body.feed_untrusted(data)
            except InvalidRequest as error:
                self._error = BodyBroken(error.message)
            if body.is_complete:
                self.is_whole, self.rest = True, body.rest
        return body.take()
