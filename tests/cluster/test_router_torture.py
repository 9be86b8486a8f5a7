"""Goal: whichever process is killed, every destination has every record of its sources once, in order (§6.1).

Method: a random graph of routers over four shards, chosen by a printed seed, in which a record reaches a box
on one way only. Writers fill the boxes at its top while shards, the gateway and everything are killed with
-9, at moments counted in acks. When all routers have caught up, each destination is compared with each of its
sources, record by record.

10,000 records and 4 kills by default, 100,000 and 20 with STREAMS_SWEEP=full.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.testing import Server, running_server
from tests.support.crashing import Client, Lost, Writer, box_on, eventually
from tests.support.machines import SWEEP_FACTOR

SHARDS = 4
FULL = SWEEP_FACTOR > 1
RECORDS = 100_000 if FULL else 10_000
VICTIMS = ["shard", "gateway", "both", "everything"] * (5 if FULL else 1)
WRITERS = 6
#: Records in one write.
BATCH = 20
PATIENCE_S = 120.0


class Edge(NamedTuple):
    name: str
    source: str
    dest: str


class Graph:
    """A random graph in which no record reaches a box twice: no two ways into a box bring the same ones."""

    def __init__(self, rng: random.Random) -> None:
        layers = [
            [box_on((at + layer) % SHARDS, SHARDS, f"layer{layer}-{at}") for at in range(count)]
            for layer, count in enumerate((4, 4, 3))
        ]
        self.boxes = [box for layer in layers for box in layer]
        self.tops = layers[0]
        #: box -> the tops whose records reach it.
        self.reach = {box: {box} if box in self.tops else set() for box in self.boxes}
        self.edges: list[Edge] = []
        for below, above in ((layers[1], layers[0]), (layers[2], layers[0] + layers[1])):
            for dest in below:
                for source in rng.sample(above, len(above)):
                    fresh = self.reach[source] and not self.reach[source] & self.reach[dest]
                    if fresh and (not self.reach[dest] or rng.random() < 0.6):
                        self.reach[dest] |= self.reach[source]
                        self.edges.append(Edge(f"{source}->{dest}", source, dest))

    def make(self, client: Client, rng: random.Random) -> None:
        for box in self.boxes:
            client.put(box, durability=rng.choice(("disk", "fsync")))
        for edge in self.edges:
            client.ok("PUT", f"/v0/routers/{edge.name}", {"source": edge.source, "dest": edge.dest})


class BatchWriter(Writer):
    def _body(self, number: int) -> dict[str, Any]:
        records = [{"data": [self.box, self.name, number * BATCH + at]} for at in range(BATCH)]
        return {"records": records, "idempotency_key": f"{self.name}-{number}"}


@pytest.mark.timeout(3600)
def test_copies_are_exact_whatever_is_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("STREAMS_TORTURE_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"torture: STREAMS_TORTURE_SEED={seed}")
    rng = random.Random(seed)
    graph = Graph(rng)
    assert len(graph.edges) >= 7, "every box below the top has a way in"
    victims = rng.sample(VICTIMS, len(VICTIMS))
    acks_each = RECORDS // BATCH // WRITERS // (len(victims) + 1) + 1
    writers: list[BatchWriter] = []
    port = 0
    while victims:
        with running_server(tmp_path, shards=SHARDS, port=port) as server:
            if not writers:
                port = server.port
                graph.make(Client(port), rng)
                tops = [graph.tops[at % len(graph.tops)] for at in range(WRITERS)]
                writers = [BatchWriter(f"w{at}", port, box) for at, box in enumerate(tops)]
                for writer in writers:
                    writer.start()
            is_up = True
            while is_up and victims:
                wait_for_acks(writers, acks_each)
                is_up = kill(server, victims.pop(), rng)
    with running_server(tmp_path, port=port) as server:
        wait_for_acks(writers, acks_each)
        for writer in writers:
            writer.stop()
        check(server, graph)


def wait_for_acks(writers: list[BatchWriter], more: int) -> None:
    for writer in writers:
        writer.wait_for_acks(more)


def kill(server: Server, victim: str, rng: random.Random) -> bool:
    """Whether the server is still there to be killed again."""
    if victim == "everything":
        server.kill()
        return False
    if victim in ("shard", "both"):
        os.kill(server.shard_pids()[rng.randrange(SHARDS)], signal.SIGKILL)
    if victim in ("gateway", "both"):
        os.kill(server.gateway_pids()[0], signal.SIGKILL)
    return True


def check(server: Server, graph: Graph) -> None:
    client = Client(server.port)
    wait_until_caught_up(client, graph)
    found = {box: list(client.read_all(box)[0].values()) for box in graph.boxes}
    written = sum(len(found[box]) for box in graph.tops)
    assert written >= RECORDS
    for edge in graph.edges:
        sent = found[edge.source]
        came = [record for record in found[edge.dest] if record[0] in graph.reach[edge.source]]
        assert len(came) == len(sent), f"{edge.name}: {len(sent)} records, {len(came)} copies"
        assert came == sent, f"{edge.name}: not in the order of its source"
        state = client.ok("GET", f"/v0/routers/{edge.name}")
        assert (state["forwarded_total"], state["state"]) == (len(sent), "ok")
    client.close()


def wait_until_caught_up(client: Client, graph: Graph) -> None:
    """From the top down: what is above has stopped when what is below is asked."""

    def is_done(edge: Edge) -> bool:
        try:
            answer = client.send("GET", f"/v0/routers/{edge.name}")
        except Lost:
            return False
        return answer.status == 200 and answer.body["lag"] == 0

    for edge in graph.edges:
        eventually(lambda edge=edge: is_done(edge), within_s=PATIENCE_S)
    for edge in graph.edges:  # layers below, fed meanwhile
        eventually(lambda edge=edge: is_done(edge), within_s=PATIENCE_S)
