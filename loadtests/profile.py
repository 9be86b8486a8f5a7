"""`make profile WORKLOAD=append-100`: records flame graphs of the gateways and shards under a load.

    .venv/bin/python -m loadtests.profile append-100 --seconds 10

It writes one SVG for each process to build/profile/, and prints the functions that take the most time. py-spy
counts the time of running threads without waits. `--wall` includes waits. `--gil` counts only the thread that
holds the interpreter lock, which is more accurate on a busy machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from loadtests import rows
from loadtests.rows import ROOT, Bench, CaseFailed, Sizes

RATE_HZ: Final = 250
SECONDS: Final = 8.0
#: The load starts this long before the recording, and outlasts it.
LEAD_S: Final = 1.0
FUNCTIONS_SHOWN: Final = 12

#: Short name -> row of the benchmark that loads one server.
WORKLOADS: Final = {
    "append-1000": "append-1000-disk",
    "append-100": "append-100-disk",
    "append-1000-fsync": "append-1000-fsync",
    "single": "single-64-disk",
    "single-1": "single-1-disk-p50",
    "single-fsync": "single-64-fsync",
    "diff": "diff-1000",
    "direct": "direct-1000",
    "direct-1": "direct-1",
    "work": "work-16-disk",
    "watch": "watch-100-rate",
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.profile", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("workload", choices=WORKLOADS)
    add("--seconds", type=float, default=SECONDS, metavar="N", help="duration of the recording")
    add("--wall", dest="mode", action="store_const", const="wall", default="busy", help="include waits")
    add(
        "--gil",
        dest="mode",
        action="store_const",
        const="gil",
        help="count only the thread that holds the interpreter lock",
    )
    add("--out", type=Path, default=ROOT / "build" / "profile", metavar="DIR", help="folder for the graphs")
    return parser.parse_args(argv)


def record(pid: int, seconds: float, *, mode: str) -> str:
    """Return the folded stacks of one process: one line for each stack, outermost first, with its count."""
    tool = Path(sys.executable).with_name("py-spy")
    with tempfile.NamedTemporaryFile(prefix="profile-", suffix=".txt") as file:
        words = [str(tool), "record", "--pid", str(pid), "--format", "raw", "--output", file.name]
        words += ["--duration", f"{seconds:.0f}", "--rate", str(RATE_HZ), "--threads", "--nonblocking"]
        words += {"busy": [], "wall": ["--idle"], "gil": ["--gil"]}[mode]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=seconds + 60)
        if ran.returncode != 0:
            raise CaseFailed(f"py-spy could not record process {pid}: {ran.stderr.strip()[-300:]}")
        return Path(file.name).read_text()


def fold_stacks(text: str) -> dict[tuple[str, ...], int]:
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack:
            stacks[tuple(stack.split(";"))] += int(count)
    return dict(stacks)


def busiest(
    stacks: dict[tuple[str, ...], int], count_max: int = FUNCTIONS_SHOWN
) -> list[tuple[str, int, int]]:
    """Return the functions with the most own samples: (name, own samples, samples with callees)."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for stack, count in stacks.items():
        names = [_name(frame) for frame in stack]
        own[names[-1]] += count
        for name in set(names):
            whole[name] += count
    return [(name, count, whole[name]) for name, count in own.most_common(count_max)]


def _name(frame: str) -> str:
    """Return a frame without its line number: `handle (shard/core/machine.py:120)` is one function."""
    return frame.rpartition(":")[0] + ")" if frame.endswith(")") and ":" in frame else frame


def summary(who: str, stacks: dict[tuple[str, ...], int], seconds: float) -> list[str]:
    total = sum(stacks.values())
    lines = [f"{who}: busy {total / RATE_HZ / seconds:.0%} of one core"]
    for name, own, whole in busiest(stacks):
        lines.append(f"  {own / max(1, total):6.1%} own {whole / max(1, total):6.1%} with calls  {name}")
    return lines


# ---------------------------------------------------------------------------------------------------
# The graph: one rectangle for each function, as wide as its time, above its caller.

_WIDTH, _ROW = 1200, 17


