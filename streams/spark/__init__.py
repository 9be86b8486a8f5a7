"""Boxes in Spark: `spark.read.format("streams")`, and jobs over them.

    import streams.spark as ss

    spark = ss.session(cores=2)
    orders = spark.read.format("streams").option("url", "http://127.0.0.1:4000").load("orders")

Importing this module needs no Spark: each public name is loaded at its first use.

    options (option_table), offsets,
    gaps, columns, bad_rows           pure: parsing, planning, conversion, rows that cannot be written
    reads, source                     which records, from which shards; Spark's readers
    sink                              transactions; Spark's writers
    updates                           writes of queries with output mode update
    checkpoints                       shortens a planned micro-batch
    sessions, java, spark_home        local sessions that need no setup
    autoload                          lets Spark find the format by itself
    lag, listeners, expressions       consumer lag of queries; slots and shards as SQL
    jobs                              archive, backfill, replay, rollup, snapshot, audit
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import TYPE_CHECKING

from streams.protocol.errors import Refused
from streams.spark.java import java_home

if TYPE_CHECKING:
    from streams.protocol.errors import WriterConflict
    from streams.spark import jobs
    from streams.spark.checkpoints import recut
    from streams.spark.expressions import prepare, shard, slot
    from streams.spark.gaps import GapError
    from streams.spark.lag import follow_lag
    from streams.spark.sessions import activate, register, session
    from streams.spark.sink import PartialCommit
    from streams.spark.source import StreamsDataSource
    from streams.spark.updates import batch_writer

# A plain SparkSession looks for Java in JAVA_HOME and on PATH only. Without either, it gets the runtime that
# the extra `spark` installs.
if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
    try:
        os.environ["JAVA_HOME"] = str(java_home())
    except (OSError, Refused):
        pass  # Spark itself reports that there is no Java

_MODULE_OF = {
    "GapError": "streams.spark.gaps",
    "PartialCommit": "streams.spark.sink",
    "StreamsDataSource": "streams.spark.source",
    "WriterConflict": "streams.protocol.errors",
    "activate": "streams.spark.sessions",
    "batch_writer": "streams.spark.updates",
    "follow_lag": "streams.spark.lag",
    "prepare": "streams.spark.expressions",
    "recut": "streams.spark.checkpoints",
    "register": "streams.spark.sessions",
    "session": "streams.spark.sessions",
    "shard": "streams.spark.expressions",
    "slot": "streams.spark.expressions",
}

__all__ = [
    "GapError",
    "PartialCommit",
    "StreamsDataSource",
    "WriterConflict",
    "activate",
    "batch_writer",
    "follow_lag",
    "jobs",
    "prepare",
    "recut",
    "register",
    "session",
    "shard",
    "slot",
]


def __getattr__(name: str) -> object:
    if name == "jobs":
        return importlib.import_module("streams.spark.jobs")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'streams.spark' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    # The import system binds a submodule of the same name here; the caller wants the object inside it.
    globals()[name] = value
    return value
