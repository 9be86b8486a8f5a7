"""Goal: idle connections shut nobody out. Method: a front with room for few, more clients than that, on real
sockets; answered and closed connections are counted."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import AsyncExitStack

import h2.connection
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from gateway.http.edge import FrontLimits
from gateway.requests.request import Request, Response, Socket
from streams.protocol.access.keys import Key
from streams.protocol.errors import Unauthorized
from tests.gateway.edge_harness import (
    Running,
    head_and,
    no_connections,
    parse_answers,
    read_to_end,
    read_until,
    running_front,
    talk,
)

KEY = Key("k" * 64)
HEALTH = head_and(line="GET /health HTTP/1.1")
KEYED = head_and(line="GET / HTTP/1.1", Authorization="Bearer key")
WAIT = head_and(line="GET /wait HTTP/1.1", Authorization="Bearer key")
STREAM = head_and(line="GET /stream HTTP/1.1", Authorization="Bearer key")


class Handler:
    def __init__(self) -> None:
        self.gate = trio.Event()

    async def __call__(self, request: Request) -> Response:
        if request.path == "/health":
            return Response(200, b"{}")
        if request.headers.get("authorization") != "Bearer key":
            return Response(401, b"{}")
        request.key = KEY
        if request.path == "/stream":
            return Response(200, stream=self._events())
        if request.path == "/wait":
            await self.gate.wait()
        return Response(200, b"{}")

    async def _events(self):
        yield b"event"
        await self.gate.wait()


async def admit(_path: str, headers: dict[str, str], _query: str) -> str:
    if headers.get("authorization") != "Bearer key":
        raise Unauthorized("authorization: this key is not known here")
    return KEY.digest


async def serve_socket(headers: dict[str, str], accept) -> None:
    await admit("", headers, "")
    opened: Socket = await accept()
    await opened.receive()


def full_front(connections_max: int, handler: Handler | None = None, **limits: int):
    return running_front(
        handler or Handler(),
        limits=FrontLimits(connections_max=connections_max, **limits),
        admit=admit,
        socket_handler=serve_socket,
    )


async def open_all(running: Running, stack: AsyncExitStack, count: int, wire: bytes = b""):
    streams = []
    for _ in range(count):
        stream = await stack.enter_async_context(await running.connect())
        if wire:
            await stream.send_all(wire)
            if wire != WAIT:
                await read_until(stream, b"{}" if wire != STREAM else b"event")
        streams.append(stream)
    await trio.testing.wait_all_tasks_blocked()
    return streams


def is_closed(stream: trio.SocketStream) -> bool:
    """Whether the server has closed a connection on which nothing else has come."""
    with socket.socket(fileno=os.dup(stream.socket.fileno())) as peeking:
        try:
            return peeking.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True


@pytest.mark.parametrize("wire", [b"", b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_idle_connections_without_a_key_shut_nobody_out(wire, monkeypatch):
    """Silent ones, ones with half a head, and HTTP/2 ones: four times as many as there is room for."""
    monkeypatch.setattr("gateway.admission.close_counters.LOG_EVERY_S", 1e9)
    async with full_front(20) as running, AsyncExitStack() as stack:
        [working] = await open_all(running, stack, 1, KEYED)
        with capture_logs() as logs:
            for _ in range(80):
                stream = await stack.enter_async_context(await running.connect())
                await stream.send_all(wire)
            await trio.testing.wait_all_tasks_blocked()
            [answer] = parse_answers(await talk(running, HEALTH))
            assert answer.status == 200
            [answer] = parse_answers(await talk(running, KEYED))
            assert answer.status == 200
        await working.send_all(KEYED)
        await read_until(working, b"{}")
        closed = running.front.statistics().closed_by_reason
        assert closed["no_key"] + closed["address"] >= 60
        assert running.front.statistics().connections <= 20
        lines = [line for line in logs if "idle connections" in line["event"]]
        assert 1 <= len(lines) <= 2 and all(line["last_address"] == "127.0.0.1" for line in lines)


async def test_the_connections_of_valid_keys_stay_when_strangers_flood():
    async with full_front(20) as running, AsyncExitStack() as stack:
        keyed = await open_all(running, stack, 10, KEYED)
        keyed += await open_all(running, stack, 5, STREAM)
        waiting = await open_all(running, stack, 2, WAIT)
        strangers = await open_all(running, stack, 40)
        assert not any(is_closed(stream) for stream in keyed + waiting)
        assert sum(is_closed(stream) for stream in strangers) >= 37


async def test_a_probe_and_a_key_are_answered_when_every_other_connection_is_busy():
    handler = Handler()
    async with full_front(20, handler) as running, AsyncExitStack() as stack:
        await open_all(running, stack, 19, STREAM)
        for _ in range(3):
            for wire in (HEALTH, KEYED):
                [stream] = await open_all(running, stack, 1, wire)  # It is not closed by its client.
                assert not is_closed(stream)
        stream = await running.connect()
        await stream.send_all(STREAM)
        refused = await read_until(stream, b"}")
        [answer] = parse_answers(refused + b"}" if refused.count(b"{") > refused.count(b"}") else refused)
        assert (answer.status, answer.json["error"]["detail"]["limit"]) == (429, "connections")


async def test_no_socket_and_no_http2_stream_opens_in_the_reserve():
    upgrade = head_and(
        line="GET /v0/ws HTTP/1.1",
        Authorization="Bearer key",
        Connection="Upgrade",
        Upgrade="websocket",
        Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
        Sec_WebSocket_Version="13",
    )
    async with full_front(20) as running, AsyncExitStack() as stack:
        await open_all(running, stack, 19, STREAM)
        [answer] = parse_answers(await talk(running, upgrade, half_close=False))
        assert answer.status == 429
        client = h2.connection.H2Connection()
        client.initiate_connection()
        pseudo = {":method": "GET", ":path": "/stream", ":scheme": "http", ":authority": "x"}
        client.send_headers(1, [*pseudo.items(), ("authorization", "Bearer key")], end_stream=True)
        async with await running.connect() as stream:
            await stream.send_all(client.data_to_send())
            events = []
            while not any(isinstance(event, h2.events.ResponseReceived) for event in events):
                events += client.receive_data(await stream.receive_some(65536))
        [status] = [
            dict(event.headers)[b":status"] for event in events if hasattr(event, "headers") and event.headers
        ]
        assert status == b"429"


async def test_idle_connections_of_valid_keys_give_way_to_new_clients():
    """A client that has a key but keeps too many connections shuts nobody out either."""
    handler = Handler()
    async with full_front(20, handler) as running, AsyncExitStack() as stack:
        idle = await open_all(running, stack, 19, KEYED)
        await open_all(running, stack, 1, WAIT)
        [answer] = parse_answers(await talk(running, HEALTH))
        assert answer.status == 200
        assert sum(is_closed(stream) for stream in idle) == 1
        assert running.front.statistics().closed_by_reason["idle"] == 1


async def test_a_server_without_keys_keeps_connections_that_have_made_a_request():
    async with (
        running_front(Handler(), limits=FrontLimits(connections_max=20)) as running,
        AsyncExitStack() as stack,
    ):
        used = await open_all(running, stack, 10, HEALTH)
        await open_all(running, stack, 30)
        assert not any(is_closed(stream) for stream in used)


async def test_an_address_over_its_limit_is_refused():
    async with (
        full_front(20, connections_per_address_max=3) as running,
        AsyncExitStack() as stack,
    ):
        await open_all(running, stack, 3, KEYED)
        async with await running.connect() as stream:
            assert await read_to_end(stream) == b""
        assert running.front.statistics().closed_by_reason["address_limit"] == 1


async def test_five_hundred_connections_that_come_and_go_leave_an_empty_table():
    async with full_front(20) as running:

        async def come_and_go() -> None:
            for _ in range(25):
                async with await running.connect():
                    await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(come_and_go)
        await no_connections(running)
        running.front.table.check()
        assert repr(running.front.table) == "<ConnectionTable 0 kept, 0 strangers>"


async def test_pipelined_requests_without_a_key_take_turns():
    """Two connections bring 32 requests each at once, and neither waits for more than two of the other."""
    served: list[str] = []

    async def refuse(request: Request) -> Response:
        served.append(request.path)
        return Response(401, b"{}")

    async with running_front(refuse, admit=admit) as running, AsyncExitStack() as stack:
        streams = await open_all(running, stack, 2)
        for name, stream in zip("ab", streams, strict=True):
            await stream.send_all(head_and(line=f"GET /{name} HTTP/1.1") * 32)
        for stream in streams:
            received = b""
            while received.count(b"{}") < 32:
                received += await stream.receive_some(65536)
    runs = [len(list(run)) for _, run in itertools.groupby(served)]
    assert max(runs[:-1]) <= 2, runs
