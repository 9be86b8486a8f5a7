"""The catalog of an Iceberg table: a box with one record, which names the newest metadata file.

A commit writes a new metadata file and then replaces the record. The append has an expected seq, so of two
concurrent commits one is refused. The box is of class fsync: a commit that was answered survives a crash.

`metadata/version-hint.text` names the same file, for engines that open a table by its folder. It is written
after the commit. If a process dies in between, such engines see the previous snapshot until the next run.
"""

from __future__ import annotations

import posixpath
import uuid
from typing import Any

from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import TableRequirement, TableUpdate, update_table_metadata

from streams.spark.jobs.job_context import JobRefused, Ledger


class BoxCatalog(NoopCatalog):
    """The catalog of one table. Only the methods that a job needs are there."""

    def __init__(self, ledger: Ledger, location: str, properties: dict[str, str] | None = None) -> None:
        super().__init__("streams", **(properties or {}))
        self._ledger = ledger
        self._location = location

    def open_table(self) -> Table | None:
        """Return the table, or None if it does not exist yet."""
        if not self._ledger.entries:
            return None
        entry = self._ledger.entries[-1]
        if (entry.get("format"), entry.get("location")) != ("iceberg", self._location):
            raise JobRefused(
                f"this name is used for a table of format {entry.get('format')} at {entry.get('location')}; "
                f"use another name"
            )
        io = self._io(entry["metadata"])
        metadata = FromInputFile.table_metadata(io.new_input(entry["metadata"]))
        self._write_hint(io, entry["metadata"])
        return Table(("streams",), metadata, entry["metadata"], io, self)

    def create(self, schema: Schema, spec: PartitionSpec, properties: dict[str, str]) -> Table:
        metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, self._location, properties)
        location = self._publish(metadata, 0)
        return Table(("streams",), metadata, location, self._io(location), self)

    def load_table(self, identifier: Any) -> Table:
        table = self.open_table()
        assert table is not None, "only a table that exists is loaded again"
        return table

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        for requirement in requirements:
            requirement.validate(table.metadata)
        metadata = update_table_metadata(table.metadata, updates, metadata_location=table.metadata_location)
        number = int(posixpath.basename(table.metadata_location).partition("-")[0]) + 1
        location = self._publish(metadata, number)
        return CommitTableResponse.model_validate({"metadata": metadata, "metadata-location": location})

    def _publish(self, metadata: TableMetadata, number: int) -> str:
        location = f"{self._location}/metadata/{number:05d}-{uuid.uuid4()}.metadata.json"
        io = self._io(location)
        ToOutputFile.table_metadata(metadata, io.new_output(location))
        entry = {"format": "iceberg", "location": self._location, "metadata": location}
        self._ledger.replace([entry])  # the commit
        self._write_hint(io, location)
        return location

    def _write_hint(self, io: FileIO, location: str) -> None:
        text = posixpath.basename(location).encode()
        with io.new_output(f"{self._location}/metadata/version-hint.text").create(overwrite=True) as file:
            file.write(text)

    def _io(self, location: str) -> FileIO:
        return load_file_io(self.properties, location)
