"""Serves single connections with Hypercorn: HTTP/2 and upgrades, which the edge does not speak.

Hypercorn's own `TCPServer` gets our `SocketStream` instead of trio's, because Hypercorn sends without a
deadline and shielded from cancellation: a peer that stops reading would block it forever.
"""

from __future__ import annotations

import logging
import socket

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState
from quart_trio import QuartTrio

from gateway.admission.close_counters import CloseCounters
from gateway.admission.connection_table import OpenConnection
from gateway.admission.frame_budget import FrameBudget
from gateway.admission.slice_lane import SliceLane
from gateway.http.edge_rules import FrontLimits, log
from gateway.http.hypercorn.adjustments import H2_FRAME_BYTES_MAX, H2_STREAMS_MAX
from gateway.http.hypercorn.connection import HypercornConnection
from gateway.http.hypercorn.socket_stream import SocketStream

#: One message of a WebSocket: the largest record that is allowed by default, plus its envelope. Quart reads
#: ten messages ahead, so this also bounds the memory of a connection. Larger writes use HTTP.
SOCKET_MESSAGE_BYTES_MAX = 2 * 1024 * 1024

#: Key in the state of an ASGI scope: the function that ends the connection at once.
ABORT = "gateway.abort"
#: Key in the state of an ASGI scope: the function to call when the client has shown a valid key, or needs
#: none. It returns False if there is no room to keep the connection: then no stream is opened on it.
SET_KNOWN = "gateway.set_known"


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
        close_counters: CloseCounters | None = None,
    ) -> None:
        self._app = ASGIWrapper(app)
        self._limits = limits
        self._lane = lane or SliceLane()
        self._close_counters = close_counters or CloseCounters()
        self._config = hypercorn_config(limits)
        self._context = WorkerContext(None)
        self._state: LifespanState = {}
        self._is_finished = trio.Event()

    def __repr__(self) -> str:
        state = "draining" if self._context.terminated.is_set() else "serving"
        return f"<HypercornServer {state}>"

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the app's lifespan: startup before the first connection, shutdown after the last."""
        lifespan = Lifespan(self._app, self._config, self._state)
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            task_status.started()
            await self._is_finished.wait()
            with trio.move_on_after(self._limits.drain_s):
                await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def serve(
        self, sock: socket.socket, first: bytes, address: str = "", place: OpenConnection | None = None
    ) -> None:
        """Serve one connection until it ends. `first` is the input that was already read from it."""
        stream = SocketStream(sock, first, self._limits, address)
        state = ConnectionState(self._state.copy())
        state[ABORT] = stream.abort
        budget = FrameBudget(trio.current_time())

        def set_known() -> bool:
            budget.set_known()
            return place is None or place.keep()

        state[SET_KNOWN] = set_known
        server = HypercornConnection(self._app, self._config, self._context, state, stream)  # type: ignore[arg-type]
        server.watch_frames(budget, self._lane, self._close_counters, self._limits)
        if place is not None:
            place.server = server
        try:
            await server.run()
        except Exception as error:
            # Hypercorn raises some protocol violations as exceptions (for example a path that is not ASCII).
            # They are the fault of this one peer and end only this connection.
            log.warning("HTTP/2 or WebSocket connection closed after an error", error=repr(error))

    def finish(self) -> None:
        """Let `run` end: the last connection is closed."""
        self._is_finished.set()

    async def drain(self) -> None:
        """Close idle connections now, and busy ones after their answers."""
        await self._context.terminated.set()
