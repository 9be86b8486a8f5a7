"""Goal: a gateway does not wait for a shard that will not come, and waits for one that is starting."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from gateway.shards.links import STALLED_S, Link
from streams.protocol import wire
from streams.protocol.errors import OutcomeUnknown, ShardUnavailable
from tests.gateway.edge_harness import PATIENCE_S


async def test_a_link_is_settled_when_nobody_listens_any_more_but_not_while_a_shard_starts(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "shard.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        link = Link(0, path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0) as scope:
                await link.wait_decided()
            assert scope.cancelled_caught, "it is connected, and nobody has answered yet"
            listener.close()
            with trio.fail_after(PATIENCE_S):
                await link.wait_decided()
            assert not link.is_up
            nursery.cancel_scope.cancel()


class HangingShard:
    """Answers the hello, takes whatever else comes, and answers that when it is told to."""

    def __init__(self, sock: trio.SocketStream) -> None:
        self._sock = sock
        self._receiver = wire.Receiver()
        self.asked: list[wire.Message] = []
        #: While it is stopped it reads nothing until it goes on.
        self.is_stopped = False
        self.goes_on = trio.Event()

    async def close(self) -> None:
        await self._sock.aclose()

    async def run(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._sock.socket)
            if self.is_stopped:
                await self.goes_on.wait()
            count = await self._sock.socket.recv_into(self._receiver.space())
            if not count:
                return
            for message in self._receiver.parse(count):
                if message.op == wire.OP_HELLO:
                    await self.answer(message)
                else:
                    self.asked.append(message)

    async def answer(self, message: wire.Message) -> None:
        head = wire.head_encoder.encode(wire.ReplyHead())
        await self._sock.send_all(wire.frame(wire.REPLY, 0, message.op, message.id, head, 0))


@asynccontextmanager
async def hanging_shard(folder: Path) -> AsyncIterator[tuple[Link, HangingShard, trio.Nursery]]:
    path = str(folder / "shard.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        link = Link(0, path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            accepted, _ = await trio.socket.from_stdlib_socket(listener).accept()
            shard = HangingShard(trio.SocketStream(accepted))
            nursery.start_soon(shard.run)
            await link.wait_up()
            yield link, shard, nursery
            nursery.cancel_scope.cancel()


async def test_requests_to_a_shard_that_hangs_fail_until_it_answers_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with hanging_shard(tmp_path) as (link, shard, _):
        began_s = trio.current_time()
        with pytest.raises(OutcomeUnknown):
            await link.call(wire.OP_APPEND, b"", b"")
        assert STALLED_S <= trio.current_time() - began_s <= 2 * STALLED_S
        began_s = trio.current_time()
        with pytest.raises(ShardUnavailable, match="shard 0"):
            await link.call(wire.OP_APPEND, b"", b"")
        assert trio.current_time() == began_s, "it fails without waiting"
        await shard.answer(shard.asked[0])
        await trio.testing.wait_all_tasks_blocked()
        assert link.is_up


def append_to_stopped(link: Link, shard: HangingShard) -> list[object]:
    """Stop the shard, and send a request that fills its socket and one behind it. Returns their answers."""
    shard.is_stopped = True
    answers: list[object] = []
    for size in (1 << 20, 10):
        link.post(wire.OP_APPEND, b"", bytes(size), answers.append)
    return answers


async def test_of_a_request_that_a_hanging_shard_may_still_get_the_outcome_is_unknown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with hanging_shard(tmp_path) as (link, shard, _):
        answers = append_to_stopped(link, shard)
        await trio.sleep(2 * STALLED_S)
        assert not link.is_up
        assert [type(answer) for answer in answers] == [OutcomeUnknown, OutcomeUnknown]
        shard.goes_on.set()
        await trio.testing.wait_all_tasks_blocked()
        appends = [message for message in shard.asked if message.op == wire.OP_APPEND]
        assert len(appends) == 2, "both were handled after all"


async def test_of_a_request_that_was_not_sent_nothing_was_done_when_the_link_ends(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with hanging_shard(tmp_path) as (link, shard, _):
        answers = append_to_stopped(link, shard)
        await trio.testing.wait_all_tasks_blocked()
        await shard.close()
        await trio.testing.wait_all_tasks_blocked()
        assert [type(answer) for answer in answers] == [OutcomeUnknown, ShardUnavailable]


async def test_posted_requests_are_answered_by_a_call_and_withdrawn_ones_are_not(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with hanging_shard(tmp_path) as (link, shard, _):
        answers: dict[str, object] = {}
        for name in ("first", "withdrawn", "third", "never"):
            on_answer = partial(answers.__setitem__, name)
            id = link.post(wire.OP_READ_STREAM, b"", name.encode(), on_answer)
            if name == "withdrawn":
                link.withdraw(id)
                link.withdraw(id)
        await trio.testing.wait_all_tasks_blocked()
        by_body = {message.body: message for message in shard.asked}
        assert [message.op for message in shard.asked].count(wire.OP_FORGET) == 1, (
            "the shard hears of it once"
        )
        for name in (b"third", b"withdrawn", b"first"):
            await shard.answer(by_body[name])
        await trio.testing.wait_all_tasks_blocked()
        assert list(answers) == ["third", "first"]
        assert link.in_flight == 1
        await trio.sleep(2 * STALLED_S)
        assert isinstance(answers["never"], OutcomeUnknown)
        with pytest.raises(ShardUnavailable):
            link.post(wire.OP_READ_STREAM, b"", b"", answers.clear)  # type: ignore[arg-type]


async def test_the_first_request_of_a_while_is_sent_at_once_and_the_next_ones_together(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A long poll is under way, as it is in every gateway."""
    async with hanging_shard(tmp_path) as (link, shard, _):
        link.post(wire.OP_CLAIM, b"", b"", lambda _: None)
        for _ in range(2):
            autojump_clock.jump(0.003)
            unsent = []
            for _ in range(4):
                link.post(wire.OP_APPEND, b"", b"", lambda _: None)
                unsent.append(len(link._unsent))
            assert unsent == [0, 1, 2, 3]
            await trio.testing.wait_all_tasks_blocked()
            assert not link._unsent
        assert [message.op for message in shard.asked] == [wire.OP_CLAIM] + [wire.OP_APPEND] * 8


async def test_a_shard_that_holds_a_long_poll_back_and_gives_signs_of_life_does_not_hang(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with hanging_shard(tmp_path) as (link, shard, nursery):
        nursery.start_soon(link.call, wire.OP_DIFF, b"", b"")
        for _ in range(6):
            await trio.sleep(STALLED_S / 2)
            for message in shard.asked[1:]:
                assert message.op == wire.OP_PING
                await shard.answer(message)
            del shard.asked[1:]
        assert link.is_up and link.in_flight == 1
