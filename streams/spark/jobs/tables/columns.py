"""Typed columns of a table: fields of the records' JSON.

A column is a top-level field of `data`. Its type is inferred once, from a sample, and then pinned in the
table. Later runs may add columns and never change one. A value that does not fit its column becomes null; the
column `data` always has the whole text, so nothing is lost. Nested values are columns of JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import functions as sql
from pyspark.sql.types import StructType

from streams.spark.jobs.job_context import JobRefused

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Columns of every table, with their types in Spark.
BASE_COLUMNS = {
    "box": "string",
    "seq": "bigint",
    "ts": "timestamp",
    "tag": "string",
    "node": "string",
    "meta": "string",
    "data": "string",
}
INFER = "infer"
_TYPES = ("string", "bigint", "int", "double", "float", "boolean", "date", "timestamp")
#: The sample is in memory: at most 64 MB.
_SAMPLE_RECORDS, _SAMPLE_CHARACTERS = 1_000, 1 << 16
#: Each column costs statistics in every file.
_COLUMNS_MAX = 200


class Column(NamedTuple):
    #: Of the table: the field, or `data_FIELD` if the table has a column with the name of the field.
    name: str
    field: str
    #: As Spark names it.
    type: str


def parse_columns(text: str) -> list[Column]:
    """Parse columns as in a CREATE TABLE: `id bigint, price double`."""
    try:
        schema: Any = StructType.fromDDL(text)
    except PySparkException as error:
        raise JobRefused(f"columns: {text!r} is not a list such as 'id bigint, price double'") from error
    columns = [_column(each.name, each.dataType.simpleString()) for each in schema.fields]
    for column in columns:
        if column.type not in _TYPES and not column.type.startswith("decimal("):
            raise JobRefused(
                f"columns: {column.field} cannot be {column.type}; the types are {', '.join(_TYPES)} and "
                f"decimal(p,s)"
            )
    return _check_columns(columns)


def infer_columns(rows: DataFrame) -> list[Column]:
    """Return the columns of the top-level fields in a sample of the records."""
    sample = rows.select("data").filter(sql.length("data") <= _SAMPLE_CHARACTERS).limit(_SAMPLE_RECORDS)
    return infer_from([row["data"] for row in sample.collect()])


def infer_from(texts: Iterable[str]) -> list[Column]:
    """Return the columns of the top-level fields of JSON texts, in the order of their first appearance."""
    types: dict[str, str | None] = {}
    for text in texts:
        record = msgspec.json.decode(text)
        if isinstance(record, dict):
            for field, value in record.items():
                types[field] = _join_types(types.get(field), _type_of(value))
    return _check_columns([_column(field, type or "string") for field, type in types.items()])


def _type_of(value: Any) -> str | None:
    """Return the type of a JSON value; None for null."""
    match value:
        case None:
            return None
        case bool():
            return "boolean"
        case int():
            return "bigint" if -(2**63) <= value < 2**63 else "string"
        case float():
            return "double"
        case _:  # nested values are JSON text
            return "string"


def _join_types(one: str | None, other: str | None) -> str | None:
    if one is None or other is None or one == other:
        return one or other
    return "double" if {one, other} == {"bigint", "double"} else "string"


def _column(field: str, type: str) -> Column:
    return Column(f"data_{field}" if field.lower() in BASE_COLUMNS else field, field, type)


def _check_columns(columns: list[Column]) -> list[Column]:
    if len(columns) > _COLUMNS_MAX:
        raise JobRefused(f"columns: {len(columns)} columns; at most {_COLUMNS_MAX} are possible")
    names = [each.name.lower() for each in columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JobRefused(f"columns: {twice[0]} appears twice; column names do not depend on case")
    return columns


def new_columns(
    table_columns: Sequence[Column], requested_columns: Iterable[Column], *, keep_types: bool
) -> list[Column]:
    """Return the requested columns that the table lacks.

    A column with another type is refused; with `keep_types` the pinned type stays, as after an inference from
    another sample.
    """
    by_name = {each.name.lower(): each for each in table_columns}
    additions = []
    for column in requested_columns:
        existing = by_name.get(column.name.lower())
        if existing is None:
            additions.append(column)
        elif existing.type != column.type and not keep_types:
            raise JobRefused(
                f"columns: {column.name} is {existing.type} in the table and cannot become {column.type}; "
                f"add a column with another name, or write a new table"
            )
    return additions


def typed_rows(rows: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """Return the rows with the columns of a table."""
    base = rows.select(*BASE_COLUMNS)
    if not columns:
        return base
    schema = ", ".join(f"`{each.field}` {each.type}" for each in columns)
    json_rows = base.withColumn("_json", sql.from_json("data", schema))
    return json_rows.select(
        *BASE_COLUMNS, *[sql.col("_json").getField(each.field).alias(each.name) for each in columns]
    )
