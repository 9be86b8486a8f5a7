"""Goal: at whatever request to the object store the machine is lost, what is put back from the store alone
has every change that was acked, in each box, and nothing that an acked change took away.

Method: a script of writes, deletes, fences, groups and whole boxes runs on a real engine whose store is a
real S3-protocol server; uploads fail now and then, some of them after they took effect. The power goes at one
request, before it took effect or after. Then the store is put back alone; and the shard starts again on its
disk, goes on, and is lost a second time. `STREAMS_SWEEP=full` looks at twenty times as many requests. The
seed is printed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

from shard.core.machine import Machine
from shard.storage.cold.object_store import ObjectCold
from shard.storage.files import Disk
from streams.protocol.errors import StreamsError
from streams.protocol.messages import commands, queues
from streams.protocol.messages.commands import Command
from tests.support.machines import SWEEP_FACTOR, columns, live_texts
from tests.support.objects import FaultyStore, Life, living, put_back
from tests.support.objectstore import Bucket, bucket, object_server

__all__ = ["bucket", "object_server"]

BOXES = ("one", "two", "three")
ROUNDS = 25


class Model:
    """One box as those know it who asked: exactly so if everything was answered."""

    def __init__(self) -> None:
        self.exists = False
        self.records: dict[int, str] = {}
        self.head_seq = 0
        self.token = ""
        self.group = 0

    def look(self) -> Any:
        if not self.exists:
            return None
        return (self.records, self.head_seq, self.token, self.group)

    def copy(self) -> Model:
        other = Model()
        other.__dict__ |= self.__dict__ | {"records": dict(self.records)}
        return other

    def after(self, command: Command) -> Model:
        """What the box is when this has been done."""
        other = self.copy()
        if isinstance(command, commands.PutBox):
            other.exists = True
        elif isinstance(command, commands.Append):
            for text in command.columns.datas:
                other.head_seq += 1
                other.records[other.head_seq] = bytes(text).decode()
        elif isinstance(command, commands.DeleteRecords):
            other.records = {seq: d for seq, d in other.records.items() if seq >= (command.before_seq or 0)}
        elif isinstance(command, commands.SetFence):
            other.token = command.token
        elif isinstance(command, queues.CommitGroup):
            other.group = command.cursor
        else:
            assert isinstance(command, commands.DeleteBox)
            other = Model()
        return other


class Script:
    """What each box is asked, one thing after the other; and what is known of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.known = {box: Model() for box in BOXES}
        #: What was asked and never answered: it may have happened or not.
        self.open: dict[str, Command] = {}
        self.numbers = iter(range(10**9))

    def next_command(self, box: str) -> Command:
        model, rng = self.known[box], self.rng
        if not model.exists:
            return commands.PutBox(box, commands_patch())
        kind = rng.choices(("append", "delete", "fence", "group", "drop"), weights=(12, 3, 1, 2, 1))[0]
        if kind == "append":
            rows = [f"{box}-{next(self.numbers)}" for _ in range(rng.randrange(1, 4))]
            return commands.Append(
                box=box, columns=columns(*rows), fencing_token=model.token or None, idempotency_key=rows[0]
            )
        if kind == "delete":
            return commands.DeleteRecords(box, max(0, model.head_seq - rng.randrange(5)))
        if kind == "fence":
            return commands.SetFence(box, f"token-{next(self.numbers)}")
        if kind == "group":
            return queues.CommitGroup(box, "g", rng.randint(0, model.head_seq))
        return commands.DeleteBox(box, False)

    async def play(self, life: Life, store: FaultyStore, rounds: int) -> None:
        """Asks all boxes at once, again and again, until the rounds are over or the power is gone."""
        for _ in range(rounds):
            asked = {box: self.next_command(box) for box in BOXES}
            tickets = {box: life.send(command) for box, command in asked.items()}
            self.open = dict(asked)
            await life.until(
                lambda tickets=tickets: (
                    store.died.is_set()  # type: ignore[misc]
                    or all(ticket.found is not None for ticket in tickets.values())
                )
            )
            for box, ticket in tickets.items():
                if ticket.found is not None:
                    assert not isinstance(ticket.found, StreamsError), (asked[box], ticket.found)
                    self.known[box] = self.known[box].after(self.open.pop(box))
            if store.died.is_set():
                return

    def check(self, machine: Machine) -> None:
        """Every box is what is known of it, or that and what was never answered; now it is known which."""
        for box, model in self.known.items():
            candidates = [model] + ([model.after(self.open[box])] if box in self.open else [])
            found = looked_at(machine, box)
            looks = [candidate.look() for candidate in candidates]
            assert found in looks, f"{box} is {found}, and should be one of {looks}"
            self.known[box] = candidates[looks.index(found)]
        self.open = {}


