"""Recounts the tables of `spark_torture.py` with pyiceberg and plain HTTP, without the code of the jobs.

    in.N ──archive──► table ──rollup──► sums ──merge──► newest

    table     has exactly the rows that were sent
    travel    a snapshot has exactly the seqs that it names, and no others
    sums      the newest record of each window has the count and the sum of the rows in the boxes
    newest    has exactly these records

Each expectation is a table of rows (box, n, text), so that `recount.compare` counts every difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyiceberg.table import StaticTable

from loadtests import recount
from loadtests.recount import Recount

WINDOW_MS: Final = 10_000
AGGREGATES: Final = {"rows": "count(*)", "total": "sum(n)"}
#: Snapshots that are read again, from the first to the last.
SNAPSHOTS_MAX: Final = 12


def recount_tables(
    url: str, folder: Path, boxes: Sequence[str], sums: str, sent_rows: pa.Table
) -> dict[str, Recount]:
    """Return the recounts of both tables and of the box of sums."""
    table = StaticTable.from_metadata(str(folder / "table"))
    numbers = {box: number for number, box in enumerate(boxes)}
    found = table.scan(selected_fields=("box", "n", "text")).to_arrow()
    rows = _rows((numbers[row["box"]], row["n"], row["text"]) for row in found.to_pylist())
    windows = _rows(_windows(url, boxes))
    newest = StaticTable.from_metadata(str(folder / "newest"))
    merged = newest.scan(selected_fields=("tag", "rows", "total")).to_arrow().to_pylist()
    return {
        "table": recount.compare(sent_rows, rows),
        "travel": _recount_snapshots(table, numbers),
        "sums": recount.compare(
            windows, _rows(_window_row(numbers, *each) for each in _newest_sums(url, sums))
        ),
        "newest": recount.compare(windows, _rows(_window_row(numbers, row["tag"], row) for row in merged)),
    }


def _rows(rows: Iterable[tuple[int, int, str]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, recount.SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=recount.SCHEMA)


def _recount_snapshots(table: StaticTable, numbers: Mapping[str, int]) -> Recount:
    """Compare the seqs of some snapshots with the ranges that their properties name."""
    snapshots = sorted(table.snapshots(), key=lambda each: each.sequence_number or 0)
    expected: list[tuple[int, int, str]] = []
    found: list[tuple[int, int, str]] = []
    for snapshot in snapshots[:: max(1, len(snapshots) // SNAPSHOTS_MAX)]:
        text = str(snapshot.snapshot_id)
        assert snapshot.summary is not None
        cursors = json.loads(snapshot.summary["streams.cursors"] or "")
        for box, (_, seq) in cursors.items():
            expected += [(numbers[box], n, text) for n in range(1, seq + 1)]
        rows = table.scan(selected_fields=("box", "seq"), snapshot_id=snapshot.snapshot_id).to_arrow()
        found += [(numbers[row["box"]], row["seq"], text) for row in rows.to_pylist()]
    return recount.compare(_rows(expected), _rows(found))


def _windows(url: str, boxes: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return each window of each box, with the count and the sum of its rows, from the boxes themselves."""
    windows: dict[tuple[int, int], list[int]] = {}
    for number, box in enumerate(boxes):
        for page in recount.read_pages(url, box):
            for record in page["records"]:
                values = windows.setdefault((number, record["$ts"] // WINDOW_MS * WINDOW_MS), [])
                values.append(record["data"]["n"])
    return [(box, start, f"{len(values)} {sum(values)}") for (box, start), values in windows.items()]


def _newest_sums(url: str, box: str) -> Iterable[tuple[str, dict[str, Any]]]:
    newest: dict[str, dict[str, Any]] = {}
    for page in recount.read_pages(url, box):
        values = [record["data"] for record in page["records"]]
        newest |= {f"{each['key']}|{each['start']}": each for each in values}  # the tag of the record
    return newest.items()


def _window_row(numbers: Mapping[str, int], tag: str, values: Mapping[str, Any]) -> tuple[int, int, str]:
    box, _, start = tag.partition("|")
    at = datetime.strptime(start, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return numbers[box], int(at.timestamp() * 1000), f"{values['rows']} {values['total']}"
