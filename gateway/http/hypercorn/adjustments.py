"""Adjusts Hypercorn, h2 and wsproto where they have no setting.

Only this file and `h2_data.py` use members of theirs that are not public.

HTTP/2 (`adjust_h2`):
- priorities are ignored, as RFC 9113 allows: one frame could reorder a thousand streams;
- the flow-control windows are wider;
- DATA is received and sent many frames at a time, and an answer waits while its client gives no window for it
  (`h2_data.py`);
- DATA that arrives on a stream after its answer (a body refused for its length) is dropped; in Hypercorn it
  raises a KeyError that ends the connection, with every other request on it;
- a client that sends GOAWAY without an error still gets its pending answers, and may send the rest of the
  requests that it has begun: Node does so whenever it closes a session. Hypercorn would end the connection.

HTTP/1.1 (`adjust_h1`): a body that breaks while its answer is being sent ends the body, not the answer.

WebSockets (`watch_socket`): frames are counted and handled in slices, and no extension is accepted.

Both (`exchanges.py`): input that an exchange has not read when it ends is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import h2.events
import h2.settings
import trio
from h2.connection import ConnectionInputs, H2Connection
from h2.connection import ConnectionState as H2State
from hypercorn.protocol import ws_stream
from hypercorn.protocol.events import Body, Data, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.task_group import TaskGroup
from wsproto.events import CloseConnection, Message, TextMessage
from wsproto.events import Event as SocketEvent
from wsproto.frame_protocol import CloseReason

from gateway.admission.frame_budget import FrameBudget, FrameFlood, SocketFrameWalker
from gateway.admission.slice_lane import SliceLane
from gateway.http.hypercorn.exchanges import Exchanges
from gateway.http.hypercorn.h2_data import BulkReceiver, SendBuffer, send_data
from gateway.requests.request import is_full_duplex

#: Flow-control windows: bytes that a peer may send on one HTTP/2 stream, and on all streams of a connection,
#: before we have read them. With the protocol's default of 64 KiB, a body of 1 MiB takes sixteen round trips.
H2_STREAM_WINDOW_BYTES = 1024 * 1024
H2_CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
#: The frame size that every peer may use from its first frame on. A larger one must be announced, and `h2`
#: applies the announcement only at the read after the one that brought its acknowledgement.
H2_FRAME_BYTES_MAX = 16 * 1024
H2_STREAMS_MAX = 256
#: Text of the answer to a WebSocket message that is not a valid command. Such an answer earns no credit.
_NO_COMMAND = '"code":"invalid_request"'
_NO_COMMAND_WITHIN = 512


class SocketFlood(FrameFlood):
    """The client of a WebSocket has sent more small frames than its budget allows. The close code says so."""


# -- HTTP/2


def adjust_h2(
    protocol: H2Protocol, task_group: TaskGroup, watch: Callable[[WSStream], None], budget: FrameBudget
) -> bytes:
    """Adjust a connection before its first stream. Returns the bytes to send behind Hypercorn's SETTINGS."""
    assert not protocol.streams
    protocol.streams, protocol.stream_buffers = _Streams(watch), _Buffers()
    protocol.task_group = Exchanges(task_group._nursery)
    protocol._priority_updated = _ignore_priority  # type: ignore[method-assign, assignment]
    protocol._send_data = partial(send_data, protocol)  # type: ignore[method-assign]
    _receive_in_bulk(protocol.connection)
    _outlive_goaway(protocol)
    _credit_answers(protocol, budget)
    return _widen(protocol)


def preface_bytes_of(protocol: H2Protocol) -> int:
    count: int = protocol.connection.incoming_buffer._preamble_len
    return count


class _Streams(dict[int, Any]):
    """The streams of an HTTP/2 connection. Events of a stream that has ended are dropped."""

    def __init__(self, watch_socket: Callable[[WSStream], None]) -> None:
        super().__init__()
        self._watch_socket = watch_socket

    def __setitem__(self, stream_id: int, stream: Any) -> None:
        if isinstance(stream, WSStream):
            self._watch_socket(stream)
        super().__setitem__(stream_id, stream)

    def __missing__(self, stream_id: int) -> _EndedStream:
        return _EndedStream()


class _EndedStream:
    async def handle(self, event: object) -> None:
        pass


class _Buffers(dict[int, StreamBuffer]):
    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        super().__setitem__(stream_id, SendBuffer())