def commands_patch() -> Any:
    from streams.protocol.model.boxes import BoxPatch

    return BoxPatch(durability="object")


def looked_at(machine: Machine, name: str) -> Any:
    box = machine.boxes.get(name)
    if box is None:
        return None
    texts = {}
    for seq, (_, text) in live_texts(machine, name).items():
        texts[seq] = text.decode().partition('"data":')[2].removesuffix("}")
    groups = {group: cursor for group, cursor, _ in box.groups.facts()}
    return (texts, box.log.head_seq, box.fencing_token, groups.get("g", 0))


async def lose_at(tmp_path: Path, store: FaultyStore, seed: int, *, dies_at: int, dies_after: bool) -> int:
    """One history in which the power goes at a request. Returns how many there were, if it did not."""
    script = Script(random.Random(seed))
    rng = random.Random(seed + 1)
    store.failing = {
        number: rng.random() < 0.5 for number in rng.sample(range(2, 60), 6) if number != dies_at
    }
    store.dies_at, store.dies_after = dies_at, dies_after
    shard = tmp_path / "shard"
    async with living(shard, store, stops=False, compact_objects=8) as life:
        await script.play(life, store, ROUNDS)
        asked = store.writes
    if not store.died.is_set():
        return asked
    alive = FaultyStore(store.inner)
    machine, found = await trio.to_thread.run_sync(put_back, alive, tmp_path / "back")
    assert found.left_out == 0
    lost = Script(random.Random(0))
    lost.known, lost.open = dict(script.known), dict(script.open)
    lost.check(machine)
    # Starts the shard again on this disk: it uploads the changes that it had not uploaded yet.
    async with living(shard, alive, stops=False, compact_objects=8) as life:
        with trio.fail_after(60):
            while life.machine.uploading.has_work:  # noqa: ASYNC110 (there is no event to wait for)
                await trio.sleep(0.002)
        script.check(life.machine)
        await script.play(life, alive, 3)
    machine, found = await trio.to_thread.run_sync(put_back, alive, tmp_path / "back-again")
    script.check(machine)
    assert found.left_out == 0
    return asked


@pytest.mark.slow
async def test_no_acked_change_is_lost_at_whatever_request_the_machine_is(
    tmp_path: Path, bucket: Bucket
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def fresh(name: str) -> FaultyStore:
        return FaultyStore(ObjectCold(f"{bucket.url}/{name}", Disk(), backoff_s=0.001))

    whole = await lose_at(await made(tmp_path / "whole"), fresh("whole"), seed, dies_at=0, dies_after=False)
    for turn, dies_at in enumerate(sorted(rng.sample(range(1, whole), min(whole - 1, 4 * SWEEP_FACTOR)))):
        place = await made(tmp_path / f"at-{dies_at}")
        await lose_at(place, fresh(f"at-{dies_at}"), seed, dies_at=dies_at, dies_after=turn % 2 == 0)


async def made(directory: Path) -> Path:
    await trio.Path(directory).mkdir()
    return directory
