"""Goal: a client cannot tell the fronts apart. Method: the same conversations over the edge and Hypercorn, in
HTTP/1.1 and in HTTP/2, and the three ways in which a connection passes from one to the other."""

from __future__ import annotations

import base64
import re
import socket
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx2
import pytest
import trio
import trio.testing
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from quart import websocket

from gateway.http.edge import FrontLimits, FrontName
from gateway.http.hypercorn.adjustments import (
    H2_CONNECTION_WINDOW_BYTES,
    H2_FRAME_BYTES_MAX,
    H2_STREAM_WINDOW_BYTES,
    H2_STREAMS_MAX,
)
from gateway.http.hypercorn.app import build_app
from gateway.requests.request import SESSION_TYPE, Request, Response
from tests.gateway.edge_harness import (
    OUR_REQUEST_ID,
    PATIENCE_S,
    EndlessAnswer,
    Recorder,
    Running,
    head_and,
    no_connections,
    parse_answers,
    read_to_end,
    read_until,
    running_front,
    talk,
)
from tests.gateway.h2_client import H2Wire


@dataclass(frozen=True)
class Way:
    front: FrontName
    http2: bool

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(http1=not self.http2, http2=self.http2, timeout=PATIENCE_S)

    def __str__(self) -> str:
        return f"{self.front}-{'h2' if self.http2 else 'h1'}"


WAYS = [Way(front, http2) for front in ("edge", "hypercorn") for http2 in (False, True)]


@pytest.fixture(params=WAYS, ids=str)
def way(request) -> Way:
    return request.param


async def test_a_request_arrives_as_it_was_sent(way):
    recorder = Recorder()
    async with running_front(recorder, front=way.front) as running, way.client() as client:
        answer = await client.post(
            running.url,
            content=b"\x00\xffbody",
            headers=[("X-One", "a"), ("x-one", "b"), ("X-Latin", "é".encode("latin-1"))],
            extensions={"target": b"/v0/boxes/a%2Fb%20c//d?x=%2B&y=1+2&z"},
        )
    assert answer.status_code == 200
    [request] = recorder.requests
    assert (request.method, request.path, request.query) == (
        "POST",
        "/v0/boxes/a%2Fb%20c//d",
        "x=%2B&y=1+2&z",
    )
    assert bytes(request.body) == b"\x00\xffbody"
    assert request.headers["x-one"] == "a, b"
    assert request.headers["x-latin"] == "é"
    assert request.headers["host"] == f"127.0.0.1:{running.port}"
    assert request.headers["content-length"] == "6"
    assert request.started_ns > 0


async def test_answers_carry_the_same_headers(way):
    async def handler(request: Request) -> Response:
        response = Response(201, b"{", b"}")
        response.headers.append((b"x-request-id", b"abc"))
        return response

    async with running_front(handler, front=way.front) as running, way.client() as client:
        answer = await client.get(running.url)
    assert answer.status_code == 201
    assert answer.content == b"{}"
    of_json = {"content-type", "x-content-type-options", "cache-control"}
    assert set(answer.headers) == {*of_json, "x-request-id", "content-length", "date"}
    assert answer.headers["content-length"] == "2"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_every_method_reaches_the_handler(way, method):
    async with running_front(Recorder(), front=way.front) as running, way.client() as client:
        answer = await client.request(method, running.url + "/nowhere")
    assert answer.json()["method"] == method


async def test_head_has_the_length_and_no_body(way):
    async def handler(request: Request) -> Response:
        return Response(200, b"x" * 1000)

    async with running_front(handler, front=way.front) as running, way.client() as client:
        for _ in range(2):
            answer = await client.head(running.url)
            assert answer.headers["content-length"] == "1000"
            assert answer.content == b""


