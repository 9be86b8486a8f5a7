"""Checks, row by row, that boxes hold exactly the rows that were sent.

It shares no code with the Spark source and sink: it reads boxes over plain HTTP, and compares with pyarrow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from loadtests.audit import PATIENCE_S, PAUSE_S, NoAnswer, once

PAGE_RECORDS: Final = 1000
#: Two rows are equal if these are equal: the number of the box, the number of the row, and its text.
SCHEMA: Final = pa.schema([("box", pa.int64()), ("n", pa.int64()), ("text", pa.utf8())])


@dataclass(frozen=True)
class Recount:
    sent_count: int
    found_count: int
    #: Rows that were sent and are in no box.
    lost_count: int
    #: Copies of a row beyond the first.
    duplicate_count: int
    #: Rows that were never sent: another text, or another box.
    unknown_count: int
    #: Gaps that the server has reported.
    gap_count: int

    @property
    def agrees(self) -> bool:
        return self.sent_count == self.found_count and not (
            self.lost_count or self.duplicate_count or self.unknown_count or self.gap_count
        )


def compare(sent_rows: pa.Table, box_rows: pa.Table, gaps: int = 0) -> Recount:
    keys = SCHEMA.names
    row_counts = box_rows.group_by(keys).aggregate([([], "count_all")])
    flagged_rows = sent_rows.append_column("sent", pa.repeat(pa.scalar(1), sent_rows.num_rows))
    all_rows = flagged_rows.join(row_counts, keys=keys, join_type="full outer")
    is_found = pc.is_valid(all_rows["count_all"])
    copies = pc.subtract(row_counts["count_all"], 1)
    return Recount(
        sent_count=sent_rows.num_rows,
        found_count=box_rows.num_rows,
        lost_count=pc.sum(pc.invert(is_found)).as_py() or 0,
        duplicate_count=pc.sum(copies).as_py() or 0,
        unknown_count=pc.sum(pc.invert(pc.is_valid(all_rows["sent"]))).as_py() or 0,
        gap_count=gaps,
    )


def read_boxes(url: str, boxes: Sequence[str]) -> tuple[pa.Table, int]:
    """Return the rows of all boxes, and the number of reported gaps. A box is numbered by its index."""
    batches, gaps = [], 0
    for number, box in enumerate(boxes):
        for page in read_pages(url, box):
            gaps += page["tombstone"] is not None
            rows = [record["data"] for record in page["records"]]
            columns = [
                pa.repeat(pa.scalar(number, pa.int64()), len(rows)),
                pa.array([row["n"] for row in rows], pa.int64()),
                pa.array([row["text"] for row in rows], pa.utf8()),
            ]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA), gaps


def read_pages(url: str, box: str) -> Iterator[dict[str, Any]]:
    """Yield all pages of a box, from its first record to its last."""
    from_seq, caught_up = 0, False
    while not caught_up:
        page = call(url, "POST", f"/v0/boxes/{box}/diff", {"from_seq": from_seq, "limit": PAGE_RECORDS})
        from_seq, caught_up = page["next_from_seq"], page["caught_up"]
        yield page


def call(url: str, method: str, path: str, body: Any = None) -> Any:
    """Repeat an idempotent request until it succeeds."""
    until = time.monotonic() + PATIENCE_S
    while True:
        status, answer = once(url, method, path, body)
        if 200 <= status < 300:
            return orjson.loads(answer)
        if status not in (0, 429, 503) or time.monotonic() > until:
            raise NoAnswer(f"{method} {path} was answered {status}: {answer[:400]!r}")
        time.sleep(PAUSE_S)
