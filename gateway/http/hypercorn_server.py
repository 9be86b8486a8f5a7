"""Hypercorn as a server of single connections: what the edge does not speak (HTTP/2, upgrades), it does.

Hypercorn's own `TCPServer` is driven with a stream of ours in place of trio's, because Hypercorn sends
without a deadline and shielded from cancellation: a peer that stops reading would hold it for ever.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import h2.errors
import h2.events
import h2.settings
import h11
import trio
from h2.connection import ConnectionInputs, H2Connection
from h2.connection import ConnectionState as H2State
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ws_stream
from hypercorn.protocol.events import Body, Data, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    ConnectionState,
    LifespanState,
    Scope,
)
from quart_trio import QuartTrio
from wsproto.events import CloseConnection, Message, TextMessage
from wsproto.events import Event as SocketEvent
from wsproto.frame_protocol import CloseReason

from gateway.admission.closures import Closures, Reason
from gateway.admission.connection_table import OpenConnection
from gateway.admission.frame_budget import (
    FrameBudget,
    FrameFlood,
    FrameTooLarge,
    H2FrameWalker,
    SocketFrameWalker,
)
from gateway.admission.slice_lane import SliceLane
from gateway.http.edge_rules import FrontLimits, log
from gateway.http.h1 import HEAD_END
from gateway.http.h2_data import BulkReceiver, SendBuffer, send_data
from gateway.requests.request import is_full_duplex

#: What a peer may send on one HTTP/2 stream, and on all of a connection's, before we have read it. The
#: protocol's default of 64 KiB makes a body of 1 MiB wait for sixteen round trips.
H2_STREAM_WINDOW_BYTES = 1024 * 1024
H2_CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
#: The size every peer may use from its first frame on. A larger one must be announced, and `h2` takes
#: the announcement into account only at the read after the one that brought its acknowledgement.
H2_FRAME_BYTES_MAX = 16 * 1024
H2_STREAMS_MAX = 256
#: What is read of an HTTP/2 connection at a time: eight full frames.
_H2_READ_BYTES = 128 * 1024
#: Input of one exchange that its app has not taken. A read is more than half of it, so it holds one or two.
_INPUT_BYTES_MAX = 160 * 1024
#: One message of a WebSocket: the largest record that is allowed by default, and room for what is around it.
#: Quart reads ten of them ahead, so this is also what bounds a connection's memory. Larger writes go by HTTP.
SOCKET_MESSAGE_BYTES_MAX = 2 * 1024 * 1024

#: Where in its state an ASGI scope has the way to end its connection at once.
ABORT = "gateway.abort"
#: Where it has the function to call when the client has shown a valid key, or needs none. It returns False if
#: there is no room to keep the connection: then no stream is opened on it.
SET_KNOWN = "gateway.set_known"

#: What is read and dropped of a client that was told to go, so that it sees why.
_LINGER_BYTES_MAX = 1024 * 1024
#: How an answer to a WebSocket's command that is none begins. It earns no credit.
_NO_COMMAND = '"code":"invalid_request"'
_NO_COMMAND_WITHIN = 512


def hypercorn_config(limits: FrontLimits) -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("gateway.hypercorn")
    config.include_server_header = False
    config.keep_alive_timeout = limits.keep_alive_s
    config.keep_alive_max_requests = 2**62
    config.h11_max_incomplete_size = limits.head_bytes_max
    config.websocket_max_message_size = min(SOCKET_MESSAGE_BYTES_MAX, limits.body_bytes_max)
    config.h2_max_concurrent_streams = H2_STREAMS_MAX
    config.h2_max_header_list_size = limits.head_bytes_max
    config.h2_max_inbound_frame_size = H2_FRAME_BYTES_MAX
    return config


class HypercornServer:
    def __init__(
        self,
        app: QuartTrio,
        limits: FrontLimits,
        lane: SliceLane | None = None,
        closures: Closures | None = None,
    ) -> None:
        self._app = ASGIWrapper(app)
        self._limits = limits
        self._lane = lane or SliceLane()
        self._closures = closures or Closures()
        self._config = hypercorn_config(limits)
        self._context = WorkerContext(None)
        self._state: LifespanState = {}
        self._finished = trio.Event()

    def __repr__(self) -> str:
        state = "draining" if self._context.terminated.is_set() else "serving"
        return f"<HypercornServer {state}>"

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The app's lifespan: its startup before the first connection, its shutdown after the last."""
        lifespan = Lifespan(self._app, self._config, self._state)
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            task_status.started()
            await self._finished.wait()
            with trio.move_on_after(self._limits.drain_s):
                await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def serve(
        self, sock: socket.socket, first: bytes, address: str = "", place: OpenConnection | None = None
    ) -> None:
        """Serves one connection to its end. `first` is what was already read from it."""
        stream = SocketStream(sock, first, self._limits, address)
        state = ConnectionState(self._state.copy())
        state[ABORT] = stream.abort
        budget = FrameBudget(trio.current_time())

        def set_known() -> bool:
            budget.set_known()
            return place is None or place.keep()

        state[SET_KNOWN] = set_known
        server = _Server(self._app, self._config, self._context, state, stream)  # type: ignore[arg-type]
        server.watch_frames(budget, self._lane, self._closures, self._limits)
        if place is not None:
            place.server = server
        try:
            await server.run()
        except Exception as error:
            # Hypercorn lets some breaches of protocol out as exceptions (a path that is not ASCII, for
            # one). They are the fault of this one peer and end this one connection.
            log.warning("hypercorn gave up a connection", error=repr(error))

    def finish(self) -> None:
        """There is no connection any more."""
        self._finished.set()

    async def drain(self) -> None:
        """Idle connections close now, busy ones after their answers."""
        await self._context.terminated.set()


