"""`streams bench`: what this server does for one Python process, from here. `make bench` measures the server
itself."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output
from streams.cli.verbs import MILLIS, ServerTarget, example, server_options

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.client._sync.producer import Producer
    from streams.client._sync.queue import Queue

_EVENT = {
    "user": 12345,
    "action": "click",
    "page": "/products/tea",
    "session": "a1b2c3d4e5f6",
    "amount": 19.9,
}


#: Names of the runs, in their order.
_RUNS = ("append", "producer", "read", "watch", "queue")


@example("streams bench --for 200ms", "streams bench --for 200ms --run append --run queue --rate 100")
@click.command("bench")
@click.option("--for", "for_ms", type=MILLIS, default=3000, help="Duration of each run (default 3s).")
@click.option("--run", "runs", type=click.Choice(_RUNS), multiple=True, help="Only this run; repeatable.")
@click.option("--rate", type=click.IntRange(1), help="At most so many operations per second in each run.")
@click.option(
    "--durability",
    type=click.Choice(("memory", "disk", "fsync", "object")),
    default="disk",
    show_default=True,
)
@click.option("--direct", is_flag=True, help="Also run a direct writer (only on the server's machine).")
@server_options
def command(
    target: ServerTarget, for_ms: int, runs: tuple[str, ...], rate: int | None, durability: str, direct: bool
) -> None:
    """Measure appends, reads, a watch and a queue on temporary boxes, which are deleted at the end.

    One process and one connection, so this is what one client gets. Times are those of one operation: an
    append, a page of a read, from an append to its arrival at a watch, from an append to the ack of its job.
    """
    seconds = for_ms / 1000
    rows: list[dict[str, Any]] = []
    with target.client(is_patient=True) as client, output.screen(as_json=target.as_json) as draw:
        name = f"bench.{uuid.uuid4().hex[:12]}"
        box, queue = client.box(name), client.queue(f"{name}.jobs")
        box.create(durability=durability)  # type: ignore[arg-type]  # click checks the choice
        queue.create(durability=durability)  # type: ignore[arg-type]
        measurements: dict[str, Callable[[], dict[str, Any]]] = {
            "append": lambda: _run_appends(box, seconds, rate),
            "producer": lambda: _run_http_producer(box, seconds, rate),
            "direct": lambda: _run_direct_producer(box, target, client.url, seconds, rate),
            "read": lambda: _run_reads(box, seconds, rate),
            "watch": lambda: _run_watch(box, seconds, rate),
            "queue": lambda: _run_queue(queue, seconds, rate),
        }
        try:
            for run, measure in measurements.items():
                if direct if run == "direct" else not runs or run in runs:
                    rows.append(measure())
                    if output.is_for_people(target.as_json):
                        draw(_COLUMNS, rows)
        finally:
            box.drop()
            queue.drop()
    output.show_rows(_COLUMNS, rows, as_json=target.as_json)


_COLUMNS = ("run", "per_s", "p50_ms", "p90_ms", "p99_ms", "max_ms")


class _Clock:
    """Times operations until the end of a run, no more than `rate` in a second."""

    def __init__(self, seconds: float, rate: int | None) -> None:
        self._began_s = time.perf_counter()
        self._end_s = self._began_s + seconds
        self._rate = rate
        self._count = 0
        self._times_ms: list[float] = []

    def ticks(self, count: int = 1) -> Iterator[None]:
        """Yield once for each operation, of `count` records, and time what the caller does then."""
        while (now_s := time.perf_counter()) < self._end_s:
            if self._rate is not None and (due_s := self._began_s + self._count / self._rate) > now_s:
                time.sleep(min(due_s, self._end_s) - now_s)
                if due_s >= self._end_s:
                    return
            began_s = time.perf_counter()
            yield
            self._times_ms.append((time.perf_counter() - began_s) * 1000)
            self._count += count

    def add(self, count: int) -> None:
        """Count further records of the last operation."""
        self._count += count

    def row(self, run: str) -> dict[str, Any]:
        times_ms = sorted(self._times_ms) or [0.0]
        shares = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}
        percentiles = {
            name: round(times_ms[min(int(len(times_ms) * share), len(times_ms) - 1)], 3)
            for name, share in shares.items()
        }
        return {
            "run": run,
            "per_s": round(self._count / (time.perf_counter() - self._began_s)),
            **percentiles,
        }


def _run_appends(box: Box, seconds: float, rate: int | None) -> dict[str, Any]:
    clock = _Clock(seconds, rate)
    for _ in clock.ticks():
        box.append(_EVENT, tag="bench")
    return clock.row("append")


def _run_http_producer(box: Box, seconds: float, rate: int | None) -> dict[str, Any]:
    with box.producer() as producer:
        return _run_producer("producer", producer, seconds, rate)


def _run_direct_producer(
    box: Box, target: ServerTarget, url: str, seconds: float, rate: int | None
) -> dict[str, Any]:
    from streams.direct import ShardWriter

    with ShardWriter(url, key=target.resolve().key or None) as writer, writer.producer(box.name) as producer:
        return _run_producer("direct", producer, seconds, rate)


def _run_producer(run: str, producer: Producer, seconds: float, rate: int | None) -> dict[str, Any]:
    """Measure submitting. The time of a record is not known: many are in flight."""
    clock = _Clock(seconds, rate)
    size = 1000 if rate is None else max(1, min(1000, rate // 10))
    for _ in clock.ticks(size):
        for _ in range(size):
            producer.submit(_EVENT, tag="bench")
    producer.flush()
    row = clock.row(run)
    return {"run": run, "per_s": row["per_s"]}


def _run_reads(box: Box, seconds: float, rate: int | None) -> dict[str, Any]:
    if box.position().head_seq == 0:
        box.append_batch([_EVENT] * 1000)
    clock, from_seq = _Clock(seconds, rate), 0
    for _ in clock.ticks(0):
        page = box.page(from_seq, limit=1000)
        clock.add(len(page.records))
        from_seq = 0 if page.caught_up else page.next_from_seq
    return clock.row("read")


def _run_watch(box: Box, seconds: float, rate: int | None) -> dict[str, Any]:
    items = iter(box.watch(box.position().head_seq))
    clock = _Clock(seconds, rate)
    for _ in clock.ticks():
        box.append(_EVENT)
        next(items)
    return clock.row("watch")


def _run_queue(queue: Queue, seconds: float, rate: int | None) -> dict[str, Any]:
    clock = _Clock(seconds, rate)
    for _ in clock.ticks():
        queue.append(_EVENT)
        queue.ack(queue.claim(wait_ms=1000))
    return clock.row("queue")
