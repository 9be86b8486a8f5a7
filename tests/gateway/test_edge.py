"""Goal: no client can confuse, hold or fill the edge. Method: real sockets, raw bytes.

Waits are bounded by small limits, never by sleeping: a test that passes its deadline fails.
"""

from __future__ import annotations

import re
import socket
import weakref
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from gateway.admission.inline import need_task
from gateway.http.edge import UNSENT_BYTES_MAX, FrontLimits, serve_front
from gateway.requests.errors import response_for
from gateway.requests.request import Request, Response
from streams.protocol.errors import Throttled, Unauthorized
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
from tests.gateway.test_edge_h1 import BAD_FIELDS

GET = b"GET /good HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def assert_still_serves(running: Running) -> None:
    [answer] = parse_answers(await talk(running, GET))
    assert answer.status == 200


# Requests and their answers.


async def test_one_connection_answers_many_requests():
    recorder = Recorder()
    async with running_front(recorder) as running, await running.connect() as stream:
        for number in range(5):
            await stream.send_all(head_and(b"abc", line=f"POST /{number} HTTP/1.1", Content_Length="3"))
            [answer] = parse_answers(await read_until(stream, b'"body":"abc"}'))
            assert answer.json["path"] == f"/{number}"
            assert answer.json["body"] == "abc"
            assert "connection" not in answer.headers
            assert "date" in answer.headers
        assert running.front.statistics().connections == 1
    assert len(recorder.requests) == 5


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_requests_may_come_in_any_pieces(step):
    wire = (
        b"\r\n"
        + GET
        + head_and(b"hello", Content_Length="5")
        + CHUNKED
        + b"2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nT: v\r\n\r\n"
        + b"DELETE /d HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    recorder = Recorder()
    async with running_front(recorder) as running:
        pieces = [wire[at : at + step] for at in range(0, len(wire), step)]
        answers = parse_answers(await talk(running, *pieces))
    assert [answer.status for answer in answers] == [200] * 4
    assert recorder.lines == ["GET /good", "POST /v0/boxes/a", "POST /c", "DELETE /d"]
    assert [bytes(request.body) for request in recorder.requests] == [b"", b"hello", b"hello", b""]
    assert "t" not in recorder.requests[3].headers


async def test_pipelined_answers_come_in_order_even_when_later_ones_are_quicker():
    gate = trio.Event()

    async def handler(request: Request) -> Response:
        if request.path == "/0":
            await gate.wait()
        return Response(200, request.path.encode())

    async with running_front(handler) as running, await running.connect() as stream:
        await stream.send_all(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in range(50)))
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        await stream.send_eof()
        answers = parse_answers(await read_to_end(stream))
    assert [answer.body for answer in answers] == [b"/%d" % number for number in range(50)]


async def test_a_pipelining_client_is_read_no_faster_than_it_is_answered():
    """Its requests stay in the kernel: the server holds one read's worth of them."""
    gate = trio.Event()
    seen = 0

    async def handler(request: Request) -> Response:
        nonlocal seen
        seen += 1
        await gate.wait()
        return Response(200)

    async with running_front(handler) as running, await running.connect() as stream:
        with trio.move_on_after(0.2) as scope:
            await stream.send_all(GET * 1_000_000)
        assert scope.cancelled_caught
        assert seen == 1


async def test_a_client_that_was_told_to_wait_is_not_read_before():
    """v0 §9: a client that comes back at once would cost as much in refusals as it was refused for."""
    handled_s: list[float] = []

    async def handler(request: Request) -> Response:
        handled_s.append(trio.current_time())
        if len(handled_s) > 1:
            return Response(200)
        return response_for(Throttled(retry_after_ms=200))

    async with running_front(handler) as running, await running.connect() as stream:
        await stream.send_all(GET * 2)
        await stream.send_eof()
        first, second = parse_answers(await read_to_end(stream))
    assert (first.status, second.status) == (429, 200)
    assert handled_s[1] - handled_s[0] >= 0.2


