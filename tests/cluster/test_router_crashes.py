"""Goal: a router half made or half deleted when somebody died is settled, and nothing copies that should not.

Method: real servers. The steps that a gateway takes are taken over the shards' own sockets, up to the moment
at which it would have been killed; then the server must bring it to an end by itself (§2.4, §6.1, §6.4).
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.shards.unix_sockets import connectable_path
from streams.protocol import wire
from streams.protocol.messages import forwards, routers
from streams.protocol.messages.routers import Route
from streams.testing import Server, running_server
from tests.support.crashing import Client, Lost, box_on, eventually

SHARDS = 2


class Shard:
    """One request at a time to one shard, as a gateway sends it."""

    def __init__(self, server: Server, index: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(30)
        with connectable_path(str(server.data_dir / "run" / f"shard-{index:02d}.sock")) as path:
            self._sock.connect(path)

    def ask(self, command: forwards.Command, reply: Any) -> Any:
        return msgspec.msgpack.decode(self._call(wire.OP_FORWARDING, forwards.encode(command)), type=reply)

    def delete_box(self, box: str) -> None:
        self._call(wire.OP_DELETE_BOX, wire.head_encoder.encode(wire.RequestHead(box)))

    def _call(self, op: int, head: bytes) -> bytes:
        self._sock.sendall(wire.frame(wire.REQUEST, 0, op, 1, head, 0))
        receiver = wire.Receiver()
        while True:
            for message in receiver.parse(self._sock.recv_into(receiver.space())):
                assert not message.flags & wire.FAILED, message.body
                return message.body

    def close(self) -> None:
        self._sock.close()


class World:
    """A server, a client, and a source and a destination on different shards."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = Client(server.port)
        self.shards = [Shard(server, index) for index in range(SHARDS)]
        self.source, self.dest = box_on(1, SHARDS, "source"), box_on(0, SHARDS, "dest")
        self.route = Route(source=self.source, dest=self.dest)

    def register(self, name: str) -> routers.RegisteredRouter:
        put: routers.PutRouterResult = self.shards[0].ask(
            routers.PutRouter(name, self.route), routers.PutRouterResult
        )
        return put.router

    def tie_dest(self, router: routers.RegisteredRouter) -> None:
        end = forwards.AttachEndpoint(box=self.dest, origin=router.origin, life=self.life(), position=0)
        self.shards[0].ask(end, forwards.AttachEndpointReply)

    def tie_source(self, origin: str, revision: int) -> None:
        route = msgspec.structs.replace(self.route, revision=revision)
        begin = forwards.AttachEndpoint(
            box=self.source, origin=origin, life=self.life(), position=0, route=route
        )
        self.shards[1].ask(begin, forwards.AttachEndpointReply)

    def life(self) -> int:
        return int(self.client.ok("GET", f"/v0/boxes/{self.source}")["generation"])

    def ties(self) -> list[tuple[str, str]]:
        found = [shard.ask(forwards.ListEndpoints(), forwards.EndpointList) for shard in self.shards]
        return sorted(end for each in found for end in [*each.sources, *each.dests])

    def names(self) -> list[str]:
        return [router["router"] for router in self.client.ok("GET", "/v0/routers")["routers"]]

    def put(self, name: str, **body: Any) -> None:
        self.client.ok("PUT", f"/v0/routers/{name}", {"source": self.source, "dest": self.dest, **body})

    def head(self, box: str) -> int:
        return int(self.client.ok("GET", f"/v0/boxes/{box}?touch=false")["head_seq"])

    def wait_for_head(self, box: str, head: int) -> None:
        eventually(lambda: self.head(box) == head)


@pytest.fixture(scope="module")
def server() -> Any:
    with running_server(shards=SHARDS) as found:
        yield found


@pytest.fixture
def world(server: Server) -> Any:
    found = World(server)
    for box in (found.source, found.dest):
        found.client.send("DELETE", f"/v0/boxes/{box}")
    eventually(lambda: found.names() == [] and found.ties() == [])
    for box in (found.source, found.dest):
        found.client.put(box)
    yield found
    found.client.close()
    for shard in found.shards:
        shard.close()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_router_that_was_registered_is_tied_in_the_end(world: World, steps: int) -> None:
    """§6.1: the gateway that created it died after this many endpoints were attached."""
    router = world.register("half-made")
    if steps >= 1:
        world.tie_dest(router)
    if steps >= 2:
        world.tie_source(router.origin, router.route.revision)
    eventually(lambda: len(world.ties()) == 2)
    world.client.append(world.source, 1, 2)
    world.wait_for_head(world.dest, 2)
    eventually(lambda: world.client.ok("GET", "/v0/routers/half-made")["lag"] == 0)
    assert world.names() == ["half-made"]


def test_a_router_that_was_dropped_is_untied_in_the_end(world: World) -> None:
    """§6.4: the gateway that deleted it died before both endpoints were detached."""
    world.put("half-gone")
    found = world.shards[0].ask(routers.GetRouter("half-gone"), routers.GetRouterResult).router
    world.shards[0].ask(routers.DropRouter("half-gone", found.number), routers.GetRouterResult)
    eventually(lambda: world.ties() == [])
    world.client.append(world.source, 1)
    assert world.names() == [] and world.head(world.dest) == 0


def test_an_end_tied_too_late_is_untied(world: World) -> None:
    """A message of a dead gateway may be read after everything it knew of is gone."""
    world.tie_source("ghost#4000", 4000)
    world.client.append(world.source, 1)
    eventually(lambda: world.ties() == [])
    assert world.head(world.dest) == 0, "its destination does not know it"


