"""Snapshots of a Delta table, written with delta-rs.

A commit is one file of the table's log, which the store creates only if it does not exist, so of two
concurrent commits one is refused. The properties of a snapshot are metadata of its commit. The ledger has one
entry, which names the folder.

The log must keep all commits: they have the seqs of the snapshots. So its retention is a hundred years.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSystem, LocalFileSystem

from streams.spark.jobs.files import normalize_path
from streams.spark.jobs.job_context import JobRefused, Ledger
from streams.spark.jobs.tables.columns import BASE_COLUMNS, Column
from streams.spark.jobs.tables.versions import CURSORS, DataFile, TableVersion, version_of

_COLUMNS, _MERGED = "streams.columns", "streams.merged"
_DATE = "date"
_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_CONFIGURATION = {
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.checkpointInterval": "50",
}


def _arrow_type(type: str) -> pa.DataType:
    if type.startswith("decimal("):
        precision, scale = type[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    return _TYPES[type]


class OpenDeltaTable:
    def __init__(self, table: DeltaTable, properties: Mapping[str, str]) -> None:
        self._table = table
        #: Of the newest commit: they describe the table too.
        self._properties = dict(properties)

    def __repr__(self) -> str:
        return f"<OpenDeltaTable {self._table.table_uri}>"

    @classmethod
    def open(cls, ledger: Ledger, location: str) -> OpenDeltaTable | None:
        if not ledger.entries:
            return None
        entry = ledger.entries[-1]
        if (entry.get("format"), entry.get("location")) != ("delta", location):
            raise JobRefused(
                f"this name is used for a table of format {entry.get('format')} at {entry.get('location')}; "
                f"use another name"
            )
        if not DeltaTable.is_deltatable(location):  # a run was stopped before it created the table
            return None
        table = DeltaTable(location)
        return cls(table, table.history(1)[0])

    @classmethod
    def create(
        cls,
        ledger: Ledger,
        location: str,
        columns: Sequence[Column],
        partition_by: Sequence[str],
        *,
        is_merged: bool = False,
    ) -> OpenDeltaTable:
        if not ledger.entries:
            if DeltaTable.is_deltatable(location):
                raise JobRefused(f"there is a Delta table at {location} already; use another path")
            ledger.replace([{"format": "delta", "location": location}])
        properties = {_COLUMNS: json.dumps(columns), _MERGED: str(is_merged).lower()}
        table = DeltaTable.create(
            location,
            _schema(columns, partition_by),
            partition_by=list(partition_by),
            configuration=_CONFIGURATION,
            commit_properties=CommitProperties(custom_metadata=properties),
        )
        return cls(table, properties)

    @property
    def columns(self) -> list[Column]:
        return [Column(*each) for each in json.loads(self._properties[_COLUMNS])]

    @property
    def partition_by(self) -> list[str]:
        return list(self._table.metadata().partition_columns)

    @property
    def is_merged(self) -> bool:
        return self._properties.get(_MERGED) == "true"

    def newest(self) -> TableVersion | None:
        if CURSORS not in self._properties:
            return None
        return version_of(self._table.version(), int(self._properties["timestamp"]), self._properties)

    def versions(self) -> list[TableVersion]:
        """Return the commits that have cursors: all but the first, which creates the table."""
        commits = [each for each in reversed(self._table.history()) if CURSORS in each]
        return [version_of(each["version"], each["timestamp"], each) for each in commits]

    def files(
        self,
        version: int | None = None,
        *,
        boxes: Sequence[str] | None = None,
        times_ms: tuple[int, int] | None = None,
    ) -> list[DataFile]:
        table = self._table if version is None else DeltaTable(self._table.table_uri, version=version)
        root = self._location
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        return [
            DataFile(f"{root}/{unquote(each['path'])}", each["size_bytes"])
            for each in actions
            if boxes is None or each.get("partition.box", boxes[0]) in boxes
        ]

    def commit(
        self,
        add: Sequence[str],
        properties: Mapping[str, str],
        *,
        remove: Sequence[str] = (),
        new_columns: Sequence[Column] = (),
    ) -> None:
        if new_columns:
            self._add_columns(new_columns)
        adds = [self._add_action(path) for path in add]
        removes = self._remove_actions(remove)
        metadata = {
            **properties,
            _COLUMNS: self._properties[_COLUMNS],
            _MERGED: self._properties[_MERGED],
        }
        try:
            self._table.create_write_transaction(
                [*adds, *removes],
                "append",
                _schema(self.columns, self.partition_by),
                partition_by=self.partition_by,
                # A second run must not add its rows behind ours: it has read the same records.
                commit_properties=CommitProperties(custom_metadata=metadata, max_commit_retries=0),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except CommitFailedError as error:
            raise JobRefused(
                f"another run of this job has changed the table at {self._location}; run the job again when "
                f"it has ended ({error})"
            ) from error
        self._table = DeltaTable(self._table.table_uri)
        self._properties = self._table.history(1)[0]

    @property
    def _location(self) -> str:
        return normalize_path(unquote(self._table.table_uri)).rstrip("/")

    def _add_columns(self, columns: Sequence[Column]) -> None:
        """Add columns in a commit of its own, with the cursors of the newest one: no record is added."""
        metadata = {name: value for name, value in self._properties.items() if name.startswith("streams.")}
        metadata[_COLUMNS] = json.dumps([*self.columns, *columns])
        fields = Schema.from_arrow(
            pa.schema([(each.name, _arrow_type(each.type)) for each in columns])
        ).fields
        try:
            self._table.alter.add_columns(
                fields, commit_properties=CommitProperties(custom_metadata=metadata, max_commit_retries=0)
            )
        except CommitFailedError as error:
            raise JobRefused(
                f"another run of this job has changed the table at {self._location}; run the job again when "
                f"it has ended ({error})"
            ) from error
        self._properties = metadata

    def _add_action(self, path: str) -> AddAction:
        if "://" in path:
            store, inside = FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", path))
        else:
            store, inside = LocalFileSystem(), path
        with pq.ParquetFile(inside, filesystem=store) as file:
            values = {name: _partition_value(file, name) for name in self.partition_by}
            rows = file.metadata.num_rows
        return AddAction(
            path=path.removeprefix(self._location + "/"),
            size=store.get_file_info(inside).size,
            partition_values=values,
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": rows}),
        )

    def _remove_actions(self, paths: Sequence[str]) -> list[RemoveAction]:
        if not paths:
            return []
        path_set = set(paths)
        root = self._location
        actions = pa.table(self._table.get_add_actions(flatten=False)).to_pylist()
        old_actions = [each for each in actions if f"{root}/{unquote(each['path'])}" in path_set]
        if len(old_actions) != len(path_set):
            raise JobRefused("the table has changed since its files were listed; run the job again")
        return [
            RemoveAction(path=each["path"], data_change=True, deletion_timestamp=int(time.time() * 1000))
            for each in old_actions
        ]


def _partition_value(file: pq.ParquetFile, name: str) -> str | None:
    """Return the value of a partition column, which all rows of a file share."""
    is_day = name == _DATE and name not in file.schema_arrow.names
    batch = next(file.iter_batches(1, columns=["ts" if is_day else name]))
    value = batch.column(0)[0].as_py()
    if value is None:
        return None
    if is_day:
        return str(value.date().isoformat())
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _schema(columns: Sequence[Column], partition_by: Sequence[str]) -> Schema:
    fields = [
        *((name, _arrow_type(type)) for name, type in BASE_COLUMNS.items()),
        *((each.name, _arrow_type(each.type)) for each in columns),
    ]
    if _DATE in partition_by and _DATE not in dict(fields):
        fields.append((_DATE, pa.date32()))
    return Schema.from_arrow(pa.schema(fields))
