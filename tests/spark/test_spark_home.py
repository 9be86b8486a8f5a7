"""The home of links that sessions on this machine start from. Needs no Spark that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streams.spark.spark_home import spark_home


def test_workers_of_a_home_of_links_import_what_pip_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = spark_home()
    assert home is not None and home.is_relative_to(tmp_path) and spark_home() == home
    assert (home / "bin" / "spark-submit").is_file() and any((home / "jars").glob("spark-core*.jar"))
    assert "rootLogger.level = error" in (home / "conf" / "log4j2.properties").read_text()
    # As Spark sets it for its workers.
    paths = [str(path) for path in sorted((home / "python" / "lib").iterdir())]
    assert len(paths) == 2
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import pyspark.worker, py4j; print(pyspark.worker.__cached__)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert where.stdout.startswith(f"{home}/python/lib/pyspark.zip/pyspark/__pycache__/"), where.stderr
    assert [path.name for path in home.parent.iterdir()] == [home.name], "nothing is left of making it"


def test_where_no_home_can_be_made_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "streams").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert spark_home() is None
