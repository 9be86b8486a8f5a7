"""Goal: the wire gives back the messages that were framed, however bytes arrive, and refuses what cannot be.

Method: streams of random messages are cut at every byte and at random places and fed to a `Receiver`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.protocol import wire
from streams.protocol.wire import HEADER, HEADER_BYTES, Message, Receiver, WireError, frame
from tests.support.machines import sampled

READ_BYTES = 256 * 1024


def encoded(message: Message) -> bytes:
    kind, flags, op, id, head, body = message
    return frame(kind, flags, op, id, head, len(body)) + body


def feed(receiver: Receiver, data: bytes, step: int) -> list[Message]:
    """Hands `data` over in reads of at most `step` bytes."""
    messages: list[Message] = []
    at = 0
    while at < len(data):
        space = receiver.space()
        assert len(space) > 0, "there is always room for one more read"
        count = min(step, len(space), len(data) - at)
        space[:count] = data[at : at + count]
        messages += receiver.parse(count)
        at += count
    return messages


SOME = [
    Message(wire.REQUEST, 0, wire.OP_APPEND, 1, b"head", b"body"),
    Message(wire.REPLY, wire.FAILED, wire.OP_DIFF, 2**64 - 1, b"", b""),
    Message(wire.PUSH, 0, 65535, 0, b"only a head", b""),
    Message(wire.REQUEST, 255, 0, 7, b"", b"only a body"),
]


def test_messages_survive_a_cut_at_every_byte() -> None:
    data = b"".join(map(encoded, SOME))
    for cut in range(len(data) + 1):
        receiver = Receiver()
        found = feed(receiver, data[:cut], len(data)) + feed(receiver, data[cut:], len(data))
        assert found == SOME
        assert receiver.is_between_messages


def test_messages_survive_reads_of_one_byte() -> None:
    assert feed(Receiver(), b"".join(map(encoded, SOME)), 1) == SOME


def test_a_receiver_says_when_a_peer_broke_off_in_the_middle() -> None:
    receiver = Receiver()
    assert receiver.is_between_messages
    feed(receiver, encoded(SOME[0])[:-1], 1000)
    assert not receiver.is_between_messages
    assert repr(receiver) == f"<Receiver {len(encoded(SOME[0])) - 1} of {READ_BYTES} B>"


@sampled(40)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), max_size=40),
    st.integers(1, 5000),
    st.randoms(use_true_random=False),
)
def test_many_messages_in_one_read_come_out_in_order(
    sizes: list[tuple[int, int]], step: int, rng: random.Random
) -> None:
    messages = [
        Message(1, 0, op % 65536, op, rng.randbytes(head), rng.randbytes(body))
        for op, (head, body) in enumerate(sizes)
    ]
    assert feed(Receiver(), b"".join(map(encoded, messages)), step) == messages


def test_the_buffer_grows_for_a_large_message_and_shrinks_afterwards() -> None:
    receiver = Receiver()
    large = Message(1, 0, 20, 1, b"h", random.Random(1).randbytes(20 * READ_BYTES))
    assert feed(receiver, encoded(large), 100_000) == [large]
    assert len(receiver.space()) == READ_BYTES
    assert feed(receiver, encoded(SOME[0]), 7) == [SOME[0]]


def test_a_buffer_of_middling_size_is_kept() -> None:
    receiver = Receiver()
    middling = Message(1, 0, 20, 1, b"", bytes(2 * READ_BYTES))
    assert feed(receiver, encoded(middling), READ_BYTES) == [middling]
    assert len(receiver.space()) > READ_BYTES


def test_a_large_message_behind_a_small_one_in_the_same_read_is_whole() -> None:
    large = Message(1, 0, 20, 1, b"", random.Random(2).randbytes(READ_BYTES + 1))
    stream = [*SOME, large, *SOME, large]
    assert feed(Receiver(), b"".join(map(encoded, stream)), READ_BYTES) == stream


@pytest.mark.parametrize("body", range(READ_BYTES // 4 - 30, READ_BYTES // 4 + 30, 7))
def test_there_is_room_whatever_is_left_at_the_end_of_the_buffer(body: int) -> None:
    stream = [Message(1, 0, 20, index, b"x", bytes(body)) for index in range(12)]
    assert feed(Receiver(), b"".join(map(encoded, stream)), READ_BYTES) == stream


def test_a_message_over_the_limit_is_refused_by_its_header_alone() -> None:
    header = frame(1, 0, 20, 1, b"", 1000)
    limit = HEADER_BYTES + 1000
    assert feed(Receiver(limit), header, 1000) == []
    with pytest.raises(WireError, match=f"message of {limit} bytes"):
        feed(Receiver(limit - 1), header, 1000)


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(HEADER_BYTES - 5, 1, 0, 20, 1, 0),  # shorter than a header
        HEADER.pack(0, 1, 0, 20, 1, 0),
        HEADER.pack(HEADER_BYTES - 4 + 10, 1, 0, 20, 1, 11),  # a head longer than the message
        HEADER.pack(2**32 - 1, 1, 0, 20, 1, 0),
    ],
)
def test_a_header_that_cannot_be_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        feed(Receiver(), header, 1000)


def test_heads_survive_the_wire_and_absent_fields_have_defaults() -> None:
    head = wire.RequestHead("box", "a=1", wire.FORM_NDJSON, "key")
    assert wire.request_head_decoder.decode(wire.head_encoder.encode(head)) == head
    assert wire.request_head_decoder.decode(b"\x91\xa1b") == wire.RequestHead("b", "", 0, "")
    reply = wire.ReplyHead(201, 1.5, 0.25, 7)
    assert wire.reply_head_decoder.decode(wire.head_encoder.encode(reply)) == reply
    assert wire.reply_head_decoder.decode(b"\x90") == wire.ReplyHead()


@pytest.mark.parametrize("status", [200, 201])
@pytest.mark.parametrize("times", [(0.0, 0.0), (0.12345, 1234.5678)])
def test_the_head_of_a_write_has_the_bytes_of_the_general_encoder(
    status: int, times: tuple[float, float]
) -> None:
    head = wire.ReplyHead(status, *(round(time_ms, 3) for time_ms in times))
    assert wire.encode_write_head(status, *times) == wire.head_encoder.encode(head)
