"""Goal: a delayed job becomes claimable once and not before its time, and the outputs of its ack appear once
in a box of another shard, however often a shard is killed (§21, §24).

Method: a real server. A producer appends jobs whose times are spread over some seconds; workers claim and ack
them with an output for each; the shards are killed with SIGKILL at moments counted in acks. Test and server
have one clock, so a job that comes too early is seen. `STREAMS_SCALE=full` (`make scale`) has a million jobs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from streams.testing import Server, running_server
from tests.support.crashing import PATIENCE_S, Client, Lost, box_on, eventually

FULL = os.environ.get("STREAMS_SCALE") == "full"


class Size(NamedTuple):
    jobs: int
    batch: int
    #: The first job is due so long after it was appended; the last one so long after that.
    lead_ms: int
    spread_ms: int
    kills: int


SIZE = Size(1_000_000, 5_000, 20_000, 60_000, 20) if FULL else Size(2_000, 100, 300, 1_500, 2)
CLAIM_MAX = 500


class Worker(threading.Thread):
    """Claims delayed jobs and acks them with outputs, until all are acked."""

    def __init__(self, server: Server, queue: str, done: str, acked: dict[int, int], lock: Any) -> None:
        super().__init__(daemon=True)
        self._client = Client(server.port)
        self._queue, self._done = queue, done
        self._acked, self._lock = acked, lock
        self.early: list[tuple[int, float]] = []
        self.twice: list[int] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while len(self._acked) < SIZE.jobs:
                try:
                    self._work()
                except Lost:
                    self._client.close()
        except BaseException as failure:
            self.failure = failure

    def _work(self) -> None:
        body = {"node": self.name, "max": CLAIM_MAX, "wait_ms": 200}
        answer = self._client.send("POST", f"/v0/boxes/{self._queue}/claim", body)
        now_ms = time.time() * 1000
        if answer.status != 200:
            return
        jobs = answer.body["claimed"]
        if not jobs:
            return
        with self._lock:
            self.early += [
                (job["data"], job["$deliver_at"] - now_ms) for job in jobs if job["$deliver_at"] > now_ms
            ]
            self.twice += [job["data"] for job in jobs if job["data"] in self._acked]
        self._ack(jobs)

    def _ack(self, jobs: list[dict[str, Any]]) -> None:
        """Repeat with one key until it is answered."""
        body = {
            "node": self.name,
            "seqs": [job["$seq"] for job in jobs],
            "lease_ids": [job["lease_id"] for job in jobs],
            "idempotency_key": jobs[0]["lease_id"],
            "outputs": {self._done: {"records": [{"data": job["data"]} for job in jobs]}},
        }
        while True:
            try:
                answer = self._client.send("POST", f"/v0/boxes/{self._queue}/ack", body)
            except Lost:
                continue
            if answer.status == 200:
                with self._lock:
                    self._acked.update((job["data"], job["$seq"]) for job in jobs)
                return
            if answer.code == "lease_lost":  # the shard died after the claim: they come again
                return
            assert answer.status in (429, 503), answer


def produce(client: Client, queue: str, start_ms: int) -> None:
    """Append all jobs, each batch until it is acked, in a random order of their times."""
    rng = random.Random(7)
    for first in range(0, SIZE.jobs, SIZE.batch):
        records = [
            {"data": number, "deliver_at": start_ms + rng.randrange(SIZE.spread_ms)}
            for number in range(first, first + SIZE.batch)
        ]
        body = {"records": records, "idempotency_key": str(first), "return_seqs": False}

        def write(body: dict[str, Any] = body) -> bool:
            try:
                return client.send("POST", f"/v0/boxes/{queue}", body).status in (200, 201)
            except Lost:
                return False

        eventually(write)


def kill_shard(server: Server, shard: int) -> None:
    pid = server.shard_pids()[shard]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.shard_pids().get(shard, pid) != pid)


def test_each_delayed_job_comes_once_and_not_before_its_time(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with running_server(tmp_path, shards=2, throttle_lag_ms=60_000) as server:
        client = Client(server.port)
        queue, done = box_on(0, 2, "q"), box_on(1, 2, "done")
        client.put(queue, type="queue", durability="fsync", lease_ms=60_000, idempotency_window_ms=3_600_000)
        client.put(done, durability="fsync")
        acked: dict[int, int] = {}
        lock = threading.Lock()
        workers = [Worker(server, queue, done, acked, lock) for _ in range(2)]
        produce(client, queue, int(time.time() * 1000) + SIZE.lead_ms)
        for worker in workers:
            worker.start()
        for number in range(SIZE.kills):
            wanted = SIZE.jobs * number // SIZE.kills
            eventually(
                lambda wanted=wanted: len(acked) >= wanted or any(worker.failure for worker in workers),
                within_s=20 * PATIENCE_S,
            )
            kill_shard(server, number % 2)
        for worker in workers:
            worker.join(20 * PATIENCE_S)
            assert worker.failure is None and not worker.is_alive(), worker.failure
            assert worker.early == [], "before its time"
            assert worker.twice == [], "after its ack"
        assert len(acked) == SIZE.jobs

        def settled() -> bool:
            client.close()
            try:
                answer = client.send("GET", f"/v0/boxes/{queue}")
            except Lost:
                return False
            return answer.status == 200 and answer.body["queue"]["outputs_pending"] == 0

        eventually(settled)
        state = client.ok("GET", f"/v0/boxes/{queue}")
        assert (state["count"], state["queue"]["ready"], state["queue"]["delayed"]) == (0, 0, 0)
        records, tombstones, _ = client.read_all(done)
        assert tombstones == [] and sorted(records.values()) == list(range(SIZE.jobs)), "each output once"
        print(
            json.dumps({"jobs": SIZE.jobs, "kills": SIZE.kills, "s": round(time.monotonic() - started_s, 1)})
        )
