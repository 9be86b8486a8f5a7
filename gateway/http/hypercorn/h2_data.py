"""Moves DATA of an HTTP/2 connection in bulk.

The `h2` library and Hypercorn handle DATA frame by frame: an object, two state machines, several events and
one `send` for every 16 KiB, about 100 µs in each direction. Here adjacent frames are handled as one: the DATA
of a stream in one read becomes one event, and the output of a stream goes out in one write of many frames.
Windows, states and errors stay those of `h2`: the library handles everything except plain DATA on an open
stream within its windows.

    bytes in ──► BulkReceiver ──► h2 (all other frames) ──► events for Hypercorn
                       └─ DATA ─► one DataReceived for adjacent frames
    bytes out ◄── send_data ◄── SendBuffer ◄── the answer of an exchange

Bounds: a receiver keeps at most one incomplete frame, which its caller holds to `H2_FRAME_BYTES_MAX`. A write
is at most `SEND_BYTES_MAX`, so that the streams of a connection take turns.

Members touched that are not public: `H2Connection._inbound_flow_control_window_manager`.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Final

import h2.events
import h2.exceptions
import trio
from h2.connection import ConnectionInputs, H2Connection
from h2.stream import StreamInputs, StreamState
from hypercorn.events import RawData
from hypercorn.protocol.h2 import (
    BUFFER_HIGH_WATER,
    BUFFER_LOW_WATER,
    BufferCompleteError,
    H2Protocol,
    StreamBuffer,
)
from hypercorn.trio.worker_context import WorkerContext
from priority.priority import MissingStreamError

#: Bytes that one stream sends before the next stream has its turn.
SEND_BYTES_MAX: Final = 256 * 1024

_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _PUSH_PROMISE, _CONTINUATION = 0x0, 0x1, 0x5, 0x9
_END_HEADERS: Final = 0x4
#: States of a stream in which its client may send DATA.
_RECEIVING: Final = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)


class BulkReceiver:
    """Replaces `H2Connection.receive_data`."""

    def __init__(self, connection: H2Connection, preface_bytes: int) -> None:
        self._connection = connection
        self._receive = connection.receive_data
        #: Bytes of the preface that are still to come: the library checks them.
        self._preface_bytes = preface_bytes
        #: The beginning of a frame.
        self._rest = b""
        #: True between a frame of headers and its last continuation, where no other frame may come.
        self._in_headers = False

    def __repr__(self) -> str:
        return f"<BulkReceiver {len(self._rest)} B of a frame>"

    def receive_data(self, data: bytes) -> list[h2.events.Event]:
        events: list[h2.events.Event] = []
        if self._preface_bytes:
            preface, data = data[: self._preface_bytes], data[self._preface_bytes :]
            self._preface_bytes -= len(preface)
            events += self._receive(preface)
        if self._rest:
            data = self._rest + data
        start = at = 0
        while len(data) - at >= _HEADER_BYTES:
            end = at + _HEADER_BYTES + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA and not flags and not self._in_headers:
                if start < at:
                    events += self._receive(data[start:at])
                start, at = at, self._end_of_data(data, at, end)
                events += self._receive_stretch(data, start, at)
                start = at
                continue
            if kind in (_HEADERS, _PUSH_PROMISE, _CONTINUATION):
                self._in_headers = not flags & _END_HEADERS
            at = end
        self._rest = data[at:]
        if start < at:
            events += self._receive(data[start:at])
        return events

    @staticmethod
    def _end_of_data(data: bytes, at: int, end: int) -> int:
        """Return the end of the last whole frame behind `at` with the same type, flags and stream."""
        same = data[at + 3 : at + _HEADER_BYTES]
        while data[end + 3 : end + _HEADER_BYTES] == same:
            next_end = end + _HEADER_BYTES + (data[end] << 16 | data[end + 1] << 8 | data[end + 2])
            if next_end > len(data):
                break
            end = next_end
        return end

    def _receive_stretch(self, data: bytes, at: int, end: int) -> list[h2.events.Event]:
        """Receive DATA without flags of one stream as one event."""
        connection = self._connection
        stream_id = int.from_bytes(data[at + 5 : at + _HEADER_BYTES], "big") & 0x7FFFFFFF
        stream = connection.streams.get(stream_id)
        if stream is None or stream.state_machine.state not in _RECEIVING:
            return self._receive(data[at:end])
        pieces: list[memoryview] = []
        view = memoryview(data)
        start = at
        while start < end:
            body = start + _HEADER_BYTES
            start = body + (data[start] << 16 | data[start + 1] << 8 | data[start + 2])
            pieces.append(view[body:start])
        payload = b"".join(pieces)
        if not payload or len(payload) > connection.remote_flow_control_window(stream_id):
            return self._receive(data[at:end])
        try:
            connection.state_machine.process_input(ConnectionInputs.RECV_DATA)
            connection._inbound_flow_control_window_manager.window_consumed(len(payload))
            _, events = stream.receive_data(payload, False, len(payload))
        except h2.exceptions.ProtocolError as error:  # more than its content-length
            connection.close_connection(error.error_code)
            raise
        return events


class SendBuffer(StreamBuffer):
    """The unsent part of an answer, in the pieces in which it came.

    Hypercorn resumes the writer after every short pop, and a pop without a window is the shortest: the buffer
    of a stalled client would grow without limit. Here the writer resumes when the buffer has room."""

    def __init__(self) -> None:
        super().__init__(WorkerContext.event_class)
        self._pieces: deque[bytes | memoryview] = deque()
        self._size = 0
        #: Set when the end of the answer has been sent, too.
        self._end_sent = trio.Event()

    def __len__(self) -> int:
        return self._size

    @property
    def complete(self) -> bool:
        return self._complete and not self._size

    async def drain(self) -> None:
        """Wait until everything is sent. Hypercorn may send GOAWAY next, and some clients ignore everything
        behind it, so the end of the answer has to be sent before."""
        await super().drain()
        if self._complete:
            await self._end_sent.wait()

    def set_end_sent(self) -> None:
        self._end_sent.set()

    async def close(self) -> None:
        self._pieces.clear()
        self._size = 0
        self._end_sent.set()
        await super().close()

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self._pieces.append(data)
        self._size += len(data)
        await self._is_empty.clear()
        if self._size >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes | memoryview:  # type: ignore[override]
        parts: list[bytes | memoryview] = []
        bytes_left = max_length
        while self._pieces and bytes_left > 0:
            piece = self._pieces[0]
            if len(piece) <= bytes_left:
                self._pieces.popleft()
            else:
                self._pieces[0] = memoryview(piece)[bytes_left:]
                piece = memoryview(piece)[:bytes_left]
            parts.append(piece)
            bytes_left -= len(piece)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._size -= len(data)
        if self._size < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self._size:
            await self._is_empty.set()
        return data


async def send_data(protocol: H2Protocol, stream_id: int) -> None:
    """Send as much of a stream as its window allows, in one write. Replaces `H2Protocol._send_data`."""
    connection = protocol.connection
    buffer = protocol.stream_buffers.get(stream_id)
    assert buffer is None or isinstance(buffer, SendBuffer)
    try:
        if buffer is None:
            raise KeyError(stream_id)
        window = min(connection.local_flow_control_window(stream_id), SEND_BYTES_MAX)
        data = await buffer.pop(max(0, window))
        frames = _frame_data(connection, stream_id, data) if data else b""
        is_end = buffer.complete
        if is_end:
            connection.end_stream(stream_id)
            frames += connection.data_to_send()
            del protocol.stream_buffers[stream_id]
            protocol.priority.remove_stream(stream_id)
        elif not data:
            protocol.priority.block(stream_id)
        if frames:
            await protocol.send(RawData(data=frames))
        if is_end:
            buffer.set_end_sent()
    except (KeyError, h2.exceptions.ProtocolError):
        # The stream or the connection has been closed while this waited.
        if buffer is not None:
            await buffer.close()
            protocol.stream_buffers.pop(stream_id, None)
        with suppress(MissingStreamError):
            protocol.priority.remove_stream(stream_id)


def _frame_data(connection: H2Connection, stream_id: int, data: bytes | memoryview) -> bytes:
    """Return the frames that wait to be sent, followed by DATA frames of a stream within its window."""
    stream = connection.streams[stream_id]
    connection.state_machine.process_input(ConnectionInputs.SEND_DATA)
    stream.state_machine.process_input(StreamInputs.SEND_DATA)
    connection.outbound_flow_control_window -= len(data)
    stream.outbound_flow_control_window -= len(data)
    frame_bytes = connection.max_outbound_frame_size
    behind_length = b"\0\0" + stream_id.to_bytes(4, "big")
    parts: list[bytes | memoryview] = [connection.data_to_send()]
    view = memoryview(data)
    header = frame_bytes.to_bytes(3, "big") + behind_length
    for at in range(0, len(view), frame_bytes):
        piece = view[at : at + frame_bytes]
        parts.append(header if len(piece) == frame_bytes else len(piece).to_bytes(3, "big") + behind_length)
        parts.append(piece)
    return b"".join(parts)
