"""SQL columns for the slot and shard of a box, and rows prepared for the sink. Everything runs in the JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from streams.protocol.messages.server_replies import Placement
from streams.protocol.model.slots import SLOTS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def slot(box: Column | str) -> Column:
    """Return the slot of a box name. The server's hash is Spark's `xxhash64`."""
    return sql.pmod(sql.xxhash64(box), sql.lit(SLOTS))


def shard(box: Column | str, placement: Placement) -> Column:
    """Return the shard that owns a box in this placement (`Client.placement()`)."""
    slot_column, owner = slot(box), sql.lit(None).cast("int")
    for start, end, number in placement.slots:
        owner = sql.when((slot_column >= start) & (slot_column < end), sql.lit(number)).otherwise(owner)
    return owner


def prepare(
    rows: DataFrame,
    *,
    data: Column | str | None = None,
    box: Column | str | None = None,
    tag: Column | str | None = None,
    meta: Column | str | None = None,
    ts: Column | str | None = None,
    source: Column | str | None = None,
) -> DataFrame:
    """Select the columns that the sink accepts from any frame.

    Without `data`, a record is the whole row as JSON. Structs, maps and arrays become JSON; text must be JSON
    already and stays unchanged. `source` is JSON text that dead letters get (`onBadRow=deadletter`).
    """
    whole = sql.to_json(sql.struct(*[sql.col(f"`{name}`") for name in rows.columns]))
    columns = {"data": whole if data is None else _json(rows, data)}
    if box is not None:
        columns["box"] = _column(box)
    if tag is not None:
        columns["tag"] = _column(tag).cast("string")
    if meta is not None:
        columns["meta"] = _json(rows, meta)
    if ts is not None:
        columns["ts"] = _column(ts)
    if source is not None:
        columns["source"] = _column(source)
    return rows.select(*[column.alias(name) for name, column in columns.items()])


def _column(expression: Column | str) -> Column:
    return sql.expr(expression) if isinstance(expression, str) else expression


def _json(rows: DataFrame, expression: Column | str) -> Column:
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType, VariantType

    column = _column(expression)
    kind = rows.select(column.alias("it")).schema["it"].dataType
    if isinstance(kind, StringType):
        return column
    if isinstance(kind, (StructType, MapType, ArrayType, VariantType)):
        return sql.to_json(column)
    # to_json accepts only structs, maps and arrays: encode a scalar in an array and drop the brackets.
    in_array = sql.to_json(sql.array(column))
    return sql.substring(in_array, sql.lit(2), sql.length(in_array) - 2)
