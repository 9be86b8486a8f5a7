"""Compressed bodies: what decompression makes is charged as it is made (`gateway/requests/content.py`)."""

from __future__ import annotations

import gzip
import mmap
import random
import threading
import zlib
from typing import Any

import pytest
import trio
import trio.testing
import zstandard

from gateway.admission.memory import EVERYONE, STALLED_S, MemoryBudget
from gateway.requests import content
from gateway.requests.content import decompress_body
from gateway.requests.queued_sink import QueuedSink
from gateway.requests.request import Request
from gateway.s2.append_session import AppendSession
from gateway.s2.read_session import Draining
from streams.protocol.errors import InvalidRequest, PayloadTooLarge, Throttled

MIB = 1024 * 1024
COMPRESS = {"gzip": gzip.compress, "zstd": zstandard.compress}


def request_of(body: bytes, encoding: str, bytes_max: int = 512 * MIB) -> Request:
    request = Request("POST", "/v0/boxes/a", "", {"content-encoding": encoding}, body)
    request.memory = MemoryBudget(bytes_max, limit="body_bytes_in_flight", what="the bodies of requests")
    return request


@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 131_072, 3 * MIB, 10 * MIB + 1])
async def test_what_was_compressed_comes_back_and_is_charged_until_the_request_is_over(encoding, size):
    plain = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    request = request_of(COMPRESS[encoding](plain), encoding)
    assert await decompress_body(request, 10 * MIB + 1) == plain
    assert request.charge is not None and request.memory is not None
    assert request.charge.size == request.memory.bytes_used == size
    request.charge.close()
    assert request.memory.bytes_used == 0


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_the_event_loop_copies_nothing_of_a_large_body(encoding, monkeypatch):
    """All but the first 64 KiB is written by another thread, into the memory that is handed on."""
    written: list[tuple[int, int]] = []
    for decoder in (content._GzipDecoder, content._ZstdDecoder):

        def read_into(self: Any, space: memoryview, original: Any = decoder.read_into) -> int:
            written.append((threading.get_ident(), len(space)))
            return original(self, space)

        monkeypatch.setattr(decoder, "read_into", read_into)
    plain = random.Random(1).randbytes(9 * MIB)
    request = request_of(COMPRESS[encoding](plain), encoding)
    request.body = memoryview(request.body)  # as a long body is
    body = await decompress_body(request, 10 * MIB)
    assert body == plain
    assert isinstance(body, memoryview) and isinstance(body.obj, mmap.mmap)
    assert threading.get_ident() not in {thread for thread, _ in written}
    assert sum(size for _, size in written) >= 9 * MIB - 65_536


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_a_bomb_is_refused_before_it_is_in_memory(encoding):
    """64 MiB in some kilobytes, and room for one: the budget is never exceeded."""
    request = request_of(COMPRESS[encoding](bytes(64 * MIB)), encoding, MIB)
    with pytest.raises(Throttled) as caught:
        await decompress_body(request, 64 * MIB)
    assert caught.value.detail == {"limit": "body_bytes_in_flight"}
    assert request.memory is not None and 0 < request.memory.bytes_used <= MIB


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_a_body_is_not_uncompressed_beyond_its_limit(encoding):
    for size, fits in ((MIB, True), (MIB + 1, False), (64 * MIB, False)):
        request = request_of(COMPRESS[encoding](bytes(size)), encoding)
        if fits:
            assert len(await decompress_body(request, MIB)) == MIB
        else:
            with pytest.raises(PayloadTooLarge):
                await decompress_body(request, MIB)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"no gzip"),
        ("gzip", gzip.compress(bytes(200_000))[:-1]),
        ("gzip", gzip.compress(b"a") + b"b"),
        ("gzip", gzip.compress(bytes(MIB)) + gzip.compress(b"b")),
        ("gzip", gzip.compress(b"")[:-9]),
        ("gzip", zlib.compress(b"a")),
        ("zstd", b"no zstd"),
        ("zstd", zstandard.compress(bytes(200_000))[:10] + b"damaged"),
    ],
    ids=["no gzip", "cut off", "more behind it", "two members", "cut head", "zlib", "no zstd", "damaged"],
)
async def test_what_is_not_whole_is_refused(encoding, body):
    with pytest.raises(InvalidRequest):
        await decompress_body(request_of(body, encoding), MIB)


async def test_a_frame_of_an_s2_session_is_charged_while_it_is_not_whole(autojump_clock):
    """And a client that stops in its middle is ended when another needs the room."""
    budget = MemoryBudget(2 * MIB, limit="body_bytes_in_flight", what="the bodies of requests")
    charge = budget.open(EVERYONE)
    sink = QueuedSink()
    send, receive = trio.open_memory_channel[bytes](0)
    calls: Any = None  # nothing is asked before a frame is whole
    session = AppendSession(
        calls,
        "b/s",
        None,
        "",
        receive,
        lambda _: None,
        trio.lowlevel.checkpoint,
        Draining(trio.Event(), 60),
        charge,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run, sink)
        await send.send((MIB + 1).to_bytes(3, "big") + bytes(MIB // 2))
        await trio.testing.wait_all_tasks_blocked()
        assert budget.bytes_used == MIB // 2 + 3
        await trio.sleep(STALLED_S)
        other = budget.open(EVERYONE)
        other.grow(2 * MIB)
        status = await sink.next_all()
    session.close()
    assert int.from_bytes(status[4:6], "big") == 429 and b"stalled" in status
    assert budget.bytes_used == other.size == 2 * MIB