@pytest.mark.parametrize("end", ["source", "dest"])
def test_routers_of_a_box_that_a_dead_gateway_deleted_are_dropped(world: World, end: str) -> None:
    """§2.4: it died between the box and its routers."""
    world.put("orphan")
    box = world.source if end == "source" else world.dest
    world.shards[1 if end == "source" else 0].delete_box(box)
    eventually(lambda: world.names() == [] and world.ties() == [])
    other = world.dest if end == "source" else world.source
    assert world.client.send("GET", f"/v0/boxes/{other}").status == 200
    assert world.client.send("GET", f"/v0/boxes/{box}").status == 404, "the box stays deleted"


def test_a_router_whose_destination_is_missing_waits_for_it_and_says_so(world: World) -> None:
    """§6.1, §6.2"""
    world.route = Route(source=world.source, dest=world.dest, create_dest=False)
    world.client.ok("DELETE", f"/v0/boxes/{world.dest}")
    world.register("waiting")
    state = world.client.ok("GET", "/v0/routers/waiting")
    assert state["state"] == "blocked" and "attached" in state["last_error"]
    world.client.put(world.dest)
    eventually(lambda: world.client.ok("GET", "/v0/routers/waiting")["state"] == "ok")
    world.client.append(world.source, 1)
    world.wait_for_head(world.dest, 1)


def test_without_the_shard_of_its_source_a_router_is_not_deleted_by_halves(tmp_path: Path) -> None:
    """§6.4: a deletion that was not answered leaves the router as it was, or not at all."""
    with running_server(tmp_path, shards=SHARDS) as server:
        world = World(server)
        world.put("kept")
        os.kill(server.shard_pids()[1], signal.SIGKILL)

        def deleted() -> bool:
            try:
                answer = world.client.send("DELETE", "/v0/routers/kept")
            except Lost:
                return False
            assert answer.status in (200, 503), answer
            return answer.status == 200

        eventually(deleted)
        assert world.names() == []
        eventually(lambda: Client(server.port).send("GET", "/v0/ready").status == 200)
        world.client.append(world.source, 1)
        assert world.head(world.dest) == 0


def test_every_gateway_makes_routers_and_the_first_one_carries(tmp_path: Path) -> None:
    """§6.1 with several gateways; killing any of them loses nothing."""
    with running_server(tmp_path, shards=SHARDS, gateways=3) as server:
        clients = [Client(server.port) for _ in range(8)]  # connections spread over the gateways
        source = box_on(1, SHARDS, "many")
        dests = [f"many-dest-{at}" for at in range(8)]
        for client, dest in zip(clients, dests, strict=True):
            client.ok("PUT", f"/v0/routers/to-{dest}", {"source": source, "dest": dest})
        for at in range(3):
            clients[at].append(source, *range(at * 10, at * 10 + 10))
            os.kill(server.gateway_pids()[at], signal.SIGKILL)
            for client in clients:
                client.close()
            eventually(lambda: len(server.gateway_pids()) == 3)
        for dest in dests:
            eventually(lambda dest=dest: head_or_none(clients[0], dest) == 30)
            records, tombstones, _ = clients[0].read_all(dest)
            assert (list(records.values()), tombstones) == (list(range(30)), [])


def head_or_none(client: Client, box: str) -> int | None:
    try:
        answer = client.send("GET", f"/v0/boxes/{box}")
    except Lost:
        return None
    return answer.body.get("head_seq")


def test_a_memory_box_at_either_end_survives_the_restart_of_its_shard(tmp_path: Path) -> None:
    """§1.1, §6.1: its records go, its routers stay."""
    with running_server(tmp_path, shards=SHARDS) as server:
        client = Client(server.port)
        first, middle, last = box_on(0, SHARDS, "f"), box_on(1, SHARDS, "m"), box_on(0, SHARDS, "l")
        client.put(middle, durability="memory")
        client.ok("PUT", "/v0/routers/in", {"source": first, "dest": middle})
        client.ok("PUT", "/v0/routers/out", {"source": middle, "dest": last})
        client.append(first, 1, 2)
        eventually(lambda: client.ok("GET", f"/v0/boxes/{last}")["head_seq"] == 2)
        for router in ("in", "out"):  # their sources know that the copies have arrived
            eventually(lambda router=router: client.ok("GET", f"/v0/routers/{router}")["position"] == 2)
        os.kill(server.shard_pids()[1], signal.SIGKILL)
        client.append(first, 3)
        eventually(lambda: list(client.read_all(last)[0].values()) == [1, 2, 3])
        tombstones = client.read_all(last)[1]
        assert [each["reason"] for each in tombstones] == ["source_trim"], "copies may have been lost with it"
        assert list(client.read_all(middle)[0].values()) == [3]


def test_a_router_whose_box_finds_no_room_is_not_made(tmp_path: Path) -> None:
    """§12: a refused request changes nothing."""
    with running_server(tmp_path, shards=1, max_boxes=2) as server:
        client = Client(server.port)
        client.put("there")
        refused = client.send("PUT", "/v0/routers/r", {"source": "new-1", "dest": "new-2"})
        assert (refused.status, refused.code) == (429, "throttled")
        assert refused.body["error"]["detail"] == {"limit": "boxes"}
        assert client.ok("GET", "/v0/routers")["routers"] == []
        assert [box["box"] for box in client.ok("GET", "/v0/boxes")["boxes"]] == ["there"]
        client.ok("PUT", "/v0/routers/r", {"source": "there", "dest": "new-1"})