async def test_head_has_the_headers_of_get_and_no_body():
    async with running_front(Recorder()) as running:
        wire = b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
        head, get = parse_answers(await talk(running, wire), methods=["HEAD", "GET"])
    assert int(head.headers["content-length"]) == len(get.body) + 1  # "HEAD" is longer than "GET"
    assert head.header_names == get.header_names


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
async def test_every_method_reaches_the_handler(method):
    recorder = Recorder()
    async with running_front(recorder) as running:
        [answer] = parse_answers(await talk(running, head_and(line=f"{method} /a HTTP/1.1")))
    assert answer.status == 200
    assert recorder.lines == [f"{method} /a"]


async def test_absolute_and_asterisk_targets():
    recorder = Recorder()
    async with running_front(recorder) as running:
        wire = head_and(line="GET http://h:1/a%20b?q HTTP/1.1") + head_and(line="OPTIONS * HTTP/1.1")
        answers = parse_answers(await talk(running, wire))
    assert [answer.status for answer in answers] == [200, 200]
    assert recorder.lines == ["GET /a%20b", "OPTIONS *"]
    assert recorder.requests[0].query == "q"


async def test_http_1_0_closes_unless_asked_not_to():
    async with running_front(Recorder()) as running:
        [answer] = parse_answers(await talk(running, b"GET / HTTP/1.0\r\n\r\n", half_close=False))
        assert answer.headers["connection"] == "close"
        kept = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        first, second = parse_answers(await talk(running, kept, b"GET / HTTP/1.0\r\n\r\n", half_close=False))
        assert first.headers["connection"] == "keep-alive"
        assert second.headers["connection"] == "close"


