"""Hypercorn as a server of single connections: what the edge does not speak (HTTP/2, upgrades), it does.

Hypercorn's own `TCPServer` is driven with a stream of ours in place of trio's, because Hypercorn sends
without a deadline and shielded from cancellation: a peer that stops reading would hold it for ever.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h2.events
import h2.settings
import trio
from h2.connection import ConnectionInputs
from h2.connection import ConnectionState as H2State
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol.h2 import BUFFER_LOW_WATER, H2Protocol, StreamBuffer
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
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

from gateway.edge_rules import FrontLimits, log

#: What a peer may send on one HTTP/2 stream, and on all of a connection's, before we have read it. The
#: protocol's default of 64 KiB makes a body of 1 MiB wait for sixteen round trips.
H2_STREAM_WINDOW_BYTES = 1024 * 1024
H2_CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
#: The size every peer may use from its first frame on. A larger one must be announced, and `h2` takes
#: the announcement into account only at the read after the one that brought its acknowledgement.
H2_FRAME_BYTES_MAX = 16 * 1024
H2_STREAMS_MAX = 256
#: One message of a WebSocket: the largest record that is allowed by default, and room for what is around it.
#: Quart reads ten of them ahead, so this is also what bounds a connection's memory. Larger writes go by HTTP.
SOCKET_MESSAGE_BYTES_MAX = 2 * 1024 * 1024

#: Where in its state an ASGI scope has the way to end its connection at once.
ABORT = "gateway.abort"


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
    def __init__(self, app: QuartTrio, limits: FrontLimits) -> None:
        self._app = ASGIWrapper(app)
        self._limits = limits
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

    async def serve(self, sock: socket.socket, first: bytes) -> None:
        """Serves one connection to its end. `first` is what was already read from it."""
        stream = SocketStream(sock, first, self._limits)
        state = ConnectionState(self._state.copy())
        state[ABORT] = stream.abort
        server = _Server(self._app, self._config, self._context, state, stream)  # type: ignore[arg-type]
        stream.before_receive = server.check_input
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
    """Hypercorn's server of one connection, with six things that it has no setting for:

    - the flow-control windows of HTTP/2 are wider;
    - an HTTP/2 answer is held back when its client gives no window for it (`_Buffer`);
    - DATA that arrives on an HTTP/2 stream after its answer (a body refused for its length) is dropped; to
      Hypercorn it is a KeyError that ends the connection, with every other request on it;
    - what an exchange has not taken when it is over is dropped: Hypercorn leaves it on a queue, and when that
      is full the whole connection waits for ever for somebody to take from it;
    - a client that says GOAWAY without an error still gets the answers that it waits for, and may send the
      rest of what it has begun: Node does so whenever it closes a session. To Hypercorn that is the end;
    - a connection whose peer has closed ends with its last answer, where Hypercorn would keep it, and one of
      our connection slots, for the keep-alive time.
    """

    _is_widened = False
    _has_ended = False

    async def protocol_send(self, event: Event) -> None:
        # The first bytes Hypercorn sends as HTTP/2 are its SETTINGS; ours go right behind them.
        if not self._is_widened and isinstance(event, RawData):
            protocol = self.protocol.protocol
            if isinstance(protocol, H2Protocol):
                self._is_widened = True
                assert not protocol.streams  # Settings go out before the first stream is made.
                protocol.streams, protocol.stream_buffers = _Streams(), _Buffers()
                protocol.task_group = _Exchanges(self._task_group._nursery)
                _outlive_goaway(protocol)
                event = RawData(event.data + _widen(protocol))
        if self._has_ended and isinstance(event, Updated):
            return  # It would start the idle timer again.
        await super().protocol_send(event)

    def check_input(self) -> None:
        """The h2 library collects a frame before it looks at its length, and a frame can claim 16 MiB."""
        protocol = self.protocol.protocol
        if isinstance(protocol, H2Protocol):
            collected: bytearray = protocol.connection.incoming_buffer._data
            if len(collected) > H2_FRAME_BYTES_MAX + 9:
                raise trio.BrokenResourceError("an HTTP/2 frame is larger than we allow")

    async def _read_data(self) -> None:
        await super()._read_data()
        self._has_ended = True
        await self.idle_task.stop()
        protocol = self.protocol.protocol
        if isinstance(protocol, H2Protocol):  # It sends no more; whoever waits for it to send would wait on.
            for buffer in list(protocol.stream_buffers.values()):
                await buffer.close()


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
        queue, taken = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)

        async def run(
            scope: Scope,
            _receive: ASGIReceiveCallable,
            send: ASGISendCallable,
            sync_spawn: Callable[..., Any],
            call_soon: Callable[..., Any],
        ) -> None:
            with taken:
                await app(scope, taken.receive, send, sync_spawn, call_soon)

        async def put(message: ASGIReceiveEvent) -> None:
            with suppress(trio.BrokenResourceError):
                await queue.send(message)

        await super().spawn_app(run, config, scope, send)  # type: ignore[arg-type]
        return put


class _Streams(dict[int, Any]):
    """The streams of an HTTP/2 connection. One that is over takes what still comes, and drops it."""

    def __missing__(self, stream_id: int) -> _Over:
        return _Over()


class _Over:
    async def handle(self, event: object) -> None:
        pass


class _Buffers(dict[int, StreamBuffer]):
    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        super().__setitem__(stream_id, _Buffer(WorkerContext.event_class))


class _Buffer(StreamBuffer):
    """What was answered and not yet sent. Hypercorn lets the writer go on after every short pop, and a pop
    for which there is no window is the shortest: the buffer of a stalled client would grow without end."""

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


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

    def __init__(self, sock: socket.socket, first: bytes, limits: FrontLimits) -> None:
        self.socket = sock
        self._first = first
        self._limits = limits
        self.before_receive: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<SocketStream {'closed' if self.socket.fileno() < 0 else 'open'}>"

    async def receive_some(self, max_bytes: int) -> bytes:
        self.before_receive()
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
