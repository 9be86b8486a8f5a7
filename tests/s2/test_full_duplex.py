"""Goal: an append session over HTTP/1.1 is full duplex: acks come while the body is open, with the limits,
the drain and the error frames of HTTP/2 (s2 §1, §13). The Rust SDK and the `s2` command depend on it.

Method: a client of our own that sends chunks by hand, against real servers with either front.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gateway.s2 import session_frames
from streams.testing import Server, running_server
from tests.s2.conftest import Client
from tests.support.duplex import Duplex
from tests.support.s2_frames import Frames, given

FRONTS = ["edge", "hypercorn"]


@pytest.fixture(scope="module")
def other_server() -> Iterator[Server]:
    with running_server(shards=1, front="hypercorn", throttle_lag_ms=60_000) as running:
        yield running


@pytest.fixture(params=FRONTS)
def stream(request: pytest.FixtureRequest, client: Client) -> Client:
    """A stream `s` on a server with this front."""
    server: Server = request.getfixturevalue("server" if request.param == "edge" else "other_server")
    found = client.on(server)
    found.create()
    found.stream()
    return found


def session(client: Client, stream: str = "s", *, length: int | None = None, **headers: str) -> Duplex:
    given = {"content-type": "s2s/proto", "s2-basin": client.basin}
    given.update((name.replace("_", "-"), value) for name, value in headers.items())
    return Duplex(client.port, f"/v1/streams/{stream}/records", given, length=length)


def said(connection: Duplex) -> Frames:
    return Frames(connection.data)


def test_acks_come_while_the_body_is_open_and_the_connection_goes_on(stream: Client) -> None:
    with session(stream) as connection:
        connection.until(lambda: connection.status == 200)  # before anything of the body is sent
        assert connection.headers["content-type"] == "s2s/proto"
        for number in range(3):
            connection.send(given(b"%d" % number))
            connection.until(lambda: len(said(connection).regular) == number + 1)  # noqa: B023
        last = given(b"3")
        connection.send(last[:2])  # a frame in two chunks, of which one has the start of the next frame too
        connection.send(last[2:] + given(b"4")[:5])
        connection.send(given(b"4")[5:], ends=True)
        assert len(Frames(connection.answered()).regular) == 5
        connection.request(
            "/v1/streams/s/records", {"s2-basin": stream.basin, "content-type": "application/json"}
        )
        connection.send(json.dumps({"records": [{"body": "5"}]}).encode(), ends=True)
        assert json.loads(connection.answered())["end"]["seq_num"] == 6
    assert stream.bodies() == ["0", "1", "2", "3", "4", "5"]


def test_a_body_with_a_length_is_answered_while_it_arrives(stream: Client) -> None:
    first, second = given(b"a"), given(b"b")
    with session(stream, length=len(first + second), expect="100-continue") as connection:
        connection.until(lambda: connection.status == 200)
        connection.send(first)
        connection.until(lambda: len(said(connection).regular) == 1)
        connection.send(second)
        assert len(Frames(connection.answered()).regular) == 2
    assert stream.bodies() == ["a", "b"]


@pytest.mark.parametrize(
    ("raw", "is_framing"),
    [
        (b"zz\r\n", True),
        (b"3\r\nabcd\r\n", True),
        (b"0\r\nbad trailer\r\n\r\n", True),
        (b"5\r\n\0\0\0\0?\r\n0\r\n\r\n", False),
        (b"6\r\n\0\0\7\0\x0a\x04\r\n0\r\n\r\n", False),
    ],
    ids=["chunk size", "chunk too long", "trailer", "frame", "end within a frame"],
)
def test_what_breaks_in_the_middle_is_an_error_frame_behind_all_acks(
    stream: Client, raw: bytes, is_framing: bool
) -> None:
    with session(stream) as connection:
        connection.send(given(b"good"))
        connection.send_raw(raw)
        found = Frames(connection.answered())
        assert not is_framing or connection.closed()  # where the next request would start is not known
    assert len(found.regular) == 1
    assert found.terminal is not None
    assert (found.terminal[0], found.terminal[1]["code"]) == (400, "bad_frame")
    assert stream.bodies() == ["good"]


def test_a_client_that_stops_in_the_middle_of_its_body_gets_its_acks_and_an_error_frame(
    stream: Client,
) -> None:
    with session(stream) as connection:
        connection.send(given(b"a") + given(b"b")[:6])
        connection.close_sending()
        found = Frames(connection.answered())
        assert connection.closed()
    assert len(found.regular) == 1
    assert found.terminal is not None and found.terminal[1]["code"] == "bad_frame"
    assert stream.bodies() == ["a"]


def test_a_client_that_closes_its_sending_side_behind_its_body_gets_all_acks(stream: Client) -> None:
    with session(stream) as connection:
        connection.send(b"".join(given(b"%d" % number) for number in range(50)), ends=True)
        connection.close_sending()
        found = Frames(connection.answered())
    assert (len(found.regular), found.terminal) == (50, None)
    assert stream.tail() == 50


def test_a_failure_ends_a_session_whose_body_is_open(stream: Client) -> None:
    with session(stream) as connection:
        connection.send(given(b"a", match=0) + given(b"b", match=7) + given(b"late"))
        found = Frames(connection.answered())
        connection.send(given(b"never") * 100)  # it may have been under way
        assert connection.closed()
    assert (len(found.regular), found.terminal) == (1, (412, {"seq_num_mismatch": 1}))
    assert stream.bodies() == ["a"]


def test_what_is_wrong_from_the_start_is_an_ordinary_answer_before_the_body(stream: Client) -> None:
    with session(stream, "missing") as connection:
        body = json.loads(connection.answered())
        assert (connection.status, body["code"]) == (404, "stream_not_found")
        assert connection.headers["connection"] == "close"
        assert connection.closed()


def test_a_session_carries_more_than_any_other_body_may(stream: Client) -> None:
    batch = given(*[b"x" * 100_000] * 10)
    with session(stream) as connection:
        for number in range(70):  # a body is 64 MiB at most
            connection.send(batch)
            connection.until(lambda: len(said(connection).regular) >= number - 3)  # noqa: B023
        connection.send(b"", ends=True)
        assert len(Frames(connection.answered()).regular) == 70
    assert stream.tail() == 700


def test_a_client_that_reads_no_acks_is_not_read_from_and_loses_nothing(stream: Client) -> None:
    """Its own sends stop: what is under way is bounded. When it reads again, the session goes on."""
    batch = given(*[b"x" * 100_000] * 10)
    with session(stream) as connection:
        connection.until(lambda: connection.status == 200)
        for _ in range(20):
            connection.send(batch)
        connection.send(b"", ends=True)
        assert len(Frames(connection.answered()).regular) == 20


def test_one_byte_chunks_are_a_session_too(stream: Client) -> None:
    data = given(b"a" * 2000, b"b") + given(b"c")  # more lines of framing than are parsed in one go
    with session(stream) as connection:
        connection.send_raw(b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n")
        assert len(Frames(connection.answered()).regular) == 2
    assert stream.bodies() == ["a" * 2000, "b", "c"]


@pytest.fixture
def stopping() -> Iterator[Callable[[str, int], tuple[Server, Client]]]:
    with ExitStack() as stack:

        def start(front: str, drain_ms: int) -> tuple[Server, Client]:
            server = stack.enter_context(running_server(shards=1, front=front, drain_ms=drain_ms))
            client = Client(server.url, "drain-basin")
            client.create()
            client.stream()
            return server, client

        yield start


@pytest.mark.parametrize("front", FRONTS)
def test_a_server_that_stops_advises_a_session_to_leave_and_ends_one_that_stays(
    stopping: Callable[[str, int], tuple[Server, Client]], front: str
) -> None:
    server, client = stopping(front, 3_000)
    with session(client) as leaving, session(client) as staying:
        for each in (leaving, staying):
            each.send(given(b"a"))
            each.until(lambda: len(said(each).regular) == 1)  # noqa: B023
            assert not said(each).advised
        os.kill(server.pid, signal.SIGTERM)
        while not said(leaving).advised:
            count = len(said(leaving).regular)
            leaving.send(given(b"b"))
            leaving.until(lambda: len(said(leaving).regular) > count)  # noqa: B023
        leaving.send(b"", ends=True)
        assert Frames(leaving.answered()).terminal is None
        found = Frames(staying.answered())
    assert found.terminal is not None
    assert (found.terminal[0], found.terminal[1]["code"]) == (503, "server_draining")
    assert server.wait() == 0


def test_compressed_frames_are_read_over_http_1(stream: Client) -> None:
    plain = given(b"z" * 5000)
    with session(stream) as connection:
        connection.send(session_frames.frame(plain[4:], codec=session_frames.ZSTD), ends=True)
        assert len(Frames(connection.answered()).regular) == 1
    assert stream.bodies() == ["z" * 5000]
