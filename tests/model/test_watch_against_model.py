"""Goal: whatever happens to boxes and to a watcher, what it has received, with its tombstones, is what it was
owed (§7): every record once and in order, every loss reported, no state of a dead process used later.

Method: real machines, real feeds, streams and sessions, no sockets and no clock but the test's. A client is
modelled as what a browser does: it keeps what it has read, and comes back with the id it has read last; what
was on the way to it when it left is lost. Nothing is compared step by step: at the end all comes to rest, and
then the account of each watcher must be whole.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gateway.shards.placement import even
from gateway.watch import cursors
from gateway.watch.page import Place
from gateway.watch.plan import plan_of_body
from gateway.watch.service import Watch
from streams.protocol.messages import commands
from tests.support.machines import columns, patch, sampled
from tests.support.memory_shards import MemoryLink, MemoryShard, dispatch_to
from tests.support.sse import Event, Parser

BOXES = ("alpha", "beta", "gamma")
LIVES = (
    {},
    {"cap_records": 3},
    {"ttl_ms": 60, "durability": "fsync"},
    {"durability": "memory", "cap_records": 4},
    {"durability": "fsync", "cap_bytes": 300},
)
OWN_NODE = "me"


class Life:
    """One life of a box: what was written into it, and what has become of each record."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.nodes: dict[int, str] = {}
        self.deleted: set[int] = set()


class World:
    """Shards, and what the test knows to have happened to their boxes."""

    def __init__(self) -> None:
        self.shards = [MemoryShard(), MemoryShard()]
        self.lives: dict[str, list[Life]] = {box: [] for box in BOXES}
        self.alive: dict[str, Life] = {}
        self.written = 0
        for box in BOXES:
            self.create(box, 0)
        self.settle()

    def shard_of(self, box: str) -> MemoryShard:
        return self.shards[even(len(self.shards)).shard_of(box)]

    def create(self, box: str, kind: int) -> None:
        if box not in self.alive:
            life = Life(len(self.lives[box]))
            self.lives[box].append(life)
            self.alive[box] = life
            self.shard_of(box).do(commands.PutBox(box, patch(**LIVES[kind % len(LIVES)])))

    def append(self, box: str, count: int) -> None:
        self.create(box, count)
        life = self.alive[box]
        nodes = [OWN_NODE if (self.written + at) % 5 == 0 else "other" for at in range(count)]
        records = [
            {"data": [life.number, self.written + at], "node": node, "tag": f"t{(self.written + at) % 3}"}
            for at, node in enumerate(nodes)
        ]
        self.written += count
        reply = self.shard_of(box).do(commands.Append(box=box, columns=columns(*records))).reply
        if isinstance(reply, commands.AppendResult):  # else it can never fit, and nothing happened
            life.nodes.update(zip(range(reply.first_seq, reply.last_seq + 1), nodes, strict=True))

    def delete_records(self, box: str, before_seq: int | None, tag: str | None) -> None:
        if box in self.alive:
            log = self.shard_of(box).machine.boxes[box].log
            before = {seq for seq in self.alive[box].nodes if log.is_live(seq)}
            match = None if tag is None else commands.Match(tag)
            shard = self.shard_of(box)
            # First what time alone takes, so that it is not mistaken for what was asked for.
            shard.do(commands.GetState(box, False))
            before = {seq for seq in before if log.is_live(seq)}
            shard.do(commands.DeleteRecords(box, before_seq, match))
            self.alive[box].deleted |= {seq for seq in before if not log.is_live(seq)}

    def delete_box(self, box: str) -> None:
        if self.alive.pop(box, None) is not None:
            self.shard_of(box).do(commands.DeleteBox(box))

    def pass_time(self, ms: int) -> None:
        for shard in self.shards:
            shard.driver.now_ms += ms
            shard.tick()

    def settle(self) -> None:
        for shard in self.shards:
            shard.sync()