class _Server(TCPServer):
    """Hypercorn's server of one connection, with nine things that it has no setting for:

    - frames are counted before they are parsed, and parsed in slices between which other tasks run
      (`admission/frame_budget.py`); a client that sends too many is told to calm down, and closed;
    - priorities of HTTP/2 are ignored, as RFC 9113 allows: one frame could reorder a thousand streams;
    - the flow-control windows of HTTP/2 are wider;
    - DATA of HTTP/2 is received and sent many frames at a time, and an answer is held back when its client
      gives no window for it (`h2_data.py`);
    - DATA that arrives on an HTTP/2 stream after its answer (a body refused for its length) is dropped; to
      Hypercorn it is a KeyError that ends the connection, with every other request on it;
    - what an exchange has not taken when it is over is dropped: Hypercorn leaves it on a queue, and when that
      is full the whole connection waits for ever for somebody to take from it;
    - a client that says GOAWAY without an error still gets the answers that it waits for, and may send the
      rest of what it has begun: Node does so whenever it closes a session. To Hypercorn that is the end;
    - a connection whose peer has closed ends with its last answer, where Hypercorn would keep it, and one of
      our connection slots, for the keep-alive time;
    - an HTTP/1.1 body that breaks while its answer is being sent ends the body, not the answer; and when an
      answer has ended before its body has, some of the body is read and dropped before the connection is
      closed: closing a socket with unread input resets the connection, and a reset may overtake the answer.
    """

    _is_widened = False
    _has_ended = False

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Closed):
            protocol = self.protocol.protocol
            if isinstance(protocol, H11Protocol) and isinstance(protocol.connection, h11.Connection):
                if protocol.connection.their_state is h11.ERROR and _serves_full_duplex(protocol):
                    await protocol.handle(Closed())  # The handler sees its body end, and ends its answer.
                    return
                if protocol.connection.their_state is not h11.DONE:
                    await self._linger()
        # The first bytes Hypercorn sends as HTTP/2 are its SETTINGS; ours go right behind them.
        if not self._is_widened and isinstance(event, RawData):
            protocol = self.protocol.protocol
            if isinstance(protocol, H2Protocol):
                self._is_widened = True
                assert not protocol.streams  # Settings go out before the first stream is made.
                protocol.streams, protocol.stream_buffers = _Streams(self.watch_socket), _Buffers()
                protocol.task_group = _Exchanges(self._task_group._nursery)
                protocol._priority_updated = _ignore_priority  # type: ignore[method-assign, assignment]
                protocol._send_data = partial(send_data, protocol)  # type: ignore[method-assign]
                _receive_in_bulk(protocol.connection)
                _outlive_goaway(protocol)
                _credit_answers(protocol, self._budget)
                event = RawData(event.data + _widen(protocol))
        if self._has_ended and isinstance(event, Updated):
            return  # It would start the idle timer again.
        await super().protocol_send(event)

    def watch_frames(
        self, budget: FrameBudget, lane: SliceLane, closures: Closures, limits: FrontLimits
    ) -> None:
        self._budget = budget
        self._lane = lane
        self._closures = closures
        self._limits = limits
        #: From the moment on at which the connection speaks HTTP/2.
        self._walker: H2FrameWalker | None = None
        #: The last bytes of what came before. They may be the beginning of the end of a head.
        self._tail = b""
        self._drops_input = False
        self._input_ended = trio.Event()

    async def _linger(self) -> None:
        """Ends the output, and waits for the peer to close while `_handle_all_input` drops what comes."""
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
    def served(self) -> int:
        return self.protocol.protocol.keep_alive_requests if hasattr(self, "protocol") else 0

    async def _read_data(self) -> None:
        try:
            await self._handle_all_input()
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        except FrameTooLarge:
            await self._dismiss(h2.errors.ErrorCodes.FRAME_SIZE_ERROR, b"the frame is larger than allowed")
        except _SocketFlood:
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
        if isinstance(protocol, H2Protocol):  # It sends no more; whoever waits for it to send would wait on.
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
        """Hands on each head by itself, for HTTP/2 or a WebSocket may begin behind it. Returns the bytes that
        are HTTP/2."""
        if not data and not self._drops_input:
            await self.protocol.handle(RawData(b""))
        while data:
            protocol = self.protocol.protocol
            if self._drops_input or getattr(protocol.connection, "their_state", None) is h11.ERROR:
                return b""
            if isinstance(protocol, H11Protocol) and not isinstance(protocol.task_group, _Exchanges):
                protocol.task_group = _Exchanges(self._task_group._nursery)
                _leave_errors_to_sessions(protocol)
            end = len(data)
            if not isinstance(getattr(protocol, "connection", None), H11WSConnection):
                found = (self._tail + data).find(HEAD_END)
                if found >= 0:
                    end = found + len(HEAD_END) - len(self._tail)
            part, data = data[:end], data[end:]
            self._tail = (self._tail + part)[-3:] if len(part) < 3 else part[-3:]
            await self.protocol.handle(RawData(part))
            protocol = self.protocol.protocol
            if isinstance(protocol, H2Protocol):
                preface_bytes: int = protocol.connection.incoming_buffer._preamble_len
                self._walker = H2FrameWalker(
                    self._budget, skip_bytes=preface_bytes, frame_bytes_max=H2_FRAME_BYTES_MAX
                )
                break
            if isinstance(protocol.stream, WSStream):
                self.watch_socket(protocol.stream)
        return data

    def watch_socket(self, stream: WSStream) -> None:
        """Has the frames of a WebSocket counted, and handled in slices. Its client is known: a socket opens
        for a valid key alone."""
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
                        await self._lane.wait_turn()
                    is_first = False
                    await handle(Data(stream_id=event.stream_id, data=part))
            except FrameFlood:
                await send(CloseConnection(code=CloseReason.POLICY_VIOLATION, reason="too many small frames"))
                raise _SocketFlood from None

        async def send_and_credit(event: SocketEvent) -> None:
            if isinstance(event, Message) and not _says_no_command(event):
                budget.credit_body(len(event.data))
            await send(event)

        stream.handle = handle_slices  # type: ignore[method-assign]
        stream._send_wsproto_event = send_and_credit  # type: ignore[method-assign]

    def _count(self, reason: Reason) -> None:
        self._closures.count(reason, self.stream.address)

    async def _dismiss(self, code: h2.errors.ErrorCodes, why: bytes) -> None:
        """Says why, as far as the client takes it at once, and closes. A reset would overtake the reason, so
        some of the input is read and dropped first."""
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
            dropped = 0
            while dropped < _LINGER_BYTES_MAX and (data := await stream.receive_some(MAX_RECV)):
                dropped += len(data)
        stream.abort()