async def test_204_has_neither_length_nor_body(way):
    async def handler(request: Request) -> Response:
        return Response(204)

    async with running_front(handler, front=way.front) as running, way.client() as client:
        answer = await client.delete(running.url)
    assert answer.status_code == 204
    assert "content-length" not in answer.headers


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 120_000, 3_000_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_bodies_of_all_sizes_both_ways(way, size, framing):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]

    async def pieces():
        for at in range(0, size, 50_000):
            yield body[at : at + 50_000]

    async def handler(request: Request) -> Response:
        return Response(200, memoryview(request.body)[: size // 2], memoryview(request.body)[size // 2 :])

    async with running_front(handler, front=way.front) as running, way.client() as client:
        answer = await client.post(running.url, content=body if framing == "length" else pieces())
        assert answer.content == body
        assert running.front.statistics().body_bytes_in_flight == 0


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_over_the_limit_is_413_and_the_server_goes_on(way, framing):
    limits = FrontLimits(body_bytes_max=100_000, linger_s=0.5)
    recorder = Recorder()

    async def pieces(count: int):
        for _ in range(count):
            yield bytes(1000)

    async with running_front(recorder, front=way.front, limits=limits) as running, way.client() as client:
        for count, status in ((100, 200), (101, 413), (150, 413), (100, 200)):
            content = bytes(1000) * count if framing == "length" else pieces(count)
            answer = await client.post(running.url, content=content)
            assert answer.status_code == status
            if status == 413:
                assert answer.json()["error"]["code"] == "payload_too_large"
                assert re.fullmatch(OUR_REQUEST_ID, answer.headers["x-request-id"])
        assert running.front.statistics().body_bytes_in_flight == 0
    assert len(recorder.requests) == 2


async def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes(way):
    limits = FrontLimits(body_bytes_max=1000, linger_s=0.05)

    async with running_front(Recorder(), front=way.front, limits=limits) as running:
        if way.http2:  # httpx waits for its body to be sent before it reads, so speak h2 by hand
            h2c = await H2Client.connect(running)
            await h2c.request("POST", "/", [("content-length", "1001")], ends=False)
            assert await h2c.status_of(1) == b"413"
            await h2c.aclose()
        else:
            raw = await talk(running, head_and(Content_Length="1001"), half_close=False)
            [answer] = parse_answers(raw)
            assert (answer.status, answer.code, answer.headers["connection"]) == (
                413,
                "payload_too_large",
                "close",
            )


async def test_a_slow_body_is_given_up(way):
    limits = FrontLimits(body_timeout_s=0.05, linger_s=0.05)
    async with running_front(Recorder(), front=way.front, limits=limits) as running:
        if way.http2:
            h2c = await H2Client.connect(running)
            await h2c.request("POST", "/", [("content-length", "9")], ends=False)
            assert await h2c.status_of(1) == b"400"
            await h2c.aclose()
        else:
            raw = await talk(running, head_and(b"a", Content_Length="9"), half_close=False)
            [answer] = parse_answers(raw)
            assert (answer.status, answer.code) == (400, "invalid_request")
        assert running.front.statistics().body_bytes_in_flight == 0


async def test_bodies_in_flight_are_bounded(way):
    gate, entered = trio.Event(), trio.Event()

    async def handler(request: Request) -> Response:
        entered.set()
        await gate.wait()
        return Response(200)

    limits = FrontLimits(body_bytes_in_flight_max=10_000, linger_s=0.1)
    async with running_front(handler, front=way.front, limits=limits) as running, way.client() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.post(running.url, content=bytes(8000)))
            await entered.wait()
            answer = await client.post(running.url, content=bytes(5000))
            assert answer.status_code == 429
            assert answer.json()["error"]["detail"] == {"limit": "body_bytes_in_flight"}
            assert answer.headers["retry-after"] == "1"
            gate.set()
        assert (await client.post(running.url, content=bytes(8000))).status_code == 200


async def test_too_many_headers_and_too_long_a_target_are_400(way):
    limits = FrontLimits(header_count_max=20, url_bytes_max=100)
    async with running_front(Recorder(), front=way.front, limits=limits) as running, way.client() as client:
        answer = await client.get(running.url, headers={f"x-{n}": "y" for n in range(30)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        answer = await client.get(running.url + "/" + "a" * 200)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_a_handlers_bug_is_a_500_with_a_request_id(way):
    async def handler(request: Request) -> Response:
        raise ZeroDivisionError

    async with running_front(handler, front=way.front) as running, way.client() as client:
        for sent, answered in (("my-id", "my-id"), ("not an id", None)):
            answer = await client.get(running.url, headers={"x-request-id": sent})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
            request_id = answer.json()["error"]["detail"]["request_id"]
            assert answer.headers["x-request-id"] == request_id
            assert request_id == answered or (answered is None and re.fullmatch(OUR_REQUEST_ID, request_id))


async def test_a_response_header_with_a_line_break_is_a_500(way):
    async def handler(request: Request) -> Response:
        response = Response(200)
        response.headers.append((b"x-a", b"b\r\nset-cookie: c"))
        return response

    async with running_front(handler, front=way.front) as running, way.client() as client:
        answer = await client.get(running.url)
    assert answer.status_code == 500
    assert "set-cookie" not in answer.headers


async def test_a_stream_is_flushed_chunk_by_chunk(way):
    gates = [trio.Event() for _ in range(3)]

    async def ticks():
        for number, gate in enumerate(gates):
            await gate.wait()
            yield b"tick %d" % number

    async def handler(request: Request) -> Response:
        return Response(200, content_type=b"text/event-stream", stream=ticks())

    async with (
        running_front(handler, front=way.front) as running,
        way.client() as client,
        client.stream("GET", running.url) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        assert "content-length" not in answer.headers
        chunks = answer.aiter_raw()
        for number, gate in enumerate(gates):
            gate.set()
            assert await anext(chunks) == b"tick %d" % number
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)


async def test_a_stream_ends_and_cleans_up_when_its_client_goes_away(way):
    cleaned = trio.Event()

    async def endless():
        try:
            yield b"first"
            await trio.sleep_forever()
        finally:
            cleaned.set()

    async def handler(request: Request) -> Response:
        return Response(200, stream=endless())

    async with running_front(handler, front=way.front) as running:
        async with way.client() as client, client.stream("GET", running.url) as answer:
            assert await anext(answer.aiter_raw()) == b"first"
        with trio.fail_after(PATIENCE_S):
            await cleaned.wait()


async def test_a_stream_whose_reader_stalls_is_cut_off(way):
    handler = EndlessAnswer()
    limits = FrontLimits(write_timeout_s=0.05, rate_bytes_per_s_min=1_000_000_000)
    async with running_front(handler, front=way.front, limits=limits) as running:
        if way.http2:
            h2c = await H2Client.connect(running)
            await h2c.request("GET", "/", [])
            await h2c.status_of(1)  # From here on it gives the server no window.
            stream = h2c.stream
        else:
            stream = await running.connect()
            await stream.send_all(head_and(line="GET / HTTP/1.1"))
        with trio.fail_after(PATIENCE_S):
            await handler.cleaned.wait()
        await stream.aclose()


async def test_a_handler_outlives_its_client(way):
    gate, entered, finished = trio.Event(), trio.Event(), trio.Event()

    async def handler(request: Request) -> Response:
        entered.set()
        await gate.wait()
        finished.set()
        return Response(200)

    async with running_front(handler, front=way.front) as running:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with way.client() as client:
                    await client.post(running.url, content=b"abc")

            nursery.start_soon(ask)
            await entered.wait()
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        with trio.fail_after(PATIENCE_S):
            await finished.wait()


async def test_a_half_closed_client_gets_its_answer():
    for front in ("edge", "hypercorn"):
        async with running_front(Recorder(), front=front) as running:
            [answer] = parse_answers(await talk(running, head_and(b"abc", Content_Length="3")))
            assert answer.json["body"] == "abc"


async def test_drain_answers_what_is_in_flight_and_ends_soon(way):
    gate, entered = trio.Event(), trio.Event()

    async def handler(request: Request) -> Response:
        entered.set()
        await gate.wait()
        return Response(200, b"ok")

    async with running_front(handler, front=way.front) as running, way.client() as client:
        async with trio.open_nursery() as nursery:
            answers = []

            async def ask() -> None:
                answers.append(await client.get(running.url))

            nursery.start_soon(ask)
            await entered.wait()
            running.draining.set()
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert answers[0].content == b"ok"
        if not way.http2:
            assert answers[0].headers["connection"] == "close"
        with pytest.raises(httpx2.TransportError):
            async with way.client() as other:
                await other.get(running.url)


async def test_drain_closes_an_idle_connection(way):
    async with running_front(Recorder(), front=way.front) as running:
        if way.http2:
            h2c = await H2Client.connect(running)
            await h2c.request("GET", "/", [])
            assert await h2c.status_of(1) == b"200"
            stream = h2c.stream
        else:
            stream = await running.connect()
            await stream.send_all(head_and(line="GET / HTTP/1.1"))
            await read_until(stream, b"}")
        await trio.testing.wait_all_tasks_blocked()
        running.draining.set()
        await read_to_end(stream)
        await stream.aclose()


# From the edge to Hypercorn.


class H2Client(H2Wire):
    """HTTP/2 by hand: what httpx will not do."""

    @classmethod
    async def connect(cls, running: Running) -> H2Client:
        client = cls(await running.connect())
        client.connection.initiate_connection()
        await client.flush()
        return client

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], *, stream_id: int = 1, ends: bool = True
    ) -> None:
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.connection.send_headers(stream_id, pseudo + headers, end_stream=ends)
        await self.flush()

    async def receive(self) -> bool:
        is_open = await super().receive()
        if is_open:
            await self.flush()
        return is_open

    async def body_of(self, stream_id: int) -> bytes:
        await self.ended(stream_id)
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id
        )

    async def aclose(self) -> None:
        await self.stream.aclose()


