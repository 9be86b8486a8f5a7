"""Counts again, row by row, whether boxes hold exactly the rows that were sent.

It shares no code with the Spark source and sink: boxes are read over plain HTTP, and pyarrow compares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from loadtests.audit import PATIENCE_S, PAUSE_S, Unanswered, once

PAGE_RECORDS: Final = 1000
#: What makes two rows equal: the number of the box, the number of the row, and its text.
SCHEMA: Final = pa.schema([("box", pa.int64()), ("n", pa.int64()), ("text", pa.utf8())])


@dataclass(frozen=True)
class Recount:
    sent: int
    found: int
    #: Rows that were sent and are in no box.
    lost: int
    #: Copies of a row beyond the first.
    twice: int
    #: Rows that nobody sent: another text, or another box.
    strange: int
    #: Gaps that the server has reported.
    gaps: int

    @property
    def agrees(self) -> bool:
        return self.sent == self.found and not (self.lost or self.twice or self.strange or self.gaps)


def compare(sent: pa.Table, found: pa.Table, gaps: int = 0) -> Recount:
    keys = SCHEMA.names
    counted = found.group_by(keys).aggregate([([], "count_all")])
    marked = sent.append_column("sent", pa.repeat(pa.scalar(1), sent.num_rows))
    joined = marked.join(counted, keys=keys, join_type="full outer")
    is_found = pc.is_valid(joined["count_all"])
    copies = pc.subtract(counted["count_all"], 1)
    return Recount(
        sent=sent.num_rows,
        found=found.num_rows,
        lost=pc.sum(pc.invert(is_found)).as_py() or 0,
        twice=pc.sum(copies).as_py() or 0,
        strange=pc.sum(pc.invert(pc.is_valid(joined["sent"]))).as_py() or 0,
        gaps=gaps,
    )


def read_boxes(url: str, boxes: Sequence[str]) -> tuple[pa.Table, int]:
    """The rows of all boxes, and how many gaps were reported. A box is numbered by its place in the list."""
    batches, gaps = [], 0
    for number, box in enumerate(boxes):
        for page in _pages(url, box):
            gaps += page["tombstone"] is not None
            rows = [record["data"] for record in page["records"]]
            columns = [
                pa.repeat(pa.scalar(number, pa.int64()), len(rows)),
                pa.array([row["n"] for row in rows], pa.int64()),
                pa.array([row["text"] for row in rows], pa.utf8()),
            ]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return pa.Table.from_batches(batches, SCHEMA), gaps


def _pages(url: str, box: str) -> Iterator[dict[str, Any]]:
    from_seq, caught_up = 0, False
    while not caught_up:
        page = call(url, "POST", f"/v0/boxes/{box}/diff", {"from_seq": from_seq, "limit": PAGE_RECORDS})
        from_seq, caught_up = page["next_from_seq"], page["caught_up"]
        yield page


def call(url: str, method: str, path: str, body: Any = None) -> Any:
    """Repeats a request that may be made twice until the server answers it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        status, answer = once(url, method, path, body)
        if 200 <= status < 300:
            return orjson.loads(answer)
        if status not in (0, 429, 503) or time.monotonic() > until:
            raise Unanswered(f"{method} {path} was answered {status}: {answer[:400]!r}")
        time.sleep(PAUSE_S)
