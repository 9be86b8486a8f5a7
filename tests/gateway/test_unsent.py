"""Goal: what a socket does not take at once is sent later, all of it, in order and without a copy."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from streams.unsent import BUFFERS_MAX, UnsentBuffers

Pair = tuple[socket.socket, socket.socket]


class SlowSocket:
    """Takes so many bytes with each call, and blocks after the last number."""

    def __init__(self, takes: list[int]) -> None:
        self._takes = takes
        self.taken = b""

    def send(self, buffer: bytes) -> int:
        return self.sendmsg([buffer])

    def sendmsg(self, buffers: list[bytes]) -> int:
        parts = list(buffers)
        assert len(parts) <= BUFFERS_MAX
        if not self._takes:
            raise BlockingIOError
        data = b"".join(parts)[: self._takes.pop(0)]
        self.taken += data
        return len(data)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@given(
    st.lists(st.binary(max_size=9), max_size=12),
    st.lists(st.integers(1, 20), max_size=12),
    st.sampled_from(["send", "send_now", "send_some"]),
)
def test_bytes_are_sent_in_order_whatever_the_socket_takes(
    buffers: list[bytes], takes: list[int], method: str
) -> None:
    sock = SlowSocket(takes)
    unsent = UnsentBuffers(sock)  # type: ignore[arg-type]
    whole = b"".join(buffers)
    for buffer in buffers:
        if method == "send_now":
            unsent.send_now(buffer)
        else:
            unsent.put(buffer)
    if method == "send_some":
        while unsent.bytes and unsent.send_some(7):
            pass
    else:
        unsent.send()
    assert whole.startswith(sock.taken)
    assert unsent.sent_bytes == len(sock.taken)
    assert unsent.bytes == len(whole) - len(sock.taken)
    takes[:] = [len(whole) + 1] * 2
    unsent.send()
    assert sock.taken == whole and not unsent and unsent.bytes == 0


def test_more_buffers_than_one_call_takes_are_all_sent(pair: Pair) -> None:
    unsent = UnsentBuffers(pair[0], [b"%05d" % n for n in range(3 * BUFFERS_MAX)])
    unsent.send()
    assert pair[1].recv(1 << 20) == b"".join(b"%05d" % n for n in range(3 * BUFFERS_MAX))


def test_a_lost_connection_is_raised_and_what_was_sent_stays_counted(pair: Pair) -> None:
    unsent = UnsentBuffers(pair[0], [b"some"])
    unsent.send()
    pair[1].close()
    unsent.put(b"more")
    with pytest.raises(OSError):
        unsent.send()
    assert (unsent.sent_bytes, unsent.bytes) == (4, 4)


async def test_the_sender_sends_the_rest_when_the_socket_takes_more(pair: Pair) -> None:
    unsent = UnsentBuffers(pair[0])
    data = bytes(range(256)) * 20_000
    got = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(unsent.keep_sending, unsent.send)
        await trio.testing.wait_all_tasks_blocked()
        unsent.put(data)
        unsent.wake_sender()
        while len(got) < len(data):
            await trio.lowlevel.wait_readable(pair[1])
            got += pair[1].recv(1 << 20)
        nursery.cancel_scope.cancel()
    assert got == data and not unsent
