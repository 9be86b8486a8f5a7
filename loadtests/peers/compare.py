"""`make compare`: measures us and our peers in turns, and writes docs/reference/benchmarks.md with its plots.

    .venv/bin/python -m loadtests.peers.compare --rounds 5

In turns: a round measures every workload with every contender, one after the other, and there are several
rounds. A machine that gets slower for a minute slows all of them. A ratio is the median of the ratios of the
rounds, so both of its sides were measured within the same minutes. What is not installed is left out, with a
line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from loadtests import bench as benching
from loadtests import machine
from loadtests.peers import page
from loadtests.peers.measuring import CONTENDERS, OURS, WORKLOADS, Contender, Ground, Workload
from loadtests.peers.servers import SERVERS, NotInstalled, running_peer
from loadtests.rows import ROOT, Bench, CaseFailed, Sizes
from streams.testing import ServerFailed

ROUNDS, SECONDS = 3, 2.0
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
    add("--data-dir", type=Path, default=ROOT / "build", metavar="DIR", help="where data goes")
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


def rounds(ground: Ground, count: int, pattern: str) -> dict[str, dict[str, list[float]]]:
    """Figures by workload and contender, one a round. Workloads that differ only in the figure share one."""
    found: dict[str, dict[str, list[float]]] = {each.key: {} for each in WORKLOADS}
    taking_part = [each for each in CONTENDERS if each.peer == OURS or each.peer in ground.peers]
    for number in range(1, count + 1):
        shared: dict[Any, dict[str, float] | None] = {}
        for workload in (each for each in WORKLOADS if fnmatch(each.key, pattern)):
            for contender in filter(workload.is_for, taking_part):
                same = (workload.measure, *workload.plan.items(), contender.key)
                if same not in shared:
                    shared[same] = measured(ground, workload, contender)
                figures = shared[same]
                if figures:
                    found[workload.key].setdefault(contender.key, []).append(figures[workload.figure])
                    figure = page.number(figures[workload.figure])
                    say(f"[{number}/{count}] {workload.title}: {contender.title}: {figure}")
    return found


def aims(bench: Bench, repeat: int) -> list[dict[str, Any]]:
    """Our own rows, beside their floors and aims."""
    found = []
    for case in benching.CASES:
        if wanted := [row for row in case.rows if row.key in AIMS]:
            times = 1 if ONCE.intersection(row.key for row in wanted) else repeat
            figures, error, skipped = benching.measure(bench, case, times)
            found += [benching.summary(row, figures, error, skipped) for row in wanted]
            say(f"{wanted[0].title}: {benching.shown_briefly(found[-len(wanted) :])}")
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Median and spread of each, and its ratio to ours: above 1 we are better, whatever is measured."""
    out: dict[str, Any] = {}
    for workload in WORKLOADS:
        rows_ = out[workload.key] = {}
        of_ours = {
            each.promise: found[workload.key].get(each.key) for each in CONTENDERS if each.peer == OURS
        }
        for contender in CONTENDERS:
            figures = found[workload.key].get(contender.key)
            if not figures:
                continue
            ours = of_ours[contender.promise] or of_ours["disk"]
            ratios = [
                theirs / mine if workload.is_time else mine / theirs
                for mine, theirs in zip(ours or [], figures, strict=False)
            ]
            rows_[contender.key] = {
                "median": statistics.median(figures),
                "least": min(figures),
                "most": max(figures),
                "ratio": None if contender.peer == OURS or not ratios else statistics.median(ratios),
                "ratios": [] if contender.peer == OURS else [min(ratios), max(ratios)] if ratios else [],
            }
    return out


def run(asked: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    asked.data_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compare-", dir=asked.data_dir.absolute()))
    sizes = Sizes.quick(asked.seconds) if asked.quick else Sizes(asked.seconds)
    facts = machine.facts(folder)
    for warning in machine.warnings_of(facts):
        say(f"warning: {warning}")
    ground = Ground(Bench(sizes, {}, folder))
    skipped: dict[str, str] = {}
    versions: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            for name in SERVERS:
                if asked.only and name not in asked.only.split(","):
                    continue
                try:
                    ground.peers[name] = running = stack.enter_context(running_peer(name, folder))
                    versions[name] = running.version
                except (NotInstalled, OSError) as error:
                    skipped[name] = str(error).splitlines()[0]
                    say(f"skipped: {skipped[name]}")
            found = rounds(ground, asked.rounds, asked.workloads)
        own = aims(ground.bench, asked.rounds) if asked.workloads == "*" else []
        ground.bench.close()
    finally:
        ground.bench.close(well=False)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "at": time.strftime("%Y-%m-%d", time.gmtime()),
        "took_s": round(time.monotonic() - began),
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        "quick": asked.quick,
        "machine": facts,
        "versions": versions,
        "skipped": skipped,
        "figures": found,
        "summary": summary(found),
        "aims": own,
    }


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv)
    result = run(asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "compare.json").write_text(json.dumps(result, indent=1) + "\n")
    page.plots(result, asked.out / "benchmarks")
    (asked.out / "benchmarks.md").write_text(page.text(result))
    say(f"{asked.out / 'benchmarks.md'}, in {result['took_s']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
