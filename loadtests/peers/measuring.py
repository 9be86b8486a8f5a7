"""Workloads and contenders of the comparison. Each measurement takes a few seconds.

The plan is the same for all: one server, one load process on the same machine, the same number of
connections, records of 110 bytes in 8 boxes. Only the protocol differs. Redis is measured twice: with our
loop, and with its own tool, which is written in C and uses less CPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from loadtests import rows
from loadtests.peers.install import environment, find
from loadtests.peers.jobs import begin as begin_jobs
from loadtests.peers.jobs import fill as fill_jobs
from loadtests.peers.kafka import perf_test
from loadtests.peers.load import wire_of
from loadtests.peers.servers import NotInstalled, Running
from loadtests.peers.wires import records
from loadtests.rows import BOXES, DIFF_LIMIT, RECORD_BYTES, ROOT, Bench, Case, CaseFailed, Row

READ_BOX_RECORDS: Final = 20_000
#: Jobs in the queue of a peer: enough for the measured time at the best rate seen, and quick to fill.
PEER_JOBS: Final = 200_000
KAFKA_TOOL: Final = "kafka-producer-perf-test"
#: Records that Kafka's tool sends in a second of the measured time: its rate on two cores, roughly.
KAFKA_TOOL_RECORDS_PER_S: Final = 300_000
OURS: Final = "streams"


@dataclass(frozen=True)
class Contender:
    """One server with one setting. `promise` is our durability class with a comparable guarantee."""

    key: str
    peer: str
    setting: str
    promise: str
    title: str
    #: The guarantee of a response, in the terms of the server's documentation.
    durability: str
    tool: str = ""


CONTENDERS: Final = (
    Contender(
        "streams-disk", OURS, "disk", "disk", "streams, disk", "written to the file; synced within 50 ms"
    ),
    Contender(
        "redis-everysec",
        "redis",
        "everysec",
        "disk",
        "Redis Streams, everysec",
        "appendonly, appendfsync everysec: written to the file, synced every second",
    ),
    Contender(
        "redis-everysec-c",
        "redis",
        "everysec",
        "disk",
        "Redis Streams, everysec, redis-benchmark",
        "the same, loaded by Redis' own tool in C",
        tool="redis-benchmark",
    ),
    Contender(
        "valkey-everysec",
        "valkey",
        "everysec",
        "disk",
        "Valkey Streams, everysec",
        "as Redis: written to the file, synced every second",
    ),
    Contender(
        "valkey-everysec-c",
        "valkey",
        "everysec",
        "disk",
        "Valkey Streams, everysec, valkey-benchmark",
        "the same, loaded by Valkey's own tool in C",
        tool="valkey-benchmark",
    ),
    Contender(
        "kafka",
        "kafka",
        "",
        "disk",
        "Kafka, confluent-kafka",
        "acks=all, one replica: in the page cache; the broker leaves syncs to the system",
    ),
    Contender(
        "kafka-java",
        "kafka",
        "",
        "disk",
        "Kafka, kafka-producer-perf-test",
        "the same, loaded by Kafka's own tool in Java",
        tool="kafka-producer-perf-test",
    ),
    Contender(
        "nats-file",
        "nats",
        "",
        "disk",
        "NATS JetStream, file",
        "file store, one replica, synced every two minutes (its default)",
    ),
    Contender(
        "rabbitmq-stream",
        "rabbitmq",
        "stream",
        "disk",
        "RabbitMQ stream",
        "stream queue, one replica: written to the file, not synced",
    ),
    Contender(
        "postgresql-off",
        "postgresql",
        "off",
        "disk",
        "PostgreSQL, async commit",
        "synchronous_commit off: in memory, written and synced within 0.6 s; less than ours promises",
    ),
    Contender("streams-fsync", OURS, "fsync", "fsync", "streams, fsync", "synced before the answer"),
    Contender(
        "redis-always",
        "redis",
        "always",
        "fsync",
        "Redis Streams, always",
        "appendonly, appendfsync always: synced before the answer",
    ),
    Contender(
        "redis-always-c",
        "redis",
        "always",
        "fsync",
        "Redis Streams, always, redis-benchmark",
        "the same, loaded by Redis' own tool in C",
        tool="redis-benchmark",
    ),
    Contender(
        "valkey-always",
        "valkey",
        "always",
        "fsync",
        "Valkey Streams, always",
        "as Redis: synced before the answer",
    ),
    Contender(
        "rabbitmq-quorum",
        "rabbitmq",
        "quorum",
        "fsync",
        "RabbitMQ quorum queue",
        "quorum queue, one replica, publisher confirms: synced before the confirm",
    ),
    Contender(
        "postgresql-on",
        "postgresql",
        "on",
        "fsync",
        "PostgreSQL, sync commit",
        "synchronous_commit on: synced before the answer",
    ),
)


@dataclass
class Ground:
    """Our server, the running peers, and the sizes of measurements."""

    bench: Bench
    peers: dict[str, Running] = field(default_factory=dict)

    def load(self, contender: Contender, **plan: Any) -> dict[str, Any]:
        """Run the load generator against a peer."""
        sizes = self.bench.sizes
        full_plan = {
            "seconds": sizes.seconds,
            "warm_up_s": sizes.warm_up_s,
            "record_bytes": RECORD_BYTES,
            "bytes_max": 4 * 2**30,
            "peer": contender.peer,
            "setting": contender.setting,
            "port": self.peers[contender.peer].port,
            "trees": {"server": [self.peers[contender.peer].pid]},
            **plan,
        }
        process = subprocess.run(
            [sys.executable, "-m", "loadtests.generator"],
            input=json.dumps(full_plan).encode(),
            capture_output=True,
            cwd=ROOT,
            timeout=sizes.seconds + 120,
        )
        try:
            result: dict[str, Any] = json.loads(process.stdout)
        except ValueError:
            raise CaseFailed(
                f"the generator ended with {process.returncode}: {process.stderr.decode()}"
            ) from None
        if "error" in result or result["failures"]:
            raise CaseFailed(str(result.get("error") or result["first_failure"]))
        return result

    @contextmanager
    def boxes(self, contender: Contender, names: list[str]) -> Iterator[Any]:
        wire = wire_of(
            {
                "peer": contender.peer,
                "setting": contender.setting,
                "port": self.peers[contender.peer].port,
            }
        )
        wire.prepare(names)
        try:
            yield wire
        finally:
            wire.remove(names)


Figures = dict[str, float]

#: Processes of a result that are the server. The load generator is the client.
_SERVER_PROCESSES: Final = ("gateway", "shard", "server")


def cpu_figures(result: dict[str, Any]) -> Figures:
    """Return the CPU seconds that a million records cost the server, and the client.

    The system counts CPU time in hundredths of a second. A figure that is less in a short run is left out.
    """
    cores, rate = result["cores"], result["records_per_s"]
    used = {
        "server_cpu": sum(cores.get(name, 0.0) for name in _SERVER_PROCESSES),
        "client_cpu": cores.get("generator", 0.0),
    }
    return {name: cores_used / rate * 1e6 for name, cores_used in used.items() if cores_used and rate}


def appends(ground: Ground, contender: Contender, *, batch: int, connections: int) -> Figures:
    plan = {"batch": batch, "connections": connections}
    if contender.peer == "kafka":
        return _kafka_appends(ground, contender, **plan)
    if contender.tool:
        return {"rate": _redis_benchmark(ground, contender, batch=batch, connections=connections)}
    if contender.peer == OURS:
        case = Case((Row("rate", "", "records/s"),), rows.appends, {"durability": contender.setting, **plan})
        result = rows.appends(ground.bench, case).detail
    else:
        names = [f"bench-{number}" for number in range(BOXES)]
        with ground.boxes(contender, names):
            result = ground.load(contender, kind="peer", send="append", boxes=names, **plan)
    return {"rate": result["records_per_s"], **result["latency_ms"], **cpu_figures(result)}


def _kafka_appends(ground: Ground, contender: Contender, *, batch: int, connections: int) -> Figures:
    """Append by Kafka's own tool, or by its Python client with as many batches on their way as others have
    connections."""
    names = [f"bench-{number}" for number in range(BOXES)]
    with ground.boxes(contender, names):
        if contender.tool:
            count = round(KAFKA_TOOL_RECORDS_PER_S * max(1.0, ground.bench.sizes.seconds))
            return perf_test(ground.peers["kafka"].port, names[0], count, RECORD_BYTES, batch)
        plan = {"batch": batch, "connections": connections}
        result = ground.load(contender, kind="kafka", send="append", boxes=names, **plan)
    return {"rate": result["records_per_s"], **result["latency_ms"], **cpu_figures(result)}


def _redis_benchmark(ground: Ground, contender: Contender, *, batch: int, connections: int) -> float:
    """Return the rate by redis-benchmark, with as many requests as fit into the time of a measurement."""
    tool = find(contender.tool)
    if not tool:
        raise NotInstalled(f"{contender.tool} is not installed; try `make peers`")
    [(tag, data)] = records(0, 1, RECORD_BYTES)
    port = ground.peers[contender.peer].port
    with ground.boxes(contender, ["bench-0"]):

        def rate(count: int) -> float:
            words = [tool, "-p", str(port), "-c", str(connections), "-P", str(batch), "-n", str(count)]
            words += ["--csv", "XADD", "bench-0", "*", "tag", tag, "data", data]
            ran = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=120)
            rates = re.findall(r'"([\d.]+)"', ran.stdout.splitlines()[-1]) if ran.stdout else []
            if ran.returncode != 0 or not rates:
                raise CaseFailed(
                    f"{tool} ended with {ran.returncode}: {ran.stdout[-500:]}{ran.stderr[-500:]}"
                )
            return float(rates[0])

        few = rate(max(20_000 if batch == 1 else 100_000, 2 * batch * connections))
        return rate(max(batch * connections, round(few * ground.bench.sizes.seconds)))


def reads(ground: Ground, contender: Contender, *, connections: int) -> Figures:
    each = min(READ_BOX_RECORDS, ground.bench.sizes.diff_box_records)
    if contender.peer == OURS:
        case = Case((Row("rate", "", "records/s"),), rows.diffs, {"connections": connections})
        return {"rate": rows.diffs(ground.bench, case).figures["rate"]}
    names = [f"bench-{number}" for number in range(BOXES)]
    with ground.boxes(contender, names) as wire:
        wire.fill(names, each, RECORD_BYTES)
        result = ground.load(
            contender,
            kind="peer",
            send="read",
            boxes=names,
            box_records=each,
            limit=DIFF_LIMIT,
            connections=connections,
        )
    return {"rate": result["records_per_s"]}


def delivers(ground: Ground, contender: Contender) -> Figures:
    if contender.peer == OURS:
        latencies: Figures = rows.watching(
            ground.bench, Case((Row("watch-1-rate", "", "deliveries/s"),), rows.watching, {"watchers": 1})
        ).detail["latency_ms"]
        return latencies
    with ground.boxes(contender, ["deliver"]):
        if contender.peer == "kafka":
            plan = {"batch": 1, "connections": 1}
            result = ground.load(contender, kind="kafka", send="deliver", boxes=["deliver"], **plan)
        else:
            result = ground.load(contender, kind="deliver", boxes=["deliver"])
    return dict(result["latency_ms"])


def works(ground: Ground, contender: Contender, *, batch: int, connections: int) -> Figures:
    """Claim and ack the jobs of one queue."""
    plan = {"batch": batch, "connections": connections}
    jobs = min(PEER_JOBS, ground.bench.sizes.queue_jobs)
    if contender.peer == OURS:
        durable_plan = {"durability": contender.setting, **plan}
        result = rows.workers(
            ground.bench, Case((Row("rate", "", "jobs/s"),), rows.workers, durable_plan)
        ).detail
    else:
        with ground.boxes(contender, ["jobs"]) as wire:
            begin_jobs(wire, "jobs")
            fill_jobs(wire, "jobs", jobs, RECORD_BYTES)
            result = ground.load(contender, kind="jobs", boxes=["jobs"], **plan)
    return {"rate": result["records_per_s"], **cpu_figures(result)}


@dataclass(frozen=True)
class Workload:
    key: str
    title: str
    #: The figure that is compared; less is better when it is a time.
    figure: str
    measure: Callable[..., Figures]
    plan: dict[str, int]
    without: frozenset[str] = frozenset()
    #: How each contender does it, where that is not obvious.
    note: str = ""

    @property
    def is_time(self) -> bool:
        return self.figure != "rate"

    def is_for(self, contender: Contender) -> bool:
        if contender.tool and (self.measure is not appends or self.is_time):
            return False
        if contender.tool == KAFKA_TOOL and self.plan["batch"] == 1:
            return False  # it puts as many records into a request as it has
        return contender.key not in self.without and contender.peer not in self.without


#: Contenders without queues of jobs.
NO_QUEUE: Final = frozenset({"kafka", "rabbitmq-stream"})

WORKLOADS: Final = (
    Workload(
        "append-1000",
        "Appends, batches of 1000, 16 connections (records/s)",
        "rate",
        appends,
        {"batch": 1000, "connections": 16},
        note="Redis: pipelines of 1000 XADD. JetStream: 1000 publishes, then their acks. RabbitMQ: 1000 "
        "publishes, then their confirms. PostgreSQL: one COPY of 1000 rows into a table with a `json` "
        "column.",
    ),
    Workload(
        "append-1",
        "Single appends, 64 connections (records/s)",
        "rate",
        appends,
        {"batch": 1, "connections": 64},
        note="PostgreSQL: a prepared INSERT.",
    ),
    Workload(
        "append-p50",
        "Single append, 1 connection, p50 (ms)",
        "p50",
        appends,
        {"batch": 1, "connections": 1},
    ),
    Workload(
        "append-p99",
        "Single append, 1 connection, p99 (ms)",
        "p99",
        appends,
        {"batch": 1, "connections": 1},
    ),
    Workload(
        "read-1000",
        "Reads of pages of 1000 from memory, 4 connections (records/s)",
        "rate",
        reads,
        {"connections": 4},
        without=frozenset(
            {
                *("rabbitmq", "kafka", "streams-fsync", "postgresql-on"),
                *("redis-always", "redis-always-c", "valkey-always"),
            }
        ),
        note="streams: diff. Redis: XRANGE. JetStream: a pull consumer without acks. PostgreSQL: SELECT … "
        "WHERE seq > $1 ORDER BY seq LIMIT 1000. RabbitMQ's streams have no pages, and Kafka's client reads "
        "ahead.",
    ),
    Workload(
        "deliver-p50",
        "From an append to a reader that waits, p50 (ms)",
        "p50",
        delivers,
        {},
        without=frozenset(
            {"rabbitmq-stream", "streams-fsync", "redis-always", "valkey-always", "postgresql-on"}
        ),
        note="streams: server-sent events. Redis: XREAD BLOCK. JetStream: a push consumer. RabbitMQ: a "
        "consumer of a quorum queue, which syncs first. PostgreSQL: LISTEN, then SELECT. Kafka: a "
        "consumer of one partition, in the process of the producer.",
    ),
    Workload(
        "deliver-p99",
        "From an append to a reader that waits, p99 (ms)",
        "p99",
        delivers,
        {},
        without=frozenset(
            {"rabbitmq-stream", "streams-fsync", "redis-always", "valkey-always", "postgresql-on"}
        ),
    ),
    *(
        Workload(
            f"jobs-{batch}",
            f"Claim and ack, {batch} job{'s' if batch > 1 else ''} at a time, 16 workers (jobs/s)",
            "rate",
            works,
            {"batch": batch, "connections": 16},
            without=NO_QUEUE,
            note="streams: claim and ack of a queue. Redis: XREADGROUP, then XACK and XDEL. JetStream: a "
            "pull consumer, each ack answered. RabbitMQ: a consumer of a quorum queue with this prefetch; "
            "its acks are not answered. PostgreSQL: SELECT … FOR UPDATE SKIP LOCKED, then DELETE and "
            "COMMIT.",
        )
        for batch in (1, 16)
    ),
    *(
        Workload(
            f"append-{batch}-{who}-cpu",
            f"CPU of the {who} for a million records, {title} (s)",
            f"{who}_cpu",
            appends,
            {"batch": batch, "connections": connections},
            note="Of all processes of a server; of the process that loads it, for the client."
            if batch == 1000 and who == "server"
            else "",
        )
        for batch, connections, title in ((1000, 16, "batches of 1000"), (1, 64, "one by one"))
        for who in ("server", "client")
    ),
)