@pytest.mark.parametrize("step", [1, 3, 24, 1000])
async def test_the_http2_preface_passes_the_connection_on_however_it_is_cut(step):
    recorder = Recorder()
    async with running_front(recorder) as running:
        client = H2Client(await running.connect())
        client.connection.initiate_connection()
        client.connection.send_headers(
            1,
            [(":method", "GET"), (":path", "/a"), (":scheme", "http"), (":authority", "x")],
            end_stream=True,
        )
        wire = client.connection.data_to_send()
        for at in range(0, len(wire), step):
            await client.stream.send_all(wire[at : at + step])
            if at < 40:
                await trio.testing.wait_all_tasks_blocked()
        assert await client.status_of(1) == b"200"
        await client.aclose()
        assert running.front.statistics().handed_to_hypercorn_total == 1
    assert recorder.lines == ["GET /a"]


async def test_http2_windows_and_streams_are_wide():
    async with running_front(Recorder()) as running:
        client = await H2Client.connect(running)
        await client.request("GET", "/", [])
        await client.body_of(1)
        settings = client.connection.remote_settings
        assert settings.initial_window_size == H2_STREAM_WINDOW_BYTES
        assert settings.max_frame_size == H2_FRAME_BYTES_MAX
        assert settings.max_concurrent_streams == H2_STREAMS_MAX
        assert client.connection.outbound_flow_control_window == H2_CONNECTION_WINDOW_BYTES
        await client.aclose()