def _serves_full_duplex(protocol: H11Protocol) -> bool:
    """Return True while a request is answered whose body is still arriving (`requests/request.py`)."""
    if not isinstance(protocol.stream, HTTPStream):
        return False
    scope = protocol.stream.scope
    types = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"content-type"]
    return is_full_duplex(scope["method"], scope["raw_path"].decode("latin-1"), types[0] if types else None)


def _leave_errors_to_sessions(protocol: H11Protocol) -> None:
    """Has Hypercorn not answer a body that breaks if its handler answers while the body arrives."""
    send_error = protocol._send_error_response

    async def send(status_code: int) -> None:
        if not _serves_full_duplex(protocol):
            await send_error(status_code)

    protocol._send_error_response = send  # type: ignore[method-assign]


class _SocketFlood(FrameFlood):
    """The client of a WebSocket has sent more small frames than its budget allows. It has been told so."""


def _says_no_command(event: Message[Any]) -> bool:
    return isinstance(event, TextMessage) and _NO_COMMAND in event.data[:_NO_COMMAND_WITHIN]


class _Exchanges(TaskGroup):
    """Starts the app for each exchange of a connection, with a queue that ends with it."""

    def __init__(self, nursery: trio.Nursery | None) -> None:
        self._nursery = nursery

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        queue = _InputQueue(config.max_app_queue_size)

        async def run(
            scope: Scope,
            _receive: ASGIReceiveCallable,
            send: ASGISendCallable,
            sync_spawn: Callable[..., Any],
            call_soon: Callable[..., Any],
        ) -> None:
            try:
                await app(scope, queue.take, send, sync_spawn, call_soon)
            finally:
                queue.close()

        await super().spawn_app(run, config, scope, send)  # type: ignore[arg-type]
        return queue.put


