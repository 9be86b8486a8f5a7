"""Goal: kill -9 loses no job and brings back none that was acked; leases end or stay as the queue says (§8).

Method: real servers, killed while workers are at work, at moments counted in acks. Afterwards every job is
accounted for: acked, waiting, or in the dead letter box, each in exactly one place.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from streams.testing import Server, running_server
from tests.support.crashing import PATIENCE_S, Client, Lost, box_on, eventually

SHARDS = 2


def call(client: Client, box: str, action: str, **body: object) -> dict[str, Any]:
    return client.ok("POST", f"/v0/boxes/{box}/{action}", body)


def claim(client: Client, box: str, count: int = 1, **options: object) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = call(client, box, "claim", **{"node": "w", "max": count, **options})[
        "claimed"
    ]
    return jobs


def totals(client: Client, box: str) -> dict[str, int]:
    found: dict[str, int] = client.ok("GET", f"/v0/boxes/{box}")["queue"]
    return found


def test_after_a_kill_acked_jobs_stay_gone_and_the_others_come_back(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        client = Client(server.port)
        client.put("q", type="queue", durability="fsync")
        client.append("q", *range(10))
        claim(client, "q", 6)
        call(client, "q", "nack", node="w", seqs=[5])
        assert claim(client, "q", 1)[0]["deliveries"] == 2
        call(client, "q", "nack", node="w", seqs=[6], delay_ms=3_600_000)
        call(client, "q", "ack", node="w", seqs=[1, 3])
        # The shard itself: one that sees its supervisor die first may still end in order and keep its leases.
        shard = server.shard_pids()[0]
        os.kill(shard, signal.SIGKILL)
        eventually(lambda: server.shard_pids().get(0, shard) != shard)
        found = eventually(lambda: answered(client, "q"))
        assert found == {"ready": 7, "in_flight": 0, "delayed": 1, "dead_lettered": 0, "outputs_pending": 0}
        jobs = claim(client, "q", 20, node="another")
        assert {job["$seq"]: job["deliveries"] for job in jobs} == {2: 1, 4: 1, 5: 3, 7: 1, 8: 1, 9: 1, 10: 1}
        assert call(client, "q", "ack", node="w", seqs=[2])["skipped"] == [2]


def test_durable_leases_are_there_after_a_kill(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        client = Client(server.port)
        client.put("q", type="queue", durability="fsync", leases_durable=True, lease_ms=3_600_000)
        client.append("q", *range(3))
        jobs = claim(client, "q", 2)
        server.kill()
    with running_server(tmp_path) as server:
        client = Client(server.port)
        assert totals(client, "q")["in_flight"] == 2
        assert [job["$seq"] for job in claim(client, "q", 9, node="another")] == [3]
        late = call(client, "q", "extend", node="w", seqs=[1], lease_ms=1000, lease_ids=["lease_0"])
        assert late["skipped"] == [1]
        ids = [job["lease_id"] for job in jobs]
        assert call(client, "q", "ack", node="w", seqs=[1, 2], lease_ids=ids)["acked"] == 2


def test_an_orderly_restart_keeps_every_lease(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        client = Client(server.port)
        client.put("q", type="queue")
        client.append("q", *range(3))
        (job,) = claim(client, "q")
    with running_server(tmp_path) as server:
        client = Client(server.port)
        assert totals(client, "q") == {
            "ready": 2,
            "in_flight": 1,
            "delayed": 0,
            "dead_lettered": 0,
            "outputs_pending": 0,
        }
        assert call(client, "q", "ack", node="w", seqs=[1], lease_ids=[job["lease_id"]])["acked"] == 1


@pytest.mark.parametrize("leases_durable", [False, True])
def test_a_gateway_that_is_killed_frees_what_its_streams_held(tmp_path: Path, leases_durable: bool) -> None:
    with running_server(tmp_path, shards=1) as server:
        client = Client(server.port)
        client.put("q", type="queue", lease_ms=86_400_000, leases_durable=leases_durable)
        client.append("q", 1, 2)
        stream = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        stream.request("GET", "/v0/boxes/q/work?node=w&max=2")
        response = stream.getresponse()
        seen = b""
        while seen.count(b"event: job") < 2:
            seen += response.read1(65536)
        assert totals(client, "q")["in_flight"] == 2
        client.put("idle", type="queue", lease_ms=86_400_000)
        waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        body = json.dumps({"node": "w", "wait_ms": 30_000})
        waiting.request("POST", "/v0/boxes/idle/claim", body, {"content-type": "application/json"})
        eventually(lambda: client.ok("GET", "/v0/status")["shards"][0]["waiting_claims"] == 2)
        gateway = server.gateway_pids()[0]
        os.kill(gateway, signal.SIGKILL)
        eventually(lambda: server.gateway_pids().get(0, gateway) != gateway)
        client.close()
        eventually(
            lambda: (
                answered(client, "q")
                == {"ready": 2, "in_flight": 0, "delayed": 0, "dead_lettered": 0, "outputs_pending": 0}
            )
        )
        client.append("idle", 1)
        assert [job["deliveries"] for job in claim(client, "idle")] == [1], "it went to a claim of the dead"
        stream.close()
        waiting.close()


def answered(client: Client, box: str) -> dict[str, int] | None:
    try:
        answer = client.send("GET", f"/v0/boxes/{box}")
    except Lost:
        return None
    return answer.body["queue"] if answer.status == 200 else None


class Worker(threading.Thread):
    """Claims jobs until told to stop. Jobs that are multiples of ten are poison: it never acks them."""

    def __init__(self, name: str, server: Server, box: str) -> None:
        super().__init__(name=name, daemon=True)
        self._client = Client(server.port)
        self._box = box
        self._over = threading.Event()
        self.acked: list[int] = []
        #: Jobs whose ack got no answer: it may have counted or not.
        self.unsure: list[int] = []
        self.failure: BaseException | None = None

    def stop(self) -> None:
        self._over.set()
        self.join(PATIENCE_S * 2)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._work()
        except BaseException as error:
            self.failure = error

    def _work(self) -> None:
        jobs = (self._call("claim", max=4, wait_ms=100) or {"claimed": []})["claimed"]
        good = [job for job in jobs if job["data"] % 10]
        poison = [job["$seq"] for job in jobs if job["data"] % 10 == 0]
        if poison:
            self._call("nack", seqs=poison)
        if good:
            ids = [job["lease_id"] for job in good]
            answer = self._call("ack", seqs=[job["$seq"] for job in good], lease_ids=ids)
            if answer is None:
                self.unsure += [job["data"] for job in good]
            else:
                self.acked += [job["data"] for job in good if job["$seq"] not in answer["skipped"]]

    def _call(self, action: str, **body: object) -> dict[str, Any] | None:
        try:
            answer = self._client.send("POST", f"/v0/boxes/{self._box}/{action}", {"node": self.name, **body})
        except Lost:
            return None
        assert answer.status in (200, 503), answer
        return answer.body if answer.status == 200 else None


def test_shards_and_gateways_killed_under_workers_lose_no_job_and_bury_none_twice(tmp_path: Path) -> None:
    rng = random.Random(41)
    print("kills: seed 41")
    with running_server(tmp_path, shards=SHARDS) as server:
        client = Client(server.port)
        box, dead = box_on(0, SHARDS, "q"), box_on(1, SHARDS, "dead")
        client.put(dead, durability="fsync")
        # A kill, or a slow machine, may cost a job a delivery or two; only poison is to run out of them.
        config = {"durability": "fsync", "max_deliveries": 8, "dead_letter": dead, "lease_ms": 2000}
        client.put(box, type="queue", **config)
        total = 600
        for start in range(0, total, 100):
            client.append(box, *range(start, start + 100))
        workers = [Worker(f"w{number}", server, box) for number in range(4)]
        for worker in workers:
            worker.start()
        for victim in ("queue's shard", "dead letters' shard", "gateway", "queue's shard"):
            before = sum(len(worker.acked) for worker in workers)
            more = rng.randrange(20, 60)
            eventually(lambda before=before, more=more: progress(workers) >= before + more)
            if victim == "gateway":
                os.kill(server.gateway_pids()[0], signal.SIGKILL)
            else:
                os.kill(server.shard_pids()[0 if victim.startswith("queue") else 1], signal.SIGKILL)
        client.close()
        eventually(lambda: is_drained(client, box))
        for worker in workers:
            worker.stop()
        poison = set(range(0, total, 10))
        letters = list(client.read_all(dead)[0].values())
        assert sorted(letters) == sorted(poison), "every poison job is buried, once"
        acked = [data for worker in workers for data in worker.acked]
        assert len(acked) == len(set(acked)), "no job is acked twice"
        unsure = {data for worker in workers for data in worker.unsure}
        assert set(acked) | unsure >= set(range(total)) - poison, "nothing left without an ack"
        assert set(acked) <= set(range(total)) - poison


def progress(workers: list[Worker]) -> int:
    return sum(len(worker.acked) for worker in workers)


def is_drained(client: Client, box: str) -> bool:
    found = answered(client, box)
    return found is not None and found["ready"] + found["in_flight"] + found["delayed"] == 0
