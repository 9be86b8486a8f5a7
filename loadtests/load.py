"""`make load` and `make soak`: starts a server, runs users against it, kills shards on request, and reports.

    .venv/bin/python -m loadtests.load mixed --seconds 60 --shape spike
    .venv/bin/python -m loadtests.load tail --web            # locust's page, until Ctrl-C
    .venv/bin/python -m loadtests.load soak --seconds 600

The load itself is `loadtests/locustfile.py`. The exit code is 3 when a record was lost, doubled or reordered,
1 when a request failed, 0 otherwise. The report is one self-contained HTML file.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loadtests import machine
from loadtests.checking import slope_per_hour
from streams.testing import Server, running_server

ROOT: Final = Path(__file__).resolve().parents[1]
SAMPLE_S: Final = 2.0
KILL_EVERY_S: Final = 30.0
CALIBRATE_S: Final = 10.0
SHARE: Final = 0.7
#: Time beyond the run: start, final check, report.
SPARE_S: Final = 300.0
#: Over a shorter time, the slope of memory is noise: one garbage collection looks like gigabytes an hour.
SLOPE_S: Final = 300.0
SHAPES: Final = ("none", "ramp", "spike", "steady")

PRODUCERS: Final = ("SingleProducer", "BatchProducer", "BulkProducer")
EVERYONE: Final = (*PRODUCERS, "TailReader", "DiffPoller", "JobProducer", "QueueWorker")


@dataclass(frozen=True)
class Scenario:
    users: tuple[str, ...]
    what: str
    shape: str = "none"
    count: int = 20
    seconds: float = 20.0
    kills: bool = False
    words: tuple[str, ...] = ()


SCENARIOS: Final = {
    "producers": Scenario(PRODUCERS, "writes of 1, 100 and 1000 records"),
    "tail": Scenario(("BatchProducer", "TailReader"), "readers over server-sent events"),
    "poll": Scenario(("BatchProducer", "DiffPoller"), "readers that ask with diff"),
    "work": Scenario(("JobProducer", "QueueWorker"), "workers of two queues"),
    "mixed": Scenario(EVERYONE, "a day in short: all of them, more and more", "ramp"),
    "soak": Scenario(
        (*EVERYONE, "Keeper"),
        f"all of them at {SHARE:.0%} of what they can do, a shard killed every {KILL_EVERY_S:.0f} s",
        count=26,
        seconds=600.0,
        kills=True,
        words=("--faults", "--trim", "--calibrate", f"{CALIBRATE_S:g}", "--share", f"{SHARE:g}"),
    ),
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.load",
        description=(__doc__ or "").split("\n")[0],
        epilog="scenarios: " + "; ".join(f"{name}: {each.what}" for name, each in SCENARIOS.items()),
    )
    add = parser.add_argument
    add("scenario", nargs="?", default="mixed", choices=SCENARIOS)
    add("--seconds", type=float, metavar="N", help="duration of the load")
    add("--users", type=int, metavar="N", help="most users at a time")
    add("--shape", choices=SHAPES, help="how the number of users changes")
    add("--durability", choices=["memory", "disk", "fsync"], default="disk", help="durability of all boxes")
    add("--shards", type=int, metavar="N", help="shards of the server")
    add("--kill-every", type=float, metavar="S", help="kill -9 a shard every S seconds; 0: never")
    add("--host", metavar="URL", help="load this server instead of a new one")
    add("--web", action="store_true", help="locust's page on port 8089 instead of a run")
    add("--out", type=Path, metavar="FILE", default=ROOT / "build" / "load.html", help="file for the report")
    parsed_arguments = parser.parse_args(argv)
    scenario = SCENARIOS[parsed_arguments.scenario]
    parsed_arguments.seconds = parsed_arguments.seconds or scenario.seconds
    parsed_arguments.users = parsed_arguments.users or scenario.count
    parsed_arguments.shape = parsed_arguments.shape or scenario.shape
    if parsed_arguments.kill_every is None:
        parsed_arguments.kill_every = KILL_EVERY_S if scenario.kills else 0.0
    if parsed_arguments.host and parsed_arguments.kill_every:
        parser.error("--kill-every needs a server that is started here")
    return parsed_arguments


def command(arguments: argparse.Namespace, url: str, verdict: Path) -> list[str]:
    scenario = SCENARIOS[arguments.scenario]
    files = ["loadtests/locustfile.py"]
    if arguments.shape != "none" and not arguments.web:
        files.append(f"loadtests/shapes/{arguments.shape}.py")
    words = [sys.executable, "-m", "locust", "-f", ",".join(files), "--host", url]
    words += ["--durability", arguments.durability, "--users", str(arguments.users), *scenario.words]
    if arguments.kill_every and "--faults" not in words:
        words.append("--faults")
    if arguments.web:
        words += ["--web-host", "127.0.0.1"]
    else:
        words += ["--headless", "--only-summary", "--spawn-rate", str(arguments.users)]
        words += [
            "--run-time",
            f"{arguments.seconds:g}s",
            "--html",
            str(arguments.out),
            "--verdict",
            str(verdict),
        ]
    return [*words, *scenario.users]


# ---------------------------------------------------------------------------------------------------
# The server under load


@dataclass
class ServerWatch:
    """Samples the memory of a server under load, and kills its shards."""

    server: Server
    kill_every: float
    #: Kills stop with the load: on a slow machine the final check would never finish.
    seconds: float = float("inf")
    kills: int = 0
    #: (seconds, bytes) of all gateways, and of shards older than half the time between kills: a new shard is
    #: small, so only equal ages can be compared.
    gateway: list[tuple[float, float]] = field(default_factory=list)
    shards: list[tuple[float, float]] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        began = time.monotonic()
        next_kill = began + self.kill_every
        born: dict[int, float] = {}
        while not self._is_over.wait(SAMPLE_S):
            now = time.monotonic()
            pids = self.server.shard_pids()
            born = {pid: born.get(pid, now) for pid in pids.values()}
            self._sample(now - began, now, born)
            if self.kill_every and next_kill <= now < began + self.seconds:
                next_kill += self.kill_every
                self._kill(pids)

    def _sample(self, at: float, now: float, born: dict[int, float]) -> None:
        try:
            self.gateway.append(
                (at, float(sum(map(machine.resident_bytes, self.server.gateway_pids().values()))))
            )
            self.shards += [
                (at, float(machine.resident_bytes(pid)))
                for pid, since in born.items()
                if now - since >= self.kill_every / 2
            ]
        except (OSError, ValueError):
            pass  # the process has just ended

    def _kill(self, pids: dict[int, int]) -> None:
        if pids:
            self.kills += 1
            _, pid = sorted(pids.items())[self.kills % len(pids)]
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self._is_over.set()

    def result(self) -> dict[str, Any]:
        """Return memory figures without the first third, in which caches fill. A slope needs `SLOPE_S`."""
        result: dict[str, Any] = {"kills": self.kills}
        for name, samples in (("gateway", self.gateway), ("shard", self.shards)):
            late_samples = samples[len(samples) // 3 :]
            if late_samples:
                result[f"{name}_mb"] = round(late_samples[-1][1] / 1e6, 1)
                if late_samples[-1][0] - late_samples[0][0] >= SLOPE_S:
                    result[f"{name}_mb_per_hour"] = round(slope_per_hour(late_samples) / 1e6, 1)
                result[f"{name}_mb_range"] = [
                    round(f(each for _, each in late_samples) / 1e6, 1) for f in (min, max)
                ]
        return result


# ---------------------------------------------------------------------------------------------------
# The report


def sentences(verdict: dict[str, Any]) -> list[str]:
    faults = ", ".join(f"{count} {kind}" for kind, count in verdict["faults"].items() if count)
    lines = [
        f"{verdict['acked']:,} records and {verdict['jobs_done']:,} jobs were checked: "
        + (faults or "none lost, doubled or reordered")
        + f". {verdict['retried']:,} requests were repeated.",
    ]
    watch = verdict.get("beside")
    if watch:
        lines.append(f"{watch['kills']} shards were killed.")
        for name in ("gateway", "shard"):
            if f"{name}_mb" in watch:
                least, most = watch[f"{name}_mb_range"]
                slope = watch.get(f"{name}_mb_per_hour")
                lines.append(
                    f"Memory of a {name}: {watch[f'{name}_mb']:,} MB at the end, {least:,}-{most:,} MB, "
                    + (f"slope {slope:+,} MB an hour." if slope is not None else "too short for a slope.")
                )
    return [*lines, *verdict["descriptions"]]


def complete(report: Path, verdict: dict[str, Any]) -> None:
    """Add the verdict to locust's report, and remove references to other files."""
    text = re.sub(r'<link rel="shortcut icon"[^>]*>', "", report.read_text())
    colour = "#1b5e20" if verdict["is_good"] else "#b71c1c"
    lines = "".join(f"<div>{html.escape(line)}</div>" for line in sentences(verdict))
    block = (
        f'<div style="background:{colour};color:#fff;font:15px sans-serif;padding:12px 24px">{lines}</div>'
    )
    begin = text.rindex("<body>") + len("<body>")
    report.write_text(text[:begin] + block + text[begin:])