async def test_many_http2_requests_at_once():
    async def handler(request: Request) -> Response:
        await trio.testing.wait_all_tasks_blocked()
        return Response(200, request.body)

    async with running_front(handler) as running, Way("edge", True).client() as client:

        async def ask(number: int) -> None:
            body = b"%d" % number * 1000
            assert (await client.post(running.url, content=body)).content == body

        async with trio.open_nursery() as nursery:
            for number in range(150):
                nursery.start_soon(ask, number)
        assert running.front.statistics().connections == 1


async def test_an_h2c_upgrade_after_plain_requests():
    recorder = Recorder()
    async with running_front(recorder) as running:
        client = H2Client(await running.connect())
        settings = client.connection.initiate_upgrade_connection()
        upgrade = head_and(
            line="GET /up HTTP/1.1",
            Connection="Upgrade, HTTP2-Settings",
            Upgrade="h2c",
            HTTP2_Settings=settings.decode(),
        )
        await client.stream.send_all(head_and(line="GET /plain HTTP/1.1") + upgrade)
        raw = b""
        while b"101" not in raw or not raw.rpartition(b"101")[2].count(b"\r\n\r\n"):
            raw += await client.stream.receive_some(65536)
        plain, _, frames = raw.partition(b"HTTP/1.1 101 ")
        assert [answer.status for answer in parse_answers(plain)] == [200]
        client.events += client.connection.receive_data(frames.partition(b"\r\n\r\n")[2])
        await client.flush()
        assert await client.status_of(1) == b"200"
        await client.request("GET", "/next", [], stream_id=3)
        assert await client.status_of(3) == b"200"
        await client.aclose()
    assert recorder.lines == ["GET /plain", "GET /up", "GET /next"]


async def test_an_upgrade_with_a_body_or_to_the_unknown_is_answered_in_http_1_1():
    recorder = Recorder()
    async with running_front(recorder) as running:
        for token in ("h2c", "something-else"):
            wire = head_and(b"abc", Connection="Upgrade", Upgrade=token, Content_Length="3")
            first, second = parse_answers(await talk(running, wire + head_and(line="GET /next HTTP/1.1")))
            assert first.json["body"] == "abc"
            assert second.json["path"] == "/next"
    assert [bytes(request.body) for request in recorder.requests] == [b"abc", b"", b"abc", b""]