async def test_connection_close_is_obeyed_and_what_follows_is_not_served():
    recorder = Recorder()
    async with running_front(recorder) as running:
        wire = head_and(line="GET /a HTTP/1.1", Connection="close") + GET
        [answer] = parse_answers(await talk(running, wire, half_close=False))
    assert answer.headers["connection"] == "close"
    assert recorder.lines == ["GET /a"]


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_expect_100_continue(framing):
    async with running_front(Recorder()) as running, await running.connect() as stream:
        if framing == "length":
            await stream.send_all(head_and(Content_Length="3", Expect="100-Continue"))
        else:
            await stream.send_all(head_and(Transfer_Encoding="chunked", Expect="100-continue"))
        assert await read_until(stream, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stream.send_all(b"abc" if framing == "length" else b"3\r\nabc\r\n0\r\n\r\n")
        [answer] = parse_answers(await read_until(stream, b'"body":"abc"}'))
        assert answer.status == 200


async def test_no_100_when_the_body_is_already_there_or_refused():
    async with running_front(Recorder(), limits=FrontLimits(body_bytes_max=10)) as running:
        raw = await talk(running, head_and(b"abc", Content_Length="3", Expect="100-continue"))
        assert raw.startswith(b"HTTP/1.1 200 ")
        raw = await talk(running, head_and(Content_Length="11", Expect="100-continue"), half_close=False)
        assert raw.startswith(b"HTTP/1.1 413 ")


async def test_a_half_closed_client_gets_its_answer():
    async def handler(request: Request) -> Response:
        await trio.testing.wait_all_tasks_blocked()
        return Response(200, b"late")

    async with running_front(handler) as running:
        [answer] = parse_answers(await talk(running, head_and(b"abc", Content_Length="3")))
    assert answer.body == b"late"


async def test_a_handler_outlives_its_client():
    gate, finished = trio.Event(), trio.Event()

    async def handler(request: Request) -> Response:
        await gate.wait()
        finished.set()
        return Response(200, b"nobody is there")

    async with running_front(handler) as running:
        stream = await running.connect()
        await stream.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        await stream.aclose()  # a reset, which the server could notice
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        with trio.fail_after(PATIENCE_S):
            await finished.wait()


async def test_a_big_answer_of_many_parts_arrives_whole():
    parts = [bytes([n % 251]) * (n * 7 % 5000) for n in range(3000)]

    async def handler(request: Request) -> Response:
        return Response(200, *(memoryview(part) for part in parts))

    async with running_front(handler) as running:
        [answer] = parse_answers(await talk(running, GET))
    assert answer.body == b"".join(parts)


async def test_an_idle_connection_holds_on_to_nothing():
    answers: list[weakref.ref[memoryview]] = []

    async def handler(request: Request) -> Response:
        whole = memoryview(request.body)
        answers.append(weakref.ref(whole))
        return Response(200, whole)

    async with running_front(handler) as running, await running.connect() as stream:
        for size in (1000, 1_000_000):
            await stream.send_all(head_and(b"a" * (size - 1) + b"z", Content_Length=str(size)))
            await read_until(stream, b"z")
            await trio.testing.wait_all_tasks_blocked()
            assert answers.pop()() is None


async def test_status_204_has_no_length():
    async def handler(request: Request) -> Response:
        return Response(204)

    async with running_front(handler) as running:
        first, second = parse_answers(await talk(running, GET + GET))
    assert "content-length" not in first.headers
    assert second.status == 204


async def test_a_handlers_bug_is_a_500_with_a_request_id_and_the_connection_goes_on():
    async def handler(request: Request) -> Response:
        if request.path == "/bug":
            raise ZeroDivisionError
        if request.path == "/split":
            response = Response(200)
            response.headers.append((b"x-request-id", b"a\r\nset-cookie: b"))
            return response
        return Response(200)

    async with running_front(handler) as running:
        wire = (
            head_and(line="GET /bug HTTP/1.1", X_Request_Id="abc-1")
            + head_and(line="GET /split HTTP/1.1", X_Request_Id="bad id")
            + GET
        )
        bug, split, good = parse_answers(await talk(running, wire))
    assert (bug.status, bug.code, bug.headers["x-request-id"]) == (500, "internal", "abc-1")
    assert bug.json["error"]["detail"]["request_id"] == "abc-1"
    assert (split.status, split.code) == (500, "internal")
    assert re.fullmatch(OUR_REQUEST_ID, split.headers["x-request-id"])
    assert good.status == 200


# Refusals.

BAD_REQUESTS = [
    *(b"POST / HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n\r\n" for fields in BAD_FIELDS),
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET / RTSP/1.0\r\nHost: x\r\n\r\n",
    b"\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    b"PRI * HTTP/2.0\r\nHost: x\r\n\r\nSM\r\n\r\n",
    CHUNKED + b"x\r\n",
    CHUNKED + b"1\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"1\na\n0\n\n",
    CHUNKED + b"ffffffffffffffff1\r\n",
    CHUNKED + b"0\r\nContent-Length: 3\r\n\r\n",
]


@pytest.mark.parametrize("wire", BAD_REQUESTS)
async def test_bad_framing_is_answered_400_and_closed_and_nothing_after_it_is_served(wire):
    recorder = Recorder()
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running_front(recorder) as running:
        answers = parse_answers(await talk(running, GET + wire + smuggled, half_close=False))
        assert recorder.lines == ["GET /good"]
        await assert_still_serves(running)
    assert [answer.status for answer in answers] == [200, 400]
    assert answers[1].code == "invalid_request"
    assert answers[1].headers["connection"] == "close"
    assert "x-request-id" in answers[1].headers
    assert answers[1].json["performance"]["server_total_ms"] >= 0


@pytest.mark.parametrize(
    "wire", [b"GET / HTT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabc", CHUNKED]
)
async def test_a_request_that_ends_early_is_answered_400(wire):
    recorder = Recorder()
    async with running_front(recorder) as running:
        [answer] = parse_answers(await talk(running, wire))
        assert answer.status == 400
        assert recorder.requests == []


LIMITS = FrontLimits(head_bytes_max=1000, header_count_max=8, url_bytes_max=100, body_bytes_max=1000)


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (head_and(X="a" * 2000), 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000, 400),
        (b"A" * 100_000, 400),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000, 400),
        (head_and(**{f"X{n}": "y" for n in range(8)}), 400),
        (head_and(line="GET /%s HTTP/1.1" % ("a" * 100)), 400),
        (head_and(b"a" * 1000, Content_Length="1000"), 200),
        (head_and(b"a" * 1001, Content_Length="1001"), 413),
        (head_and(Content_Length="1001"), 413),
        (head_and(b"a" * 5_000_000, Content_Length="5000000"), 413),
        (CHUNKED + b"3e8\r\n" + b"a" * 1000 + b"\r\n0\r\n\r\n", 200),
        (CHUNKED + b"3e9\r\n", 413),
        (CHUNKED + b"1f4\r\n" + b"a" * 500 + b"\r\n1f5\r\n", 413),
    ],
)
async def test_limits_of_head_and_body(wire, status):
    """Also: the sender of too much sees the answer, not a reset, even if it only reads when all is sent."""
    async with running_front(Recorder(), limits=LIMITS) as running, await running.connect() as stream:
        received = b""

        async def send() -> None:
            try:
                await stream.send_all(wire)
                await stream.send_eof()
            except trio.BrokenResourceError:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            received = await read_to_end(stream)
        [answer] = parse_answers(received)
        assert answer.status == status
        if status == 413:
            assert answer.code == "payload_too_large"
        await assert_still_serves(running)
        assert running.front.statistics().body_bytes_in_flight == 0


