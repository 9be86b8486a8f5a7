"""Snapshots of an Iceberg table, written with pyiceberg.

Files have no field ids: readers find columns by name (the table property `schema.name-mapping.default`). The
table has no delete files: a commit that changes rows replaces whole files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyiceberg import expressions
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile as IcebergDataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import DayTransform, IdentityTransform, Transform
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestamptzType,
)

from streams.spark.jobs.job_context import JobRefused, Ledger
from streams.spark.jobs.tables.catalog import BoxCatalog
from streams.spark.jobs.tables.columns import BASE_COLUMNS, Column
from streams.spark.jobs.tables.versions import DataFile, TableVersion, version_of

_COLUMNS, _MERGED = "streams.columns", "streams.merged"
#: The partition column of this name is the day of `ts`.
DATE = "date"

#: A table keeps its newest snapshots. Every commit writes the metadata of all of them again, so with more of
#: them each run would take longer.
SNAPSHOTS_KEPT, _EXPIRED_AT_ONCE = 100, 20

_TYPES: dict[str, IcebergType] = {
    "string": StringType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "double": DoubleType(),
    "float": FloatType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestamptzType(),
}

_PROPERTIES = {
    "format-version": "2",
    # A second run must not add its rows behind ours: it has read the same records.
    "commit.retry.num-retries": "0",
    # One manifest for each run would make every commit and every read slower.
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "32",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "32",
}


def iceberg_type(column: Column) -> IcebergType:
    if match := re.fullmatch(r"decimal\((\d+),(\d+)\)", column.type):
        return DecimalType(int(match[1]), int(match[2]))
    return _TYPES[column.type]


class IcebergTable:
    def __init__(self, table: Table) -> None:
        self._table = table

    def __repr__(self) -> str:
        return f"<IcebergTable {self._table.location()}>"

    @classmethod
    def open(cls, ledger: Ledger, location: str) -> IcebergTable | None:
        table = BoxCatalog(ledger, location).open_table()
        return None if table is None else cls(table)

    @classmethod
    def create(
        cls,
        ledger: Ledger,
        location: str,
        columns: Sequence[Column],
        partition_by: Sequence[str],
        *,
        is_merged: bool = False,
    ) -> IcebergTable:
        fields = [
            NestedField(number, name, _TYPES[type], required=False)
            for number, (name, type) in enumerate(BASE_COLUMNS.items(), 1)
        ]
        for column in columns:
            fields.append(NestedField(len(fields) + 1, column.name, iceberg_type(column), required=False))
        schema = Schema(*fields)
        properties = {**_PROPERTIES, _COLUMNS: json.dumps(columns), _MERGED: str(is_merged).lower()}
        properties["schema.name-mapping.default"] = schema.name_mapping.model_dump_json()
        table = BoxCatalog(ledger, location).create(schema, _partition_spec(schema, partition_by), properties)
        return cls(table)

    @property
    def columns(self) -> list[Column]:
        return [Column(*each) for each in json.loads(self._table.properties[_COLUMNS])]

    @property
    def partition_by(self) -> list[str]:
        return [field.name for field in self._table.spec().fields]

    @property
    def is_merged(self) -> bool:
        return self._table.properties.get(_MERGED) == "true"

    def newest(self) -> TableVersion | None:
        snapshot = self._table.current_snapshot()
        return None if snapshot is None else _version(snapshot)

    def versions(self) -> list[TableVersion]:
        return [_version(each) for each in self._snapshots()]

    def _snapshots(self) -> list[Snapshot]:
        return sorted(self._table.snapshots(), key=lambda each: each.sequence_number or 0)

    def files(
        self,
        version: int | None = None,
        *,
        boxes: Sequence[str] | None = None,
        times_ms: tuple[int, int] | None = None,
    ) -> list[DataFile]:
        if self._table.current_snapshot() is None:
            return []
        terms: Any = expressions  # mypy sees the fields of its models, not its constructors
        row_filter = terms.AlwaysTrue()
        if boxes is not None:
            row_filter = terms.And(row_filter, terms.In("box", set(boxes)))
        if times_ms is not None:
            start, end = (_timestamp(each) for each in times_ms)
            row_filter = terms.And(
                row_filter, terms.GreaterThanOrEqual("ts", start), terms.LessThan("ts", end)
            )
        tasks = self._table.scan(row_filter, snapshot_id=version).plan_files()
        return [DataFile(task.file.file_path, task.file.file_size_in_bytes) for task in tasks]

    def commit(
        self,
        add: Sequence[str],
        properties: Mapping[str, str],
        *,
        remove: Sequence[str] = (),
        new_columns: Sequence[Column] = (),
    ) -> None:
        self._commit(add, properties, remove, new_columns)
        self._expire_snapshots()

    def _commit(
        self,
        add: Sequence[str],
        properties: Mapping[str, str],
        remove: Sequence[str],
        new_columns: Sequence[Column],
    ) -> None:
        removed_files = self._data_files(remove) if remove else []
        with self._table.transaction() as transaction:
            if new_columns:
                with transaction.update_schema() as update:
                    for column in new_columns:
                        update.add_column(column.name, iceberg_type(column))
                transaction.set_properties({_COLUMNS: json.dumps([*self.columns, *new_columns])})
            if not removed_files:
                # Names of files contain the id of their run, so none is in the table already.
                transaction.add_files(list(add), dict(properties), check_duplicate_files=False)
                return
            with transaction.update_snapshot(snapshot_properties=dict(properties)).overwrite() as overwrite:
                for file in removed_files:
                    overwrite.delete_data_file(file)
                for path in add:
                    metadata = transaction.table_metadata
                    overwrite.append_data_file(parquet_file_to_data_file(self._table.io, metadata, path))

    def _expire_snapshots(self) -> None:
        """Remove the oldest snapshots from the metadata. Their files stay."""
        snapshots = self._snapshots()
        if len(snapshots) < SNAPSHOTS_KEPT + _EXPIRED_AT_ONCE:
            return
        oldest_ms = snapshots[-SNAPSHOTS_KEPT].timestamp_ms
        oldest = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=oldest_ms)
        self._table.maintenance.expire_snapshots().older_than(oldest).commit()

    def _data_files(self, paths: Sequence[str]) -> list[IcebergDataFile]:
        path_set = set(paths)
        files = [task.file for task in self._table.scan().plan_files() if task.file.file_path in path_set]
        if len(files) != len(path_set):
            raise JobRefused("the table has changed since its files were listed; run the job again")
        return files


def _version(snapshot: Snapshot) -> TableVersion:
    properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
    return version_of(snapshot.snapshot_id, snapshot.timestamp_ms, properties)


def _timestamp(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


def _partition_spec(schema: Schema, partition_by: Sequence[str]) -> PartitionSpec:
    fields = []
    for number, name in enumerate(partition_by, 1000):
        is_date = name == DATE and DATE not in schema.column_names
        source = schema.find_field("ts" if is_date else name)
        transform: Transform[Any, Any] = DayTransform() if is_date else IdentityTransform()
        fields.append(PartitionField(source.field_id, number, transform, name))
    return PartitionSpec(*fields)
