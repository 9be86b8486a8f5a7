"""Rows of one Python producer process, with our client and with those of Redis and NATS, in one run.

    python -m loadtests.producers http '{"url": …, "box": …, "seconds": 4}'

Each row is a separate process that creates events, passes them to the client and waits for the last ack. All
clients use similar batches, and all servers write to a file that is synced from time to time: our `disk`,
Redis with `appendfsync everysec`, JetStream with its file store. A peer is measured if its server and its
Python client are installed; otherwise the row names the missing one.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from loadtests.rows import ROOT, Bench, Case, CaseFailed, CaseSkipped, Measurement, Row, call

BATCH: Final = 1000
START_S: Final = 20.0


def event(number: int) -> dict[str, Any]:
    """Return an event of about 110 bytes as JSON, as in the other rows."""
    return {
        "user": number % 1000,
        "action": "click",
        "page": "/products/tea",
        "session": "a1b2c3d4e5f6",
        "n": number,
    }


# ---------------------------------------------------------------------------------------------------
# In the producer process


def _measure_rate(seconds: float, produce: Callable[[int], None], finish: Callable[[], None]) -> float:
    """Return events a second, from the first event to the last ack."""
    began = time.perf_counter()
    count = 0
    while time.perf_counter() < began + seconds:
        produce(count)
        count += BATCH
    finish()
    return count / (time.perf_counter() - began)


def through_http(plan: dict[str, Any]) -> float:
    import streams

    with streams.Client(plan["url"]) as client, client.box(plan["box"]).producer() as producer:
        return _submit_rate(plan, producer)


def through_shard(plan: dict[str, Any]) -> float:
    import streams

    with streams.ShardWriter(plan["url"]) as writer, writer.producer(plan["box"]) as producer:
        return _submit_rate(plan, producer)


def _submit_rate(plan: dict[str, Any], producer: Any) -> float:
    def produce(start: int) -> None:
        for number in range(start, start + BATCH):
            producer.submit(event(number), tag="click")

    return _measure_rate(plan["seconds"], produce, producer.flush)


def through_redis(plan: dict[str, Any]) -> float:
    import msgspec
    import redis

    client = redis.Redis(port=plan["port"])

    def produce(start: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for number in range(start, start + BATCH):
            pipeline.xadd("box", {"tag": "click", "data": msgspec.json.encode(event(number))})
        pipeline.execute()

    return _measure_rate(plan["seconds"], produce, lambda: None)


def through_nats(plan: dict[str, Any]) -> float:
    import asyncio

    import msgspec
    import nats

    async def run() -> float:
        connection = await nats.connect(f"nats://127.0.0.1:{plan['port']}")
        stream = connection.jetstream()
        await stream.add_stream(name="box", subjects=["box"])
        began = time.perf_counter()
        count = 0
        while time.perf_counter() < began + plan["seconds"]:
            acks = [
                await stream.publish_async("box", msgspec.json.encode(event(number)))
                for number in range(count, count + BATCH)
            ]
            await asyncio.gather(*acks)
            count += BATCH
        rate = count / (time.perf_counter() - began)
        await connection.close()
        return rate

    return asyncio.run(run())


CLIENTS: Final[dict[str, Callable[[dict[str, Any]], float]]] = {
    "http": through_http,
    "direct": through_shard,
    "redis": through_redis,
    "nats": through_nats,
}


# ---------------------------------------------------------------------------------------------------
# In the benchmark


def _run_producer(case: Case, way: str, plan: dict[str, Any]) -> Measurement:
    command = [sys.executable, "-m", "loadtests.producers", way, json.dumps(plan)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=plan["seconds"] + 120)
    if ran.returncode != 0:
        raise CaseFailed(f"the producer ended with {ran.returncode}: {ran.stderr}")
    return Measurement({case.rows[0].key: round(float(ran.stdout), 1)})


def ours(bench: Bench, case: Case) -> Measurement:
    server = bench.server()
    call(server, "PUT", "/v0/boxes/bench-producer", {"durability": "disk"})
    try:
        plan = {"url": server.url, "box": "bench-producer", "seconds": bench.sizes.seconds}
        return _run_producer(case, case.plan["way"], plan)
    finally:
        call(server, "DELETE", "/v0/boxes/bench-producer")


def peer(bench: Bench, case: Case) -> Measurement:
    program, module = case.plan["program"], case.plan["way"]
    for is_installed, name in (
        (shutil.which(program), program),
        (importlib.util.find_spec(module), f"Python's {module}"),
    ):
        if not is_installed:
            raise CaseSkipped(f"{name} is not installed")
    with _running(bench, case) as port:
        return _run_producer(case, module, {"port": port, "seconds": bench.sizes.seconds})


@contextmanager
def _running(bench: Bench, case: Case) -> Iterator[int]:
    """Run the peer's server on a free port, with its data beside ours."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
    folder = tempfile.mkdtemp(dir=bench.folder)
    words = [word.format(port=port, folder=folder) for word in case.plan["words"]]
    process = subprocess.Popen(
        [case.plan["program"], *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CaseFailed(f"{case.plan['program']} did not start") from None
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(START_S)
        shutil.rmtree(folder, ignore_errors=True)


_REDIS: Final = ("--port", "{port}", "--dir", "{folder}", "--appendonly", "yes", "--appendfsync", "everysec")
_NATS: Final = ("-a", "127.0.0.1", "-p", "{port}", "-js", "-sd", "{folder}")

PRODUCER_CASES: Final[tuple[Case, ...]] = (
    Case(
        (Row("producer-http", "one Python process, producer() over HTTP", "records/s"),),
        ours,
        {"way": "http"},
    ),
    Case(
        (Row("producer-direct", "one Python process, producer() direct", "records/s"),),
        ours,
        {"way": "direct"},
    ),
    Case(
        (Row("producer-redis", "one Python process, redis-py, pipelines of 1000", "records/s"),),
        peer,
        {"way": "redis", "program": "redis-server", "words": _REDIS},
    ),
    Case(
        (Row("producer-nats", "one Python process, nats-py, JetStream, 1000 at once", "records/s"),),
        peer,
        {"way": "nats", "program": "nats-server", "words": _NATS},
    ),
)


if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]](json.loads(sys.argv[2])))
