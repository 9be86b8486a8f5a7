"""Spark under random kills: `python -m loadtests.spark_torture --minutes 10`, or `make torture`.

One Spark application on a master with two workers runs jobs over boxes, over tables, or both (`--jobs`,
`spark_torture_driver.py`), while rows are appended to the source boxes and files are added:

    boxes     in.N ──stream──► copy.N,   files ──backfill──► filled.N ──replay──► replayed.N
    tables    in.N ──archive──► table ──rollup──► sums ──merge──► newest

Meanwhile the driver (its Python or its JVM), executors, shards and gateways are killed with SIGKILL at random
moments, from a seed. A killed driver is restarted and resumes. It is killed only after one of its jobs has
made progress, because otherwise a slow machine would never get beyond its start. Then kills stop, the jobs
finish, and every box is read over plain HTTP and compared row by row with the rows sent (`recount.py`).
Tables and some of their older snapshots are read with pyiceberg (`spark_torture_tables.py`). The exit code is
1 if a row is lost, duplicated or unknown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.json

import streams
from loadtests import machine, recount
from loadtests.audit import once
from loadtests.children import start
from loadtests.process_table import descendants, processes
from loadtests.recount import Recount
from loadtests.rows import ROOT
from loadtests.spark_torture_tables import recount_tables
from streams.client.retry import Retry
from streams.testing import Server, running_server
from tests.support.spark_cluster import cluster

PREFIX: Final = "torture"
BOXES: Final = 8
KINDS_OF_COPIES: Final = ("copy", "filled", "replayed")
#: Records of one append, and lines of one file.
BATCH: Final = 500
FILE_LINES: Final = 4000
KINDS: Final = ("driver", "driver's JVM", "executor", "shard", "gateway")
#: Seconds between two kills: from, to.
PAUSES_S: Final = (1.0, 12.0)
REPORT_S: Final = 10.0
#: Longest time of a driver to its first progress, and to its end after the last kill.
DRIVER_S: Final = 600.0
#: Drivers that may fail without a kill after the last kill.
FAILURES_MAX: Final = 3


def text_of(number: int) -> str:
    """Return a text that only this row has."""
    return hashlib.sha256(str(number).encode()).hexdigest()


# -- the rows


@dataclass
class Feed:
    """Appends batches to the source boxes and adds files, about `rate` rows a second each."""

    url: str
    folder: Path
    rate: int
    #: Rows appended, and rows in files; both are numbered from 0.
    appended_count: int = 0
    file_rows: int = 0
    failure: str = ""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        self._add_file()
        for work, rows in ((self._append, BATCH), (self._add_file, FILE_LINES)):
            self._threads.append(threading.Thread(target=self._repeat, args=(work, rows / self.rate)))
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, work: Any, every_s: float) -> None:
        try:
            while not self._is_over.wait(every_s):
                work()
        except Exception as error:
            self.failure = repr(error)

    def _append(self) -> None:
        first = self.appended_count
        box = f"{PREFIX}.in.{first // BATCH % BOXES}"
        entries = [{"n": n, "text": text_of(n)} for n in range(first, first + BATCH)]
        with streams.Client(self.url, retry=Retry(total_s=120)) as client:
            client.box(box).append_batch(entries, idempotency_key=f"torture-{first}")
        self.appended_count += BATCH

    def _add_file(self) -> None:
        first = self.file_rows
        lines = [f'{{"n":{n},"text":"{text_of(n)}"}}\n' for n in range(first, first + FILE_LINES)]
        # Spark must not list an incomplete file.
        part = self.folder / "part.json"
        part.write_text("".join(lines))
        part.rename(self.folder / "files" / f"{first:012}.json")
        self.file_rows += FILE_LINES

    def appended_rows(self) -> pa.Table:
        numbers = range(self.appended_count)
        boxes = [n // BATCH % BOXES for n in numbers]
        columns = [pa.array(boxes, pa.int64()), pa.array(numbers, pa.int64())]
        return pa.Table.from_arrays([*columns, pa.array(map(text_of, numbers))], schema=recount.SCHEMA)

    def filed_rows(self) -> pa.Table:
        """Read the rows of the files with pyarrow."""
        files = sorted((self.folder / "files").iterdir())
        table = pa.concat_tables([pyarrow.json.read_json(file) for file in files])
        numbers = table["n"].to_pylist()
        boxes = pa.array([n % BOXES for n in numbers], pa.int64())
        return pa.Table.from_arrays([boxes, table["n"], table["text"]], schema=recount.SCHEMA)


# -- the driver


class Drivers:
    """Runs one driver at a time, and starts a new one when it has ended."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        self._stop, self._ready = folder / "stop", folder / "ready"
        self._plan = {**plan, "folder": str(folder), "stop": str(self._stop), "ready": str(self._ready)}
        self._sessions: set[int] = set()
        self._was_killed = False
        self._began_s = 0.0
        self.started_count = 0
        #: Drivers that ended without a kill and without having finished.
        self.failed_count = 0
        self.failures: list[str] = []
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        self._ready.unlink(missing_ok=True)
        self._was_killed = False
        self._began_s = time.monotonic()
        self.started_count += 1
        process = start(
            "loadtests.spark_torture_driver",
            self._plan,
            log=self._folder / f"driver-{self.started_count}.log",
        )
        self._sessions.add(process.pid)
        return process

    @property
    def is_ready(self) -> bool:
        return self._ready.exists() and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def note_kill(self) -> None:
        self._was_killed = True

    def look(self) -> bool:
        """Start a new driver if the last has ended. Return True if it has finished everything."""
        code = self._process.poll()
        if code is None:
            if not self._ready.exists() and time.monotonic() - self._began_s > DRIVER_S:
                raise TimeoutError(f"driver {self.started_count} has made no progress in {DRIVER_S:.0f} s")
            return False
        if code == 0:
            return True
        if not self._was_killed:
            self.failed_count += 1
            self.failures.append(self._last_words())
            say(f"driver {self.started_count} ended without a kill: {self.failures[-1]}")
        self._process = self._begin()
        return False

    def _last_words(self) -> str:
        log = (self._folder / f"driver-{self.started_count}.log").read_text(errors="replace")
        ours = [line for line in log.splitlines() if line.startswith(("streams.", "py4j.", "RuntimeError"))]
        lines = ours or log.splitlines()
        return lines[-1][:500] if lines else "(nothing)"

    def finish(self) -> None:
        """Wait until a driver has finished everything."""
        self._stop.touch()
        failed_before = self.failed_count
        until = time.monotonic() + DRIVER_S
        while not self.look():
            if time.monotonic() > until or self.failed_count - failed_before > FAILURES_MAX:
                raise TimeoutError("the jobs did not finish after kills were over")
            time.sleep(0.5)

    def end(self) -> None:
        """Kill all processes of all drivers, including orphans."""
        for each in processes().values():
            if each.session in self._sessions:
                send_kill(each.pid)
        self._process.wait()


