"""Measures what a record costs each process, and computes what machines with more cores can take.

    .venv/bin/python -m loadtests.scaling      # a minute; prints tables for docs/explanation/scale.md

For each batch size the server gets as much as it can take, and the CPU time of its processes is divided by
the records. Shards are pinned to cores of their own, first one and then two. The arithmetic assumes one core
for each process, so a rate is the least of what the gateways and what the shards can take.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from loadtests import machine
from loadtests.rows import ROOT, Bench, Case, Row, Sizes, appends
from streams.testing import Server

#: Records of a request, and the connections that send them.
LOADS: Final = ((1, 64), (10, 32), (100, 16), (1000, 16))
CORES: Final = (4, 8, 16, 64)
#: The part of a core that a process may use and still answer quickly.
BUSY_PART: Final = 0.8


def pin(pid: int, core: int) -> None:
    """Run all threads of a process on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def pin_shards(server: Server) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for number, (_, pid) in enumerate(sorted(server.shard_pids().items())):
        pin(pid, cores[-1 - number % len(cores)])


def measure(shards: int, seconds: float, rounds: int, folder: Path) -> dict[int, dict[str, float]]:
    """Return by batch size: records a second, and the least CPU time of each process for a record in µs."""
    bench = Bench(Sizes(seconds), {"shards": str(shards)}, folder)
    found: dict[int, dict[str, float]] = {}
    try:
        for batch, connections in LOADS:
            plan = {"durability": "disk", "batch": batch, "connections": connections}
            pin_shards(bench.server())
            results: list[dict[str, Any]] = [
                appends(bench, Case((Row("rate", "", "records/s"),), appends, plan)).detail
                for _ in range(rounds)
            ]
            found[batch] = {"rate": max(result["records_per_s"] for result in results)} | {
                name: min(result["cpu_us_per_request"][name] / batch for result in results)
                for name in ("gateway", "shard", "generator")
            }
            print(f"{shards} shards, batches of {batch}: {found[batch]}", file=sys.stderr)
        bench.close()
    finally:
        bench.close(well=False)
    return found


def split(cores: int, gateway_us: float, shard_us: float) -> tuple[int, float]:
    """Return the number of gateways that allows the highest rate on so many cores, and this rate."""

    def rate(gateways: int) -> float:
        return BUSY_PART * 1e6 * min(gateways / gateway_us, (cores - gateways) / shard_us)

    best = max(range(1, cores), key=rate)
    return best, rate(best)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def report(by_shards: dict[int, dict[int, dict[str, float]]]) -> str:
    lines = [
        "| records a request | gateway, µs | shard, µs | load generator, µs | 1 shard, records/s | 2 shards |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for batch, _ in LOADS:
        one, two = by_shards[1][batch], by_shards[2][batch]
        costs = (min(one[name], two[name]) for name in ("gateway", "shard", "generator"))
        rates = (number(one["rate"]), number(two["rate"]))
        lines.append(f"| {batch:,} | {' | '.join([*map(number, costs), *rates])} |")
    lines += ["", "| cores | " + " | ".join(f"batches of {batch:,}" for batch, _ in LOADS) + " |"]
    lines.append("|---|" + "---|" * len(LOADS))
    for cores in CORES:
        cells = []
        for batch, _ in LOADS:
            least = [min(by_shards[each][batch][name] for each in (1, 2)) for name in ("gateway", "shard")]
            gateways, rate = split(cores, *least)
            cells.append(f"{rate / 1e6:.2f} M/s, {gateways} + {cores - gateways}")
        lines.append(f"| {cores} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.scaling")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="N", help="measured time of each load")
    parser.add_argument("--rounds", type=int, default=2, metavar="K", help="the least of K counts")
    arguments = parser.parse_args(argv)
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="scaling-", dir=ROOT / "build"))
    try:
        facts = machine.facts(folder)
        for warning in machine.warnings_of(facts):
            print(f"warning: {warning}", file=sys.stderr)
        by_shards = {
            shards: measure(shards, arguments.seconds, arguments.rounds, folder) for shards in (1, 2)
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{facts['cores']} cores ({facts['cpu']}), speed {facts['speed']:.2f}\n\n{report(by_shards)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