def _outlive_goaway(protocol: H2Protocol) -> None:
    """Keep a connection open after a GOAWAY, sent or received, and hide a GOAWAY without an error from
    Hypercorn. A connection without streams is idle, and closes when the peer does or when its idle time is
    over.

    Hypercorn sends GOAWAY when it stops and the last answer exists, which may be before the end of that
    answer is sent. After its own GOAWAY `h2` would not send the rest."""
    connection = protocol.connection
    machine = connection.state_machine
    open_states = (H2State.CLIENT_OPEN, H2State.SERVER_OPEN)
    machine._transitions = {
        **machine._transitions,
        **{
            (state, input): (None, state)
            for state in open_states
            for input in (ConnectionInputs.RECV_GOAWAY, ConnectionInputs.SEND_GOAWAY)
        },
    }
    receive_data = connection.receive_data

    def receive_without_goaway(data: bytes) -> list[h2.events.Event]:
        return [
            event
            for event in receive_data(data)
            if not (isinstance(event, h2.events.ConnectionTerminated) and event.error_code == 0)
        ]

    connection.receive_data = receive_without_goaway  # type: ignore[method-assign, assignment]


def _receive_in_bulk(connection: H2Connection) -> None:
    receiver = BulkReceiver(connection, connection.incoming_buffer._preamble_len)
    connection.receive_data = receiver.receive_data  # type: ignore[method-assign, assignment]


def _credit_answers(protocol: H2Protocol, budget: FrameBudget) -> None:
    stream_send = protocol.stream_send

    async def send(event: StreamEvent) -> None:
        if isinstance(event, Response):
            budget.credit_answer(event.status_code)
        elif isinstance(event, (Body, Data)):
            budget.credit_body(len(event.data))
        await stream_send(event)

    protocol.stream_send = send  # type: ignore[method-assign]


async def _ignore_priority(_: h2.events.PriorityUpdated) -> None:
    pass


def _widen(protocol: H2Protocol) -> bytes:
    connection = protocol.connection
    connection.update_settings(
        {
            h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: H2_STREAM_WINDOW_BYTES,
        }
    )
    connection.increment_flow_control_window(H2_CONNECTION_WINDOW_BYTES - 65_535)
    return bytes(connection.data_to_send())


# -- HTTP/1.1


def adjust_h1(protocol: H11Protocol, task_group: TaskGroup) -> None:
    """Adjust a connection. It may be called again."""
    if not isinstance(protocol.task_group, Exchanges):
        protocol.task_group = Exchanges(task_group._nursery)
        _leave_errors_to_sessions(protocol)


def serves_full_duplex(protocol: H11Protocol) -> bool:
    """Return True while a request is answered whose body is still arriving (`requests/request.py`)."""
    if not isinstance(protocol.stream, HTTPStream):
        return False
    scope = protocol.stream.scope
    types = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"content-type"]
    return is_full_duplex(scope["method"], scope["raw_path"].decode("latin-1"), types[0] if types else None)


def _leave_errors_to_sessions(protocol: H11Protocol) -> None:
    """Stop Hypercorn from answering a broken body whose handler answers while the body arrives."""
    send_error = protocol._send_error_response

    async def send(status_code: int) -> None:
        if not serves_full_duplex(protocol):
            await send_error(status_code)

    protocol._send_error_response = send  # type: ignore[method-assign]


# -- WebSockets


class _PlainHandshake(ws_stream.Handshake):
    """A WebSocket handshake that accepts no extension. With permessage-deflate, a frame of a few bytes would
    become a message of two megabytes that no budget has counted."""

    def __init__(self, headers: list[tuple[bytes, bytes]], http_version: str) -> None:
        super().__init__(headers, http_version)
        self.extensions = None


# Hypercorn has no setting for it and takes the class by this name.
ws_stream.Handshake = _PlainHandshake  # type: ignore[misc]


def watch_socket(stream: WSStream, lane: SliceLane) -> None:
    """Count the frames of a WebSocket, and handle them in slices. Its client is known: a socket opens only
    for a valid key."""
    if "handle" in vars(stream):
        return
    budget = FrameBudget(trio.current_time())
    budget.set_known()
    walker = SocketFrameWalker(budget)
    handle, send = stream.handle, stream._send_wsproto_event

    async def handle_slices(event: StreamEvent) -> None:
        if not isinstance(event, (Body, Data)):
            await handle(event)
            return
        is_first = True
        try:
            for part in walker.slices_untrusted(event.data, trio.current_time()):
                if not is_first:
                    await lane.wait_turn()
                is_first = False
                await handle(Data(stream_id=event.stream_id, data=part))
        except FrameFlood:
            await send(CloseConnection(code=CloseReason.POLICY_VIOLATION, reason="too many small frames"))
            raise SocketFlood from None

    async def send_and_credit(event: SocketEvent) -> None:
        if isinstance(event, Message) and not _says_no_command(event):
            budget.credit_body(len(event.data))
        await send(event)

    stream.handle = handle_slices  # type: ignore[method-assign]
    stream._send_wsproto_event = send_and_credit  # type: ignore[method-assign]


def _says_no_command(event: Message[Any]) -> bool:
    return isinstance(event, TextMessage) and _NO_COMMAND in event.data[:_NO_COMMAND_WITHIN]
