"""Goal: sessions are full duplex, keep order, end as they should, and outlive what clients do to their
connection (s2 §1, §13).

Method: HTTP/2 frame by frame to a real server; the frames of S2 inside are built by hand.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gateway.s2 import session_frames
from streams.protocol.model import binary_records
from streams.testing import Server, running_server
from tests.s2.conftest import Client
from tests.support.h2c import H2c
from tests.support.s2_frames import Frames, given

GOAWAY = b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)  # length 8, type 7, stream 0: last stream 0, no error


def said(connection: H2c, stream: int) -> Frames:
    return Frames(connection.data.get(stream, b""))


def open_append(connection: H2c, client: Client, stream: str = "s") -> int:
    headers = {"content-type": "s2s/proto", "s2-basin": client.basin}
    number = connection.request("POST", f"/v1/streams/{stream}/records", headers, ends=False)
    connection.until(lambda: number in connection.status)
    return number


def open_read(connection: H2c, client: Client, query: str) -> int:
    headers = {"content-type": "s2s/proto", "s2-basin": client.basin}
    number = connection.request("GET", f"/v1/streams/s/records?{query}", headers, ends=True)
    connection.until(lambda: number in connection.status)
    return number


@pytest.fixture
def stream(basin: Client) -> Client:
    basin.stream()
    return basin


def test_an_append_session_is_answered_before_it_has_said_anything(server: Server, stream: Client) -> None:
    with H2c(server.port) as connection:
        session = open_append(connection, stream)
        assert connection.status[session] == 200
        assert connection.headers[session]["content-type"] == "s2s/proto"
        assert "content-encoding" not in connection.headers[session]
        for number in range(3):
            connection.send(session, given(b"%d" % number))
            connection.until(lambda: len(said(connection, session).regular) == number + 1)  # noqa: B023
        connection.send(session, given(b"3"), ends=True)
        assert len(Frames(connection.answered(session)).regular) == 4
    assert stream.bodies() == ["0", "1", "2", "3"]


def test_inputs_are_pipelined_and_acked_in_their_order(server: Server, stream: Client) -> None:
    with H2c(server.port) as connection:
        session = open_append(connection, stream)
        data = b"".join(given(*[b"x"] * (1 + number % 3)) for number in range(100))
        connection.send(session, data[:77])
        connection.send(session, data[77:], ends=True)
        found = Frames(connection.answered(session))
    assert found.terminal is None
    ends = []
    for ack in found.regular:
        end = next(body for tag, _, *body in binary_records.fields(ack, 0, len(ack)) if tag == 0x12)
        ends.append({tag: value for tag, value, *_ in binary_records.fields(ack, *end)}[0x08])
    assert ends == [sum(1 + number % 3 for number in range(upto + 1)) for upto in range(100)]


def test_the_first_failure_comes_after_all_earlier_acks_and_nothing_behind_it_is_done(
    server: Server, stream: Client
) -> None:
    with H2c(server.port) as connection:
        session = open_append(connection, stream)
        good = [given(b"%d" % number, match=number) for number in range(4)]
        connection.send(session, b"".join([*good, given(b"bad", match=77), given(b"late"), given(b"later")]))
        found = Frames(connection.answered(session))
    assert len(found.regular) == 4
    assert found.terminal == (412, {"seq_num_mismatch": 4})
    assert stream.bodies() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\0\0\0\0", (400, "bad_frame")),
        (b"\0\0\x02\x80?", (400, "bad_frame")),
        (session_frames.frame(b"\xff"), (400, "bad_frame")),
        (b"\0\0\x09\0cut", (400, "bad_frame")),
        (session_frames.frame(b""), (422, "invalid")),
    ],
    ids=["no length", "terminal", "no protobuf", "cut short", "an empty batch"],
)
def test_a_bad_frame_ends_the_session_and_not_what_came_before(
    server: Server, stream: Client, data: bytes, expected: tuple[int, str]
) -> None:
    with H2c(server.port) as connection:
        session = open_append(connection, stream)
        connection.send(session, given(b"good") + data, ends=True)
        found = Frames(connection.answered(session))
    assert len(found.regular) == 1
    assert found.terminal is not None
    assert (found.terminal[0], found.terminal[1]["code"]) == expected
    assert stream.bodies() == ["good"]


def test_what_is_wrong_from_the_start_is_an_ordinary_answer(server: Server, basin: Client) -> None:
    with H2c(server.port) as connection:
        missing = open_append(connection, basin, "missing")
        assert connection.status[missing] == 404
        assert json.loads(connection.answered(missing))["code"] == "stream_not_found"
        basin.stream()
        beyond = open_read(connection, basin, "seq_num=5")
        assert connection.status[beyond] == 416
        assert json.loads(connection.answered(beyond)) == {"tail": {"seq_num": 0, "timestamp": 0}}


def test_a_reader_is_told_of_the_end_at_once_and_of_what_comes_then(server: Server, stream: Client) -> None:
    stream.append("a", "b")
    with H2c(server.port) as connection:
        session = open_read(connection, stream, "seq_num=0")
        connection.until(lambda: len(said(connection, session).regular) == 2)
        batch, heartbeat = said(connection, session).regular
        assert heartbeat.startswith(b"\x12")
        assert batch.endswith(heartbeat)  # a batch that reaches the end says so too
        stream.append("c")
        connection.until(lambda: len(said(connection, session).regular) == 3)
        assert b"\x22\x01c" in said(connection, session).regular[2]
        stream.call("DELETE", "/streams/s")
        found = Frames(connection.answered(session))
    assert found.terminal is not None
    assert (found.terminal[0], found.terminal[1]["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    ("query", "counts"),
    [
        ("seq_num=0&count=1500", [1000, 500]),
        ("seq_num=0&bytes=10800", [1000, 200]),
        ("seq_num=0&wait=0", [1000, 1000, 500]),
        ("tail_offset=3&count=9", [3]),
        ("seq_num=0&count=0", []),
    ],
)
def test_a_bounded_read_ends_by_itself(
    server: Server, readable: Client, query: str, counts: list[int]
) -> None:
    with H2c(server.port) as connection:
        session = open_read(connection, readable, query)
        found = Frames(connection.answered(session))
    assert found.terminal is None
    got = [
        sum(tag == 0x0A for tag, *_ in binary_records.fields(each, 0, len(each))) for each in found.regular
    ]
    assert got == counts


@pytest.fixture(scope="module")
def readable(server: Server) -> Client:
    client = Client(server.url, "readable-basin")
    client.create()
    client.stream()
    for _ in range(3):
        client.append(*["x"] * 1000 if client.tail() < 2000 else ["x"] * 500)
    return client


def test_a_client_that_says_goaway_may_finish_what_it_has_begun(server: Server, stream: Client) -> None:
    with H2c(server.port) as connection:
        session = open_append(connection, stream)
        connection.send(session, given(b"before"))
        connection.until(lambda: len(said(connection, session).regular) == 1)
        connection.send_raw(GOAWAY)
        connection.send(session, given(b"after"), ends=True)
        assert len(Frames(connection.answered(session)).regular) == 2
    assert stream.bodies() == ["before", "after"]


def test_a_follower_gets_what_the_very_batch_trims_and_later_readers_pass_it_by(
    server: Server, stream: Client
) -> None:
    trim = {"headers": [["", "trim"]], "body": "\0\0\0\0\0\0\0\2"}
    with H2c(server.port) as connection:
        session = open_read(connection, stream, "seq_num=0")
        connection.until(lambda: len(said(connection, session).regular) == 1)
        batch = {"records": [{"body": "a"}, {"body": "b"}, trim]}
        assert stream.call("POST", "/streams/s/records", batch).status_code == 200
        connection.until(lambda: len(said(connection, session).regular) == 2)
        found = said(connection, session).regular[1]
        assert b"\x22\x01a" in found and b"\x22\x01b" in found
    page = stream.call("GET", "/streams/s/records?seq_num=0").json()
    assert [record["seq_num"] for record in page["records"]] == [2]
    assert page["tail"]["seq_num"] == stream.tail() == 3
    assert stream.call("GET", "/streams/s/records?seq_num=0&count=1").json()["records"] == page["records"]


def test_over_http_1_a_session_is_one_exchange(stream: Client) -> None:
    answer = stream.call("POST", "/streams/s/records", given(b"a") + given(b"b"), content_type="s2s/proto")
    assert (answer.status_code, len(Frames(answer.content).regular)) == (200, 2)
    read = stream.call("GET", "/streams/s/records?seq_num=0&wait=0", content_type="s2s/proto")
    assert len(Frames(read.content).regular) == 1


@pytest.fixture
def stopping() -> Iterator[Callable[[int], tuple[Server, Client]]]:
    """A server with a stream of one record that has this long to stop."""
    with ExitStack() as stack:

        def start(drain_ms: int) -> tuple[Server, Client]:
            server = stack.enter_context(running_server(shards=1, drain_ms=drain_ms))
            client = Client(server.url, "drain-basin")
            client.create()
            client.stream()
            client.append("a")
            return server, client

        yield start


def test_a_server_that_stops_advises_its_sessions_to_leave(
    stopping: Callable[[int], tuple[Server, Client]],
) -> None:
    server, client = stopping(120_000)
    with H2c(server.port) as connection:
        writing = open_append(connection, client)
        connection.send(writing, given(b"b"))
        connection.until(lambda: len(said(connection, writing).regular) == 1)
        reading = open_read(connection, client, "seq_num=0")
        connection.until(lambda: len(said(connection, reading).regular) >= 2)
        assert not said(connection, reading).advised and not said(connection, writing).advised
        os.kill(server.pid, signal.SIGTERM)
        connection.until(lambda: said(connection, reading).advised)
        connection.send(writing, given(b"c"), ends=True)
        found = Frames(connection.answered(writing))
        assert (len(found.regular), found.advised, found.terminal) == (2, True, None)
        assert reading not in connection.ended
    assert server.wait() == 0  # at once: nobody is left


def test_sessions_that_stay_are_ended_when_the_time_is_over_all_acks_first(
    stopping: Callable[[int], tuple[Server, Client]],
) -> None:
    server, client = stopping(2_000)  # all of which is left for the end
    with H2c(server.port) as connection:
        writing = open_append(connection, client)
        reading = open_read(connection, client, "seq_num=0")
        connection.send(writing, given(b"b"))
        connection.until(lambda: len(said(connection, writing).regular) == 1)
        os.kill(server.pid, signal.SIGTERM)
        for session in (writing, reading):
            found = Frames(connection.answered(session))
            assert found.terminal is not None
            assert (found.terminal[0], found.terminal[1]["code"]) == (503, "server_draining")
    assert server.wait() == 0