async def test_a_refused_head_request_gets_no_body():
    async with running_front(Recorder(), limits=LIMITS) as running:
        wire = head_and(line="HEAD / HTTP/1.1", Content_Length="5000")
        [answer] = parse_answers(await talk(running, wire, half_close=False), methods=["HEAD"])
    assert answer.status == 413


async def test_bodies_in_flight_are_bounded_over_all_connections():
    gate = trio.Event()

    async def handler(request: Request) -> Response:
        await gate.wait()
        return Response(200)

    limits = FrontLimits(body_bytes_in_flight_max=10_000)
    async with running_front(handler, limits=limits) as running, await running.connect() as stream:
        await stream.send_all(head_and(b"a" * 8000, Content_Length="8000"))
        await trio.testing.wait_all_tasks_blocked()
        assert running.front.statistics().body_bytes_in_flight == 8000
        for wire in (head_and(b"a" * 5000, Content_Length="5000"), CHUNKED + b"bb8\r\n" + b"a" * 3000):
            [answer] = parse_answers(await talk(running, wire, half_close=False))
            assert (answer.status, answer.code) == (429, "throttled")
            assert answer.json["error"]["detail"]["limit"] == "body_bytes_in_flight"
            assert "retry-after" in answer.headers
        gate.set()
        await read_until(stream, b"\r\n\r\n")
        assert running.front.statistics().body_bytes_in_flight == 0


async def test_a_client_that_vanishes_in_its_body_gives_its_bytes_back():
    async with running_front(Recorder()) as running:
        for wire in (head_and(b"a" * 4000, Content_Length="5000"), CHUNKED + b"5\r\nabc"):
            async with await running.connect() as stream:
                await stream.send_all(wire)
                await trio.testing.wait_all_tasks_blocked()
                assert running.front.statistics().body_bytes_in_flight > 0
            await trio.testing.wait_all_tasks_blocked()
            assert running.front.statistics().body_bytes_in_flight == 0


