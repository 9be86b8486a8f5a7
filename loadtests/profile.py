"""`make profile WORKLOAD=append-100`: flame graphs of the gateway and of each shard under a load.

    .venv/bin/python -m loadtests.profile append-100 --seconds 10

One SVG a process in build/profile/, and the functions that take the most time, as text. Time is that of all
threads that run (py-spy; waiting is not counted), so a process that is at its limit shows what it spends its
core on, and one that is not shows how much of the time it worked at all. `--wall` counts waiting, too;
`--gil` only the thread that holds the interpreter: a better picture on a machine that others use.
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
#: The load begins before the recording and outlasts it.
LEAD_S: Final = 1.0
SHOWN: Final = 12

#: Any row of the benchmark that loads one server of its own, by a short name.
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
    add("--seconds", type=float, default=SECONDS, metavar="N", help="how long is recorded")
    add("--wall", dest="mode", action="store_const", const="wall", default="busy", help="count waiting, too")
    add("--gil", dest="mode", action="store_const", const="gil", help="count only who holds the interpreter")
    add("--out", type=Path, default=ROOT / "build" / "profile", metavar="DIR", help="where the graphs go")
    return parser.parse_args(argv)


def record(pid: int, seconds: float, *, mode: str) -> str:
    """Folded stacks of one process: a line a stack, outermost first, and how often it was seen."""
    tool = Path(sys.executable).with_name("py-spy")
    with tempfile.NamedTemporaryFile(prefix="profile-", suffix=".txt") as file:
        words = [str(tool), "record", "--pid", str(pid), "--format", "raw", "--output", file.name]
        words += ["--duration", f"{seconds:.0f}", "--rate", str(RATE_HZ), "--threads", "--nonblocking"]
        words += {"busy": [], "wall": ["--idle"], "gil": ["--gil"]}[mode]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=seconds + 60)
        if ran.returncode != 0:
            raise CaseFailed(f"py-spy could not look at process {pid}: {ran.stderr.strip()[-300:]}")
        return Path(file.name).read_text()


def folded(text: str) -> dict[tuple[str, ...], int]:
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack:
            stacks[tuple(stack.split(";"))] += int(count)
    return dict(stacks)


def busiest(stacks: dict[tuple[str, ...], int], shown: int = SHOWN) -> list[tuple[str, int, int]]:
    """Functions by the time they worked themselves: name, own samples, samples with what they called."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for stack, count in stacks.items():
        names = [_name(frame) for frame in stack]
        own[names[-1]] += count
        for name in set(names):
            whole[name] += count
    return [(name, count, whole[name]) for name, count in own.most_common(shown)]


def _name(frame: str) -> str:
    """Without its line: `handle (shard/core/machine.py:120)` is one function wherever it was."""
    return frame.rpartition(":")[0] + ")" if frame.endswith(")") and ":" in frame else frame


def summary(who: str, stacks: dict[tuple[str, ...], int], seconds: float) -> list[str]:
    total = sum(stacks.values())
    lines = [f"{who}: at work in {total / RATE_HZ / seconds:.0%} of the time of one core"]
    for name, own, whole in busiest(stacks):
        lines.append(f"  {own / max(1, total):6.1%} own {whole / max(1, total):6.1%} with calls  {name}")
    return lines


# ---------------------------------------------------------------------------------------------------
# The graph: one rectangle a function, as wide as the time it took, on top of who called it.

_WIDTH, _ROW = 1200, 17


def flame(title: str, stacks: dict[tuple[str, ...], int]) -> str:
    """An SVG that needs nothing else. A rectangle shows its name, share and samples when pointed at."""
    from html import escape

    total = max(1, sum(stacks.values()))
    shapes: list[str] = []
    depth = 0

    def draw(children: dict[tuple[str, ...], int], level: int, left: float) -> None:
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
                    f'<rect x="{left:.1f}" y="{{{level}}}" width="{width:.1f}" height="{_ROW - 1}" '
                    f'fill="hsl({hue},85%,66%)" rx="1"/>'
                    f'<text x="{left + 2:.1f}" y="{{{level}t}}">{label}</text></g>'
                )
                draw(inside, level + 1, left)
            left += width

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


def recorded(bench: Bench, pids: dict[str, int], seconds: float, *, mode: str) -> dict[str, Any]:
    """All processes at the same time, while something else loads them."""
    found: dict[str, Any] = {}

    def one(who: str, pid: int) -> None:
        try:
            found[who] = folded(record(pid, seconds, mode=mode))
        except (CaseFailed, OSError, subprocess.TimeoutExpired) as error:
            found[who] = error

    threads = [threading.Thread(target=one, args=item) for item in pids.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def run(asked: argparse.Namespace, folder: Path) -> int:
    from loadtests.bench import CASES

    key = WORKLOADS[asked.workload]
    [case] = [case for case in CASES if any(row.key == key for row in case.rows)]
    bench = Bench(Sizes(asked.seconds + 3 * LEAD_S), {}, folder)
    loaded: dict[str, Any] = {}

    def load() -> None:
        try:
            loaded["figures"] = case.measure(bench, case)
        except Exception as error:  # told below, with what was recorded until then
            loaded["error"] = error

    try:
        server = bench.server()
        pids = {f"gateway-{index}": pid for index, pid in server.gateway_pids().items()}
        pids |= {f"shard-{index}": pid for index, pid in server.shard_pids().items()}
        thread = threading.Thread(target=load)
        thread.start()
        _wait_for_load(pids)
        stacks = recorded(bench, pids, asked.seconds, mode=asked.mode)
        thread.join()
        bench.close()
    finally:
        bench.close(well=False)
    if "error" in loaded:
        print(f"the load failed: {loaded['error']}", file=sys.stderr)
        return 2
    return tell(asked, key, loaded["figures"], stacks)


def _wait_for_load(pids: dict[str, int]) -> None:
    """Until the server is at work: some rows fill their boxes first, which is work as well."""
    from loadtests.generator import cpu_s

    before, deadline = cpu_s(list(pids.values())), time.monotonic() + 30
    while cpu_s(list(pids.values())) - before < LEAD_S / 2 and time.monotonic() < deadline:
        time.sleep(0.1)


def tell(asked: argparse.Namespace, key: str, measured: rows.Measured, stacks: dict[str, Any]) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    figures = ", ".join(f"{name} {value:,}" for name, value in measured.figures.items())
    lines = [f"{key}: {figures}; cores {measured.detail.get('cores', {})}"]
    failed = False
    for who, found in sorted(stacks.items()):
        if isinstance(found, Exception):
            failed = True
            lines.append(f"{who}: {found}")
            continue
        path = asked.out / f"{asked.workload}-{who}.svg"
        path.write_text(flame(f"{asked.workload}: {who}", found))
        lines += [*summary(who, found, asked.seconds), f"  graph: {path}"]
    (asked.out / f"{asked.workload}.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 2 if failed else 0


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv)
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="profile-", dir=ROOT / "build"))
    try:
        return run(asked, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
