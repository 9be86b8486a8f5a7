"""Properties of a snapshot that describe its boxes, and the interface of a table format.

A snapshot has these properties:

    streams.cursors   {box: [generation, last seq]} for all boxes: the table has their records up to here
    streams.ranges    {box: [generation, first seq, last seq, records]}, added by this snapshot
    streams.gaps      {box: [gap, ...]}: records that were lost before they could be added, if any
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from streams.spark.jobs.job_context import JobRefused
from streams.spark.jobs.tables.columns import Column
from streams.spark.offsets import Cursor

CURSORS, RANGES, RUN, GAPS = "streams.cursors", "streams.ranges", "streams.run", "streams.gaps"
#: Every snapshot stores the cursors of all boxes, 40 bytes each.
BOXES_MAX = 1_000


class TableRange(NamedTuple):
    """Records of one box that one snapshot added."""

    gen: int
    first: int
    last: int
    records: int


class DataFile(NamedTuple):
    path: str
    bytes: int


class TableVersion(NamedTuple):
    """One snapshot of a table: its id, its time, and the last seq of each box."""

    id: int
    at_ms: int
    cursors: dict[str, Cursor]
    ranges: dict[str, TableRange]


class OpenTable(Protocol):
    """A table that exists."""

    @property
    def columns(self) -> list[Column]:
        """Typed columns, in the order of the table."""

    @property
    def partition_by(self) -> list[str]: ...

    @property
    def is_merged(self) -> bool:
        """True if the table has the newest record of each tag, False if it has all records."""

    def newest(self) -> TableVersion | None:
        """Return the newest snapshot, or None if there is none yet."""

    def versions(self) -> list[TableVersion]:
        """Return the snapshots that can be read, oldest first."""

    def files(
        self,
        version: int | None = None,
        *,
        boxes: Sequence[str] | None = None,
        times_ms: tuple[int, int] | None = None,
    ) -> list[DataFile]:
        """Return the data files of a snapshot (None: the newest).

        With `boxes` or `times_ms` (from, before), files that cannot have such records are left out.
        """

    def commit(
        self,
        add: Sequence[str],
        properties: Mapping[str, str],
        *,
        remove: Sequence[str] = (),
        new_columns: Sequence[Column] = (),
    ) -> None:
        """Add and remove files and add columns, in one snapshot.

        Raises `JobRefused` if another run has committed since the table was opened.
        """


def summary_properties(
    run: str,
    cursors: Mapping[str, Cursor],
    ranges: Mapping[str, TableRange],
    gaps: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, str]:
    """Return the properties of a snapshot."""
    if len(cursors) > BOXES_MAX:
        raise JobRefused(
            f"a table has at most {BOXES_MAX} boxes, and this one would have {len(cursors)}; use one table "
            f"for each prefix"
        )
    properties = {
        RUN: run,
        CURSORS: json.dumps({box: [cursor.gen, cursor.seq] for box, cursor in sorted(cursors.items())}),
        RANGES: json.dumps({box: list(each) for box, each in sorted(ranges.items())}),
    }
    return properties | ({GAPS: json.dumps(gaps)} if gaps else {})


def version_of(id: int, at_ms: int, properties: Mapping[str, str]) -> TableVersion:
    """Return a snapshot from its properties. A snapshot of another writer has no cursors."""
    cursors = {box: Cursor(*each) for box, each in json.loads(properties.get(CURSORS, "{}")).items()}
    ranges = {box: TableRange(*each) for box, each in json.loads(properties.get(RANGES, "{}")).items()}
    return TableVersion(id, at_ms, cursors, ranges)


def find_version(table: OpenTable, version: int | None) -> TableVersion:
    """Return a snapshot (None: the newest). Raises `JobRefused` if there is no such snapshot."""
    match = table.newest()
    if match is None:
        raise JobRefused("the table has no snapshot yet")
    if version is not None and match.id != version:
        versions = table.versions()
        match = next((each for each in versions if each.id == version), None)
        if match is None:
            ids = ", ".join(str(each.id) for each in versions[-5:])
            raise JobRefused(f"the table has no snapshot {version}; its newest are {ids}")
    if not match.cursors:
        raise JobRefused(
            f"snapshot {match.id} has no property {CURSORS}: another program wrote it, and where the "
            f"boxes continue is unknown. Roll the table back to the snapshot before it"
        )
    return match
