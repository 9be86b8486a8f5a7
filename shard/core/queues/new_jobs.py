"""Works out the job fields of a write (v0 §21)."""

from __future__ import annotations

from streams.protocol.errors import InvalidRequest
from streams.protocol.model.job_fields import JobFields, resolve_times
from streams.protocol.model.records import Columns
from streams.protocol.payloads.appends import AHEAD_MS_MAX


def job_fields_of(columns: Columns, box: str, *, is_queue: bool, wall_ms: int) -> JobFields | None:
    """Return the job fields of a write to `box` at `wall_ms`, with delays as times."""
    fields, delays_ms = columns.job_fields, columns.delays_ms
    if not is_queue and (delays_ms is not None or (fields is not None and fields.times is not None)):
        raise InvalidRequest(
            f"deliver_at, delay_ms: {box} is a log; only jobs of a queue can wait", field="deliver_at"
        )
    return resolve_times(fields, delays_ms, columns.count, wall_ms=wall_ms, ahead_ms_max=AHEAD_MS_MAX)
