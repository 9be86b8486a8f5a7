"""Rows of Spark: rows a second through the data source, after a warm-up (`spark_throughput.py`)."""

from __future__ import annotations

import json
import subprocess
import sys

from loadtests.rows import ROOT, Bench, Case, CaseFailed, Measurement, Row

_ROWS, _ROWS_QUICK = 1_000_000, 2_000
#: One JVM for all rows, and each figure is the best of three.
_RUN_S = 600


def _measure(bench: Bench, case: Case) -> Measurement:
    out = bench.folder / "spark.json"
    is_quick = bench.sizes.is_quick
    command = [sys.executable, "-m", "loadtests.spark_throughput", "--json", str(out)]
    command += ["--rows", str(_ROWS_QUICK if is_quick else _ROWS), "--repeat", "0" if is_quick else "3"]
    command += ["--only", ",".join(row.key.removeprefix("spark-") for row in case.rows)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_S)
    if process.returncode:
        raise CaseFailed(process.stderr.strip() or "spark_throughput failed")
    figures = json.loads(out.read_text())["figures"]
    row_figures = {row.key: figures[row.key.removeprefix("spark-")] for row in case.rows}
    return Measurement(row_figures, {"figures": figures})


SPARK_CASES = (
    Case(
        (
            Row("spark-write-txn", "Spark: write, one transaction", "rows/s", aim=800_000),
            Row("spark-read", "Spark: read", "rows/s", aim=1_200_000),
            Row("spark-write-empty", "Spark: write to a sink that drops all", "rows/s"),
            Row("spark-read-empty", "Spark: read a source that costs nothing", "rows/s"),
        ),
        _measure,
    ),
)
