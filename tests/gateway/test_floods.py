"""Goal: a client that floods its connection with frames is sent away before it costs others their turn, and
no ordinary client is. Method: real sockets to a real front; frames, answers and closures are counted."""

from __future__ import annotations

import h2.connection
import h2.events
import h2.settings
import httpx2
import pytest
import trio
from h2.errors import ErrorCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from structlog.testing import capture_logs
from wsproto import ConnectionType, WSConnection
from wsproto.events import CloseConnection, TextMessage
from wsproto.events import Request as SocketRequest

from gateway.admission.frame_budget import KNOWN_TOKENS, STRANGER_TOKENS
from gateway.requests.request import SESSION_TYPE, Request, Response, Socket
from streams.protocol.access.keys import Key
from streams.protocol.errors import Unauthorized
from tests.gateway.edge_harness import PATIENCE_S, Running, read_to_end, running_front
from tests.gateway.h2_client import H2Wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
#: More than any budget: a front that hands on all of it has no budget.
FLOOD = 40_000
KEY = Key("k" * 64)


def is_refused(headers: dict[str, str]) -> bool:
    return headers.get("authorization") != "Bearer key"


class Handler:
    """Answers holders of the key, streams where it is asked to, and counts requests."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, request: Request) -> Response:
        self.count += 1
        if request.path == "/health":
            return Response(200, b"{}")
        if is_refused(request.headers):
            return Response(401, b"{}")
        request.key = KEY
        if request.incoming is not None:
            return Response(200, stream=self._echo(request.incoming))
        if request.path == "/wait":
            await trio.sleep_forever()
        return Response(200, b"x" * int(request.query or 2))

    async def _echo(self, incoming):
        async for data in incoming:
            yield data


async def admit(_path: str, headers: dict[str, str], _query: str) -> str:
    if is_refused(headers):
        raise Unauthorized("authorization: this key is not known here")
    return KEY.digest


async def serve_socket(headers: dict[str, str], accept) -> None:
    if is_refused(headers):
        raise Unauthorized("authorization: there is no key in this request")
    socket: Socket = await accept()
    while True:
        await socket.send(await socket.receive())


def keyed_front(handler: Handler | None = None):
    return running_front(handler or Handler(), admit=admit, socket_handler=serve_socket)


class H2Peer(H2Wire):
    """An HTTP/2 client that also sends what no library would."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.connection.initiate_connection()

    async def request(self, path: str, *, ends: bool = True, **headers: str) -> int:
        stream_id = self.connection.get_next_available_stream_id()
        pseudo = {":method": "GET" if ends else "POST", ":path": path, ":scheme": "http", ":authority": "x"}
        self.connection.send_headers(
            stream_id,
            [*pseudo.items(), *((name.replace("_", "-"), value) for name, value in headers.items())],
            end_stream=ends,
        )
        await self.flush()
        return stream_id

    async def error_code(self) -> int | None:
        """The error with which the server said goodbye; None if it only closed."""
        while not any(isinstance(event, h2.events.ConnectionTerminated) for event in self.events):
            if not await self.receive():
                return None
        return next(
            event.error_code for event in self.events if isinstance(event, h2.events.ConnectionTerminated)
        )


def goodbye_of(wire: bytes) -> int | None:
    """The error code of the first GOAWAY among the frames that a server has sent."""
    at = 0
    while at < len(wire):
        frame, length = Frame.parse_frame_header(memoryview(wire[at : at + 9]))
        if isinstance(frame, GoAwayFrame):
            frame.parse_body(memoryview(wire[at + 9 : at + 9 + length]))
            return frame.error_code
        at += 9 + length
    return None


async def send_flood(stream: trio.SocketStream, wire: bytes) -> None:
    try:
        await stream.send_all(wire)
    except trio.BrokenResourceError:
        pass  # It has been sent away.


def headers_frame(stream_id: int, *, flags: tuple[str, ...] = ("END_HEADERS", "END_STREAM")) -> bytes:
    """GET / over http by static table entries, and an authority."""
    return HeadersFrame(stream_id, b"\x82\x84\x86\x41\x01x", flags=list(flags)).serialize()


def rapid_resets(count: int) -> bytes:
    return b"".join(
        headers_frame(stream_id) + RstStreamFrame(stream_id, 8).serialize()
        for stream_id in range(1, 2 * count, 2)
    )


