"""Goal: a live answer is the same on both fronts, and its writer learns of a peer that left or that stalls.
Method: fronts on real sockets, a body that writes what the test says."""

from __future__ import annotations

import httpx2
import pytest
import trio

from gateway.http.edge import FrontLimits, FrontName
from gateway.requests.request import ClientStalled, Request, Response, Sink
from tests.gateway.edge_harness import (
    PATIENCE_S,
    head_and,
    no_connections,
    parse_answers,
    read_to_end,
    read_until,
    running_front,
    talk,
)

GET = head_and(line="GET / HTTP/1.1")
WAYS = [(front, http2) for front in ("edge", "hypercorn") for http2 in (False, True)]


class Body:
    """Puts what it is told to put; its end is `finish`, a cancellation, or a stall."""

    def __init__(self, *, floods: bool = False, stall_s: float = 0.05) -> None:
        self.sink: Sink | None = None
        self.started, self.finish, self.ended = trio.Event(), trio.Event(), trio.Event()
        self.floods = floods
        self.stall_s = stall_s
        self.closes = 0
        self.stalled = False

    async def run(self, sink: Sink) -> None:
        self.sink = sink
        self.started.set()
        while self.floods:
            sink.put(b"x" * 1_000_000)
            try:
                await sink.wait_sent(self.stall_s)
            except ClientStalled:
                self.stalled = True
                return
        await self.finish.wait()

    def close(self) -> None:
        self.closes += 1
        self.ended.set()

    async def handle(self, request: Request) -> Response:
        return Response(200, content_type=b"text/event-stream", live=self)

    def put(self, data: bytes) -> None:
        assert self.sink is not None
        self.sink.put(data)


def client(http2: bool) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(http1=not http2, http2=http2, timeout=PATIENCE_S)


@pytest.mark.parametrize("front, http2", WAYS)
async def test_what_is_put_arrives_at_once_and_in_order(front: FrontName, http2: bool) -> None:
    body = Body()
    async with (
        running_front(body.handle, front=front) as running,
        client(http2) as http,
        http.stream("GET", running.url) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        await body.started.wait()
        chunks = answer.aiter_raw()
        for number in range(3):
            body.put(b"")
            body.put(b"piece %d" % number)
            assert await anext(chunks) == b"piece %d" % number
        large = bytes(range(256)) * 4096
        body.put(large)
        body.put(b"end")
        body.finish.set()
        assert b"".join([chunk async for chunk in chunks]) == large + b"end"
    assert body.closes == 1


@pytest.mark.parametrize("front, http2", WAYS)
async def test_a_body_whose_client_goes_away_is_cancelled_and_closed(front: FrontName, http2: bool) -> None:
    body = Body()
    async with running_front(body.handle, front=front) as running:
        async with client(http2) as http, http.stream("GET", running.url) as answer:
            await body.started.wait()
            body.put(b"first")
            assert await anext(answer.aiter_raw()) == b"first"
        with trio.fail_after(PATIENCE_S):
            await body.ended.wait()
            await no_connections(running)
    assert body.closes == 1 and not body.finish.is_set()


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
async def test_a_body_is_told_that_its_reader_takes_nothing(front: FrontName) -> None:
    body = Body(floods=True)
    limits = FrontLimits(write_timeout_s=5, linger_s=0.05)
    async with (
        running_front(body.handle, front=front, limits=limits) as running,
        await running.connect() as stream,
    ):
        await stream.send_all(GET)
        with trio.fail_after(PATIENCE_S):
            await body.ended.wait()
        assert body.stalled
        raw = await read_to_end(stream)
        assert not raw.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
async def test_a_slow_reader_that_moves_is_not_stalled(front: FrontName) -> None:
    body = Body(floods=True, stall_s=PATIENCE_S)
    async with running_front(body.handle, front=front) as running, await running.connect() as stream:
        await stream.send_all(GET)
        got = 0
        while got < 20_000_000:
            got += len(await stream.receive_some(1_000_000))
    with trio.fail_after(PATIENCE_S):
        await body.ended.wait()
    assert not body.stalled


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
async def test_head_closes_a_live_body_without_running_it(front: FrontName) -> None:
    body = Body()
    async with running_front(body.handle, front=front) as running, await running.connect() as stream:
        await stream.send_all(head_and(line="HEAD / HTTP/1.1"))
        await read_until(stream, b"\r\n\r\n")
        with trio.fail_after(PATIENCE_S):
            await body.ended.wait()
    assert body.closes == 1 and not body.started.is_set()


async def test_a_live_body_to_http_1_0_ends_with_the_connection() -> None:
    body = Body()
    body.finish.set()
    async with running_front(body.handle) as running:
        [answer] = parse_answers(await talk(running, b"GET / HTTP/1.0\r\n\r\n", half_close=False))
    assert answer.headers["connection"] == "close" and answer.body == b""


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
async def test_a_body_that_fails_is_broken_off_and_closed(front: FrontName) -> None:
    class Failing(Body):
        async def run(self, sink: Sink) -> None:
            sink.put(b"first")
            await sink.wait_sent(PATIENCE_S)
            raise ZeroDivisionError

    body = Failing()
    async with running_front(body.handle, front=front) as running:
        raw = await talk(running, GET, half_close=False)
    assert raw.endswith(b"5\r\nfirst\r\n")
    assert body.closes == 1


async def test_the_connection_goes_on_after_a_live_body() -> None:
    body = Body()
    async with running_front(body.handle) as running, await running.connect() as stream:
        for _ in range(2):
            body.started, body.finish = trio.Event(), trio.Event()
            await stream.send_all(GET)
            await body.started.wait()
            body.put(b"hello")
            body.finish.set()
            [answer] = parse_answers(await read_until(stream, b"0\r\n\r\n"))
            assert answer.body == b"hello"
    assert body.closes == 2
