"""Measures an archive of many runs: `python -m loadtests.archive_runs`.

It writes the state after RUNS hourly runs directly: one file and one ledger entry for each run, never merged.
That is the worst state of an archive. Then it times `read_all` and `audit` before and after `compact`.
Another engine (pyarrow) counts the rows of the files independently.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import dataset

import streams
import streams.spark as ss
from streams.spark import jobs
from streams.spark.jobs.archive_files import LEDGER, box_folder, read_files
from streams.spark.jobs.job_context import summary
from streams.testing import running_server

T = TypeVar("T")

BOX, NAME = "orders", "many"
RECORDS = 10
_APPEND = 5_000
_START = datetime(2025, 1, 1, tzinfo=UTC)


def _write_runs(path: Path, runs: int) -> None:
    text = pa.utf8()
    for run in range(runs):
        moment = _START + timedelta(hours=run)
        folder = path / box_folder(BOX) / f"date={moment:%Y-%m-%d}"
        folder.mkdir(parents=True, exist_ok=True)
        seqs = range(run * RECORDS + 1, (run + 1) * RECORDS + 1)
        table = pa.table(
            {
                "seq": pa.array(seqs, pa.int64()),
                "ts": pa.array([moment] * RECORDS, pa.timestamp("us", tz="UTC")),
                "data": pa.array([f'{{"n":{seq}}}' for seq in seqs], text),
                "tag": pa.nulls(RECORDS, text),
                "node": pa.nulls(RECORDS, text),
                "meta": pa.nulls(RECORDS, text),
            }
        )
        pq.write_table(table, folder / f"{run:013d}-00000000-part-0.parquet", compression="zstd")


def _print_time(what: str, run: Callable[[], T]) -> T:
    began_s = time.perf_counter()
    result = run()
    print(f"{what:32}{time.perf_counter() - began_s:8.1f} s   {result}", flush=True)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args(argv)
    runs, records = arguments.runs, arguments.runs * RECORDS
    with tempfile.TemporaryDirectory(prefix="archive-runs-") as folder, running_server(shards=1) as server:
        path = Path(folder, "archive")
        _write_runs(path, runs)
        spark = ss.session(arguments.cores, config={"spark.local.dir": folder, "spark.driver.memory": "2g"})
        spark.range(1).count()
        with streams.Client(server.url) as client:
            for at in range(0, records, _APPEND):
                client.box(BOX).append_batch([{"n": 0}] * min(_APPEND, records - at))
            # The state after `archive --trim`: the records are in the files only.
            client.box(BOX).append_batch([{"n": 0}], trim_before_seq=records + 1)
            gen = client.box(BOX).state().generation
            total = summary(read_files(spark, str(path))).collect()[0]["fingerprint"]
            entries = [
                {
                    "box": BOX,
                    "gen": gen,
                    "first": run * RECORDS + 1,
                    "last": (run + 1) * RECORDS,
                    "records": RECORDS,
                    "fingerprint": total if run == 0 else 0,
                    "gaps": [],
                    "path": str(path),
                    "run": "",
                }
                for run in range(runs)
            ]
            for at in range(0, runs, 5_000):
                client.box(LEDGER + NAME).append_batch(entries[at : at + 5_000])
        url = server.url

        def count() -> int:
            return jobs.read_all(spark, NAME, [BOX], url=url).count()

        def fingerprints() -> str:
            findings = jobs.audit(spark, [BOX], archive=NAME, url=url).findings
            return "ok" if not any("the files" in each for each in findings) else str(findings)

        assert _print_time(f"read_all, {runs} runs, unmerged", count) == records + 1
        assert _print_time("audit", fingerprints) == "ok"
        _print_time("compact", lambda: jobs.compact(spark, NAME, url=url))
        assert _print_time("read_all, merged", count) == records + 1
        assert _print_time("audit", fingerprints) == "ok"
        assert _print_time("pyarrow", dataset.dataset(str(path), partitioning="hive").count_rows) == records
        spark.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