FLOODS = {
    "ping": PingFrame(0, b"12345678").serialize() * FLOOD,
    "settings": SettingsFrame(0).serialize() * FLOOD,
    "long settings": SettingsFrame(0, {4: 65535}).serialize().replace(b"\x00\x00\x06", b"\x00\x3f\xfc", 1)
    + b"\x00\x04\x00\x00\xff\xff" * 2730 * 4,
    "settings ack": SettingsFrame(0, flags=["ACK"]).serialize() * FLOOD,
    "priority": PriorityFrame(5, depends_on=3, stream_weight=9).serialize() * FLOOD,
    "window update": WindowUpdateFrame(0, 1).serialize() * FLOOD,
    "rapid reset": rapid_resets(FLOOD // 4),
    "requests without a key": b"".join(headers_frame(1 + 2 * number) for number in range(200))
    + PingFrame(0, b"12345678").serialize() * FLOOD,
    "reset of an old stream": headers_frame(1) + RstStreamFrame(1, 8).serialize() * FLOOD,
    "empty data": headers_frame(1, flags=("END_HEADERS",)) + DataFrame(1).serialize() * FLOOD,
    "padding": headers_frame(1, flags=("END_HEADERS",))
    + DataFrame(1, flags=["PADDED"], pad_length=10).serialize() * FLOOD,
    "small data without a key": headers_frame(1, flags=("END_HEADERS",))
    + DataFrame(1, b"x").serialize() * FLOOD,
    "unknown type": b"\x00\x00\x03\xee\x00\x00\x00\x00\x00abc" * FLOOD,
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_frames_without_a_key_is_told_to_calm_down(name):
    handler = Handler()
    async with keyed_front(handler) as running, trio.open_nursery() as nursery:
        stream = await running.connect()
        nursery.start_soon(send_flood, stream, PREFACE + FLOODS[name])
        assert goodbye_of(await read_to_end(stream)) == ErrorCodes.ENHANCE_YOUR_CALM
        assert handler.count <= STRANGER_TOKENS
        assert running.front.statistics().closed_by_reason["http2_frames"] == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "frames",
    [
        headers_frame(1, flags=()) + ContinuationFrame(1, b"").serialize() * FLOOD,
        WindowUpdateFrame(0, 1).serialize()[:-4] + bytes(4),
        WindowUpdateFrame(0, (1 << 31) - 1).serialize() * 2,
        b"\x7f\xff\xff\x00\x00\x00\x00\x00\x01",
    ],
    ids=["endless continuation", "window of nothing", "window that overflows", "frame of 8 MiB"],
)
async def test_what_breaks_the_protocol_ends_the_connection(frames):
    async with keyed_front() as running, trio.open_nursery() as nursery:
        async with await running.connect() as stream:
            nursery.start_soon(send_flood, stream, PREFACE + frames)
            await read_to_end(stream)
        nursery.cancel_scope.cancel()


async def test_a_flood_with_a_valid_key_ends_too_and_the_log_has_one_line_of_all(monkeypatch):
    monkeypatch.setattr("gateway.admission.close_counters.LOG_EVERY_S", 1e9)
    with capture_logs() as logs:
        async with keyed_front() as running, trio.open_nursery() as nursery:
            for _ in range(3):
                client = H2Peer(await running.connect())
                assert await client.status_of(await client.request("/", authorization="Bearer key")) == b"200"
                nursery.start_soon(send_flood, client.stream, PingFrame(0, b"12345678").serialize() * FLOOD)
                assert await client.error_code() == ErrorCodes.ENHANCE_YOUR_CALM
            assert running.front.statistics().closed_by_reason["http2_frames"] == 3
            nursery.cancel_scope.cancel()
    lines = [line for line in logs if "too many frames" in line["event"]]
    assert [(line["log_level"], line["last_address"]) for line in lines] == [("warning", "127.0.0.1")]


@pytest.mark.parametrize("http2", [False, True])
async def test_others_are_all_answered_while_connections_flood(http2):
    async with keyed_front() as running, trio.open_nursery() as nursery:

        async def flood_again() -> None:
            while True:
                async with await running.connect() as stream:
                    await send_flood(stream, PREFACE + FLOODS["window update"])

        for _ in range(8):
            nursery.start_soon(flood_again)
        async with httpx2.AsyncClient(http1=not http2, http2=http2, timeout=PATIENCE_S) as client:
            for _ in range(40):
                answer = await client.get(running.url, headers={"authorization": "Bearer key"})
                assert answer.status_code == 200
        nursery.cancel_scope.cancel()


async def test_a_client_that_acknowledges_every_frame_on_stream_and_connection_is_not_hit():
    """What a browser does, and Go with every 4 KiB: many times more frames than any bucket holds."""
    size = 4 << 20
    async with keyed_front() as running:
        client = H2Peer(await running.connect())
        client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        client.connection.increment_flow_control_window(8 << 20)
        frames = 0
        for _ in range(8):
            stream_id = await client.request(f"/?{size}", authorization="Bearer key")
            got = 0
            while got < size:
                client.events.clear()
                assert await client.receive()
                has_ended = any(isinstance(event, h2.events.StreamEnded) for event in client.events)
                for event in client.events:
                    if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id:
                        got += len(event.data)
                        for at in range(0, len(event.data), 4096):
                            count = min(4096, len(event.data) - at)
                            client.connection.increment_flow_control_window(count)
                            if not has_ended:
                                client.connection.increment_flow_control_window(count, stream_id)
                            frames += 2
                await client.flush()
        assert frames > 2 * KNOWN_TOKENS
        assert await client.status_of(await client.request("/", authorization="Bearer key")) == b"200"


async def test_a_session_of_many_small_frames_is_not_hit():
    """As the SDKs of S2 send: a DATA frame for a head, another for a record, for as long as it goes."""
    async with keyed_front() as running:
        client = H2Peer(await running.connect())
        stream_id = await client.request(
            "/v1/", ends=False, content_type=SESSION_TYPE, authorization="Bearer key"
        )
        count = KNOWN_TOKENS + 500
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stream.send_all, DataFrame(stream_id, b"x").serialize() * count)
            received = 0
            while received < count:
                client.events.clear()
                assert await client.receive(), f"closed after {received}"
                for event in client.events:
                    if isinstance(event, h2.events.DataReceived):
                        received += len(event.data)
        assert await client.status_of(await client.request("/", authorization="Bearer key")) == b"200"


