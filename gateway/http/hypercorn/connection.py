"""One connection that Hypercorn serves: HTTP/2, WebSockets, and HTTP/1.1 that the edge does not speak."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import h2.errors
import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol, H11WSConnection
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer

from gateway.admission.close_counters import CloseCounters, Reason
from gateway.admission.frame_budget import FrameBudget, FrameFlood, FrameTooLarge, H2FrameWalker
from gateway.admission.slice_lane import SliceLane
from gateway.http.edge_rules import FrontLimits
from gateway.http.h1 import HEAD_END
from gateway.http.hypercorn.adjustments import (
    H2_FRAME_BYTES_MAX,
    SocketFlood,
    adjust_h1,
    adjust_h2,
    preface_bytes_of,
    serves_full_duplex,
    watch_socket,
)

#: Bytes of one read of an HTTP/2 connection: eight full frames.
_H2_READ_BYTES = 128 * 1024
#: Bytes that are read and dropped while a connection is being closed, so that its client gets the reason.
_LINGER_BYTES_MAX = 1024 * 1024


class HypercornConnection(TCPServer):
    """Hypercorn's server of one connection. Beside the adjustments of `adjustments.py`:

    - frames are counted before they are parsed, and parsed in slices between which other tasks run
      (`admission/frame_budget.py`); a client that sends too many is asked to calm down, and closed;
    - a connection whose peer has closed ends with its last answer, where Hypercorn would keep it, and one of
      our connection slots, for the keep-alive time;
    - when an HTTP/1.1 answer has ended before its body has, some of the body is read and dropped before the
      connection is closed: closing a socket with unread input resets the connection, and a reset may overtake
      the answer.
    """

    _is_widened = False
    _has_ended = False

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Closed):
            protocol = self.protocol.protocol
            if isinstance(protocol, H11Protocol) and isinstance(protocol.connection, h11.Connection):
                if protocol.connection.their_state is h11.ERROR and serves_full_duplex(protocol):
                    await protocol.handle(Closed())  # The handler sees its body end, and ends its answer.
                    return
                if protocol.connection.their_state is not h11.DONE:
                    await self._linger()
        # The first bytes Hypercorn sends as HTTP/2 are its SETTINGS; ours go right behind them.
        if not self._is_widened and isinstance(event, RawData):
            protocol = self.protocol.protocol
            if isinstance(protocol, H2Protocol):
                self._is_widened = True
                more = adjust_h2(protocol, self._task_group, self._watch_socket, self._budget)
                event = RawData(event.data + more)
        if self._has_ended and isinstance(event, Updated):
            return  # It would start the idle timer again.
        await super().protocol_send(event)

    def watch_frames(
        self, budget: FrameBudget, lane: SliceLane, close_counters: CloseCounters, limits: FrontLimits
    ) -> None:
        self._budget = budget
        self._lane = lane
        self._close_counters = close_counters
        self._limits = limits
        #: From the moment on at which the connection speaks HTTP/2.
        self._walker: H2FrameWalker | None = None
        #: The last bytes of what came before. They may be the beginning of the end of a head.
        self._tail = b""
        self._drops_input = False
        self._input_ended = trio.Event()

    async def _linger(self) -> None:
        """End the output, and wait for the peer to close while `_handle_all_input` drops its input."""
        self._drops_input = True
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stream.send_eof()
            with trio.move_on_after(self._limits.linger_s):
                await self._input_ended.wait()

    @property
    def is_busy(self) -> bool:
        """True while a request is handled or a WebSocket is open."""
        protocol = self.protocol.protocol if hasattr(self, "protocol") else None
        if isinstance(protocol, H2Protocol):
            return not protocol.idle
        return protocol is not None and protocol.stream is not None

    @property
    def is_idle(self) -> bool:
        return not self.is_busy

    @property
    def request_count(self) -> int:
        return self.protocol.protocol.keep_alive_requests if hasattr(self, "protocol") else 0

    async def _read_data(self) -> None:
        try:
            await self._handle_all_input()
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        except FrameTooLarge:
            await self._dismiss(h2.errors.ErrorCodes.FRAME_SIZE_ERROR, b"the frame is larger than allowed")
        except SocketFlood:
            self._count("socket_frames")
            await self._dismiss(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, b"too many small WebSocket frames")
        except FrameFlood:
            self._count("http2_frames")
            await self._dismiss(
                h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, b"too many frames for the requests made"
            )
        self._input_ended.set()
        await self.protocol.handle(Closed())
        self._has_ended = True
        await self.idle_task.stop()
        protocol = self.protocol.protocol
        if isinstance(protocol, H2Protocol):  # It sends no more, and no task may wait for it.
            for buffer in list(protocol.stream_buffers.values()):
                await buffer.close()

    async def _handle_all_input(self) -> None:
        data = b"?"
        while data:
            read_bytes = MAX_RECV if self._walker is None else _H2_READ_BYTES
            data = bytes(await self.stream.receive_some(read_bytes))
            rest = data if self._walker is not None else await self._handle_http_1(data)
            if rest and self._walker is not None:
                is_first = True
                for part in self._walker.slices_untrusted(rest, trio.current_time()):
                    if not is_first:
                        await self._lane.wait_turn()
                    is_first = False
                    await self.protocol.handle(RawData(part))
        if self._walker is not None:
            await self.protocol.handle(RawData(b""))

    async def _handle_http_1(self, data: bytes) -> bytes:
        """Pass each head on by itself: HTTP/2 or a WebSocket may begin behind it. Returns the bytes that are
        HTTP/2."""
        if not data and not self._drops_input:
            await self.protocol.handle(RawData(b""))
        while data:
            protocol = self.protocol.protocol
            if self._drops_input or getattr(protocol.connection, "their_state", None) is h11.ERROR:
                return b""
            if isinstance(protocol, H11Protocol):
                adjust_h1(protocol, self._task_group)
            end = len(data)
            if not isinstance(getattr(protocol, "connection", None), H11WSConnection):
                position = (self._tail + data).find(HEAD_END)
                if position >= 0:
                    end = position + len(HEAD_END) - len(self._tail)
            part, data = data[:end], data[end:]
            self._tail = (self._tail + part)[-3:] if len(part) < 3 else part[-3:]
            await self.protocol.handle(RawData(part))
            protocol = self.protocol.protocol
            if isinstance(protocol, H2Protocol):
                self._walker = H2FrameWalker(
                    self._budget,
                    skip_bytes=preface_bytes_of(protocol),
                    frame_bytes_max=H2_FRAME_BYTES_MAX,
                )
                break
            if isinstance(protocol.stream, WSStream):
                self._watch_socket(protocol.stream)
        return data

    def _watch_socket(self, stream: WSStream) -> None:
        watch_socket(stream, self._lane)

    def _count(self, reason: Reason) -> None:
        self._close_counters.count(reason, self.stream.address)

    async def _dismiss(self, code: h2.errors.ErrorCodes, why: bytes) -> None:
        """Send the reason, as far as the socket accepts it at once, and close. Reads and drops some input
        first, because a reset would overtake the reason."""
        protocol = self.protocol.protocol
        stream: Any = self.stream
        with (
            suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError),
            trio.move_on_after(self._limits.linger_s),
        ):
            async with self.send_lock:  # No frame is sent in part now.
                if isinstance(protocol, H2Protocol):
                    protocol.connection.close_connection(code, additional_data=why)
                    stream.socket.send(protocol.connection.data_to_send())
                await stream.send_eof()
            dropped_bytes = 0
            while dropped_bytes < _LINGER_BYTES_MAX and (data := await stream.receive_some(MAX_RECV)):
                dropped_bytes += len(data)
        stream.abort()