class _InputQueue:
    """Input of one exchange on its way to the app, bounded in messages and in bytes. Once the exchange is
    over, input is dropped."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._messages: deque[ASGIReceiveEvent] = deque()
        self._bytes = 0
        self._is_closed = False
        self._has_more = trio.lowlevel.ParkingLot()
        self._has_room = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<_InputQueue {len(self._messages)} messages, {self._bytes} B>"

    async def put(self, message: ASGIReceiveEvent) -> None:
        size = _body_bytes(message)
        while not self._is_closed and (
            len(self._messages) >= self._messages_max
            or (self._messages and self._bytes + size > _INPUT_BYTES_MAX)
        ):
            await self._has_room.park()
        if not self._is_closed:
            self._messages.append(message)
            self._bytes += size
            self._has_more.unpark()

    async def take(self) -> ASGIReceiveEvent:
        if self._messages:
            await trio.lowlevel.checkpoint()
        while not self._messages:
            await self._has_more.park()
        message = self._messages.popleft()
        self._bytes -= _body_bytes(message)
        self._has_room.unpark_all()
        return message

    def close(self) -> None:
        self._is_closed = True
        self._messages.clear()
        self._bytes = 0
        self._has_room.unpark_all()


def _body_bytes(message: Any) -> int:
    return len(message.get("body", b""))


class _PlainHandshake(ws_stream.Handshake):
    """The handshake of a WebSocket that agrees to no extension. With permessage-deflate a frame of a few
    bytes becomes a message of two megabytes that no budget has counted."""

    def __init__(self, headers: list[tuple[bytes, bytes]], http_version: str) -> None:
        super().__init__(headers, http_version)
        self.extensions = None


# Hypercorn has no setting for it and takes the class by this name.
ws_stream.Handshake = _PlainHandshake  # type: ignore[misc]


class _Streams(dict[int, Any]):
    """The streams of an HTTP/2 connection. One that is over takes what still comes, and drops it."""

    def __init__(self, watch_socket: Callable[[WSStream], None]) -> None:
        super().__init__()
        self._watch_socket = watch_socket

    def __setitem__(self, stream_id: int, stream: Any) -> None:
        if isinstance(stream, WSStream):
            self._watch_socket(stream)
        super().__setitem__(stream_id, stream)

    def __missing__(self, stream_id: int) -> _Over:
        return _Over()


class _Over:
    async def handle(self, event: object) -> None:
        pass


class _Buffers(dict[int, StreamBuffer]):
    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        super().__setitem__(stream_id, SendBuffer())


def _outlive_goaway(protocol: H2Protocol) -> None:
    """Has `h2` stay as it is when a GOAWAY comes or goes, and Hypercorn not hear of one without an error.
    Without a stream the connection is idle, and closes when the peer does, or when it has been idle for long.

    Hypercorn says GOAWAY when it stops and the last answer has been made, which may be before the end of that
    answer is sent; and behind a GOAWAY of its own `h2` would not send it."""
    connection = protocol.connection
    machine = connection.state_machine
    open_states = (H2State.CLIENT_OPEN, H2State.SERVER_OPEN)
    machine._transitions = {
        **machine._transitions,
        **{
            (state, way): (None, state)
            for state in open_states
            for way in (ConnectionInputs.RECV_GOAWAY, ConnectionInputs.SEND_GOAWAY)
        },
    }
    receive_data = connection.receive_data

    def received(data: bytes) -> list[h2.events.Event]:
        return [
            event
            for event in receive_data(data)
            if not (isinstance(event, h2.events.ConnectionTerminated) and event.error_code == 0)
        ]

    connection.receive_data = received  # type: ignore[method-assign, assignment]


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
            sent = 0
            while sent < len(view):
                try:
                    sent += self.socket.send(view[sent:])
                except BlockingIOError:
                    with trio.CancelScope(deadline=deadline_s + sent / limits.rate_bytes_per_s_min) as scope:
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