def flame(title: str, stacks: dict[tuple[str, ...], int]) -> str:
    """Return a self-contained SVG. Each rectangle has a tooltip with name, share and samples."""
    from html import escape

    total = max(1, sum(stacks.values()))
    shapes: list[str] = []
    depth = 0

    def draw(children: dict[tuple[str, ...], int], level: int, x: float) -> None:
        nonlocal depth
        depth = max(depth, level)
        groups: dict[str, dict[tuple[str, ...], int]] = {}
        for stack, count in children.items():
            if stack:
                groups.setdefault(stack[0], {})[stack[1:]] = (
                    groups.get(stack[0], {}).get(stack[1:], 0) + count
                )
        for name, inside in sorted(groups.items()):
            count = sum(inside.values())
            width = _WIDTH * count / total
            if width >= 0.4:
                hue = 20 + sum(name.encode()) % 35
                label = escape(name[: int(width / 6.2)]) if width > 30 else ""
                shapes.append(
                    f"<g><title>{escape(name)}: {count / total:.1%}, {count} samples</title>"
                    f'<rect x="{x:.1f}" y="{{{level}}}" width="{width:.1f}" height="{_ROW - 1}" '
                    f'fill="hsl({hue},85%,66%)" rx="1"/>'
                    f'<text x="{x + 2:.1f}" y="{{{level}t}}">{label}</text></g>'
                )
                draw(inside, level + 1, x)
            x += width

    draw(stacks, 0, 0.0)
    height = (depth + 3) * _ROW
    body = "\n".join(shapes)
    for level in range(depth + 1):
        top = height - (level + 1) * _ROW
        body = body.replace(f"{{{level}}}", str(top)).replace(f"{{{level}t}}", str(top + _ROW - 5))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="monospace" font-size="10">\n<rect width="100%" height="100%" fill="#fffdf5"/>\n'
        f'<text x="4" y="14" font-size="13">{escape(title)}</text>\n{body}\n</svg>\n'
    )


# ---------------------------------------------------------------------------------------------------


def record_all(bench: Bench, pids: dict[str, int], seconds: float, *, mode: str) -> dict[str, Any]:
    """Record all processes at the same time, while another thread loads them."""
    stacks: dict[str, Any] = {}

    def one(who: str, pid: int) -> None:
        try:
            stacks[who] = fold_stacks(record(pid, seconds, mode=mode))
        except (CaseFailed, OSError, subprocess.TimeoutExpired) as error:
            stacks[who] = error

    threads = [threading.Thread(target=one, args=item) for item in pids.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stacks


def run(arguments: argparse.Namespace, folder: Path) -> int:
    from loadtests.bench import CASES

    key = WORKLOADS[arguments.workload]
    [case] = [case for case in CASES if any(row.key == key for row in case.rows)]
    bench = Bench(Sizes(arguments.seconds + 3 * LEAD_S), {}, folder)
    outcome: dict[str, Any] = {}

    def load() -> None:
        try:
            outcome["figures"] = case.measure(bench, case)
        except Exception as error:  # reported below, after the recording
            outcome["error"] = error

    try:
        server = bench.server()
        pids = {f"gateway-{index}": pid for index, pid in server.gateway_pids().items()}
        pids |= {f"shard-{index}": pid for index, pid in server.shard_pids().items()}
        thread = threading.Thread(target=load)
        thread.start()
        _wait_for_load(pids)
        stacks = record_all(bench, pids, arguments.seconds, mode=arguments.mode)
        thread.join()
        bench.close()
    finally:
        bench.close(well=False)
    if "error" in outcome:
        print(f"the load failed: {outcome['error']}", file=sys.stderr)
        return 2
    return report(arguments, key, outcome["figures"], stacks)


def _wait_for_load(pids: dict[str, int]) -> None:
    """Wait until the server uses CPU. Some rows fill their boxes first, which counts as load."""
    from loadtests.generator import cpu_s

    before, deadline = cpu_s(list(pids.values())), time.monotonic() + 30
    while cpu_s(list(pids.values())) - before < LEAD_S / 2 and time.monotonic() < deadline:
        time.sleep(0.1)


def report(
    arguments: argparse.Namespace, key: str, measurement: rows.Measurement, stacks: dict[str, Any]
) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = ", ".join(f"{name} {value:,}" for name, value in measurement.figures.items())
    lines = [f"{key}: {figures}; cores {measurement.detail.get('cores', {})}"]
    has_failed = False
    for who, samples in sorted(stacks.items()):
        if isinstance(samples, Exception):
            has_failed = True
            lines.append(f"{who}: {samples}")
            continue
        path = arguments.out / f"{arguments.workload}-{who}.svg"
        path.write_text(flame(f"{arguments.workload}: {who}", samples))
        lines += [*summary(who, samples, arguments.seconds), f"  graph: {path}"]
    (arguments.out / f"{arguments.workload}.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 2 if has_failed else 0


def main(argv: list[str] | None = None) -> int:
    parsed_arguments = arguments(argv)
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="profile-", dir=ROOT / "build"))
    try:
        return run(parsed_arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
