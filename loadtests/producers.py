"""Rows of one Python process that produces, through our client and through those of Redis and NATS, in the
same run.

    python -m loadtests.producers http '{"url": …, "box": …, "seconds": 4}'

Each row is a process of its own that makes an event after another, hands it to the client and waits for the
last ack. All clients send about as much at once, and all servers keep it in a file that is synced now and
then: our `disk`, Redis with `appendfsync everysec`, JetStream with its file store. The peers are measured
when their server and their Python client are installed; otherwise the row says what is missing.
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

from loadtests.rows import ROOT, Bench, Case, CaseFailed, CaseSkipped, Measured, Row, call

BATCH: Final = 1000
START_S: Final = 20.0


def event(number: int) -> dict[str, Any]:
    """About 110 bytes as JSON, as in the other rows."""
    return {
        "user": number % 1000,
        "action": "click",
        "page": "/products/tea",
        "session": "a1b2c3d4e5f6",
        "n": number,
    }


# ---------------------------------------------------------------------------------------------------
# In the process that produces


def _timed(seconds: float, produce: Callable[[int], None], finish: Callable[[], None]) -> float:
    """Events a second, from the first to the last ack."""
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
        return _submitted(plan, producer)


def through_shard(plan: dict[str, Any]) -> float:
    import streams

    with streams.ShardWriter(plan["url"]) as writer, writer.producer(plan["box"]) as producer:
        return _submitted(plan, producer)


def _submitted(plan: dict[str, Any], producer: Any) -> float:
    def produce(start: int) -> None:
        for number in range(start, start + BATCH):
            producer.submit(event(number), tag="click")

    return _timed(plan["seconds"], produce, producer.flush)


def through_redis(plan: dict[str, Any]) -> float:
    import msgspec
    import redis

    client = redis.Redis(port=plan["port"])

    def produce(start: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for number in range(start, start + BATCH):
            pipeline.xadd("box", {"tag": "click", "data": msgspec.json.encode(event(number))})
        pipeline.execute()

    return _timed(plan["seconds"], produce, lambda: None)


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


WAYS: Final[dict[str, Callable[[dict[str, Any]], float]]] = {
    "http": through_http,
    "direct": through_shard,
    "redis": through_redis,
    "nats": through_nats,
}


# ---------------------------------------------------------------------------------------------------
# In the benchmark


def _measured(case: Case, way: str, plan: dict[str, Any]) -> Measured:
    command = [sys.executable, "-m", "loadtests.producers", way, json.dumps(plan)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=plan["seconds"] + 120)
    if ran.returncode != 0:
        raise CaseFailed(f"the producer ended with {ran.returncode}: {ran.stderr}")
    return Measured({case.rows[0].key: round(float(ran.stdout), 1)})


def ours(bench: Bench, case: Case) -> Measured:
    server = bench.server()
    call(server, "PUT", "/v0/boxes/bench-producer", {"durability": "disk"})
    try:
        plan = {"url": server.url, "box": "bench-producer", "seconds": bench.sizes.seconds}
        return _measured(case, case.plan["way"], plan)
    finally:
        call(server, "DELETE", "/v0/boxes/bench-producer")


def peer(bench: Bench, case: Case) -> Measured:
    program, module = case.plan["program"], case.plan["way"]
    for found, what in (
        (shutil.which(program), program),
        (importlib.util.find_spec(module), f"Python's {module}"),
    ):
        if not found:
            raise CaseSkipped(f"{what} is not installed")
    with _running(bench, case) as port:
        return _measured(case, module, {"port": port, "seconds": bench.sizes.seconds})


@contextmanager
def _running(bench: Bench, case: Case) -> Iterator[int]:
    """The peer's server on a free port, with its data where ours is."""
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
    print(WAYS[sys.argv[1]](json.loads(sys.argv[2])))