async def test_a_body_in_small_frames_is_not_hit_when_it_is_the_first_of_a_valid_key():
    async with keyed_front() as running:
        client = H2Peer(await running.connect())
        stream_id = await client.request("/", ends=False, authorization="Bearer key")
        await client.stream.send_all(DataFrame(stream_id, b"x" * 10).serialize() * (STRANGER_TOKENS // 2))
        await trio.testing.wait_all_tasks_blocked()
        await client.stream.send_all(
            DataFrame(stream_id, b"x" * 10).serialize() * (3 * STRANGER_TOKENS)
            + DataFrame(stream_id, flags=["END_STREAM"]).serialize()
        )
        assert await client.status_of(stream_id) == b"200"


async def test_a_client_that_cancels_all_it_waits_for_is_not_hit():
    async with keyed_front() as running:
        client = H2Peer(await running.connect())
        assert await client.status_of(await client.request("/", authorization="Bearer key")) == b"200"
        streams = [await client.request("/wait", authorization="Bearer key") for _ in range(250)]
        for stream_id in streams:
            client.connection.reset_stream(stream_id)
        await client.flush()
        assert await client.status_of(await client.request("/", authorization="Bearer key")) == b"200"


# WebSockets.


class SocketPeer:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.protocol = WSConnection(ConnectionType.CLIENT)

    async def open(self) -> None:
        request = SocketRequest(host="x", target="/v0/ws", extra_headers=[(b"authorization", b"Bearer key")])
        await self.stream.send_all(self.protocol.send(request))
        await self.events()

    async def events(self) -> list[object]:
        with trio.fail_after(PATIENCE_S):
            self.protocol.receive_data(await self.stream.receive_some(65536) or None)
        return list(self.protocol.events())

    async def close_code(self) -> int:
        while True:
            for event in await self.events():
                if isinstance(event, CloseConnection):
                    return event.code


async def open_socket(running: Running) -> SocketPeer:
    peer = SocketPeer(await running.connect())
    await peer.open()
    return peer


def frame(first: int, payload: bytes = b"") -> bytes:
    return bytes([first, 0x80 | len(payload)]) + bytes(4) + payload


SOCKET_FLOODS = {
    "ping": frame(0x89) * FLOOD,
    "pong": frame(0x8A) * FLOOD,
    "empty fragments": frame(0x01) + frame(0x00) * FLOOD,
    "small fragments": frame(0x01) + frame(0x00, b"x") * FLOOD,
}


@pytest.mark.parametrize("name", SOCKET_FLOODS)
async def test_a_flood_of_small_socket_frames_is_closed_as_against_the_policy(name):
    async with keyed_front() as running, trio.open_nursery() as nursery:
        peer = await open_socket(running)
        nursery.start_soon(send_flood, peer.stream, SOCKET_FLOODS[name])
        assert await peer.close_code() == 1008
        assert running.front.statistics().closed_by_reason["socket_frames"] == 1
        nursery.cancel_scope.cancel()


async def test_a_socket_that_sends_small_messages_and_gets_answers_is_not_hit():
    """And others are answered meanwhile."""
    count = KNOWN_TOKENS + 500
    async with keyed_front() as running, trio.open_nursery() as nursery:
        peer = await open_socket(running)
        nursery.start_soon(send_flood, peer.stream, frame(0x81, b"hi") * count)
        received = 0
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            while received < count:
                received += sum(isinstance(event, TextMessage) for event in await peer.events())
                if received % 100 == 0:
                    answer = await client.get(running.url, headers={"authorization": "Bearer key"})
                    assert answer.status_code == 200
        await peer.stream.aclose()


async def test_messages_that_are_no_commands_earn_nothing():
    async def refuse_all(headers: dict[str, str], accept) -> None:
        socket: Socket = await accept()
        while True:
            await socket.receive()
            await socket.send(b'{"op":"error","code":"invalid_request"}')

    async with running_front(Handler(), socket_handler=refuse_all) as running, trio.open_nursery() as nursery:
        peer = await open_socket(running)
        nursery.start_soon(send_flood, peer.stream, frame(0x81, b"hi") * FLOOD)
        assert await peer.close_code() == 1008
        nursery.cancel_scope.cancel()
