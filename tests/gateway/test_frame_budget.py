"""Goal: frames are counted right however their bytes are cut, and no bytes are lost or changed. Method:
frames as bytes, cut at every place, against a count by frame."""

from __future__ import annotations

import pytest
from hyperframe.frame import DataFrame, HeadersFrame, PingFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.frame_budget import (
    HEADERS_WEIGHT,
    KNOWN_TOKENS,
    KNOWN_TOKENS_MAX,
    SLICE_WEIGHT,
    STRANGER_TOKENS,
    FrameBudget,
    FrameFlood,
    FrameTooLarge,
    FrameWalker,
    H2FrameWalker,
    SocketFrameWalker,
)

PING = PingFrame(0, b"12345678").serialize()
WINDOW = WindowUpdateFrame(0, 1).serialize()
HEADERS = HeadersFrame(1, b"\x82\x84", flags=["END_HEADERS"]).serialize()


def data_frame(length: int, pad_length: int | None = None) -> bytes:
    if pad_length is None:
        return DataFrame(1, b"x" * length).serialize()
    return DataFrame(1, b"x" * length, flags=["PADDED"], pad_length=pad_length).serialize()


def socket_frame(opcode: int, length: int, *, is_final: bool = True) -> bytes:
    first = bytes([opcode | (0x80 if is_final else 0)])
    if length < 126:
        size = bytes([0x80 | length])
    elif length < 65536:
        size = b"\xfe" + length.to_bytes(2, "big")
    else:
        size = b"\xff" + length.to_bytes(8, "big")
    return first + size + b"mask" + b"x" * length


def h2_walker(*, known: bool = False, skip_bytes: int = 0) -> H2FrameWalker:
    budget = FrameBudget(0.0)
    if known:
        budget.set_known()
    return H2FrameWalker(budget, skip_bytes=skip_bytes, frame_bytes_max=16384)


def walk(walker: FrameWalker, *reads: bytes) -> list[bytes]:
    return [part for data in reads for part in walker.slices_untrusted(data, 0.0)]


H2_FRAMES = [
    (PING, 1),
    (WINDOW, 1),
    (HEADERS, 2),
    (SettingsFrame(0, {3: 100, 4: 65535}).serialize(), 3),
    (SettingsFrame(0, flags=["ACK"]).serialize(), 1),
    (data_frame(0), 1),
    (data_frame(5), 1),
    (data_frame(1024), 0),
    (data_frame(0, 255), 1),
    (data_frame(4096, 255), 0),
    (b"\x00\x00\x03\xee\x00\x00\x00\x00\x00abc", 1),
]
SOCKET_FRAMES = [
    (socket_frame(0x9, 0), 1),
    (socket_frame(0xA, 125), 1),
    (socket_frame(0x1, 0, is_final=False), 1),
    (socket_frame(0x0, 200, is_final=False), 1),
    (socket_frame(0x1, 1024), 0),
    (socket_frame(0x2, 70_000), 0),
]


@pytest.mark.parametrize(("frame", "cost"), H2_FRAMES)
def test_an_http2_frame_costs_the_same_wherever_it_is_cut(frame, cost):
    for at in range(len(frame) + 1):
        walker = h2_walker()
        assert b"".join(walk(walker, frame[:at], frame[at:], PING)) == frame + PING
        assert walker.budget.spent_tokens == cost + 1


@pytest.mark.parametrize(("frame", "cost"), SOCKET_FRAMES)
def test_a_socket_frame_costs_the_same_wherever_it_is_cut(frame, cost):
    end = socket_frame(0x9, 0)
    for at in range(min(20, len(frame)) + 1):
        walker = SocketFrameWalker(FrameBudget(0.0))
        assert b"".join(walk(walker, frame[:at], frame[at:], end)) == frame + end
        assert walker.budget.spent_tokens == cost + 1


@given(
    st.lists(st.sampled_from(H2_FRAMES), max_size=60),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_bytes_pass_unchanged_and_every_frame_is_charged_once(frames, sizes):
    wire = b"p" * 24 + b"".join(frame for frame, _ in frames)
    walker = h2_walker(skip_bytes=24)
    reads, at, turn = [], 0, 0
    while at < len(wire):
        size = sizes[turn % len(sizes)]
        reads.append(wire[at : at + size])
        at, turn = at + size, turn + 1
    assert b"".join(walk(walker, *reads)) == wire
    assert walker.budget.spent_tokens == sum(cost for _, cost in frames)


def test_small_data_of_a_known_client_is_free_and_empty_data_is_not():
    walker = h2_walker(known=True)
    walk(walker, data_frame(1) * 100)
    assert walker.budget.spent_tokens == 0
    walk(walker, data_frame(0) * 3 + data_frame(0, 100) * 2)
    assert walker.budget.spent_tokens == 5


def test_a_slice_ends_at_a_frame_and_weighs_no_more_than_it_must():
    slices = walk(h2_walker(), PING * 100)
    assert [len(part) // len(PING) for part in slices] == [SLICE_WEIGHT] * 3 + [100 - 3 * SLICE_WEIGHT]
    assert all(part.startswith(PING) for part in slices)
    requests = walk(h2_walker(), HEADERS * 6)
    assert [len(part) // len(HEADERS) for part in requests] == [SLICE_WEIGHT // HEADERS_WEIGHT] * 3


def test_the_frame_over_the_budget_is_not_handed_on():
    walker = h2_walker()
    parts = []
    with pytest.raises(FrameFlood):
        for part in walker.slices_untrusted(PING * (STRANGER_TOKENS + 100), 0.0):
            parts.append(part)
    assert len(b"".join(parts)) == STRANGER_TOKENS * len(PING)


def test_a_frame_that_is_too_long_is_refused_by_its_header():
    with pytest.raises(FrameTooLarge):
        walk(h2_walker(), b"\x00\x40\x01\x00\x00\x00\x00\x00\x01")


def test_time_and_work_fill_the_bucket_and_a_key_makes_it_larger():
    budget = FrameBudget(0.0)
    budget.spend(STRANGER_TOKENS)
    with pytest.raises(FrameFlood):
        budget.spend(1)
    budget.fill(1.0)
    budget.spend(50)
    budget.credit_answer(401)
    assert budget.tokens == 0
    budget.credit_answer(200)
    budget.credit_body(10_240)
    assert budget.tokens == 8 + 10
    budget.fill(1000.0)
    assert budget.tokens == STRANGER_TOKENS
    budget.set_known()
    assert budget.tokens == KNOWN_TOKENS
    for _ in range(10):
        budget.credit_body(8 << 20)
    assert budget.tokens == KNOWN_TOKENS_MAX
    budget.fill(2000.0)
    assert budget.tokens == KNOWN_TOKENS_MAX