def send_kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# -- kills


@dataclass
class Killer:
    server: Server
    drivers: Drivers
    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def kill(self) -> None:
        """Kill a process of a random kind, if one can be killed now."""
        kind, luck = self.dice.choice(KINDS), self.dice.random()
        candidates = self._candidates().get(kind)
        if not candidates:
            return
        pid = candidates[int(luck * len(candidates))]
        if kind.startswith("driver"):
            self.drivers.note_kill()
        if send_kill(pid):
            self.counts[kind] += 1
            say(f"kill {sum(self.counts.values())}: {kind}, process {pid}")

    def _candidates(self) -> dict[str, list[int]]:
        pids = {
            "shard": sorted(self.server.shard_pids().values()),
            "gateway": sorted(self.server.gateway_pids().values()),
        }
        table = processes()
        if self.drivers.is_ready:
            mine = descendants(table, self.drivers.pid)
            pids["driver"] = [self.drivers.pid]
            pids["driver's JVM"] = [each.pid for each in mine if each.name == "java"]
            mine = descendants(table, os.getpid())
            pids["executor"] = [each.pid for each in mine if "CoarseGrainedExecutorBackend" in each.command]
        return pids


# -- the run


_began_s = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _began_s:7.1f} s  {text}", flush=True)


def boxes_of(kind: str) -> list[str]:
    return [f"{PREFIX}.{kind}.{number}" for number in range(BOXES)]


def counts(url: str, kinds: Sequence[str]) -> str:
    """Return the record count of each kind of box, for a line of progress; – while the server is down."""
    texts = []
    for kind in kinds:
        states = [once(url, "GET", f"/v0/boxes/{box}") for box in boxes_of(kind)]
        is_known = all(status == 200 for status, _ in states)
        total = f"{sum(json.loads(text)['count'] for _, text in states):,}" if is_known else "–"
        texts.append(f"{kind} {total}")
    return ", ".join(texts)


