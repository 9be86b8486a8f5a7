"""The socket of a connection as Hypercorn uses it: with bytes that were read already, and a write deadline.

Hypercorn sends without a deadline and shielded from cancellation: a peer that stops reading would block it
forever. The deadline is that of the edge: a total, plus a second for each `rate_bytes_per_s_min` bytes.
"""

from __future__ import annotations

import socket

import trio

from gateway.http.edge_rules import FrontLimits


class SocketStream:
    """The part of `trio.SocketStream` that Hypercorn uses, with bytes already read and a write deadline."""

    def __init__(self, sock: socket.socket, first: bytes, limits: FrontLimits, address: str = "") -> None:
        self.socket = sock
        self.address = address
        self._first = first
        self._limits = limits

    def __repr__(self) -> str:
        return f"<SocketStream {'closed' if self.socket.fileno() < 0 else 'open'}>"

    async def receive_some(self, max_bytes: int) -> bytes:
        if self._first:
            await trio.lowlevel.checkpoint()
            data, self._first = self._first[:max_bytes], self._first[max_bytes:]
            return data
        while True:
            self._check_open()
            await trio.lowlevel.wait_readable(self.socket)
            try:
                return self.socket.recv(max_bytes)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError from error

    async def send_all(self, data: bytes) -> None:
        self._check_open()
        limits = self._limits
        deadline_s = trio.current_time() + limits.write_timeout_s
        with memoryview(data) as view:
            sent_bytes = 0
            while sent_bytes < len(view):
                try:
                    sent_bytes += self.socket.send(view[sent_bytes:])
                except BlockingIOError:
                    with trio.CancelScope(
                        deadline=deadline_s + sent_bytes / limits.rate_bytes_per_s_min
                    ) as scope:
                        await trio.lowlevel.wait_writable(self.socket)
                    if scope.cancelled_caught:
                        self.abort()
                        raise trio.BrokenResourceError("the peer does not read") from None
                except OSError as error:
                    raise trio.BrokenResourceError from error

    async def send_eof(self) -> None:
        self._check_open()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise trio.BrokenResourceError from error

    def abort(self) -> None:
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    async def aclose(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError
