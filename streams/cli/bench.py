"""`streams bench`: what this server does for one Python process, from here. `make bench` measures the server
itself."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output
from streams.cli.verbs import MILLIS, ServerTarget, example, server_options

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.client._sync.producer import Producer

_EVENT = {
    "user": 12345,
    "action": "click",
    "page": "/products/tea",
    "session": "a1b2c3d4e5f6",
    "amount": 19.9,
}


@example("streams bench --for 200ms")
@click.command("bench")
@click.option("--for", "for_ms", type=MILLIS, default=3000, help="Duration of each test (default 3s).")
@click.option(
    "--durability",
    type=click.Choice(("memory", "disk", "fsync", "object")),
    default="disk",
    show_default=True,
)
@click.option("--direct", is_flag=True, help="Also test a direct writer (only on the server's machine).")
@server_options
def command(target: ServerTarget, for_ms: int, durability: str, direct: bool) -> None:
    """Measure appends and reads on a temporary box, which is deleted at the end."""
    rows: list[dict[str, Any]] = []
    with target.client(is_patient=True) as client:
        box = client.box(f"bench.{uuid.uuid4().hex[:12]}")
        box.create(durability=durability)  # type: ignore[arg-type]  # click checks the choice
        try:
            rows.append(_run_single_appends(box, for_ms / 1000))
            with box.producer() as producer:
                rows.append(_run_producer("producer, HTTP", producer, for_ms / 1000))
            if direct:
                from streams.direct import ShardWriter

                with (
                    ShardWriter(client.url, key=target.resolve().key or None) as writer,
                    writer.producer(box.name) as producer,
                ):
                    rows.append(_run_producer("producer, direct", producer, for_ms / 1000))
            rows.append(_run_reads(box, for_ms / 1000))
        finally:
            box.drop()
    output.show_rows(("row", "per_s", "p50_ms", "p99_ms"), rows, as_json=target.as_json)


def _run_single_appends(box: Box, seconds: float) -> dict[str, Any]:
    times_ms: list[float] = []
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        box.append(_EVENT, tag="bench")
        times_ms.append((time.perf_counter() - began_s) * 1000)
    times_ms.sort()
    return {
        "row": "append, one by one",
        "per_s": round(len(times_ms) / seconds),
        "p50_ms": round(times_ms[len(times_ms) // 2], 3),
        "p99_ms": round(times_ms[len(times_ms) * 99 // 100], 3),
    }


def _run_producer(row: str, producer: Producer, seconds: float) -> dict[str, Any]:
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() < began_s + seconds:
        for _ in range(1000):
            producer.submit(_EVENT, tag="bench")
        count += 1000
    producer.flush()
    return {"row": row, "per_s": round(count / (time.perf_counter() - began_s))}


def _run_reads(box: Box, seconds: float) -> dict[str, Any]:
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() < began_s + seconds:
        for _ in box.read():
            count += 1
            if count % 1000 == 0 and time.perf_counter() >= began_s + seconds:
                break
    return {"row": "read", "per_s": round(count / (time.perf_counter() - began_s))}
