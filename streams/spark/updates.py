"""Writes the micro-batches of a query with output mode `update`, each exactly once.

Spark refuses this mode for sinks written in Python. But `foreachBatch` accepts it, and a batch write with the
id of the query and the number of the micro-batch is the transaction that the streaming sink would use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from streams.spark.options import BadOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY_ID = "sql.streaming.queryId"


def batch_writer(url: str, box: str | None = None, **options: object) -> Callable[[DataFrame, int], None]:
    """Return a function for `writeStream.foreachBatch`, with the options of a write.

    The rows of each micro-batch need the columns of a write. With Spark Connect, set `txnAppId` to a name
    that belongs to the checkpoint.
    """

    def write(rows: DataFrame, batch: int) -> None:
        writer = options.get("txnAppId") or _query_id(rows)
        sink = rows.write.format("streams").option("url", url)
        for name, value in options.items():
            sink = sink.option(name, str(value))
        sink = sink.option("txnAppId", str(writer)).option("txnVersion", str(batch)).mode("append")
        sink.save(box) if box is not None else sink.save()

    return write


def _query_id(rows: DataFrame) -> str:
    """Return the id of the query, which stays the same when it resumes from its checkpoint."""
    try:
        query = rows.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    except PySparkException:  # Spark Connect has no context
        query = None
    if query is None:
        raise BadOption("txnAppId: is needed here, because Spark does not pass the id of the query")
    return str(query)
