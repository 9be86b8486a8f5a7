"""Goal: DATA that is received in bulk is what `h2` would have received, frame by frame, whatever a client
sends and however it is cut. Method: two servers get the same bytes, one of them through `BulkReceiver`; a
client of `h2` writes them, and some are made by hand."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.hypercorn.h2_data import BulkReceiver, SendBuffer

HEADERS = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "localhost")]


def servers() -> tuple[h2.connection.H2Connection, h2.connection.H2Connection]:
    plain, bulk = (h2.connection.H2Connection(h2.config.H2Configuration(client_side=False)) for _ in range(2))
    for server in (plain, bulk):
        server.initiate_connection()
        server.clear_outbound_data_buffer()
    bulk.receive_data = BulkReceiver(bulk, bulk.incoming_buffer._preamble_len).receive_data  # type: ignore
    return plain, bulk


def received(server: h2.connection.H2Connection, data: bytes, cut: int) -> tuple[list[Any], str]:
    """What came, adjacent DATA of a stream as one, and how it ended."""
    seen: list[tuple[Any, ...]] = []
    try:
        for at in range(0, len(data), cut):
            for event in server.receive_data(data[at : at + cut]):
                if isinstance(event, h2.events.DataReceived):
                    seen.append(("data", event.stream_id, event.data, event.flow_controlled_length))
                    assert event.flow_controlled_length is not None and event.stream_id is not None
                    server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                else:
                    seen.append((type(event).__name__, getattr(event, "stream_id", None)))
    except h2.exceptions.ProtocolError as error:
        return _joined(seen), type(error).__name__
    return _joined(seen), ""


def _joined(seen: list[tuple[Any, ...]]) -> list[Any]:
    found: list[Any] = []
    for (kind, stream), each in groupby(seen, key=lambda event: event[:2]):
        group = list(each)
        if kind == "data":
            found.append((stream, b"".join(event[2] for event in group), sum(event[3] for event in group)))
        else:
            found += group
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from((1, 3)),
            st.integers(0, 5000),
            st.sampled_from(("data", "data", "data", "padded", "end", "ping", "reset", "trailers")),
        ),
        max_size=20,
    ),
    st.integers(1, 20_000),
)
def test_bulk_receives_what_h2_receives(steps: list[tuple[int, int, str]], cut: int) -> None:
    client = h2.connection.H2Connection()
    client.initiate_connection()
    for stream in (1, 3):
        client.send_headers(stream, HEADERS)
    open_streams = {1, 3}
    for stream, size, kind in steps:
        if kind == "ping":
            client.ping(b"12345678")
            continue
        if stream not in open_streams or size > client.local_flow_control_window(stream) - 300:
            continue
        if kind == "reset":
            client.reset_stream(stream)
        elif kind == "trailers":
            client.send_headers(stream, [("a", "b")], end_stream=True)
        else:
            pad = 7 if kind == "padded" else None
            client.send_data(stream, b"%d" % stream * size, end_stream=kind == "end", pad_length=pad)
        if kind in ("reset", "end", "trailers"):
            open_streams.remove(stream)
    data = client.data_to_send()
    plain, bulk = servers()
    assert received(bulk, data, cut) == received(plain, data, cut)
    assert bulk.inbound_flow_control_window == plain.inbound_flow_control_window


def data_frame(stream: int, body: bytes, flags: int = 0) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((0, flags)) + stream.to_bytes(4, "big") + body


@pytest.mark.parametrize("cut", [100, 40_000, 1_000_000])
@pytest.mark.parametrize(
    "frames",
    [
        [data_frame(1, b"x" * 16_000)] * 5,  # more than the window
        [data_frame(5, b"x")],  # a stream that was never opened
        [data_frame(0, b"x")],
        [data_frame(1, b"")] * 3,
        [data_frame(1, b"x", 1), data_frame(1, b"x")],  # behind the end
        [b"\0\0\x01\x01\0\0\0\0\x03\x82", data_frame(1, b"x")],  # between headers and their continuation
    ],
    ids=["flood", "unknown", "zero", "empty", "ended", "in-headers"],
)
def test_what_is_wrong_is_as_wrong_as_to_h2(frames: list[bytes], cut: int) -> None:
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.send_headers(1, HEADERS)
    data = client.data_to_send() + b"".join(frames)
    plain, bulk = servers()
    (_, bulk_end), (_, plain_end) = received(bulk, data, cut), received(plain, data, cut)
    assert bulk_end == plain_end
    assert bulk.data_to_send()[:4] == plain.data_to_send()[:4], "the same kind of frame goes back"


def test_more_than_the_announced_length_ends_the_connection() -> None:
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.send_headers(1, [*HEADERS, ("content-length", "3")])
    data = client.data_to_send() + data_frame(1, b"1234")
    plain, bulk = servers()
    assert received(bulk, data, 1000)[1] == received(plain, data, 1000)[1] == "InvalidBodyLengthError"
    goaway = 7
    assert bulk.data_to_send()[-17 + 3] == plain.data_to_send()[-17 + 3] == goaway


async def test_a_buffer_gives_what_it_was_given_in_pieces_of_any_size() -> None:
    buffer = SendBuffer()
    for piece in (b"ab", b"", b"cdefg", b"h"):
        await buffer.push(piece)
    found = [bytes(await buffer.pop(size)) for size in (0, 1, 3, 0, 2, 100)]
    assert found == [b"", b"a", b"bcd", b"", b"ef", b"gh"]
    buffer.set_complete()
    assert buffer.complete and not len(buffer)