class Peer:
    """The sink of a stream, and the bytes that have not been read at its other end."""

    def __init__(self) -> None:
        self.unread = b""
        self.is_reading = True
        self._moved = trio.Event()

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.is_reading else len(self.unread)

    def put(self, data: bytes) -> None:
        self.unread += data

    def moved(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def wait_sent(self, stall_s: float) -> None:
        await trio.lowlevel.checkpoint()
        while self.unsent_bytes:
            await self._moved.wait()


class Client:
    """A browser: it remembers what it has read and the last id, and nothing else."""

    def __init__(self, gateways: Gateways, wid: str, first_id: str) -> None:
        self.gateways = gateways
        self.wid = wid
        self.events: list[Event] = []
        self.last_id = first_id
        self.peer: Peer | None = None
        self.scope: trio.CancelScope | None = None
        self._parser = Parser()

    async def connect(self) -> None:
        if self.peer is None:
            told = cursors.decode_untrusted(self.last_id, "id")
            self.peer, self.scope, self._parser = Peer(), trio.CancelScope(), Parser()
            body = await self.gateways.watch.open_session(self.wid, told)
            self.gateways.nursery.start_soon(self._serve, body, self.peer, self.scope)

    async def _serve(self, body: Any, peer: Peer, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await body.run(peer)
        finally:
            body.close()

    def read(self) -> None:
        if self.peer is not None:
            self.events += self._parser.feed(self.peer.unread)
            self.last_id = self._parser.last_id or self.last_id
            self.peer.unread = b""
            self.peer.moved()

    async def disconnect(self) -> None:
        """What is unread is lost."""
        if self.scope is not None:
            self.scope.cancel()
            self.peer = self.scope = None
            await trio.testing.wait_all_tasks_blocked()


class Gateways:
    """One gateway at a time, which may be killed; its sessions outlive it in the shards."""

    def __init__(self, world: World, nursery: trio.Nursery) -> None:
        self.world = world
        self.nursery = nursery
        self.was_killed = False

    async def start(self) -> None:
        self._dispatch = dispatch_to(self.world.shards)
        self.watch = Watch(self._dispatch, connections_max=0, node_bytes_max=128)
        self._scope = trio.CancelScope()

        async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            with self._scope:
                await self.watch.run(trio.Event(), task_status=task_status)

        await self.nursery.start(run)

    async def kill(self, clients: list[Client]) -> None:
        """kill -9: nobody saves anything."""
        self.was_killed = True
        for link in self._dispatch.links:
            assert isinstance(link, MemoryLink)
            link.cut()
        for client in clients:
            await client.disconnect()
        self._scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        await self.start()


Step = tuple[str, int, int]
KINDS = (
    *["append"] * 6,
    *("delete", "tag", "delete_box", "create", "time", "logged", "sync", "kill", "jump"),
    *("connect", "connect", "disconnect", "read", "read", "stop", "go"),
)


async def play(steps: list[Step], limit: int, clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = World()
        gateways = Gateways(world, nursery)
        await gateways.start()
        clients: list[Client] = []
        for starts in ("{}", '{"tail":true}'):
            boxes = ",".join(f'"{box}":{starts}' for box in BOXES)
            body = f'{{"boxes":{{{boxes}}},"node":"{OWN_NODE}","limit":{limit}}}'
            plan = plan_of_body(body.encode(), 128)
            views = await gateways.watch.view_boxes(plan, lenient=False)
            first_id = cursors.encode((box, Place(0, view.generation)) for box, view in views.items())
            wid = await gateways.watch.create_session(plan, views)
            clients.append(Client(gateways, wid, first_id.decode()))
        for kind, first, second in steps:
            await take_step(world, gateways, clients, clock, kind, first, second)
            await trio.testing.wait_all_tasks_blocked()
        await come_to_rest(world, clients, clock)
        for client in clients:
            for box in BOXES:
                check_account(world, client, box)
        nursery.cancel_scope.cancel()


async def take_step(
    world: World,
    gateways: Gateways,
    clients: list[Client],
    clock: trio.testing.MockClock,
    kind: str,
    first: int,
    second: int,
) -> None:
    box, client, shard = BOXES[first % 3], clients[first % 2], world.shards[first % 2]
    machine = shard.machine
    if kind == "append":
        world.append(box, second + 1)
        if first > 5:
            shard.logged()
    elif kind == "delete":
        world.delete_records(box, first + second, None)
    elif kind == "tag":
        world.delete_records(box, None, f"t{second % 3}")
    elif kind == "delete_box":
        world.delete_box(box)
    elif kind == "create":
        world.create(box, second)
    elif kind == "time":
        world.pass_time(first * 10)
    elif kind == "logged":
        shard.logged(min(machine.lsn, machine.logged_lsn + second))
    elif kind == "sync":
        shard.sync(min(machine.lsn, machine.durable_lsn + 1 + second))
    elif kind == "kill":
        await gateways.kill(clients)
    elif kind == "jump":
        clock.jump(second + 0.5)
    elif kind == "connect":
        if gateways.was_killed:
            world.settle()  # it may have to ask what is on the disk before it answers
        await client.connect()
    elif kind == "disconnect":
        await client.disconnect()
    elif kind == "read":
        client.read()
    elif client.peer is not None:
        client.peer.is_reading = kind == "go"
        client.peer.moved()


async def come_to_rest(world: World, clients: list[Client], clock: trio.testing.MockClock) -> None:
    world.settle()
    for client in clients:
        await client.connect()
        assert client.peer is not None
        client.peer.is_reading = True
        client.peer.moved()
    for _ in range(40):
        await trio.testing.wait_all_tasks_blocked()
        world.settle()
        for client in clients:
            client.read()
        clock.jump(0.5)
    await trio.testing.wait_all_tasks_blocked()


def check_account(world: World, client: Client, box: str) -> None:
    """Goes through what the client has read of one box, and settles it against what the box went through."""
    life: int | None = None
    heard: dict[int, set[int]] = {}
    told: dict[int, set[int]] = {}
    last_seq = 0
    may_begin = True
    for event in client.events:
        said = event.json
        if event.name not in ("record", "tombstone", "box-deleted", "caught-up") or said["box"] != box:
            assert event.name != "error", said
            continue
        if event.name == "tombstone":
            assert said["gap_from"] <= max(said["gap_to"], 1)
            if said["reason"] == "recreated":
                may_begin, last_seq = True, 0
                told[-1] = set(range(1, said["earliest_seq"]))
            else:
                assert said["gap_from"] > last_seq, "told of a loss below what was delivered"
                told.setdefault(-1 if life is None or may_begin else life, set()).update(
                    range(said["gap_from"], said["gap_to"] + 1)
                )
        elif event.name == "record":
            for record in said["records"]:
                number, seq = record["data"][0], record["$seq"]
                if number != life:
                    assert may_begin and (life is None or number > life), "a new life that was not told"
                    life, last_seq = number, 0
                    told[number] = told.get(number, set()) | told.pop(-1, set())
                may_begin = False
                assert record["$node"] != OWN_NODE
                assert said["from_seq"] < seq <= said["to_seq"]
                assert seq > last_seq, "out of order, or twice"
                last_seq = seq
                heard.setdefault(number, set()).add(seq)
    if box not in world.alive:
        return
    now = world.alive[box]
    if life is None or may_begin:
        told[now.number] = told.get(now.number, set()) | told.pop(-1, set())
    log = world.shard_of(box).machine.boxes[box].log
    got, lost = heard.get(now.number, set()), told.get(now.number, set())
    for seq, node in now.nodes.items():
        if node == OWN_NODE or seq in got or seq in now.deleted:
            continue
        assert not log.is_live(seq), f"{box} {seq} is there and was not delivered"
        assert seq in lost, f"{box} {seq} was lost and nobody said so"
    told_places = cursors.decode_untrusted(client.last_id, "id")
    assert told_places[box].seq <= log.visible_seq or not now.nodes


@pytest.mark.parametrize("limit", [256, 2])
@settings(sampled(40), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**64 - 1))
def test_what_a_watcher_received_is_what_it_was_owed(limit: int, seed: int) -> None:
    """Histories long enough for state to build up; there is nothing to shrink in a seed."""
    rng = random.Random(seed)
    steps = [(rng.choice(KINDS), rng.randrange(12), rng.randrange(7)) for _ in range(rng.randrange(40, 160))]
    clock = trio.testing.MockClock()
    trio.run(play, steps, limit, clock, clock=clock)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 6)), min_size=5, max_size=40
    )
)
@settings(sampled(40))
def test_short_histories_too(steps: list[Step]) -> None:
    """As above, with a small example if it fails."""
    clock = trio.testing.MockClock()
    trio.run(play, steps, 3, clock, clock=clock)
