"""Measures many runs of an archive to a table: `python -m loadtests.table_runs --runs 1000`.

Each run appends some records with the times of the next hour, and archives them. The time and the CPU time of
a run (driver, JVM and server) must not grow with the number of runs. Beside other work only the CPU time can
be compared. pyiceberg recounts the table at the end, and its oldest snapshot.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from pyiceberg.table import StaticTable

import streams
import streams.spark as ss
from loadtests.process_table import descendants, processes
from streams.spark import jobs
from streams.testing import running_server

BOX, NAME, RECORDS = "orders", "orders", 100
_START_MS, _HOUR_MS = 1_735_689_600_000, 3_600_000
#: A figure is the median of this many runs, without those that merge files.
_WINDOW = 10


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its descendants that run."""
    ticks = 0
    table = processes()
    for pid in [os.getpid(), *(each.pid for each in descendants(table, os.getpid()))]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks += sum(int(each) for each in fields[11:15])  # its own, and those of its ended children
    return ticks / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1_000)
    runs = parser.parse_args(argv).runs
    times_s: list[float] = []
    cpu_times_s: list[float] = []
    snapshots: list[int] = []
    with tempfile.TemporaryDirectory(prefix="table-runs-") as folder, running_server(shards=1) as server:
        spark = ss.session(2, config={"spark.local.dir": folder, "spark.driver.memory": "2g"})
        path = str(Path(folder, "table"))
        with streams.Client(server.url) as client:
            box = client.box(BOX)
            box.create(timestamping={"mode": "client-prefer"})
            for run in range(runs):
                at_ms = _START_MS + run * _HOUR_MS
                box.append_batch([streams.Entry({"n": n}, ts=at_ms + n) for n in range(RECORDS)])
                began_s, cpu_began_s = time.perf_counter(), cpu_s()
                done = jobs.archive_table(spark, [BOX], path, name=NAME, columns="n int", url=server.url)
                times_s.append(time.perf_counter() - began_s)
                cpu_times_s.append(cpu_s() - cpu_began_s)
                assert done.records == RECORDS and done.snapshot is not None
                snapshots.append(done.snapshot)
                if run + 1 in (10, 50, 100, 200, 300, 500, 700) or run + 1 == runs:
                    median_s, cpu_median_s = (
                        statistics.median(each[-_WINDOW:]) for each in (times_s, cpu_times_s)
                    )
                    print(
                        f"run {run + 1:5}: median {median_s:.2f} s, {cpu_median_s:.2f} s of CPU", flush=True
                    )
        table = StaticTable.from_metadata(path)
        kept = {each.snapshot_id for each in table.snapshots()}
        oldest = next(run for run, snapshot in enumerate(snapshots) if snapshot in kept)
        for run in (oldest, runs - 1):
            count = table.scan(snapshot_id=snapshots[run]).count()
            assert count == (run + 1) * RECORDS, (run, count)
        files = len(list(table.scan().plan_files()))
        print(f"{table.scan().count()} records in {files} files, {len(table.snapshots())} snapshots")
        spark.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