async def test_bodies_that_are_declared_and_do_not_come_take_no_room():
    limits = FrontLimits(body_bytes_in_flight_max=200_000, body_bytes_max=100_000)
    async with running_front(Recorder(), limits=limits) as running, AsyncExitStack() as stack:
        for _ in range(8):
            silent = await stack.enter_async_context(await running.connect())
            await silent.send_all(head_and(Content_Length="100000"))
        await trio.testing.wait_all_tasks_blocked()
        assert running.front.statistics().body_bytes_in_flight == 0
        async with await running.connect() as stream:
            await stream.send_all(head_and(b"a" * 100_000, Content_Length="100000"))
            assert (await read_until(stream, b"\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_that_stalls_is_ended_when_another_body_needs_its_room(framing, monkeypatch):
    """It has sent all but one byte, and so holds nearly all of the budget."""
    limits = FrontLimits(body_bytes_in_flight_max=150_000, body_bytes_max=100_000)
    almost = b"a" * 99_999
    wire = head_and(almost, Content_Length="100000")
    if framing == "chunked":
        wire = CHUNKED + b"1869f\r\n" + almost
    async with running_front(Recorder(), limits=limits) as running, await running.connect() as stalled:
        await stalled.send_all(wire)
        await trio.testing.wait_all_tasks_blocked()
        held = running.front.statistics().body_bytes_in_flight
        assert 99_999 <= held <= 100_352
        whole = head_and(b"b" * 100_000, Content_Length="100000")
        async with await running.connect() as stream:  # it moves still: the other one is refused
            await stream.send_all(whole)
            assert (await read_until(stream, b"\r\n")).startswith(b"HTTP/1.1 429 ")
        monkeypatch.setattr("gateway.admission.memory.STALLED_S", 0.0)
        async with await running.connect() as stream:
            await stream.send_all(whole)
            assert (await read_until(stream, b"\r\n")).startswith(b"HTTP/1.1 200 ")
        [ended] = parse_answers(await read_to_end(stalled))
        assert (ended.status, ended.code, ended.headers["connection"]) == (429, "throttled", "close")
        assert "stalled" in ended.json["error"]["message"]
        assert ended.json["error"]["detail"] == {"limit": "body_bytes_in_flight"}


async def test_a_body_is_charged_to_its_key_and_one_key_leaves_room_for_others():
    gate = trio.Event()

    async def handler(request: Request) -> Response:
        await gate.wait()
        return Response(200)

    async def admit(path: str, headers: dict[str, str], query: str) -> str:
        if "authorization" not in headers:
            raise Unauthorized("no key")
        return headers["authorization"]

    def post(key: str) -> bytes:
        return head_and(b"a" * 100_000, Content_Length="100000", Authorization=key)

    limits = FrontLimits(body_bytes_in_flight_max=400_000)
    async with running_front(handler, limits=limits, admit=admit) as running, AsyncExitStack() as stack:
        for key in ("one", "one", "other"):
            stream = await stack.enter_async_context(await running.connect())
            await stream.send_all(post(key))
        await trio.testing.wait_all_tasks_blocked()
        assert running.front.statistics().body_bytes_in_flight == 300_000
        [refused] = parse_answers(await talk(running, post("one"), half_close=False))
        assert (refused.status, refused.json["error"]["detail"]["limit"]) == (429, "body_bytes_in_flight")
        [stranger] = parse_answers(await talk(running, head_and(Content_Length="100000"), half_close=False))
        assert stranger.status == 401
        gate.set()
        await read_until(stream, b"\r\n\r\n")


async def test_connections_over_the_limit_wait_their_turn_while_all_are_busy():
    gate = trio.Event()

    async def handler(_: Request) -> Response:
        await gate.wait()
        return Response(200, b"{}")

    async with (
        running_front(handler, limits=FrontLimits(connections_max=1)) as running,
        await running.connect() as first,
    ):
        await first.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        second = await running.connect()
        await second.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        assert running.front.statistics().connections_total == 1
        gate.set()
        await read_until(first, b"}")
        await read_until(second, b"}")


# Slow clients.


@pytest.mark.parametrize("wire", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
async def test_a_slow_head_is_given_up(wire):
    limits = FrontLimits(head_timeout_s=0.05, linger_s=0.05)
    async with running_front(Recorder(), limits=limits) as running:
        [answer] = parse_answers(await talk(running, wire, half_close=False))
        assert (answer.status, answer.code) == (400, "invalid_request")


@pytest.mark.parametrize("wire", [head_and(b"a", Content_Length="9"), CHUNKED + b"9\r\na", CHUNKED])
async def test_a_slow_body_is_given_up(wire):
    limits = FrontLimits(body_timeout_s=0.05, linger_s=0.05)
    async with running_front(Recorder(), limits=limits) as running:
        [answer] = parse_answers(await talk(running, wire, half_close=False))
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "slowly" in answer.json["error"]["message"]
        assert running.front.statistics().body_bytes_in_flight == 0


async def test_a_trickle_does_not_keep_a_head_or_a_body_alive():
    limits = FrontLimits(head_timeout_s=0.1, body_timeout_s=0.1, linger_s=0.05)
    async with running_front(Recorder(), limits=limits) as running:
        for wire in (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", head_and(Content_Length="100000")):
            async with await running.connect() as stream:

                async def trickle(stream: trio.SocketStream = stream, wire: bytes = wire) -> None:
                    try:
                        await stream.send_all(wire)
                        while True:
                            await stream.send_all(b"a")
                            await trio.sleep(0.01)
                    except trio.BrokenResourceError:
                        pass

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trickle)
                    [answer] = parse_answers(await read_to_end(stream))
                    nursery.cancel_scope.cancel()
                assert answer.status == 400


async def test_an_idle_connection_is_closed_without_a_word():
    limits = FrontLimits(keep_alive_s=0.2)
    async with running_front(Recorder(), limits=limits) as running:
        assert await talk(running, half_close=False) == b""
        [answer] = parse_answers(await talk(running, GET, half_close=False))
        assert answer.status == 200


async def test_a_client_that_does_not_read_is_cut_off():
    handled = trio.Event()

    async def handler(request: Request) -> Response:
        handled.set()
        return Response(200, bytes(50_000_000))

    limits = FrontLimits(write_timeout_s=0.05, rate_bytes_per_s_min=1_000_000_000)
    async with running_front(handler, limits=limits) as running, await running.connect() as stream:
        await stream.send_all(GET)
        await handled.wait()
        with trio.fail_after(PATIENCE_S):
            await no_connections(running)
        assert len(await read_to_end(stream)) < 50_000_000


async def test_a_slow_handler_is_not_a_slow_client():
    limits = FrontLimits(
        head_timeout_s=0.1, body_timeout_s=0.1, write_timeout_s=0.1, keep_alive_s=0.1, linger_s=0.1
    )

    async def handler(request: Request) -> Response:
        await trio.sleep(0.3)
        return Response(200, b"done")

    async with running_front(handler, limits=limits) as running:
        [answer] = parse_answers(await talk(running, head_and(b"abc", Content_Length="3"), half_close=False))
    assert answer.body == b"done"


# Streams.


async def test_a_stream_is_flushed_chunk_by_chunk_and_the_connection_goes_on():
    gates = [trio.Event() for _ in range(3)]

    async def ticks():
        for number, gate in enumerate(gates):
            await gate.wait()
            yield b"tick %d\n" % number
            yield b""

    async def handler(request: Request) -> Response:
        if request.path == "/good":
            return Response(200, b"after")
        return Response(200, content_type=b"text/event-stream", stream=ticks())

    async with running_front(handler) as running, await running.connect() as stream:
        await stream.send_all(head_and(line="GET /s HTTP/1.1"))
        raw = await read_until(stream, b"\r\n\r\n")
        for number, gate in enumerate(gates):
            gate.set()
            raw += await read_until(stream, b"tick %d\n\r\n" % number)
            if number == 0:
                await stream.send_all(GET)  # Pipelined behind a running stream.
        raw += await read_until(stream, b"after")
    streamed, after = parse_answers(raw)
    assert streamed.headers["transfer-encoding"] == "chunked"
    assert streamed.headers["content-type"] == "text/event-stream"
    assert streamed.body == b"tick 0\ntick 1\ntick 2\n"
    assert after.body == b"after"


async def test_a_stream_to_http_1_0_ends_with_the_connection():
    async def numbers():
        for number in range(3):
            yield b"%d" % number

    async def handler(request: Request) -> Response:
        return Response(200, stream=numbers())

    async with running_front(handler) as running:
        wire = b"GET /s HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        [answer] = parse_answers(await talk(running, wire, half_close=False))
    assert answer.body == b"012"
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("waits_in", ["generator", "send"])
async def test_a_stream_ends_and_cleans_up_when_its_peer_goes_away(waits_in):
    cleaned = trio.Event()

    async def endless():
        try:
            yield b"first"
            while waits_in == "send":
                yield bytes(1_000_000)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            cleaned.set()

    async def handler(request: Request) -> Response:
        return Response(200, stream=endless())

    async with running_front(handler) as running:
        async with await running.connect() as stream:
            await stream.send_all(GET)
            await read_until(stream, b"first")
        with trio.fail_after(PATIENCE_S):
            await cleaned.wait()
            await no_connections(running)


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
async def test_the_kernel_holds_little_for_a_reader_who_takes_nothing(front):
    """Thousands of them would hold gigabytes, and have their backlog read for nothing."""
    given = 0

    async def endless():
        nonlocal given
        while True:
            yield bytes(16_384)
            given += 16_384

    async def handler(request: Request) -> Response:
        return Response(200, stream=endless())

    async with running_front(handler, front=front) as running:
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await sock.connect(("127.0.0.1", running.port))
        async with trio.SocketStream(sock) as stream:
            await stream.send_all(GET)
            before = -1
            while not given or given != before:
                before = given
                await trio.testing.wait_all_tasks_blocked(0.1)
            assert 0 < given <= 4 * UNSENT_BYTES_MAX


async def test_a_stream_whose_reader_stalls_is_cut_off():
    handler = EndlessAnswer()
    limits = FrontLimits(write_timeout_s=0.05, rate_bytes_per_s_min=1_000_000_000)
    async with running_front(handler, limits=limits) as running, await running.connect() as stream:
        await stream.send_all(GET)
        with trio.fail_after(PATIENCE_S):
            await handler.cleaned.wait()


async def test_a_stream_may_be_quiet_for_longer_than_any_deadline():
    async def quiet():
        yield b"a"
        await trio.sleep(0.3)
        yield b"b"

    async def handler(request: Request) -> Response:
        return Response(200, stream=quiet())

    limits = FrontLimits(write_timeout_s=0.1, keep_alive_s=0.1, head_timeout_s=0.1, body_timeout_s=0.1)
    async with running_front(handler, limits=limits) as running, await running.connect() as stream:
        await stream.send_all(GET)
        [answer] = parse_answers(await read_until(stream, b"0\r\n\r\n"))
    assert answer.body == b"ab"


async def test_a_stream_that_fails_is_broken_off_without_its_last_chunk():
    async def failing():
        yield b"first"
        raise ZeroDivisionError

    async def handler(request: Request) -> Response:
        return Response(200, stream=failing())

    async with running_front(handler) as running:
        raw = await talk(running, GET, half_close=False)
        assert raw.endswith(b"5\r\nfirst\r\n")
        await trio.testing.wait_all_tasks_blocked()


async def test_head_of_a_stream_closes_it_unread():
    closed = trio.Event()

    class Stream:
        def __aiter__(self):
            return self

        async def __anext__(self):
            raise AssertionError("nobody asked")

        async def aclose(self):
            closed.set()

    async def handler(request: Request) -> Response:
        return Response(200, stream=Stream()) if request.method == "HEAD" else Response(200, b"ok")

    async with running_front(handler) as running:
        wire = head_and(line="HEAD / HTTP/1.1") + GET
        head, get = parse_answers(await talk(running, wire), methods=["HEAD", "GET"])
    assert head.headers["transfer-encoding"] == "chunked"
    assert get.body == b"ok"
    assert closed.is_set()


# Draining.


async def test_drain_closes_idle_connections_and_answers_busy_ones():
    gate = trio.Event()

    async def handler(request: Request) -> Response:
        if request.path == "/slow":
            await gate.wait()
        return Response(200, b"ok")

    async with running_front(handler) as running:
        idle = await running.connect()
        await idle.send_all(GET)
        await read_until(idle, b"ok")
        busy = await running.connect()
        await busy.send_all(head_and(line="GET /slow HTTP/1.1"))
        body = await running.connect()
        await body.send_all(head_and(b"abc", Content_Length="6"))
        await trio.testing.wait_all_tasks_blocked()
        running.draining.set()
        assert await read_to_end(idle) == b""
        with pytest.raises(OSError, match="connect"):
            await running.connect()
        gate.set()
        [answer] = parse_answers(await read_to_end(busy))
        assert (answer.body, answer.headers["connection"]) == (b"ok", "close")
        await body.send_all(b"def")
        [answer] = parse_answers(await read_to_end(body))
        assert (answer.body, answer.headers["connection"]) == (b"ok", "close")
        for stream in (idle, busy, body):
            await stream.aclose()


async def test_drain_is_bounded():
    async def handler(request: Request) -> Response:
        await need_task()
        await trio.sleep_forever()

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    draining = trio.Event()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: serve_front(listener, handler, draining=draining, limits=FrontLimits(drain_s=0.05))
            )
            async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
                await stream.send_all(GET)
                await trio.testing.wait_all_tasks_blocked()
                draining.set()
                assert await read_to_end(stream) == b""


async def test_two_fronts_share_one_listener():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    recorder = Recorder()
    async with trio.open_nursery() as nursery:
        events = [trio.Event(), trio.Event()]
        fronts = [
            await nursery.start(
                lambda task_status, i=i: serve_front(
                    listener.dup(), recorder, draining=events[i], task_status=task_status
                )
            )
            for i in range(2)
        ]
        with trio.fail_after(PATIENCE_S):
            for _ in range(20):
                async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
                    await stream.send_all(GET)
                    await read_until(stream, b"}")
            events[0].set()
            await trio.testing.wait_all_tasks_blocked()
            async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
                await stream.send_all(GET)
                await read_until(stream, b"}")
            assert sum(front.statistics().connections_total for front in fronts) == 21
            events[1].set()
    listener.close()
