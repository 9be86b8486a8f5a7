"""Rows of the S2 API with the official Python SDK, in a separate process.

    python -m loadtests.s2sdk session '{"url": …, "seconds": 4}'

The SDK is pure Python, so these rows measure it as much as the server. Records have a body of 100 bytes, or
100 KB in the rows of large records.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from loadtests.rows import ROOT, Bench, Case, CaseFailed, CaseSkipped, Measurement, Row

SMALL, LARGE = 100, 100_000
BASIN: Final = "bench-s2-basin"
#: Batches in flight.
IN_FLIGHT: Final = 32
#: Bytes that S2 clients of other languages have in flight, in batches of up to 1 MiB.
FRAME_BYTES_IN_FLIGHT: Final = 5 * 2**20
#: Rows without the SDK: `s2frames.py`.
FRAMES: Final = "frames"


async def _session(stream: Any, seconds: float, size: int, count: int) -> tuple[float, int]:
    """Append for some seconds. Return seconds from the first input to the last ack, and records."""
    from s2_sdk import AppendInput, Record

    append_input = AppendInput(records=[Record(body=b"x" * size)] * count)
    began = time.perf_counter()
    records = 0
    async with stream.append_session(max_unacked_batches=IN_FLIGHT) as session:
        tickets = []
        while time.perf_counter() < began + seconds:
            tickets.append(await session.submit(append_input))
            records += count
        for ticket in tickets:
            await ticket
    return time.perf_counter() - began, records


async def _read(stream: Any) -> tuple[float, int, int]:
    """Read all records. Return seconds, records and bytes."""
    from s2_sdk import SeqNum

    began = time.perf_counter()
    records = size = 0
    async for batch in stream.read_session(start=SeqNum(0), wait=0):
        records += len(batch.records)
        size += sum(len(record.body) for record in batch.records)
    return time.perf_counter() - began, records, size


async def sessions(stream: Any, plan: dict[str, Any]) -> dict[str, float]:
    size, count = plan["size"], plan["count"]
    append_s, records = await _session(stream, plan["seconds"], size, count)
    read_s, read_records, read_bytes = await _read(stream)
    assert read_records == records, "a read session gets all that was acked"
    return {
        "append-records": records / append_s,
        "append-mb": records * size / append_s / 1e6,
        "read-records": read_records / read_s,
        "read-mb": read_bytes / read_s / 1e6,
    }


async def unary(stream: Any, plan: dict[str, Any]) -> dict[str, float]:
    from s2_sdk import AppendInput, Record

    append_input = AppendInput(records=[Record(body=b"x" * SMALL)])
    took_ms: list[float] = []
    until = time.perf_counter() + plan["seconds"]
    while time.perf_counter() < until or len(took_ms) < 10:
        began = time.perf_counter()
        await stream.append(append_input)
        took_ms.append(1000 * (time.perf_counter() - began))
    return {"p50": statistics.median(took_ms), "p99": statistics.quantiles(took_ms, n=100)[98]}


MEASUREMENTS: Final[dict[str, Callable[[Any, dict[str, Any]], Awaitable[dict[str, float]]]]] = {
    "sessions": sessions,
    "unary": unary,
}


async def _main(way: str, plan: dict[str, Any]) -> dict[str, float]:
    from s2_sdk import S2, Endpoints

    url, name = plan["url"], f"{way}-{time.time_ns()}"
    async with S2("ignored", endpoints=Endpoints(account=url, basin=url)) as s2:
        await s2.ensure_basin(BASIN)
        basin = s2.basin(BASIN)
        await basin.create_stream(name)
        try:
            return await MEASUREMENTS[way](basin.stream(name), plan)
        finally:
            await basin.delete_stream(name)


# ---------------------------------------------------------------------------------------------------
# In the benchmark


def through_sdk(bench: Bench, case: Case) -> Measurement:
    if importlib.util.find_spec("s2_sdk") is None:
        raise CaseSkipped("Python's s2-sdk is not installed")
    return _run_client(bench, case, ["loadtests.s2sdk", case.plan["way"]])


def frame_by_frame(bench: Bench, case: Case) -> Measurement:
    return _run_client(bench, case, ["loadtests.s2frames"])


def _run_client(bench: Bench, case: Case, module: list[str]) -> Measurement:
    plan = {"url": bench.server().url, "seconds": bench.sizes.seconds, **case.plan}
    command = [sys.executable, "-m", *module, json.dumps(plan)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=plan["seconds"] + 120)
    if ran.returncode != 0:
        raise CaseFailed(f"the client ended with {ran.returncode}: {ran.stderr}")
    figures = json.loads(ran.stdout)
    names: dict[str, str] = case.plan["figures"]
    return Measurement({row.key: round(figures[names[row.key]], 2) for row in case.rows})


def _case(way: str, rows: list[tuple[Row, str]], **plan: Any) -> Case:
    return Case(
        tuple(row for row, _ in rows),
        frame_by_frame if way == FRAMES else through_sdk,
        {"way": way, "figures": {row.key: figure for row, figure in rows}, **plan},
    )


S2_CASES: Final[tuple[Case, ...]] = (
    _case(
        "unary",
        [
            (Row("s2-append-p50", "S2 SDK, one append of 100 B, p50", "ms", less_is_better=True), "p50"),
            (Row("s2-append-p99", "S2 SDK, one append of 100 B, p99", "ms", less_is_better=True), "p99"),
        ],
    ),
    _case(
        "sessions",
        [
            (Row("s2-append-session", "S2 SDK, append session, 100 B", "records/s"), "append-records"),
            (Row("s2-read-session", "S2 SDK, read session, 100 B", "records/s"), "read-records"),
        ],
        size=SMALL,
        count=500,
    ),
    _case(
        "sessions",
        [
            (Row("s2-append-session-mb", "S2 SDK, append session, 100 KB", "MB/s"), "append-mb"),
            (Row("s2-read-session-mb", "S2 SDK, read session, 100 KB", "MB/s"), "read-mb"),
        ],
        size=LARGE,
        count=8,
    ),
    _case(
        FRAMES,
        [
            (
                Row("s2-append-frames", "S2 append session, s2s frames, 100 B", "records/s"),
                "append-records",
            ),
            (Row("s2-read-frames", "S2 read session, s2s frames, 100 B", "records/s"), "read-records"),
        ],
        size=SMALL,
        count=500,
        in_flight=IN_FLIGHT,
    ),
    *(
        _case(
            FRAMES,
            [
                (
                    Row(f"s2-append-frames-{key}", f"S2 append session, s2s frames, {title}", "MiB/s"),
                    "append-mib",
                ),
                (Row(f"s2-read-frames-{key}", f"S2 read session, s2s frames, {title}", "MiB/s"), "read-mib"),
            ],
            size=size,
            count=count,
            in_flight=FRAME_BYTES_IN_FLIGHT // (size * count),
        )
        for key, title, size, count in (("1k", "1 KiB", 1024, 100), ("64k", "64 KiB", 65_536, 15))
    ),
    _case(
        FRAMES,
        [
            (
                Row(
                    "s2-ack-p50", "S2 append session at 10 MiB/s of 1 KiB, ack p50", "ms", less_is_better=True
                ),
                "p50",
            ),
            (
                Row(
                    "s2-ack-p99", "S2 append session at 10 MiB/s of 1 KiB, ack p99", "ms", less_is_better=True
                ),
                "p99",
            ),
        ],
        size=1024,
        count=51,
        in_flight=100,
        mib_per_s=10,
    ),
)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))))
