"""Spark sessions that need no setup: Java is found, the source is registered, and only errors are logged."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from streams.protocol.errors import Refused
from streams.spark.java import java_home
from streams.spark.spark_home import spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Settings of a session on this machine. The argument `config` of `session` overrides them.
_LOCAL: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Spark fails to start if the host name does not resolve, or resolves to an unreachable address.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
}


class SparkNotInstalled(Refused):
    """Spark is not installed: pip install 'streams-server[spark]'."""

    code = "spark_not_installed"


def session(
    cores: int | None = None,
    *,
    master: str | None = None,
    remote: str | None = None,
    app: str = "streams",
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """Return a `SparkSession`: the running one if there is one, as Spark does, else a new one.

    It runs on this machine with `cores` cores (default: all), on a cluster (`master`), or on a Spark Connect
    server (`remote`).
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkNotInstalled from error
    if remote is not None:
        if master is not None or cores is not None:
            raise ValueError("remote excludes master and cores: the Spark Connect server has its own")
        try:
            return SparkSession.builder.remote(remote).appName(app).getOrCreate()
        except ImportError as error:
            raise SparkNotInstalled(
                f"Spark Connect needs more packages: pip install 'streams-server[connect]' ({error})"
            ) from error
    if master is None:
        # Up to 3 attempts for each task, as on a cluster; plain local[N] fails the job at the first error.
        master = f"local[{cores or os.cpu_count() or 1},3]"
    elif cores is not None:
        raise ValueError("master excludes cores: write them into it, as in local[4]")
    if "JAVA_HOME" not in os.environ or master.startswith("local"):
        os.environ["JAVA_HOME"] = str(java_home())
    # Workers must run this Python: the `python3` on PATH may lack this package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {"spark.sql.session.timeZone": "UTC"}
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = dict(_LOCAL)
        home = spark_home()
        if home is not None and os.environ.setdefault("SPARK_HOME", str(home)) == str(home):
            del settings["spark.log.level"]  # that home sets it, and Spark prints a line if it is set again
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in {**settings, **(config or {})}.items():
        builder = builder.config(name, str(value))
    spark: SparkSession = builder.getOrCreate()
    register(spark)
    return spark


def activate(spark: SparkSession) -> None:
    """Make a session the active session of this thread.

    Spark looks for Python data sources in the active session only. A thread that did not create a session has
    none: its writes fail with DATA_SOURCE_NOT_FOUND. A Spark Connect session does not need this.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)


def register(spark: SparkSession) -> None:
    """Register `format("streams")`.

    An installed package does not need this, because Spark finds it (`autoload.py`). Code that is only on the
    path does.
    """
    from streams.spark.source import StreamsDataSource

    spark.dataSource.register(StreamsDataSource)
