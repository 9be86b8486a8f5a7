"""Reports the cursors of streaming queries to the server, so that a query is a consumer like any other.

The cursors come from the progress events of micro-batches, which are exact. Spark's `commit` call to the
source comes one batch late, and never for the last batch of an AvailableNow run.
"""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import QueryProgressEvent

from streams.client._sync.client import Client
from streams.client.retry import Retry
from streams.direct import Shards
from streams.protocol.errors import StreamsError
from streams.spark import offsets
from streams.spark.listeners import QuietListener

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Concurrent cursor commits.
_REPORTS_AT_ONCE = 16

_log = logging.getLogger("streams.spark")


class Lag(QuietListener):
    """Commits the cursors of queries to a group of each box, and records the lag of each box."""

    def __init__(
        self, url: str | None, group: str | None, *, key: str | None = None, query: str | None = None
    ) -> None:
        self._client = Client(url, key=key, retry=Retry(total_s=10))
        self._key = key
        self._group = group
        self._query = query
        self._shards: Shards | None = None
        #: (group, box) -> the last report (cursor, lag). Boxes without a change cost no request.
        self._last_reports: dict[tuple[str, str], tuple[offsets.Cursor, int]] = {}
        #: Box -> records that the query has not read, as of its last micro-batch.
        self.records_behind: dict[str, int] = {}
        #: Box -> age of the first unread record; 0 if there is none.
        self.seconds_behind: dict[str, float] = {}

    def __repr__(self) -> str:
        queries, group = self._query or "all queries", self._group or "their own"
        return f"<Lag of {queries} as group {group}, {len(self.records_behind)} boxes>"

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if self._query is not None and self._query not in (progress.name, str(progress.id)):
            return
        for source in progress.sources:
            self._report_source(source.endOffset, source.latestOffset)

    def _report_source(self, end: str | None, latest: str | None) -> None:
        cursors, _ = _parse_offset(end)
        heads, source_group = _parse_offset(latest)
        group = self._group or source_group
        if group is None:
            return
        behind = offsets.pending_counts(
            cursors, {box: cursor for box, cursor in heads.items() if box in cursors}
        )
        self.records_behind |= {box: behind.get(box, 0) for box in cursors}
        self.seconds_behind |= {box: 0.0 for box in cursors if box not in behind}

        def report(box: str) -> None:
            cursor, records = cursors[box], behind.get(box, 0)
            if self._last_reports.get((group, box)) == (cursor, records) and not records:
                return
            try:
                self._client.box(box).group(group).commit(cursor.seq)
                if records:
                    self.seconds_behind[box] = self._age_s(box, cursor.seq)
                self._last_reports[group, box] = (cursor, records)
            except StreamsError as error:
                # Spark removes a listener that raises. The next micro-batch reports again.
                _log.warning(
                    "could not report the lag of box %s, retrying after the next batch: %s",
                    box,
                    error.message,
                )

        with ThreadPoolExecutor(_REPORTS_AT_ONCE) as threads:
            list(threads.map(report, cursors))

    def _age_s(self, box: str, seq: int) -> float:
        """Return the age of the first record after `seq`."""
        if self._shards is None:
            self._shards = Shards(self._client.url, key=self._key, retry=Retry(total_s=10))
        page = self._shards.scan_page(box, from_seq=seq, max_bytes=1, data=False, tags=False, meta=False)
        first_ms = next((run.time_list()[0] for run in page.runs), None)
        return max(0.0, time.time() - first_ms / 1000) if first_ms is not None else 0.0


def _parse_offset(text: str | None) -> tuple[offsets.Offset, str | None]:
    """Parse an offset of this source, and its group. Offsets of other formats give an empty offset."""
    try:
        fields = json.loads(text or "{}")
        group = fields.pop(offsets.GROUP, None)
        return offsets.from_json(fields), group
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}, None


def follow_lag(
    spark: SparkSession,
    *,
    group: str | None = None,
    url: str | None = None,
    key: str | None = None,
    query: str | None = None,
) -> Lag:
    """Commit the cursors of streaming queries to `group` of each box they read, after every micro-batch.

    `streams group ls` and the console show them. `query` selects one query by name or id; the default is all.
    Without `group`, each source uses its option `group`; sources without that option are skipped. The
    returned listener has the lag of each box. Remove it with `spark.streams.removeListener`.
    """
    listener = Lag(url, group, key=key, query=query)
    spark.streams.addListener(listener)
    return listener
