"""Buffers that are to be sent on a non-blocking socket, in order.

The kernel takes a part of what it is given. This type keeps the rest as views, without copying, and counts
it. Every socket that a gateway or a shard writes by itself has one.

`send` sends as much as the socket takes now, and `send_some` at most so many bytes. `keep_sending` runs in a
task and sends the rest later. An `OSError` of the socket is raised to the owner, which knows what a lost
connection means.

Bounds: `bytes` is how much is kept. The owner checks it before it puts more, and refuses, waits or
disconnects.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled, wait_writable

Buffer = bytes | bytearray | memoryview

#: Linux takes 1,024 buffers in one `sendmsg`.
BUFFERS_MAX = 512


class UnsentBuffers:
    __slots__ = ("_buffers", "_sender", "bytes", "sent_bytes", "sock")

    def __init__(self, sock: socket.socket, buffers: Iterable[Buffer] = ()) -> None:
        self.sock = sock
        self._buffers: deque[Buffer] = deque(buffers)
        self._sender: Task | None = None
        #: How much is unsent.
        self.bytes = sum(map(len, self._buffers))
        #: How much was sent since the beginning. So `sent_bytes + bytes` is where the next buffer begins.
        self.sent_bytes = 0

    def __repr__(self) -> str:
        return f"<UnsentBuffers {self.bytes} B in {len(self._buffers)}>"

    def __len__(self) -> int:
        return len(self._buffers)

    def put(self, buffer: Buffer) -> None:
        self._buffers.append(buffer)
        self.bytes += len(buffer)

    def put_all(self, buffers: Iterable[Buffer], size: int) -> None:
        """Put buffers that have `size` bytes together."""
        self._buffers.extend(buffers)
        self.bytes += size

    def clear(self) -> None:
        self._buffers.clear()
        self.bytes = 0

    def send_now(self, buffer: Buffer) -> None:
        """Put a buffer, and send now what the socket takes of it. Raises `OSError` as `send` does."""
        if self._buffers:
            self.put(buffer)
            return
        try:
            sent_count = self.sock.send(buffer)
        except BlockingIOError:
            sent_count = 0
        self.sent_bytes += sent_count
        if sent_count != len(buffer):
            self.put(memoryview(buffer)[sent_count:])

    def send(self) -> None:
        """Send what the socket takes now. Raises `OSError` if the connection is lost."""
        buffers = self._buffers
        while buffers:
            try:
                if len(buffers) == 1:
                    sent_count = self.sock.send(buffers[0])
                elif len(buffers) <= BUFFERS_MAX:
                    sent_count = self.sock.sendmsg(buffers)
                else:
                    sent_count = self.sock.sendmsg(islice(buffers, BUFFERS_MAX))
            except BlockingIOError:
                return
            self.skip(sent_count)

    def send_some(self, bytes_max: int) -> int:
        """Send at most so many bytes, in one call. Returns how many the socket took. Raises `OSError` if the
        connection is lost."""
        piece: list[Buffer] = []
        bytes_left = bytes_max
        for buffer in islice(self._buffers, BUFFERS_MAX):
            if len(buffer) >= bytes_left:
                piece.append(memoryview(buffer)[:bytes_left])
                break
            piece.append(buffer)
            bytes_left -= len(buffer)
        try:
            sent_count = self.sock.sendmsg(piece)
        except BlockingIOError:
            return 0
        self.skip(sent_count)
        return sent_count

    def skip(self, count: int) -> None:
        """The first `count` bytes have been sent."""
        buffers = self._buffers
        self.sent_bytes += count
        self.bytes -= count
        if self.bytes == 0:
            buffers.clear()
            return
        while count >= len(buffers[0]):
            count -= len(buffers.popleft())
        if count:
            buffers[0] = memoryview(buffers[0])[count:]

    def wake_sender(self) -> None:
        """Have `keep_sending` send in the next turn of the event loop."""
        sender, self._sender = self._sender, None
        if sender is not None:
            reschedule(sender)

    async def keep_sending(self, send: Callable[[], None]) -> None:
        """Call `send` after each `wake_sender`, and again when the socket is writable, until all is sent or
        cleared. No other task may wait for this socket to become writable."""
        while True:
            send()
            if self._buffers:
                await wait_writable(self.sock)
            else:
                self._sender = current_task()
                await wait_task_rescheduled(self._stop_sender)

    def _stop_sender(self, _: object) -> Abort:
        self._sender = None
        return Abort.SUCCEEDED