def run(arguments: argparse.Namespace, url: str, server: Server | None) -> int:
    folder = Path(tempfile.mkdtemp(prefix="load-"))
    file = folder / "verdict.json"
    seconds = float("inf") if arguments.web else arguments.seconds
    watch = ServerWatch(server, arguments.kill_every, seconds) if server else None
    thread = threading.Thread(target=watch.run) if watch else None
    try:
        if thread:
            thread.start()
        code = subprocess.run(
            command(arguments, url, file),
            cwd=ROOT,
            timeout=None if arguments.web else arguments.seconds + SPARE_S,
        ).returncode
        verdict = json.loads(file.read_text()) if file.exists() else None
    finally:
        if watch and thread:
            watch.end()
            thread.join()
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.web:
        return 0
    if verdict is None:
        print("the load ended before the final check; see the output of locust above", file=sys.stderr)
        return code or 1
    if watch:
        verdict["beside"] = watch.result()
    arguments.out.with_suffix(".json").write_text(json.dumps(verdict, indent=1) + "\n")
    complete(arguments.out, verdict)
    for line in sentences(verdict):
        print(line)
    print(f"report: {arguments.out}")
    return code


def main(argv: list[str] | None = None) -> int:
    parsed_arguments = arguments(argv)
    parsed_arguments.out = parsed_arguments.out.absolute()
    parsed_arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if parsed_arguments.host:
        return run(parsed_arguments, parsed_arguments.host, None)
    data_dir = Path(tempfile.mkdtemp(prefix="load-", dir=parsed_arguments.out.parent))
    settings = machine.USER_SETTINGS | (
        {"shards": parsed_arguments.shards} if parsed_arguments.shards else {}
    )
    try:
        with running_server(data_dir, **settings) as server:
            return run(parsed_arguments, server.url, server)
    except KeyboardInterrupt:
        return 0
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
