"""Where the edge's live answers go: straight into the socket, from whichever task has something to say.

A put costs one `send` and no change of task. What the socket does not take is kept as views of the bytes that
were put, so a thousand stalled peers share one copy of what they all miss.

Bound: whoever puts looks at `unsent_bytes`; the sink itself keeps what it is given.
"""

from __future__ import annotations

import socket
from collections import deque

import trio
from trio.lowlevel import wait_writable

from gateway.requests.request import Buffer, Progress, Stalled

#: Up to here, copying a piece into its chunk costs less than handing the kernel three buffers.
JOIN_BYTES_MAX = 32 * 1024
#: Linux takes 1024 buffers in one sendmsg.
SENDMSG_PARTS_MAX = 512


class EdgeSink:
    __slots__ = ("_is_broken", "_is_chunked", "_sock", "_unsent", "charge", "unsent_bytes")

    def __init__(self, sock: socket.socket, *, is_chunked: bool) -> None:
        self._sock = sock
        self._is_chunked = is_chunked
        self._is_broken = False
        self._unsent: deque[Buffer] = deque()
        self.unsent_bytes = 0
        self.charge: Progress | None = None

    def __repr__(self) -> str:
        return f"<EdgeSink {'broken' if self._is_broken else 'open'}, {self.unsent_bytes} B unsent>"

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
        if not self._unsent and len(parts) == 1:
            [part] = parts
            try:
                sent = self._sock.send(part)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._break()
                return
            if sent == len(part):
                return
            self._unsent.append(memoryview(part)[sent:])
            self.unsent_bytes += len(part) - sent
            return
        was_empty = not self._unsent
        self._unsent.extend(parts)
        self.unsent_bytes += sum(map(len, parts))
        if was_empty:
            self._send_some()

    def _break(self) -> None:
        """The peer is gone. The task that watches it notices too and ends the stream."""
        self._is_broken = True
        self._unsent.clear()
        self.unsent_bytes = 0

    def _send_some(self) -> bool:
        """Whether anything moved."""
        unsent = self._unsent
        moved = False
        while unsent:
            parts = [unsent[at] for at in range(min(len(unsent), SENDMSG_PARTS_MAX))]
            try:
                sent = self._sock.sendmsg(parts)
            except BlockingIOError:
                return moved
            except OSError:
                self._break()
                return True
            moved = True
            self.unsent_bytes -= sent
            if self.charge is not None:
                self.charge.moved(sent)
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = memoryview(unsent[0])[sent:]
        return moved

    async def wait_sent(self, stall_s: float) -> None:
        if not self._unsent:
            await trio.lowlevel.checkpoint()  # a writer whose peer has gone must notice here too
            return
        with trio.CancelScope(deadline=trio.current_time() + stall_s) as scope:
            while self._unsent:
                try:
                    await wait_writable(self._sock)
                except trio.ClosedResourceError:
                    self._break()
                    break
                if self._send_some():
                    scope.deadline = trio.current_time() + stall_s
        if scope.cancelled_caught:
            raise Stalled

    def put_end(self) -> None:
        """Ends a chunked body."""
        if self._is_chunked and not self._is_broken:
            self._push(b"0\r\n\r\n")
