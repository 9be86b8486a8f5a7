"""A Spark session that works as it is: Java found or brought, the source registered, quiet."""

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

#: For a session on this machine. What is given to `session` wins.
_LOCAL: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # A machine whose name cannot be resolved, or is resolved to an address that is gone, stops Spark.
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
    """A `SparkSession`: on this machine with so many cores (all, if not said), on a cluster (`master`), or of
    a Spark Connect server (`remote`). One that runs already is given back, as Spark does."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkNotInstalled from error
    if remote is not None:
        if master is not None or cores is not None:
            raise ValueError("remote goes without master and cores: the server has its own")
        try:
            return SparkSession.builder.remote(remote).appName(app).getOrCreate()
        except ImportError as error:
            raise SparkNotInstalled(
                f"Spark Connect needs more than Spark: pip install 'streams-server[connect]' ({error})"
            ) from error
    if master is None:
        # A failed task is tried again, as on a cluster; plain local[N] would give up at once.
        master = f"local[{cores or os.cpu_count() or 1},3]"
    elif cores is not None:
        raise ValueError("master goes without cores: local[4] has them in its name")
    if "JAVA_HOME" not in os.environ or master.startswith("local"):
        os.environ["JAVA_HOME"] = str(java_home())
    # Workers must be this very Python: whatever `python3` is on PATH lacks our package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {"spark.sql.session.timeZone": "UTC"}
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = dict(_LOCAL)
        home = spark_home()
        if home is not None and os.environ.setdefault("SPARK_HOME", str(home)) == str(home):
            del settings["spark.log.level"]  # it is that home's, and to set it again is told on stderr
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in {**settings, **(config or {})}.items():
        builder = builder.config(name, str(value))
    found: SparkSession = builder.getOrCreate()
    register(found)
    return found


def activate(spark: SparkSession) -> None:
    """Makes a session the active one of this thread. Spark looks for Python data sources in the active
    session only, and a thread that did not create a session has none: its writes fail with
    DATA_SOURCE_NOT_FOUND. A Spark Connect session needs nothing of the kind."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)


def register(spark: SparkSession) -> None:
    """Makes `format("streams")` known. Not needed where the package is installed, for Spark looks for it; it
    is where the code is on the path alone."""
    from streams.spark.source import StreamsDataSource

    spark.dataSource.register(StreamsDataSource)
