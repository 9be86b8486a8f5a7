"""Writes the live answers of the edge straight into the socket, from any task.

A put costs one `send` and no task switch. Unsent bytes are kept as views of the bytes that were put, so a
thousand stalled peers share one copy of the events that they miss.

Bound: the caller of `put` checks `unsent_bytes`; the sink itself has no limit.
"""

from __future__ import annotations

import socket

import trio
from trio.lowlevel import wait_writable

from gateway.requests.request import ClientStalled, ReadProgress
from streams.unsent import UnsentBuffers

#: Up to this size, copying a piece into its chunk costs less than passing three buffers to the kernel.
JOIN_BYTES_MAX = 32 * 1024


class EdgeSink:
    __slots__ = ("_is_broken", "_is_chunked", "_unsent", "charge")

    def __init__(self, sock: socket.socket, *, is_chunked: bool) -> None:
        self._is_chunked = is_chunked
        self._is_broken = False
        self._unsent = UnsentBuffers(sock)
        self.charge: ReadProgress | None = None

    def __repr__(self) -> str:
        return f"<EdgeSink {'broken' if self._is_broken else 'open'}, {self.unsent_bytes} B unsent>"

    @property
    def unsent_bytes(self) -> int:
        return self._unsent.bytes

    def put(self, data: bytes) -> None:
        if not data or self._is_broken:
            return
        if not self._is_chunked:
            self._push(data)
        elif len(data) <= JOIN_BYTES_MAX:
            self._push(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._push(b"%x\r\n" % len(data), data, b"\r\n")

    def _push(self, *parts: bytes) -> None:
        if len(parts) == 1:
            try:
                self._unsent.send_now(parts[0])
            except OSError:
                self._break()
            return
        was_empty = not self._unsent
        self._unsent.put_all(parts, sum(map(len, parts)))
        if was_empty:
            self._send()

    def _break(self) -> None:
        """Drop all output: the peer has disconnected. The task that watches it notices too and ends the
        stream."""
        self._is_broken = True
        self._unsent.clear()

    def _send(self) -> bool:
        """Send as much as the socket accepts now. Returns True if it sent bytes or the peer has
        disconnected."""
        before = self._unsent.sent_bytes
        try:
            self._unsent.send()
        except OSError:
            self._break()
            return True
        sent_bytes = self._unsent.sent_bytes - before
        if sent_bytes and self.charge is not None:
            self.charge.note_progress(sent_bytes)
        return sent_bytes > 0

    async def wait_sent(self, stall_s: float) -> None:
        if not self._unsent:
            await trio.lowlevel.checkpoint()  # a cancellation must be noticed here too
            return
        with trio.CancelScope(deadline=trio.current_time() + stall_s) as scope:
            while self._unsent:
                try:
                    await wait_writable(self._unsent.sock)
                except trio.ClosedResourceError:
                    self._break()
                    break
                if self._send():
                    scope.deadline = trio.current_time() + stall_s
        if scope.cancelled_caught:
            raise ClientStalled

    def put_end(self) -> None:
        """Send the last chunk of a chunked body."""
        if self._is_chunked and not self._is_broken:
            self._push(b"0\r\n\r\n")
