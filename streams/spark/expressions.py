"""Columns: which slot and shard a box is on, and rows made ready for writing, all inside the JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from streams.protocol.messages.server_replies import Placement
from streams.protocol.model.slots import SLOTS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def slot(box: Column | str) -> Column:
    """The slot of a box's name, as the server has it: our hash is Spark's own."""
    return sql.pmod(sql.xxhash64(box), sql.lit(SLOTS))


def shard(box: Column | str, placement: Placement) -> Column:
    """The shard that owns the box now (`Client.placement()`)."""
    at, found = slot(box), sql.lit(None).cast("int")
    for start, end, number in placement.slots:
        found = sql.when((at >= start) & (at < end), sql.lit(number)).otherwise(found)
    return found


def prepare(
    rows: DataFrame,
    *,
    data: Column | str | None = None,
    box: Column | str | None = None,
    tag: Column | str | None = None,
    meta: Column | str | None = None,
    ts: Column | str | None = None,
) -> DataFrame:
    """The columns that the sink takes, out of any. Without `data` a record is the whole row. Structs, maps
    and arrays become JSON; text that is JSON already stays as it is."""
    whole = sql.to_json(sql.struct(*[sql.col(f"`{name}`") for name in rows.columns]))
    wanted = {"data": whole if data is None else _json(rows, data)}
    if box is not None:
        wanted["box"] = _column(box)
    if tag is not None:
        wanted["tag"] = _column(tag).cast("string")
    if meta is not None:
        wanted["meta"] = _json(rows, meta)
    if ts is not None:
        wanted["ts"] = _column(ts)
    return rows.select(*[column.alias(name) for name, column in wanted.items()])


def _column(given: Column | str) -> Column:
    return sql.expr(given) if isinstance(given, str) else given


def _json(rows: DataFrame, given: Column | str) -> Column:
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType, VariantType

    column = _column(given)
    kind = rows.select(column.alias("it")).schema["it"].dataType
    if isinstance(kind, StringType):
        return column
    if isinstance(kind, (StructType, MapType, ArrayType, VariantType)):
        return sql.to_json(column)
    # A number or a truth value is JSON as it stands; to_json takes only what has parts.
    inside = sql.to_json(sql.array(column))
    return sql.substring(inside, sql.lit(2), sql.length(inside) - 2)
