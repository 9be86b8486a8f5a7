"""`make compare`: measures streams and its peers, and writes docs/reference/benchmarks.md with its plots.

    .venv/bin/python -m loadtests.peers.compare --rounds 9

A round measures every workload with every contender, one after the other, and then our own aims. There are
several rounds. If the machine is slower for a minute, it is slower for all. A ratio is the median of the
ratios of the rounds, so both of its sides were measured within the same minutes. All servers are restarted
for each round, because figures differ between starts. Peers that are not installed are skipped with a
message. At the end it reports whether this run agrees with the previous one.
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
from loadtests.rows import ROOT, Bench, CaseFailed, Measurement, Sizes
from streams.testing import ServerFailed

ROUNDS, SECONDS, MINUTES = 5, 1.2, 45.0
#: The spread of a figure predicts the next run. A few rounds rarely show the full variation of a machine, so
#: the spread is the factor between the median and the farthest round to the power of `STRETCH`, and at least
#: `FACTOR_MIN`. Two runs set both, so that each run predicts the other; a third run confirmed them. With the
#: plain range of the rounds, nine of ten ratios would agree.
STRETCH, FACTOR_MIN = 1.5, 1.25
#: Rows of `make bench` with an aim, measured in the same run.
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
    *("watch-100-p50", "router-local-hop-disk-p50", "router-hop-disk-p50", "work-1-disk", "work-16-disk"),
    *("sealed-read-cold-cache", "sealed-read-warm"),
    *("direct-1000", "direct-columns-5000", "ram-per-record", "replay"),
)
#: Rows that fill a server with millions of records: measured once.
ONCE: Final = frozenset({"ram-per-record", "replay", "sealed-read-cold-cache", "sealed-read-warm"})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.peers.compare", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--rounds", type=int, default=ROUNDS, metavar="K", help="number of rounds")
    add("--seconds", type=float, default=SECONDS, metavar="N", help="measured time of each workload")
    add(
        "--minutes", type=float, default=MINUTES, metavar="N", help="begin no round that would end after this"
    )
    add("--quick", action="store_true", help="tiny sizes: tests the comparison; the figures mean nothing")
    add("--only", default="", metavar="NAMES", help="only these peers, comma-separated: redis,nats")
    add("--workloads", default="*", metavar="PATTERN", help="only workloads that match, without our own aims")
    add("--out", type=Path, default=ROOT / "docs" / "reference", metavar="DIR", help="folder for the page")
    add(
        "--data-dir",
        type=Path,
        default=ROOT / "build",
        metavar="DIR",
        help="folder for data and compare.json",
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_contender(ground: Ground, workload: Workload, contender: Contender) -> dict[str, float] | None:
    try:
        return workload.measure(ground, contender, **workload.plan)
    except NotInstalled as missing:
        say(f"  skipped: {missing}")
    except (CaseFailed, ServerFailed, OSError) as error:
        say(f"  {contender.title}, {workload.title}: failed: {error}")
    return None


#: Workload -> contender -> one figure for each round; None where it failed.
Figures = dict[str, dict[str, list[float | None]]]


class Peers:
    """The installed peers, restarted for each round."""

    def __init__(self, only: str, folder: Path) -> None:
        self._names = [name for name in SERVERS if not only or name in only.split(",")]
        self._folder = folder
        self.skip_reasons: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    @contextmanager
    def running(self) -> Iterator[dict[str, Running]]:
        peers: dict[str, Running] = {}
        with ExitStack() as stack:
            for name in [each for each in self._names if each not in self.skip_reasons]:
                try:
                    peers[name] = stack.enter_context(running_peer(name, self._folder))
                    self.versions[name] = peers[name].version
                except (NotInstalled, OSError) as error:
                    since = ", after some rounds" if name in self.versions else ""
                    self.skip_reasons[name] = str(error).splitlines()[0] + since
                    say(f"skipped: {self.skip_reasons[name]}")
            yield peers


def one_round(ground: Ground, round_name: str, pattern: str, figures: Figures) -> None:
    """Measure every workload with every contender once. Workloads that differ only in the figure share it."""
    contenders = [each for each in CONTENDERS if each.peer == OURS or each.peer in ground.peers]
    results: dict[Any, dict[str, float] | None] = {}
    for workload in (each for each in WORKLOADS if fnmatch(each.key, pattern)):
        for contender in filter(workload.is_for, contenders):
            same = (workload.measure, *workload.plan.items(), contender.key)
            if same not in results:
                results[same] = measure_contender(ground, workload, contender)
            figure = (results[same] or {}).get(workload.figure)
            figures[workload.key].setdefault(contender.key, []).append(figure)
            if figure is not None:
                say(f"[{round_name}] {workload.title}: {contender.title}: {page.number(figure)}")


class Aims:
    """Our own rows, with their floors and aims."""

    def __init__(self) -> None:
        self._cases = [case for case in benching.CASES if any(row.key in AIMS for row in case.rows)]
        self._measurements: list[list[Measurement]] = [[] for _ in self._cases]
        self._errors = [""] * len(self._cases)
        self._skip_reasons = [""] * len(self._cases)

    def measure(self, bench: Bench, at: str) -> None:
        for number, case in enumerate(self._cases):
            if self._measurements[number] and ONCE.intersection(row.key for row in case.rows):
                continue
            figures, error, self._skip_reasons[number] = benching.measure(bench, case, 1)
            self._measurements[number] += figures
            self._errors[number] = error
            say(f"[{at}] {case.rows[0].title}: {benching.progress_line(self._rows(number))}")

    def _rows(self, number: int) -> list[dict[str, Any]]:
        measurements, error, skip_reason = (
            self._measurements[number],
            self._errors[number],
            self._skip_reasons[number],
        )
        aim_rows = [row for row in self._cases[number].rows if row.key in AIMS]
        rows_ = [benching.summary(row, measurements, error, skip_reason) for row in aim_rows]
        for row in rows_:
            row["spread"] = spread_of([each.figures[row["key"]] for each in measurements]) or None
        return rows_

    def rows(self) -> list[dict[str, Any]]:
        return [row for number in range(len(self._cases)) for row in self._rows(number)]


def spread_of(figures: list[float]) -> list[float]:
    """Return the range in which the median of the next run is expected."""
    if len(figures) < 2:
        return []
    middle = statistics.median(figures)
    farthest = max(max(figures) / middle, middle / min(figures))
    factor = max(FACTOR_MIN, farthest**STRETCH)
    return [middle / factor, middle * factor]


def summary(figures_by_workload: Figures) -> dict[str, Any]:
    """Return median and spread of each contender, and its ratio to ours: above 1, streams is better."""
    out: dict[str, Any] = {}
    for workload in WORKLOADS:
        rows_ = out[workload.key] = {}
        of_ours = {
            each.promise: figures_by_workload[workload.key].get(each.key)
            for each in CONTENDERS
            if each.peer == OURS
        }
        for contender in CONTENDERS:
            all_figures = figures_by_workload[workload.key].get(contender.key, [])
            figures = [each for each in all_figures if each is not None]
            if not figures:
                continue
            ours = of_ours[contender.promise] or of_ours["disk"]
            ratios = [
                theirs / mine if workload.is_time else mine / theirs
                for mine, theirs in zip(
                    ours or [], all_figures, strict=False
                )  # a peer may have missed rounds
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
    """Count the ratios of this run that lie in the range that the previous run predicted.

    None if the previous run was another measurement.
    """
    same = ("rounds", "seconds", "quick", "versions")
    hardware = ("cores", "cpu", "kernel", "python")
    if before is None or any(now[each] != before.get(each) for each in same):
        return None
    if any(now["machine"][each] != before["machine"].get(each) for each in hardware):
        return None
    ratio_count, outside = 0, []
    for workload in WORKLOADS:
        for contender in CONTENDERS:
            row = now["summary"][workload.key].get(contender.key, {})
            expected_range = (
                before["summary"].get(workload.key, {}).get(contender.key, {}).get("ratio_spread")
            )
            if row.get("ratio") is None or not expected_range:
                continue
            ratio_count += 1
            if not expected_range[0] <= row["ratio"] <= expected_range[1]:
                outside.append(
                    {
                        "workload": workload.title,
                        "contender": contender.title,
                        "expected": expected_range,
                        "ratio": row["ratio"],
                    }
                )
    return {"compared": ratio_count, "outside": outside} if ratio_count else None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    arguments.data_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compare-", dir=arguments.data_dir.absolute()))
    sizes = Sizes.quick(arguments.seconds) if arguments.quick else Sizes(arguments.seconds)
    facts = machine.facts(folder)
    for warning in machine.warnings_of(facts):
        say(f"warning: {warning}")
    ground = Ground(Bench(sizes, {}, folder))
    peers, own = Peers(arguments.only, folder), Aims()
    figures: Figures = {each.key: {} for each in WORKLOADS}
    rounds, longest_s, round_began = 0, 0.0, began
    try:
        for number in range(1, arguments.rounds + 1):
            longest_s = max(longest_s, time.monotonic() - round_began)
            round_began = time.monotonic()
            if number > 1 and round_began - began + longest_s > 60 * arguments.minutes:
                say(f"{number - 1} of {arguments.rounds} rounds: another one would take too long")
                break
            rounds = number
            at = f"{number}/{arguments.rounds}"
            with peers.running() as ground.peers:
                one_round(ground, at, arguments.workloads, figures)
            ground.bench.close()
            if arguments.workloads == "*":
                own.measure(ground.bench, at)
                ground.bench.close()
    finally:
        ground.bench.close(well=False)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "at": time.strftime("%Y-%m-%d", time.gmtime()),
        "took_s": round(time.monotonic() - began),
        "rounds": rounds,
        "seconds": arguments.seconds,
        "stretch": STRETCH,
        "factor_min": FACTOR_MIN,
        "quick": arguments.quick,
        "machine": facts,
        "versions": peers.versions,
        "skipped": peers.skip_reasons,
        "figures": figures,
        "summary": summary(figures),
        "aims": own.rows() if arguments.workloads == "*" else [],
    }


def read_before(path: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result


def main(argv: list[str] | None = None) -> int:
    parsed_arguments = arguments(argv)
    result_file = parsed_arguments.data_dir / "compare.json"
    before = read_before(result_file)
    result = run(parsed_arguments)
    result["agreement"] = comparison = agreement(result, before)
    parsed_arguments.out.mkdir(parents=True, exist_ok=True)
    result_file.write_text(json.dumps(result, indent=1) + "\n")
    page.plots(result, parsed_arguments.out / "benchmarks")
    (parsed_arguments.out / "benchmarks.md").write_text(page.text(result))
    if comparison is not None:
        for each in comparison["outside"]:
            low, high = each["expected"]
            say(
                f"{each['workload']}: {each['contender']}: {each['ratio']:.2f}, but the previous run "
                f"predicted "
                f"{low:.2f} to {high:.2f}"
            )
        inside = comparison["compared"] - len(comparison["outside"])
        say(f"{inside} of {comparison['compared']} ratios are in the range that the previous run predicted")
    say(f"{parsed_arguments.out / 'benchmarks.md'}, in {result['took_s']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
