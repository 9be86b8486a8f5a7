"""Shards without processes: real machines behind the interface of a link, in the time that the test says.

What `shard/engine/engine.py` does with replies that wait, and reads that have nothing yet, is done here with
one event that fires after every step: every waiter checks again.
"""

from __future__ import annotations

import trio

from gateway.requests.request import Buffer
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link, OnAnswer
from gateway.shards.placement import even
from shard.core.machine import Machine, Outcome
from streams.protocol import wire
from streams.protocol.errors import ShardUnavailable, StreamsError
from streams.protocol.messages import commands, requests
from streams.protocol.payloads.appends import RecordLimits
from tests.support.machines import Driver


class MemoryShard:
    def __init__(self) -> None:
        self.driver = Driver(Machine())
        self.driver.start("boot")
        self._stepped = trio.Event()

    @property
    def machine(self) -> Machine:
        return self.driver.machine

    def step(self) -> None:
        """Something has changed: every waiter checks again."""
        self._stepped.set()
        self._stepped = trio.Event()

    def do(self, command: commands.Command) -> Outcome:
        outcome = self.driver.do(command)
        self.step()
        return outcome

    def tick(self) -> None:
        self.driver.tick()
        self.step()

    def logged(self, lsn: int | None = None) -> None:
        self.driver.logged(lsn)
        self.step()

    def sync(self, lsn: int | None = None) -> None:
        self.driver.sync(lsn)
        self.step()

    def _is_kept(self, outcome: Outcome) -> bool:
        machine = self.machine
        return outcome.waits_for_lsn <= (machine.durable_lsn if outcome.until_durable else machine.logged_lsn)

    async def answer(self, command: commands.Command) -> commands.Reply | StreamsError:
        while True:
            outcome = self.driver.do(command)
            if outcome.changes:
                self.step()
            if outcome.reply is not None:
                break
            await self._stepped.wait()
        while not self._is_kept(outcome):
            await self._stepped.wait()
        return outcome.reply


class MemoryLink(Link):
    """One gateway's way to a `MemoryShard`. Cut, it answers nothing more."""

    def __init__(self, number: int, shard: MemoryShard) -> None:
        super().__init__(number, "")
        self._memory = shard
        self.is_up = True
        self.calls = 0

    def cut(self) -> None:
        self.is_up = False

    async def call(self, op: int, head: bytes, body: Buffer) -> wire.Message:
        await trio.lowlevel.checkpoint()
        if not self.is_up:
            raise ShardUnavailable(shard=self.shard)
        self.calls += 1
        command = requests.decode_command(op, head, bytes(body), RecordLimits())
        reply = await self._memory.answer(command)
        await trio.lowlevel.checkpoint()
        if not self.is_up:
            raise ShardUnavailable(shard=self.shard)
        if isinstance(reply, StreamsError):
            raise reply
        if isinstance(reply, commands.FollowResult):
            text = wire.head_encoder.encode(requests.page_head(reply))
            return wire.Message(wire.REPLY, 0, op, 0, text, reply.records)
        return wire.Message(wire.REPLY, 0, op, 0, b"", requests.encode_reply(reply))

    def post(self, op: int, head: bytes, body: Buffer, on_answer: OnAnswer) -> int:
        if not self.is_up:
            raise ShardUnavailable(shard=self.shard)
        trio.lowlevel.spawn_system_task(self._answer_post, op, head, body, on_answer)
        return 0

    async def _answer_post(self, op: int, head: bytes, body: Buffer, on_answer: OnAnswer) -> None:
        try:
            answer: wire.Message | StreamsError = await self.call(op, head, body)
        except StreamsError as error:
            answer = error
        on_answer(answer)


def dispatch_to(shards: list[MemoryShard]) -> Dispatch:
    """A gateway of its own over these shards."""
    links: list[Link] = [MemoryLink(number, shard) for number, shard in enumerate(shards)]
    return Dispatch(even(len(shards)), links)