def torture(arguments: argparse.Namespace, folder: Path, server: Server, master: str) -> dict[str, Recount]:
    with streams.Client(server.url) as client:
        for kind in ("in", *KINDS_OF_COPIES):
            for box in boxes_of(kind):
                client.box(box).create()
    (folder / "files").mkdir()
    feed = Feed(server.url, folder, arguments.rate)
    plan = {"url": server.url, "master": master, "prefix": PREFIX, "boxes": BOXES, "jobs": arguments.jobs}
    drivers = Drivers(folder, plan)
    killer = Killer(server, drivers, random.Random(arguments.seed))
    try:
        feed.begin()
        try:
            _kill_for(arguments.minutes * 60, killer, drivers, feed)
        finally:
            feed.end()
        if feed.failure:
            raise RuntimeError(f"the feed failed: {feed.failure}")
        say(f"kills are over; {feed.appended_count:,} rows appended, {feed.file_rows:,} in files; finishing")
        drivers.finish()
    finally:
        drivers.end()
    say("recounting")
    _print_kills(killer, drivers)
    sent_rows = {"in": feed.appended_rows(), "filled": feed.filed_rows()}
    sent_rows |= {"copy": sent_rows["in"], "replayed": sent_rows["filled"]}
    kinds = ["in", *(KINDS_OF_COPIES if "boxes" in arguments.jobs else ())]
    recounts = {
        kind: recount.compare(sent_rows[kind], *recount.read_boxes(server.url, boxes_of(kind)))
        for kind in kinds
    }
    if "tables" in arguments.jobs:
        recounts |= recount_tables(server.url, folder, boxes_of("in"), f"{PREFIX}.sums", sent_rows["in"])
    return recounts


def _kill_for(seconds: float, killer: Killer, drivers: Drivers, feed: Feed) -> None:
    """Kill processes for some seconds, after the first driver has made progress."""
    say("waiting for the first progress")
    while not drivers.is_ready:
        drivers.look()
        time.sleep(0.2)
    say("kills begin")
    now = time.monotonic()
    until, next_report, next_kill = now + seconds, now, now + killer.dice.uniform(*PAUSES_S)
    while (now := time.monotonic()) < until and not feed.failure:
        drivers.look()
        if now >= next_kill:
            killer.kill()
            next_kill = now + killer.dice.uniform(*PAUSES_S)
        if now >= next_report:
            found = counts(killer.server.url, KINDS_OF_COPIES)
            say(f"appended {feed.appended_count:,}, in files {feed.file_rows:,}; {found}")
            next_report = now + REPORT_S
        time.sleep(0.1)


def _print_kills(killer: Killer, drivers: Drivers) -> None:
    counts_text = ", ".join(f"{killer.counts[kind]} {kind}" for kind in KINDS)
    say(
        f"{sum(killer.counts.values())} kills: {counts_text}; {drivers.started_count} drivers, "
        f"{drivers.failed_count} failed"
    )


def table_of(recounts: dict[str, Recount]) -> str:
    lines = [f"{'boxes':12}{'sent':>12}{'found':>12}{'lost':>8}{'twice':>8}{'unknown':>9}{'gaps':>6}  agrees"]
    for kind, each in recounts.items():
        lines.append(
            f"{kind:12}{each.sent_count:>12,}{each.found_count:>12,}{each.lost_count:>8,}{each.duplicate_count:>8,}{each.unknown_count:>9,}"
            f"{each.gap_count:>6,}  {'yes' if each.agrees else 'NO'}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long processes are killed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--rate", type=int, default=1500, help="rows a second, to boxes and in files each")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", choices=("boxes", "tables"), default=["boxes", "tables"])
    parser.add_argument("--keep", action="store_true", help="keep data and logs")
    arguments = parser.parse_args(argv)
    say(f"seed {arguments.seed}")
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=ROOT / "build"))
    (folder / "cluster").mkdir()
    try:
        with (
            running_server(folder / "data", shards=arguments.shards, **machine.USER_SETTINGS) as server,
            cluster(folder / "cluster") as master,
        ):
            recounts = torture(arguments, folder, server, master)
    finally:
        if arguments.keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(table_of(recounts))
    return 0 if all(each.agrees for each in recounts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
