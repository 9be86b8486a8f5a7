"""Kafka: starts it (KRaft, one process), and loads it with its own tool and with its Python client.

The server and `kafka-producer-perf-test` are the jars of Maven Central; the client is confluent-kafka, which
is written in C. `make peers` fetches both. Each box is a topic with one partition and one replica. A record
is acked with `acks=all`: it is in the page cache of the broker, which leaves syncs to the system, as its
documentation advises.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

from loadtests.generator import SILENCE_S, LoadFailed, Tally
from loadtests.peers.install import FOLDER, find
from loadtests.peers.wires import records

JARS: Final = FOLDER / "kafka"
PACKAGES: Final = FOLDER / "python"
_TIMEOUT_S: Final = 120
#: The heap that Kafka's own start script gives a broker.
_HEAP: Final = ("-Xms1g", "-Xmx1g")
_CLUSTER: Final = "c3RyZWFtcy1iZW5jaC0wMQ"

_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def java(*words: str, heap: tuple[str, ...] = ()) -> list[str]:
    program = find("java")
    assert program is not None, "checked at the start of the server"
    return [program, *heap, "-cp", f"{JARS}/*", *words]


def format_storage(folder: Path, port: int, controller: int) -> list[str]:
    """Write the settings, format the data folder, and return the command that runs the server."""
    settings = folder / "server.properties"
    settings.write_text(_PROPERTIES.format(port=port, controller=controller, folder=folder))
    words = java("kafka.tools.StorageTool", "format", "--standalone", "-t", _CLUSTER, "-c", str(settings))
    process = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=_TIMEOUT_S)
    if process.returncode != 0:
        raise OSError(f"the data folder of Kafka could not be formatted:\n{process.stderr[-1000:]}")
    return java("kafka.Kafka", str(settings), heap=_HEAP)


def client() -> Any:
    """Return the module of the Python client. Raises `ImportError` if it is not installed."""
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    import confluent_kafka.admin  # type: ignore[import-not-found,unused-ignore]

    return confluent_kafka


class Kafka:
    """Creates and removes topics, one for each box."""

    def __init__(self, port: int) -> None:
        self._admin = client().admin.AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})

    def prepare(self, boxes: list[str]) -> None:
        self._finish(self._admin.create_topics([client().admin.NewTopic(box, 1, 1) for box in boxes]))

    def remove(self, boxes: list[str]) -> None:
        self._finish(self._admin.delete_topics(boxes))

    @staticmethod
    def _finish(futures: dict[str, Any]) -> None:
        for future in futures.values():
            try:
                future.result(_TIMEOUT_S)
            except Exception as error:  # whatever the client raises
                raise OSError(f"Kafka refused a topic: {error}") from None


def perf_test(port: int, box: str, count: int, record_bytes: int, batch: int) -> dict[str, float]:
    """Run Kafka's own tool: the rate, and the p99 of its acks while it sends as fast as it can."""
    words = java("org.apache.kafka.tools.ProducerPerformance", "--topic", box, "--num-records", str(count))
    words += ["--throughput", "-1", "--record-size", str(record_bytes)]
    words += ["--bootstrap-server", f"127.0.0.1:{port}", "--command-property", "acks=all"]
    words += [f"batch.size={batch * record_bytes}", "linger.ms=5"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S)
    lines = re.findall(r"sent, ([\d.]+) records/sec", ran.stdout)
    if ran.returncode != 0 or not lines:
        raise OSError(f"kafka-producer-perf-test ended with {ran.returncode}: {ran.stderr[-500:]}")
    return {"rate": float(lines[-1])}


class KafkaLoad:
    """Appends through the Python client: `connections` batches of `batch` records are on their way, or one
    record at a time to a reader that waits (`send` is deliver)."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._tally = Tally(plan)
        self._plan = plan
        self._boxes: list[str] = plan["boxes"]
        self._batch = plan["batch"]
        [(self._tag, data)] = records(0, 1, plan["record_bytes"])
        self._value = f'{{"data":{data},"tag":"{self._tag}"}}'.encode()
        servers = f"127.0.0.1:{plan['port']}"
        self._producer = client().Producer(
            {
                "bootstrap.servers": servers,
                "acks": "all",
                "linger.ms": 5 if self._batch > 1 else 0,
                "batch.num.messages": max(1000, self._batch),
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        self._servers = servers
        self._in_flight = 0

    def run(self) -> dict[str, Any]:
        if self._plan["send"] == "deliver":
            self._deliver()
        else:
            for index in range(self._plan["connections"]):
                self._send(self._boxes[index % len(self._boxes)])
            while self._in_flight:
                if self._producer.poll(SILENCE_S) == 0:
                    raise LoadFailed(f"no answer for {SILENCE_S:.0f} s")
        self._tally.end(monotonic_ns())
        return self._tally.result()

    def _send(self, box: str) -> None:
        """Send one batch, and the next one when all of it is acked."""
        if not self._tally.may_send(self._batch * len(self._value)):
            return
        self._in_flight += 1
        missing, sent_ns = self._batch, monotonic_ns()

        def on_ack(error: Any, message: Any) -> None:
            nonlocal missing
            if error is not None:
                self._tally.add_failure(str(error).encode())
            missing -= 1
            if missing == 0:
                now_ns = monotonic_ns()
                self._tally.add_answer(now_ns, now_ns - sent_ns, self._batch)
                self._in_flight -= 1
                self._send(box)

        for _ in range(self._batch):
            self._producer.produce(box, self._value, on_delivery=on_ack)

    def _deliver(self) -> None:
        kafka, [box] = client(), self._boxes
        reader = kafka.Consumer(
            {"bootstrap.servers": self._servers, "group.id": "bench", "fetch.wait.max.ms": 500}
        )
        reader.assign([kafka.TopicPartition(box, 0, kafka.OFFSET_END)])
        self._wait_for_reader(reader, box)
        while not self._tally.is_over and self._tally.may_send(len(self._value)):
            sent_ns = monotonic_ns()
            self._producer.produce(box, self._value)
            message = reader.poll(SILENCE_S)
            if message is None or message.error() is not None:
                raise LoadFailed("the reader got nothing")
            now_ns = monotonic_ns()
            self._producer.poll(0)
            self._tally.add_answer(now_ns, now_ns - sent_ns, 1)
        reader.close()

    def _wait_for_reader(self, reader: Any, box: str) -> None:
        """Append until the reader gets a record: from then on it is at the end of the topic."""
        self._producer.produce(box, self._value)
        self._producer.flush(SILENCE_S)
        for _ in range(int(SILENCE_S)):
            if reader.poll(1.0) is not None:
                break
            self._producer.produce(box, self._value)
            self._producer.flush(SILENCE_S)
        while reader.poll(0.2) is not None:
            continue