async def test_an_upgrade_without_its_connection_option_is_no_upgrade():
    async with running_front(Recorder()) as running:
        [answer] = parse_answers(await talk(running, head_and(line="GET / HTTP/1.1", Upgrade="h2c")))
        assert answer.status == 200
        assert running.front.statistics().handed_to_hypercorn_total == 0


async def test_a_websocket_upgrade_reaches_quart():
    async with running_front(Recorder()) as running:
        app = (await running.front._load_hypercorn())._app.app

        @app.websocket("/ws")
        async def echo() -> None:
            await websocket.send("hello")

        key = base64.b64encode(bytes(16)).decode()
        wire = head_and(
            line="GET /ws HTTP/1.1",
            Connection="Upgrade",
            Upgrade="websocket",
            Sec_WebSocket_Key=key,
            Sec_WebSocket_Version="13",
        )
        async with await running.connect() as stream:
            await stream.send_all(wire)
            raw = await read_until(stream, b"hello")
        assert raw.startswith(b"HTTP/1.1 101 ")


UPGRADE = head_and(
    line="GET / HTTP/1.1",
    Connection="Upgrade, HTTP2-Settings",
    Upgrade="h2c",
    HTTP2_Settings="AAMAAABkAAQAAP__",
)


@pytest.mark.parametrize(
    "wire", [b"", head_and(line="GET / HTTP/1.1"), head_and(Content_Length="5"), UPGRADE]
)
@pytest.mark.parametrize("half_close", [True, False])
async def test_a_client_that_leaves_hypercorn_leaves_nothing_behind(wire, half_close):
    """Hypercorn by itself keeps such a connection for its keep-alive time, or for good."""
    async with running_front(Recorder(), front="hypercorn") as running:
        async with await running.connect() as stream:
            await stream.send_all(wire)
            await trio.testing.wait_all_tasks_blocked()
            if half_close:
                await stream.send_eof()
                await read_to_end(stream)
        with trio.fail_after(PATIENCE_S):
            await no_connections(running)


async def test_garbage_after_the_preface_ends_that_connection_only():
    async with running_front(Recorder()) as running:
        await talk(running, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200_000, half_close=False)
        await talk(running, b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", half_close=False)
        [answer] = parse_answers(await talk(running, head_and(line="GET / HTTP/1.1")))
        assert answer.status == 200


async def test_data_on_an_answered_http2_stream_costs_the_others_nothing():
    limits = FrontLimits(body_bytes_max=1000)
    async with running_front(Recorder(), limits=limits) as running:
        client = await H2Client.connect(running)
        await client.request("POST", "/", [("content-length", "3000000")], ends=False)
        assert await client.status_of(1) == b"413"
        for number in range(300):
            while client.connection.local_flow_control_window(1) < 10_000:
                assert await client.receive()
            client.connection.send_data(1, bytes(10_000), end_stream=number == 299)
            await client.flush()
        await client.request("GET", "/next", [], stream_id=3)
        assert await client.status_of(3) == b"200"
        await client.aclose()


@pytest.mark.parametrize("fails", [False, True])
async def test_an_exchange_that_ends_before_its_input_costs_the_others_nothing(fails: bool) -> None:
    goes_on = trio.Event()

    async def answer():
        yield b"begun"
        await goes_on.wait()
        if fails:
            raise RuntimeError

    async def handler(request: Request) -> Response:
        return Response(200, stream=answer()) if request.method == "POST" else Response(200)

    async with running_front(handler) as running:
        client = await H2Client.connect(running)
        await client.request("POST", "/v1/", [("content-type", SESSION_TYPE)], ends=False)
        assert await client.status_of(1) == b"200"
        for _ in range(50):  # More than there is room for on the way to the handler.
            client.connection.send_data(1, b"input")
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        goes_on.set()
        await client.request("GET", "/next", [], stream_id=3)
        assert await client.status_of(3) == b"200"
        await client.aclose()


async def test_the_app_can_be_served_by_itself():
    """By Hypercorn's own runner, for who wants no edge."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    config = Config()
    config.errorlog = None
    stop = trio.Event()
    app = build_app(Recorder())
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: worker_serve(
                ASGIWrapper(app),
                config,
                sockets=Sockets([], [listener], []),
                shutdown_trigger=stop.wait,
                task_status=task_status,
            )
        )
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/a%20b")
        assert answer.json()["path"] == "/a%20b"
        stop.set()
