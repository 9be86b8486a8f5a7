"""Goal: what was acked before a backup, or before the time that it is restored to, is there after the
restore: in its box, in the box that a router copies it to, as a job or as a dead letter, in its stream, in
its transaction; once. And everything goes on from there.

Method: a real server under load by a writer, a router, a worker whose jobs die, transactions over all shards
and streams in ever new basins; a backup in the middle of it; restores of it into another number of shards,
with and without a time; then every box is recounted. One sample by default, more with `STREAMS_SWEEP=full`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.direct import Parcel, Shards, Txn, pack
from streams.testing import Server, running_server
from tests.cluster.test_backup import SMALL, done
from tests.support.crashing import Client, Writer, box_on, eventually

ROUNDS = 3 if os.environ.get("STREAMS_SWEEP") == "full" else 1
SAMPLES = [(2, 3), (1, 3), (3, 1), (2, 2)] if ROUNDS > 1 else [(2, 3)]
TXN_BOXES = [f"txn-{number}" for number in range(6)]


class Acked(NamedTuple):
    """What was acked at one moment, and that moment."""

    at_ms: int
    records: int
    jobs: int
    bodies: dict[str, int]
    epoch: int


class Load:
    """Everything that writes, and what it knows."""

    def __init__(self, server: Server, shards: int) -> None:
        self._server = server
        last = shards - 1
        self.source, self.dest = box_on(0, shards, "source"), box_on(last, shards, "dest")
        self.jobs, self.dead = box_on(last, shards, "jobs"), box_on(0, shards, "dead")
        client = Client(server.port)
        for box in (self.source, self.dest, self.dead, *TXN_BOXES):
            client.put(box, durability="fsync")
        client.put(self.jobs, type="queue", durability="disk", max_deliveries=1, dead_letter=self.dead)
        client.ok("PUT", "/v0/routers/copy", {"source": self.source, "dest": self.dest})
        self.writer = Writer("writer", server.port, self.source)
        self.producer = Writer("producer", server.port, self.jobs)
        #: Jobs that a worker has asked to end.
        self.ended: set[int] = set()
        #: By stream: how many records were acked.
        self.bodies: dict[str, int] = {}
        self.epoch = 0
        self.txn_lock = threading.Lock()
        self.failures: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(step,), daemon=True)
            for step in (self._work, self._stream, self._commit)
        ]

    def __enter__(self) -> Load:
        for thread in (self.writer, self.producer, *self._threads):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.writer.stop()
        self.producer.stop()
        assert self.failures == []

    def wait(self, count: int) -> None:
        """Until so much more has happened everywhere."""
        epoch, ended, streams = self.epoch, len(self.ended), len(self.bodies)
        self.writer.wait_for_acks(count)
        self.producer.wait_for_acks(count)
        eventually(
            lambda: (
                self.failures
                or (self.epoch > epoch + 1 and len(self.ended) > ended and len(self.bodies) > streams)
            )
        )

    def acked(self) -> Acked:
        """All of this was acked before the moment; what begins now is of a later one."""
        with self.txn_lock:
            found = (len(self.writer.acked), len(self.producer.acked), dict(self.bodies), self.epoch)
            at_ms = time.time_ns() // 1_000_000
            while time.time_ns() // 1_000_000 <= at_ms:
                pass
        return Acked(at_ms, *found)

    def _run(self, step: Callable[[], Callable[[], None]]) -> None:
        try:
            again = step()
            while not self._over.is_set():
                again()
        except BaseException as failure:
            self.failures.append(failure)

    def _work(self) -> Callable[[], None]:
        client = Client(self._server.port)

        def again() -> None:
            path = f"/v0/boxes/{self.jobs}"
            asked = {"node": "w", "max": 10, "wait_ms": 100}
            jobs = client.ok("POST", f"{path}/claim", asked)["claimed"]
            for job in jobs:
                number = job["data"]["number"]
                if number % 3 == 0:
                    self.ended.add(number)
                    client.ok("POST", f"{path}/ack", {"node": "w", "seqs": [job["$seq"]]})
                else:
                    client.ok("POST", f"{path}/nack", {"node": "w", "seqs": [job["$seq"]]})

        return again

    def _stream(self) -> Callable[[], None]:
        numbers = itertools.count()

        def again() -> None:
            basin = f"basin-{next(numbers):08}"
            client = S2(self._server.port, basin)
            client.call("POST", "/basins", {"basin": basin})
            client.call("POST", "/streams", {"stream": "s"})
            for count in range(1, 4):
                client.call("POST", "/streams/s/records", {"records": [{"body": str(count)}]})
                self.bodies[basin] = count
            client.close()

        return again

    def _commit(self) -> Callable[[], None]:
        shards = Shards(self._server.url)

        def again() -> None:
            with self.txn_lock:
                write_epoch(shards, self.epoch + 1)
                self.epoch += 1

        return again


class S2(Client):
    """`/v1` as one basin sees it."""

    def __init__(self, port: int, basin: str) -> None:
        super().__init__(port)
        self._basin = basin

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"content-type": "application/json", "s2-basin": self._basin}
        self._connection.request(method, f"/v1{path}", None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        content = response.read()
        assert response.status in (200, 201), (path, content)
        found: dict[str, Any] = json.loads(content)
        return found


def write_epoch(shards: Shards, epoch: int) -> None:
    """A row for each box, in all shards: held everywhere, then committed everywhere."""
    txn = Txn("writer", epoch, "query")
    parcels: dict[int, list[tuple[str, int]]] = {}
    for shard in range(shards.count):
        mine = [box for box in TXN_BOXES if shards.shard_of(box) == shard]
        parcels[shard] = []
        if mine:
            parcel = Parcel(shards, shard, txn, f"try-{time.monotonic_ns()}")
            parcel.put(pack(mine, [1] * len(mine), [b"%d" % epoch] * len(mine)))
            parcels[shard] = [(parcel.name, parcel.close())]
            if parcel.is_done:
                parcels[shard] = []
    for shard, mine_of in parcels.items():
        shards.txn_commit(shard, txn, mine_of)


def recount(server: Server, load: Load, acked: Acked, *, is_cut: bool) -> None:
    client = Client(server.port)
    # The source: a prefix of what was written, and nothing of it is missing.
    records, tombstones, _ = client.read_all(load.source)
    numbers = [data["number"] for data in records.values()]
    assert numbers == list(range(len(numbers))) and len(numbers) >= acked.records
    assert {gap["reason"] for gap in tombstones} <= {"crash"}
    # Its copies, once each and in order; more of them than records only if the source was captured first.
    new = [client.append(load.source, {"writer": "later", "number": number}) for number in range(5)]
    eventually(lambda: client.ok("GET", "/v0/routers/copy")["lag"] == 0)
    copies, gaps, _ = client.read_all(load.dest)
    old = [data["number"] for data in copies.values() if data["writer"] == "writer"]
    assert old == list(range(len(old))) and len(old) >= len(numbers), (len(old), len(numbers), gaps)
    assert len(old) == len(numbers) or (tombstones and not is_cut)
    assert [data["number"] for data in copies.values() if data["writer"] == "later"] == [0, 1, 2, 3, 4]
    assert gaps == [] and len(new) == 5
    # Jobs: each in one place.
    _check_jobs(client, load, acked)
    # Streams and their basins.
    for basin, count in acked.bodies.items():
        found = S2(server.port, basin).call("GET", "/streams/s/records?seq_num=0")["records"]
        bodies = [record["body"] for record in found]
        assert bodies == [str(number) for number in range(1, len(bodies) + 1)] and len(bodies) >= count
    # Transactions: what is missing of the last epochs is completed by their repeats, and nothing is twice.
    with Shards(server.url) as shards:
        whole = [list(client.read_all(box)[0].values()) for box in TXN_BOXES]
        assert all(epochs == list(range(1, len(epochs) + 1)) for epochs in whole)
        first, last = min(map(len, whole)), max(map(len, whole))
        assert first >= acked.epoch and (last == first or not is_cut)
        for epoch in range(first + 1, last + 3):
            write_epoch(shards, epoch)
        for box in TXN_BOXES:
            assert list(client.read_all(box)[0].values()) == list(range(1, last + 3))


def _check_jobs(client: Client, load: Load, acked: Acked) -> None:
    def settled() -> tuple[list[int], list[int]] | None:
        state = client.ok("GET", f"/v0/boxes/{load.jobs}")
        jobs = [data["number"] for data in client.read_all(load.jobs)[0].values()]
        dead = [data["number"] for data in client.read_all(load.dead)[0].values()]
        return (jobs, dead) if state["queue"]["delayed"] == 0 and not set(jobs) & set(dead) else None

    jobs, dead = eventually(settled)
    assert len({*jobs, *dead}) == len(jobs) + len(dead), "a job is in one place"
    missing = set(range(acked.jobs)) - {*jobs, *dead} - load.ended
    assert not missing, f"jobs that are nowhere: {sorted(missing)}"
    for box in (load.jobs, load.dead):
        assert client.read_all(box)[1] == [], "nothing was given up"


@pytest.mark.parametrize("round", range(ROUNDS))
@pytest.mark.parametrize(("before", "after"), SAMPLES)
def test_a_recount_after_a_restore_agrees_with_what_was_acked(
    tmp_path: Path, before: int, after: int, round: int
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with running_server(tmp_path / "data", shards=before, **SMALL) as server, Load(server, before) as load:
        load.wait(40)
        middle = load.acked()
        load.wait(20)
        last = load.acked()
        done("backup", str(target), "--data-dir", str(server.data_dir))
    for name, acked, until in (("all", last, None), ("part", middle, middle.at_ms)):
        options = () if until is None else ("--until", str(until))
        back = tmp_path / name
        done("restore", str(target), "--data-dir", str(back), "--shards", str(after), *options)
        with running_server(back, shards=after, **SMALL) as server:
            recount(server, load, acked, is_cut=until is not None)
