"""Compares Celery and Dramatiq on Redis with the same on streams: `python -m loadtests.queue_bench`.

All brokers run in turn in one run, round after round. Each has one worker process with eight threads, and a
task that does nothing but say when it starts. Two figures:

    jobs/s        a backlog is sent while no worker runs; then one is started. Jobs between its first and its
                  last, per second
    start delay   a worker that is idle gets 50 tasks a second: from the call that sends one to its start

Redis is found or unpacked by `make peers`, and writes its log every second, as streams does by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loadtests import machine
from loadtests.peers.servers import NotInstalled, running_peer
from loadtests.queue_apps import PAIR
from streams.testing import running_server

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "queue-benchmarks.md"
TASKS_PER_S: Final = 50
THREADS: Final = "8"
PATIENCE_S: Final = 120.0

_CELERY = (
    "celery",
    "-A",
    "loadtests.queue_apps",
    "worker",
    "--pool",
    "threads",
    "-c",
    THREADS,
    "-l",
    "ERROR",
)
_DRAMATIQ = ("dramatiq", "loadtests.queue_apps", "--processes", "1", "--threads", THREADS)


@dataclass
class QueueContender:
    title: str
    framework: str
    is_redis: bool
    worker: tuple[str, ...]
    sent_per_s: list[float] = field(default_factory=list)
    jobs_per_s: list[float] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)


def contenders() -> list[QueueContender]:
    return [
        QueueContender("Celery on Redis", "celery", True, (*_CELERY, "--without-gossip", "--without-mingle")),
        QueueContender(
            "Celery on streams", "celery", False, (*_CELERY, "--without-gossip", "--without-mingle")
        ),
        QueueContender("Dramatiq on Redis", "dramatiq", True, _DRAMATIQ),
        QueueContender("Dramatiq on streams", "dramatiq", False, _DRAMATIQ),
        QueueContender("streams, claim and ack", "plain", False, ("loadtests.queue_apps",)),
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def running_worker(contender: QueueContender, environ: dict[str, str]) -> Iterator[None]:
    log = subprocess.DEVNULL
    command = [sys.executable, "-m", *contender.worker]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_SENDER = """
import sys, time
from loadtests import queue_apps
framework, count, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if framework == "celery":
    task = queue_apps.app.tasks["note"]
    def send(): task.delay(time.time())
elif framework == "dramatiq":
    def send(): queue_apps.actor.send(time.time())
else:
    from streams.client._sync.client import Client
    queue = Client(queue_apps.BROKER).queue("plain")
    queue.create()
    def send(): queue.append(time.time())
send()
began = time.monotonic()
for number in range(1, count):
    if pause_s:
        time.sleep(max(0.0, began + number * pause_s - time.monotonic()))
    send()
print(time.monotonic() - began)
"""


def send(contender: QueueContender, count: int, pause_s: float, environ: dict[str, str]) -> float:
    """Send tasks from a process of its own; return the seconds from the first to the last."""
    words = [sys.executable, "-c", _SENDER, contender.framework, str(count), str(pause_s)]
    ran = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr)
    return float(ran.stdout)


def wait_for_pairs(path: Path, count: int) -> list[tuple[float, float]]:
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists() or path.stat().st_size < count * PAIR.size:
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"{path.stat().st_size // PAIR.size if path.exists() else 0} of {count} tasks ran"
            )
        time.sleep(0.02)
    return list(PAIR.iter_unpack(path.read_bytes()))


def measure(contender: QueueContender, address: str, folder: Path, jobs: int, seconds: float) -> None:
    path = folder / "pairs"
    environ = os.environ | {
        "QUEUE_BENCH_BROKER": address,
        "QUEUE_BENCH_FILE": str(path),
        "QUEUE_BENCH_FRAMEWORK": contender.framework,
    }
    path.unlink(missing_ok=True)
    contender.sent_per_s.append((jobs - 1) / send(contender, jobs, 0.0, environ))
    with running_worker(contender, environ):
        starts = sorted(start for _, start in wait_for_pairs(path, jobs))
        contender.jobs_per_s.append((len(starts) - 1) / (starts[-1] - starts[0]))
        os.truncate(path, 0)  # the worker keeps it open, to append
        count = round(seconds * TASKS_PER_S)
        send(contender, count, 1 / TASKS_PER_S, environ)
        contender.delays_ms += [(start - sent) * 1000 for sent, start in wait_for_pairs(path, count)]
    say(f"  {contender.title}: {contender.jobs_per_s[-1]:,.0f} jobs/s")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def page(
    contenders_: list[QueueContender],
    facts: dict[str, Any],
    options: argparse.Namespace,
    loads: tuple[float, float],
) -> str:
    rows = "\n".join(
        f"| {each.title} | {statistics.median(each.sent_per_s):,.0f} "
        f"| {statistics.median(each.jobs_per_s):,.0f} "
        f"| {quantile(each.delays_ms, 0.5):.1f} | {quantile(each.delays_ms, 0.99):.1f} |"
        for each in contenders_
        if each.delays_ms
    )
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return f"""# Queues beside Redis

Written by `make queues`; do not edit. Celery and Dramatiq, with Redis and with streams as
their broker, in one run on one machine: {facts["cores"]} cores ({facts["cpu"]}),
Python {facts["python"]}, {day}.
The load average was {loads[0]:.1f} when the run began and {loads[1]:.1f} when it ended.
The bench alone makes about 2; above that, other programs took part of the cores, and all figures are worse
than on a quiet machine.

| | tasks sent/s | jobs/s | start delay p50 (ms) | p99 (ms) |
|---|---|---|---|---|
{rows}

{options.rounds} rounds of {options.jobs:,} tasks, all contenders in turn.
Rates are medians of the rounds; delays are of all rounds together.

- **Tasks sent/s**: one sender, one call a task.
- **Jobs/s**: a backlog is sent while no worker runs, then a worker of one process with {THREADS} threads is
  started. Counted from its first task to its last.
- **Start delay**: {TASKS_PER_S} tasks a second to an idle worker, from the call that sends one to its start.

Redis writes its log every second (`appendfsync everysec`), as streams does by default. Celery's worker
prefetches four tasks a thread and acks late. "Claim and ack" is the Python client without a framework, in one
thread, up to 100 jobs a request.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.queue_bench", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="number of rounds")
    parser.add_argument("--jobs", type=int, default=2000, metavar="N", help="tasks of a backlog")
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="measured time of start delays"
    )
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="the page")
    options = parser.parse_args(argv)
    load_before = os.getloadavg()[0]
    all_contenders = contenders()
    with tempfile.TemporaryDirectory(prefix="queue-bench-") as name:
        folder = Path(name)
        facts = machine.facts(folder)
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            one_round(all_contenders, folder, options)
    options.out.write_text(page(all_contenders, facts, options, (load_before, os.getloadavg()[0])))
    say(f"{options.out}")
    return 0


def one_round(contenders_: list[QueueContender], folder: Path, options: argparse.Namespace) -> None:
    """Measure every contender once, each with a broker of its own that is new."""
    for contender in contenders_:
        with ExitStack() as brokers:
            if contender.is_redis:
                try:
                    peer = brokers.enter_context(running_peer("redis", folder))
                except NotInstalled as missing:
                    say(f"  skipped: {missing}")
                    continue
                address = f"redis://127.0.0.1:{peer.port}/0"
            else:
                address = brokers.enter_context(running_server(shards=1, wal_file_bytes="")).url
            measure(contender, address, folder, options.jobs, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
