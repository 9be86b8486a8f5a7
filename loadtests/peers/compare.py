"""`make compare`: measures us and our peers in turns, and writes docs/reference/benchmarks.md with its plots.

    .venv/bin/python -m loadtests.peers.compare --rounds 9

In turns: a round measures every workload with every contender, one after the other, and then our own aims;
and there are several rounds. A machine that gets slower for a minute slows all of them. A ratio is the median
of the ratios of the rounds, so both of its sides were measured within the same minutes. All servers are new
in each round, for some of what differs between two runs differs between two starts. What is not installed is
left out, with a line. In the end it is told whether the run agrees with the one before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from loadtests import bench as benching
from loadtests import machine
from loadtests.peers import page
from loadtests.peers.measuring import CONTENDERS, OURS, WORKLOADS, Contender, Ground, Workload
from loadtests.peers.servers import SERVERS, NotInstalled, Running, running_peer
from loadtests.rows import ROOT, Bench, CaseFailed, Measured, Sizes
from streams.testing import ServerFailed

ROUNDS, SECONDS = 5, 1.2
#: The spread of a figure says where another run is expected. A few rounds rarely show how far a machine goes,
#: so it is the factor between the median and the farthest of them to this power, and this much at the least.
#: Chosen by two runs, so that each is where the other expects it; a third then was where both expected it.
#: The range of the rounds themselves was kept by nine ratios of ten.
STRETCH, FACTOR_MIN = 1.5, 1.25
#: Rows of `make bench` that have an aim, and are measured in the same run.
AIMS: Final = (
    *("append-1000-disk", "append-1000-fsync", "append-100-disk", "single-64-disk", "single-64-fsync"),
    *(
        "single-1-disk-p50",
        "single-1-disk-p99",
        "single-1-fsync-p50",
        "diff-1000",
        "watch-1-p50",
        "watch-1-p99",
    ),
    *("watch-100-p50", "direct-1000", "direct-columns-5000", "ram-per-record", "replay"),
)
#: Those that fill a server with millions of records are measured once.
ONCE: Final = frozenset({"ram-per-record", "replay"})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.peers.compare", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--rounds", type=int, default=ROUNDS, metavar="K", help="how often everything is measured")
    add("--seconds", type=float, default=SECONDS, metavar="N", help="measured time of each")
    add("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast anything is")
    add("--only", default="", metavar="NAMES", help="peers, by commas: redis,nats")
    add("--workloads", default="*", metavar="PATTERN", help="only these, and our own aims not at all")
    add("--out", type=Path, default=ROOT / "docs" / "reference", metavar="DIR", help="where the page goes")
    add(
        "--data-dir",
        type=Path,
        default=ROOT / "build",
        metavar="DIR",
        help="where data goes, and compare.json",
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(ground: Ground, workload: Workload, contender: Contender) -> dict[str, float] | None:
    try:
        return workload.measure(ground, contender, **workload.plan)
    except NotInstalled as missing:
        say(f"  skipped: {missing}")
    except (CaseFailed, ServerFailed, OSError) as error:
        say(f"  {contender.title}, {workload.title}: failed: {error}")
    return None


#: By workload and contender, one a round; none where it failed.
Found = dict[str, dict[str, list[float | None]]]


class Peers:
    """Those that are installed, started anew for each round."""

    def __init__(self, only: str, folder: Path) -> None:
        self._names = [name for name in SERVERS if not only or name in only.split(",")]
        self._folder = folder
        self.skipped: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    @contextmanager
    def running(self) -> Iterator[dict[str, Running]]:
        found: dict[str, Running] = {}
        with ExitStack() as stack:
            for name in [each for each in self._names if each not in self.skipped]:
                try:
                    found[name] = stack.enter_context(running_peer(name, self._folder))
                    self.versions[name] = found[name].version
                except (NotInstalled, OSError) as error:
                    since = ", after some rounds" if name in self.versions else ""
                    self.skipped[name] = str(error).splitlines()[0] + since
                    say(f"skipped: {self.skipped[name]}")
            yield found


def one_round(ground: Ground, at: str, pattern: str, found: Found) -> None:
    """Adds a figure to each. Workloads that differ only in the figure share one measurement."""
    taking_part = [each for each in CONTENDERS if each.peer == OURS or each.peer in ground.peers]
    shared: dict[Any, dict[str, float] | None] = {}
    for workload in (each for each in WORKLOADS if fnmatch(each.key, pattern)):
        for contender in filter(workload.is_for, taking_part):
            same = (workload.measure, *workload.plan.items(), contender.key)
            if same not in shared:
                shared[same] = measured(ground, workload, contender)
            figure = (shared[same] or {}).get(workload.figure)
            found[workload.key].setdefault(contender.key, []).append(figure)
            if figure is not None:
                say(f"[{at}] {workload.title}: {contender.title}: {page.number(figure)}")


class Aims:
    """Our own rows, beside their floors and aims."""

    def __init__(self) -> None:
        self._cases = [case for case in benching.CASES if any(row.key in AIMS for row in case.rows)]
        self._found: list[list[Measured]] = [[] for _ in self._cases]
        self._errors = [""] * len(self._cases)
        self._skipped = [""] * len(self._cases)

    def measure(self, bench: Bench, at: str) -> None:
        for number, case in enumerate(self._cases):
            if self._found[number] and ONCE.intersection(row.key for row in case.rows):
                continue
            figures, error, self._skipped[number] = benching.measure(bench, case, 1)
            self._found[number] += figures
            self._errors[number] = error
            say(f"[{at}] {case.rows[0].title}: {benching.shown_briefly(self._rows(number))}")

    def _rows(self, number: int) -> list[dict[str, Any]]:
        found, error, skipped = self._found[number], self._errors[number], self._skipped[number]
        wanted = [row for row in self._cases[number].rows if row.key in AIMS]
        rows_ = [benching.summary(row, found, error, skipped) for row in wanted]
        for row in rows_:
            row["spread"] = spread_of([each.figures[row["key"]] for each in found]) or None
        return rows_

    def rows(self) -> list[dict[str, Any]]:
        return [row for number in range(len(self._cases)) for row in self._rows(number)]


def spread_of(figures: list[float]) -> list[float]:
    """Where the median of another run is expected."""
    if len(figures) < 2:
        return []
    middle = statistics.median(figures)
    farthest = max(max(figures) / middle, middle / min(figures))
    factor = max(FACTOR_MIN, farthest**STRETCH)
    return [middle / factor, middle * factor]


def summary(found: Found) -> dict[str, Any]:
    """Median and spread of each, and its ratio to ours: above 1 we are better, whatever is measured."""
    out: dict[str, Any] = {}
    for workload in WORKLOADS:
        rows_ = out[workload.key] = {}
        of_ours = {
            each.promise: found[workload.key].get(each.key) for each in CONTENDERS if each.peer == OURS
        }
        for contender in CONTENDERS:
            all_figures = found[workload.key].get(contender.key, [])
            figures = [each for each in all_figures if each is not None]
            if not figures:
                continue
            ours = of_ours[contender.promise] or of_ours["disk"]
            ratios = [
                theirs / mine if workload.is_time else mine / theirs
                for mine, theirs in zip(ours or [], all_figures, strict=False)  # it may have stayed away
                if mine is not None and theirs is not None and contender.peer != OURS
            ]
            rows_[contender.key] = {
                "rounds": len(figures),
                "median": statistics.median(figures),
                "spread": spread_of(figures),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratio_spread": spread_of(ratios),
            }
    return out


def agreement(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any] | None:
    """How this run repeats the one before: of its ratios, how many lie where that one expected them. None
    when that was not the same measurement."""
    same = ("rounds", "seconds", "quick", "versions")
    hardware = ("cores", "cpu", "kernel", "python")
    if before is None or any(now[each] != before.get(each) for each in same):
        return None
    if any(now["machine"][each] != before["machine"].get(each) for each in hardware):
        return None
    compared, outside = 0, []
    for workload in WORKLOADS:
        for contender in CONTENDERS:
            row = now["summary"][workload.key].get(contender.key, {})
            expected = before["summary"].get(workload.key, {}).get(contender.key, {}).get("ratio_spread")
            if row.get("ratio") is None or not expected:
                continue
            compared += 1
            if not expected[0] <= row["ratio"] <= expected[1]:
                outside.append(
                    {
                        "workload": workload.title,
                        "contender": contender.title,
                        "expected": expected,
                        "ratio": row["ratio"],
                    }
                )
    return {"compared": compared, "outside": outside} if compared else None


def run(asked: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    asked.data_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compare-", dir=asked.data_dir.absolute()))
    sizes = Sizes.quick(asked.seconds) if asked.quick else Sizes(asked.seconds)
    facts = machine.facts(folder)
    for warning in machine.warnings_of(facts):
        say(f"warning: {warning}")
    ground = Ground(Bench(sizes, {}, folder))
    peers, own = Peers(asked.only, folder), Aims()
    found: Found = {each.key: {} for each in WORKLOADS}
    try:
        for number in range(1, asked.rounds + 1):
            at = f"{number}/{asked.rounds}"
            with peers.running() as ground.peers:
                one_round(ground, at, asked.workloads, found)
            ground.bench.close()
            if asked.workloads == "*":
                own.measure(ground.bench, at)
                ground.bench.close()
    finally:
        ground.bench.close(well=False)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "at": time.strftime("%Y-%m-%d", time.gmtime()),
        "took_s": round(time.monotonic() - began),
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        "stretch": STRETCH,
        "factor_min": FACTOR_MIN,
        "quick": asked.quick,
        "machine": facts,
        "versions": peers.versions,
        "skipped": peers.skipped,
        "figures": found,
        "summary": summary(found),
        "aims": own.rows() if asked.workloads == "*" else [],
    }


def read_before(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv)
    kept = asked.data_dir / "compare.json"
    before = read_before(kept)
    result = run(asked)
    result["agreement"] = agreed = agreement(result, before)
    asked.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(result, indent=1) + "\n")
    page.plots(result, asked.out / "benchmarks")
    (asked.out / "benchmarks.md").write_text(page.text(result))
    if agreed is not None:
        for each in agreed["outside"]:
            low, high = each["expected"]
            say(
                f"{each['workload']}: {each['contender']}: {each['ratio']:.2f}, and the run before expected "
                f"{low:.2f} to {high:.2f}"
            )
        inside = agreed["compared"] - len(agreed["outside"])
        say(f"{inside} of {agreed['compared']} ratios are where the run before expected them")
    say(f"{asked.out / 'benchmarks.md'}, in {result['took_s']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
