"""Goal: answers that clients do not read take bounded memory in a shard, and hold up nobody else.

Method: the real engine and server in this process over real sockets; clients that read only when told to. The
limits are small, and so are the sockets' buffers, so that a few pages fill them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

import shard.server.deferred_pages
import shard.server.outgoing_replies
import shard.server.server
from shard.server.answer_pool import AnswerLimits
from streams.protocol import wire
from streams.protocol.messages.requests import failure_decoder
from tests.support.served_shard import ServedShard, WireClient, served_shard

PAGE_BYTES = 256 * 1024
PAGE = b'{"max_bytes": 262144}'
CONNECTION_BYTES, POOL_BYTES = 1 << 20, 3 << 20
LIMITS = AnswerLimits(CONNECTION_BYTES, POOL_BYTES, stall_s=60, stall_full_s=0.5)


@asynccontextmanager
async def pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServedShard]:
    """A shard with a box of which one read gives a page of `PAGE_BYTES`."""
    monkeypatch.setattr(shard.server.server, "LINK_LIMITS", LIMITS)
    monkeypatch.setattr(shard.server.server, "PEER_LIMITS", LIMITS)
    async with served_shard(folder) as served:
        client = served.local()
        for _ in range(16):
            await client.append("b", "x" * (PAGE_BYTES // 16))
        yield served


async def ask_for_pages(client: WireClient, count: int) -> int:
    return await client.send(wire.OP_DIFF, wire.RequestHead("b"), PAGE, times=count)


async def test_a_link_whose_answers_are_not_read_is_still_served_and_its_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pages(tmp_path, monkeypatch) as served:
        link, other = served.local(), served.local()
        last = await ask_for_pages(link, 100)
        body = b'{"records":[{"data":1}]}'
        behind = await link.send(wire.OP_APPEND, wire.RequestHead("behind"), body)
        await served.until(lambda: "behind" in served.engine.machine.boxes)  # though no page was read
        await other.append("other", 1)
        assert served.server.link_answers.used_bytes < CONNECTION_BYTES + 2 * PAGE_BYTES
        for id in (*range(last - 99, last + 1), behind):
            assert not (await link.answer(id)).flags & wire.FAILED
        assert served.server.link_answers.used_bytes == 0


async def test_requests_that_wait_for_room_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.server.deferred_pages, "BYTES_MAX", 64 * 1024)
    async with pages(tmp_path, monkeypatch) as served:
        link = served.local()
        await ask_for_pages(link, 20)
        padded = PAGE[:-1] + b" " * 10_000 + b"}"
        last = await link.send(wire.OP_DIFF, wire.RequestHead("b"), padded, times=10)
        answers = [await link.answer(id) for id in range(last - 9, last + 1)]
        refused = [each.body for each in answers if each.flags & wire.FAILED]
        assert 0 < len(refused) < 10
        assert {failure_decoder.decode(body).code for body in refused} == {"throttled"}


async def test_a_gateway_without_room_gets_no_pages_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pages(tmp_path, monkeypatch) as served:
        link, writer = served.local(), served.local()
        body = json.dumps({"from_seq": 16, "wait_ms": 20_000}).encode()
        waiting = await link.send(wire.OP_DIFF, wire.RequestHead("b"), body)
        await served.until(lambda: len(served.engine.delivery.reads.waiting) == 1)
        await link.stream.send_all(wire.frame(wire.REQUEST, 0, wire.OP_HOLD_PAGES, 0, b"", 0))
        page = await ask_for_pages(link, 1)
        await link.append("other", 1)
        await writer.append("b", "x" * PAGE_BYTES)
        await link.append("other", 2)
        assert served.server.link_answers.used_bytes == 0
        await link.stream.send_all(wire.frame(wire.REQUEST, 0, wire.OP_SEND_PAGES, 0, b"", 0))
        for id in (waiting, page):
            assert len((await link.answer(id)).body) > PAGE_BYTES // 2


async def test_readers_that_wait_get_their_pages_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pages(tmp_path, monkeypatch) as served:
        link, writer = served.local(), served.local()
        body = json.dumps({"from_seq": 16, "wait_ms": 20_000}).encode()
        last = await link.send(wire.OP_DIFF, wire.RequestHead("b"), body, times=40)
        await served.until(lambda: len(served.engine.delivery.reads.waiting) == 40)
        await writer.append("b", "x" * PAGE_BYTES)
        assert served.server.link_answers.used_bytes < CONNECTION_BYTES + 2 * PAGE_BYTES
        for id in range(last - 39, last + 1):
            assert len((await link.answer(id)).body) > PAGE_BYTES


async def test_claims_that_wait_get_their_jobs_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pages(tmp_path, monkeypatch) as served:
        slow, quick, writer = served.local(), served.local(), served.local()
        await writer.ask(wire.OP_PUT_BOX, wire.RequestHead("jobs"), b'{"type":"queue"}')
        await ask_for_pages(slow, 20)
        await served.until(lambda: served.server.link_answers.used_bytes >= CONNECTION_BYTES)
        claim = b'{"node":"w","wait_ms":20000}'
        first = await slow.send(wire.OP_CLAIM, wire.RequestHead("jobs"), claim)
        second = await quick.send(wire.OP_CLAIM, wire.RequestHead("jobs"), claim)
        await served.until(lambda: len(served.engine.delivery.claims.waiting) == 1)
        await writer.append("jobs", "for the quick one", "for the slow one")
        assert b"for the quick one" in (await quick.answer(second)).body
        assert b"for the slow one" in (await slow.answer(first)).body


async def test_a_read_that_is_taken_back_while_it_waits_for_room_is_answered_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pages(tmp_path, monkeypatch) as served:
        link = served.local()
        last = await ask_for_pages(link, 20)
        await link.stream.send_all(wire.frame(wire.REQUEST, 0, wire.OP_FORGET, last, b"", 0))
        failed = await link.answer(last)
        assert failure_decoder.decode(failed.body).code == "shutting_down"
        assert not (await link.answer(last - 1)).flags & wire.FAILED


async def test_peers_that_read_nothing_hold_up_neither_other_peers_for_long_nor_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.server.outgoing_replies, "STALL_CHECK_S", 0.05)
    async with pages(tmp_path, monkeypatch) as served:
        with capture_logs() as logs:
            silent = [await served.remote() for _ in range(4)]
            for peer in silent:
                await ask_for_pages(peer, 20)
            await served.until(lambda: served.server.peer_answers.is_full)
            assert served.server.peer_answers.used_bytes < POOL_BYTES + 2 * PAGE_BYTES
            gateway = served.local()
            assert not (await gateway.answer(await ask_for_pages(gateway, 1))).flags & wire.FAILED
            # The room is needed, so those who take nothing of their answers lose their connections.
            reader = await served.remote(receive_bytes=1 << 20)
            assert not (await reader.answer(await ask_for_pages(reader, 1))).flags & wire.FAILED
            closed = "closed a connection whose peer does not read its answers"
            await served.until(lambda: any(each["event"] == closed for each in logs))
        for peer in silent:
            await peer.stream.aclose()
        await served.until(lambda: served.server.peer_answers.used_bytes == 0)


async def test_a_connection_that_takes_nothing_of_its_answers_is_closed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.server.outgoing_replies, "STALL_CHECK_S", 0.05)
    async with pages(tmp_path, monkeypatch) as served:
        served.server.peer_answers.limits = LIMITS._replace(stall_s=0.5)
        peer = await served.remote()
        await ask_for_pages(peer, 20)
        await served.until(lambda: served.server.peer_answers.used_bytes > 0)
        await served.until(lambda: served.server.peer_answers.used_bytes == 0)
        assert await peer.is_closed()


async def test_a_slow_reader_of_sealed_pages_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that come from the disk find no room when they are there, and are fetched again."""
    monkeypatch.setattr("shard.engine.refetch._FETCH_BYTES_MAX", PAGE_BYTES)
    monkeypatch.setattr("shard.core.boxes.unsealed.SMALL_BYTES", 0)
    monkeypatch.setattr("shard.engine.upkeep._PAUSE_S", 0.002)
    from shard.core.boxes.upkeep import SealPolicy

    monkeypatch.setattr(shard.server.server, "LINK_LIMITS", LIMITS)
    async with served_shard(tmp_path, seal=SealPolicy(1, 1, 1), cache_bytes=0) as served:
        link = served.local()
        await link.append("b", *["x" * (PAGE_BYTES // 16)] * 16)
        await served.until(lambda: not served.engine.machine.boxes["b"].log.tail.records)
        last = await ask_for_pages(link, 30)
        with trio.fail_after(30):
            for id in range(last - 29, last + 1):
                answer = await link.answer(id)
                assert not answer.flags & wire.FAILED and len(answer.body) > PAGE_BYTES // 2
