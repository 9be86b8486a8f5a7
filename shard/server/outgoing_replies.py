"""Buffers the replies of one connection, sends them together, and counts their bytes until they are sent.

Replies that one wake-up produces leave in one `sendmsg` with the next flush. A task of the connection sends
the bytes that the socket does not accept at once.

Bounds: `AnswerPool` bounds the unsent bytes of this connection and of all connections of its kind. A
connection that accepts no data for `AnswerPool.stall_s` is closed.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import structlog

from shard.server.answer_pool import AnswerPool
from streams.protocol import wire
from streams.unsent import UnsentBuffers

if TYPE_CHECKING:
    from shard.server.server import ShardServer

log = structlog.get_logger()

#: How often to check for connections that accept no data.
STALL_CHECK_S = 1.0
#: Bodies up to this size are joined with their header: the copy costs less than one more buffer.
_JOIN_BYTES_MAX = 2048


class Replies:
    __slots__ = (
        "_is_dirty",
        "_pool",
        "_sent_at_check",
        "_server",
        "_stalled_checks",
        "_transport",
        "_unsent",
        "is_open",
    )

    def __init__(self, server: ShardServer, sock: socket.socket, pool: AnswerPool, transport: str) -> None:
        self._server = server
        self._pool = pool
        self._transport = transport
        self._unsent = UnsentBuffers(sock)
        #: False once the connection is lost or ends: further replies are dropped.
        self.is_open = True
        #: True while the server has to flush it.
        self._is_dirty = False
        #: Consecutive checks that found that nothing was sent since the check before.
        self._stalled_checks = 0
        self._sent_at_check = 0

    def __repr__(self) -> str:
        return f"<Replies {self._unsent.bytes} B unsent>"

    @property
    def unsent_bytes(self) -> int:
        return self._unsent.bytes

    @property
    def has_room(self) -> bool:
        """True if this connection, by itself, may have one more page."""
        return self._unsent.bytes < self._pool.limits.connection_bytes

    @property
    def is_pool_full(self) -> bool:
        return self._pool.is_full

    def put(self, op: int, id: int, flags: int, head: bytes, body: bytes) -> None:
        if not self.is_open:
            return
        header = wire.frame(wire.REPLY, flags, op, id, head, len(body))
        if len(body) <= _JOIN_BYTES_MAX:
            self._unsent.put(header + body)
        else:
            self._unsent.put(header)
            self._unsent.put(body)
        self._note(len(header) + len(body))

    def put_in_parts(self, op: int, id: int, head: bytes, parts: list[bytes | memoryview]) -> None:
        """Put a reply whose body is sent from its buffers, without a copy."""
        if not self.is_open:
            return
        size = sum(map(len, parts))
        header = wire.frame(wire.REPLY, 0, op, id, head, size)
        self._unsent.put(header)
        self._unsent.put_all(parts, size)
        self._note(len(header) + size)

    def _note(self, size: int) -> None:
        self._pool.used_bytes += size
        if not self._is_dirty:
            self._is_dirty = True
            self._server.note_dirty(self)

    def flush(self) -> None:
        """Send as much as the socket accepts now. A task sends the rest later."""
        self._is_dirty = False
        self._send()
        if self._unsent:
            self._unsent.wake_sender()

    async def keep_sending(self) -> None:
        await self._unsent.keep_sending(self._send)

    def _send(self) -> None:
        unsent = self._unsent
        before = unsent.sent_bytes
        is_lost = False
        try:
            unsent.send()
        except OSError:
            is_lost = True
        if unsent.sent_bytes != before:
            self._pool.used_bytes -= unsent.sent_bytes - before
            self._server.on_sent()
        if is_lost:
            self.disconnect()

    def disconnect(self) -> None:
        """End the connection now. Its receiving task sees the shutdown and ends."""
        self.close()
        try:
            self._unsent.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already closed

    def close(self) -> None:
        """Drop unsent replies, and all later ones."""
        self.is_open = False
        self._pool.used_bytes -= self._unsent.bytes
        self._unsent.clear()
        self._server.on_sent()

    def close_if_stalled(self) -> None:
        """Close the connection if its peer has accepted no data for too long. Called every
        `STALL_CHECK_S`."""
        if not self._unsent or self._unsent.sent_bytes != self._sent_at_check:
            self._sent_at_check = self._unsent.sent_bytes
            self._stalled_checks = 0
            return
        self._stalled_checks += 1
        stalled_s = self._stalled_checks * STALL_CHECK_S
        if stalled_s > self._pool.stall_s:
            log.warning(
                "closed a connection whose peer does not read its answers",
                transport=self._transport,
                unsent_bytes=self._unsent.bytes,
                seconds=stalled_s,
            )
            self.disconnect()
