"""Writes many rows with Spark once and reads them once: `python -m loadtests.spark_volume --rows 100000000`.

One `save()` with default settings, which is one transaction, then one read of everything. The rows are those
of `spark_throughput.py`: 128 bytes of data, 64 boxes. The table has times, rates, and the peak memory (RSS)
of each kind of process; a line shows the progress. Count, sum and hash of all numbers read must equal those
written. The exit code is 1 if they do not, and 2 if the disk is too small. All data is in a folder below
`build/`, which is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql import functions as sql

import streams.spark as ss
from loadtests import machine
from loadtests.process_table import descendants, processes
from loadtests.rows import ROOT
from loadtests.spark_throughput import FIRST_NUMBER, make_rows
from streams.direct import Shards
from streams.testing import Server, running_server

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

T = TypeVar("T")

DATA_BYTES: Final = 128
#: Peak disk use of a row in bytes: as sent, as rendered, and as sealed.
DISK_BYTES_A_ROW: Final = 530
PREFIX: Final = "volume."
SAMPLE_S: Final = 1.0
REPORT_S: Final = 10.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Peak memory of each kind of process, peak size of the data folder, and a line of progress."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._spark: SparkSession | None = None
        self._began_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        #: Kind -> peak of its largest process, and peak of all its processes together.
        self.largest: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.disk_bytes = self.disk_bytes_at_start = folder_bytes(folder)
        self.part = "start"

    def follow(self, spark: SparkSession) -> None:
        self._spark = spark

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        next_report = self._began_s + REPORT_S
        while not self._is_over.wait(SAMPLE_S):
            now = self._sample()
            if time.monotonic() >= next_report:
                next_report += REPORT_S
                sizes = ", ".join(f"{kind} {size / 1e6:,.0f} MB" for kind, size in sorted(now.items()))
                self.say(f"{self.part}{self._tasks()}; {sizes}; disk {self.disk_bytes / 1e9:.2f} GB at most")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:7.1f} s  {text}", flush=True)

    def _tasks(self) -> str:
        if self._spark is None:
            return ""
        tracker = self._spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(each) for each in tracker.getActiveStageIds()]
        counts = [f"{each.numCompletedTasks} of {each.numTasks} tasks" for each in stages if each]
        return f", {', '.join(counts)}" if counts else ""

    def _sample(self) -> dict[str, int]:
        kinds = dict.fromkeys(self._server.shard_pids().values(), "shard")
        kinds |= dict.fromkeys(self._server.gateway_pids().values(), "gateway")
        for each in descendants(processes(), os.getpid()):
            if each.name == "java":
                kinds[each.pid] = "Spark's JVM"
            elif "pyspark" in each.command:
                kinds[each.pid] = "Python worker"
        now: dict[str, int] = {}
        for pid, kind in kinds.items():
            size = resident_bytes(pid)
            now[kind] = now.get(kind, 0) + size
            self.largest[kind] = max(self.largest.get(kind, 0), size)
        for kind, size in now.items():
            self.total[kind] = max(self.total.get(kind, 0), size)
        self.disk_bytes = max(self.disk_bytes, folder_bytes(self._folder))
        return now


def resident_bytes(pid: int) -> int:
    """Return the RSS of a process; 0 if it has ended. Cheaper than Pss, which walks every mapping."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def folder_bytes(folder: Path) -> int:
    """Return the disk use of the files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            pass  # just removed
    return total


def numbers(frame: DataFrame, number: Column) -> tuple[int, int, int]:
    """Return count, sum and hash of the numbers of rows."""
    row = frame.agg(sql.count(number), sql.sum(number), sql.bit_xor(sql.xxhash64(number))).first()
    assert row is not None
    return row[0], row[1], row[2]


def wait_until_rendered(url: str) -> None:
    """Wait until every shard has written the rows of its commits in their final form."""
    with Shards(url) as shards:
        while any(shards.txn_list(shard).rendering for shard in range(shards.count)):
            time.sleep(0.2)


def run(rows: int, cores: int | None, folder: Path) -> bool:
    times: dict[str, float] = {}
    with running_server(folder / "data", **machine.USER_SETTINGS) as server, Watch(server, folder) as watch:

        def measure_part(part: str, work: Callable[[], T]) -> T:
            watch.part = part
            began_s = time.monotonic()
            read_numbers = work()
            times[part] = time.monotonic() - began_s
            watch.say(f"{part}: {times[part]:.1f} s")
            return read_numbers

        spark = ss.session(cores, config={"spark.local.dir": str(folder / "spark")})
        watch.follow(spark)
        try:
            frame = make_rows(spark, rows, PREFIX, partitions=max(4, rows // 1_000_000))
            write = frame.write.format("streams").option("url", server.url).mode("append")
            measure_part("write", write.save)
            measure_part("render", lambda: wait_until_rendered(server.url))
            source = spark.read.format("streams").option("url", server.url)
            read = source.option("subscribePrefix", PREFIX).load()
            number = sql.get_json_object("data", "$.n").cast("bigint")
            read_numbers = measure_part("read", lambda: numbers(read, number))
            written_numbers = numbers(spark.range(FIRST_NUMBER, FIRST_NUMBER + rows), sql.col("id"))
        finally:
            spark.stop()
    _show(rows, times, watch)
    if read_numbers != written_numbers:
        print(f"read {read_numbers}, written {written_numbers} (count, sum, hash)", file=sys.stderr)
    return read_numbers == written_numbers


def _show(rows: int, times: dict[str, float], watch: Watch) -> None:
    print(f"\n{rows:,} rows, {rows * DATA_BYTES / 1e9:.2f} GB of data\n")
    print(f"{'part':12}{'seconds':>10}{'rows/s':>14}{'MB/s':>10}")
    for part, spent_s in (times | {"write+render": times["write"] + times["render"]}).items():
        rate = rows / max(spent_s, 1e-9)
        print(f"{part:12}{spent_s:>10.1f}{rate:>14,.0f}{rate * DATA_BYTES / 1e6:>10.1f}")
    print(f"\n{'peak RSS':16}{'largest, MB':>14}{'together, MB':>14}")
    for kind in sorted(watch.total):
        print(f"{kind:16}{watch.largest[kind] / 1e6:>14,.0f}{watch.total[kind] / 1e6:>14,.0f}")
    empty = watch.disk_bytes_at_start
    a_row = (watch.disk_bytes - empty) / rows
    print(
        f"\ndisk: {watch.disk_bytes / 1e9:.2f} GB at most, {empty / 1e9:.2f} before; {a_row:.0f} bytes a row"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--cores", type=int, help="cores of Spark (default: all)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="folder for temporary data")
    arguments = parser.parse_args(argv)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    free, needed_bytes = shutil.disk_usage(arguments.dir).free, arguments.rows * DISK_BYTES_A_ROW + (2 << 30)
    if free < needed_bytes:
        print(
            f"{arguments.dir} has {free / 1e9:.1f} GB free; {needed_bytes / 1e9:.1f} GB are needed. "
            "Choose another disk with --dir",
            file=sys.stderr,
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="volume-", dir=arguments.dir.absolute()))
    try:
        return 0 if run(arguments.rows, arguments.cores, folder) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
