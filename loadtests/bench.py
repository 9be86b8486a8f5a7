"""`make bench`: starts a server, loads it, and prints its figures beside their floors and aims.

    .venv/bin/python -m loadtests.bench --rows 'single-*' --repeat 3

`loadtests/README.md` explains the figures. The exit code is 0 unless `--check-floors` is set and a figure is
below its floor (1), or a row could not be measured (2).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from loadtests import machine, report
from loadtests import rows as plain
from loadtests.actors import ACTOR_CASES
from loadtests.crowd import CROWD_CASES
from loadtests.producers import PRODUCER_CASES
from loadtests.routing import ROUTER_CASES
from loadtests.rows import ROOT, Bench, Case, CaseFailed, CaseSkipped, Measurement, Row, Sizes
from loadtests.s2sdk import S2_CASES
from loadtests.sealed_reads import SEALED_READ_CASES
from loadtests.spark_rows import SPARK_CASES
from streams.config import SETTINGS
from streams.testing import ServerFailed

SECONDS, SECONDS_QUICK = 4.0, 0.5
MINUTES = 30.0
EXIT_BELOW_FLOOR, EXIT_FAILED = 1, 2

#: In this order. The last one ends the server that the others share.
CASES: tuple[Case, ...] = (
    *plain.CASES[:-1],
    *ACTOR_CASES,
    *CROWD_CASES,
    *SEALED_READ_CASES,
    *ROUTER_CASES,
    *PRODUCER_CASES,
    *S2_CASES,
    *SPARK_CASES,
    plain.CASES[-1],
)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--seconds", type=_seconds, metavar="N", help=f"measured time of each row (default {SECONDS:g})")
    add("--rows", metavar="PATTERN", default="*", help="only rows whose key matches: 'single-*', '!spark-*'")
    add("--repeat", type=_repeats, metavar="K", default=1, help="measure K times, show median and spread")
    add("--minutes", type=float, metavar="N", default=MINUTES, help="begin no row after this time")
    add("--quick", action="store_true", help="tiny sizes: tests the benchmark; the figures mean nothing")
    add("--json", metavar="FILE", type=Path, help="write the run here too (always in build/bench.json)")
    add("--check-floors", action="store_true", help="exit with 1 when a row is below its floor")
    add(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of the server; repeatable"
    )
    add(
        "--data-dir",
        metavar="DIR",
        type=Path,
        default=ROOT / "build",
        help="where data goes (default ./build)",
    )
    add("--list", action="store_true", help="list the rows and end")
    parsed_arguments = parser.parse_args(argv)
    parsed_arguments.seconds = parsed_arguments.seconds or (
        SECONDS_QUICK if parsed_arguments.quick else SECONDS
    )
    try:
        parsed_arguments.settings = dict(setting_of(text) for text in parsed_arguments.set)
    except ValueError as error:
        parser.error(str(error))
    parsed_arguments.cases = [
        case for case in CASES if any(_matches(row, parsed_arguments.rows) for row in case.rows)
    ]
    if not parsed_arguments.cases:
        parser.error(f"no row matches {parsed_arguments.rows!r}; see --list")
    return parsed_arguments


def _matches(row: Row, pattern: str) -> bool:
    """Return True if the pattern selects a row. `!spark-*` selects all others."""
    if pattern.startswith("!"):
        return not fnmatch(row.key, pattern[1:])
    return fnmatch(row.key, pattern)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 300:
        raise argparse.ArgumentTypeError("must be from 0.05 to 300")
    return value


def _repeats(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError("must be from 1 to 100")
    return value


def setting_of(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in {setting.name for setting in SETTINGS}:
        raise ValueError(f"--set {text}: must be NAME=VALUE with a name that `streams config` lists")
    return name, value


def measure(bench: Bench, case: Case, repeat: int) -> tuple[list[Measurement], str, str]:
    """Return the measurements of a case, the error if it failed, and the reason if it was skipped."""
    measurements: list[Measurement] = []
    looked_at_s = 0.01 if bench.sizes.is_quick else 0.1
    try:
        for _ in range(repeat):
            before = machine.speed(looked_at_s)
            measurement = case.measure(bench, case)
            measurement.detail["speed"] = round((before + machine.speed(looked_at_s)) / 2, 2)
            if case.plan.get("durability") == "fsync":
                measurement.detail["sync_ms"] = machine.sync_ms(bench.folder)
            measurements.append(measurement)
    except CaseSkipped as reason:
        return [], "", str(reason)
    except (CaseFailed, ServerFailed, OSError) as error:
        bench.close(well=False)
        return measurements, str(error), ""
    return measurements, "", ""


def summary(row: Row, measurements: list[Measurement], error: str, skip_reason: str = "") -> dict[str, Any]:
    """Return one row of the result."""
    figures = [each.figures[row.key] for each in measurements]
    figure = statistics.median(figures) if figures else None
    return {
        "key": row.key,
        "title": row.title,
        "unit": row.unit,
        "better": "less" if row.less_is_better else "more",
        "figure": figure,
        "spread": [min(figures), max(figures)] if len(figures) > 1 else None,
        "floor": row.floor,
        "aim": row.aim,
        "meets_floor": None if figure is None else row.meets(row.floor, figure),
        "meets_aim": None if figure is None else row.meets(row.aim, figure),
        "error": error,
        "skipped": skip_reason,
        "speed": statistics.median([each.detail["speed"] for each in measurements]) if measurements else None,
        "sync_ms": _median_of(measurements, "sync_ms"),
        "latency_ms": _median_of(measurements, "latency_ms", "p50"),
        "detail": [each.detail for each in measurements],
    }


def _median_of(measurements: list[Measurement], *path: str) -> float | None:
    """Return the median of one number in the details of a case; None if it has none there."""
    numbers: list[float] = []
    for measurement in measurements:
        found: Any = measurement.detail
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            numbers.append(found)
    return statistics.median(numbers) if numbers else None


def progress_line(rows: list[dict[str, Any]]) -> str:
    """Return the line of progress: figures, and the cores that each kind of process used."""
    if rows[0]["skipped"]:
        return f"skipped: {rows[0]['skipped']}"
    texts = [f"{report.number(row['figure']) or 'failed'} {row['unit']}" for row in rows]
    if rows[0]["error"]:
        return f"{', '.join(texts)} ({rows[0]['error'].strip().splitlines()[-1]})"
    cores = rows[0]["detail"][-1].get("cores", {})
    speed = f", speed {rows[0]['detail'][-1]['speed']:.2f}"
    return (
        ", ".join(texts) + "".join(f", {name} {cores_used:.2f}" for name, cores_used in cores.items()) + speed
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    arguments.data_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.data_dir.absolute()))
    began = time.monotonic()
    facts = machine.facts(folder)
    warnings = machine.warnings_of(facts)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    sizes = Sizes.quick(arguments.seconds) if arguments.quick else Sizes(arguments.seconds)
    bench = Bench(sizes, arguments.settings, folder)
    rows: list[dict[str, Any]] = []
    try:
        with report.progress(len(arguments.cases)) as progress:
            for case in arguments.cases:
                selected_rows = [row for row in case.rows if _matches(row, arguments.rows)]
                progress.begin(case.rows[0].title)
                if time.monotonic() - began < 60 * arguments.minutes:
                    measurements, error, skip_reason = measure(bench, case, arguments.repeat)
                else:
                    reason = f"the run has taken {arguments.minutes:g} minutes"
                    measurements, error, skip_reason = [], "", reason
                new_rows = [summary(row, measurements, error, skip_reason) for row in selected_rows]
                rows += new_rows
                progress.end(progress_line(new_rows))
        bench.close()
    finally:
        bench.close(well=False)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "version": 1,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "took_s": round(time.monotonic() - began, 1),
        "seconds": arguments.seconds,
        "repeat": arguments.repeat,
        "quick": arguments.quick,
        "settings": arguments.settings,
        "machine": facts | {"load_average_after": [round(each, 2) for each in os.getloadavg()]},
        "warnings": warnings,
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    parsed_arguments = arguments(argv)
    if parsed_arguments.list:
        for row in (row for case in CASES for row in case.rows):
            print(f"{row.key:24}{row.title}")
        return 0
    result = run(parsed_arguments)
    text = json.dumps(result, indent=1) + "\n"
    (ROOT / "build").mkdir(exist_ok=True)
    for path in filter(None, (ROOT / "build" / "bench.json", parsed_arguments.json)):
        path.write_text(text)
    report.show(result)
    if any(row["error"] for row in result["rows"]):
        return EXIT_FAILED
    below = [row["key"] for row in result["rows"] if row["meets_floor"] is False]
    if parsed_arguments.check_floors and below:
        print(f"below their floor: {', '.join(below)}", file=sys.stderr)
        return EXIT_BELOW_FLOOR
    return 0


if __name__ == "__main__":
    sys.exit(main())
