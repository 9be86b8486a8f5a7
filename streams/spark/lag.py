"""How far streaming queries are, told to the server: a query is a consumer like any other.

Written from the progress of each micro-batch, which is exact. What Spark tells the source itself comes a
batch late, and for the last batch of an AvailableNow run never.
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

#: Boxes whose cursor is on its way to the server at a time.
_REPORTS_AT_ONCE = 16

_log = logging.getLogger("streams.spark")


class Lag(QuietListener):
    """Commits the cursors of queries to a group of each box, and keeps how far each box is behind."""

    def __init__(
        self, url: str | None, group: str | None, *, key: str | None = None, query: str | None = None
    ) -> None:
        self._client = Client(url, key=key, retry=Retry(total_s=10))
        self._key = key
        self._group = group
        self._query = query
        self._shards: Shards | None = None
        #: Group and box -> what was reported last: boxes where nothing has changed cost nothing.
        self._reported: dict[tuple[str, str], tuple[offsets.Place, int]] = {}
        #: Box -> records that a query still has before it, as of its last micro-batch.
        self.records_behind: dict[str, int] = {}
        #: Box -> how long ago the first of these came; 0 when there is none.
        self.seconds_behind: dict[str, float] = {}

    def __repr__(self) -> str:
        of, to = self._query or "all queries", self._group or "their own"
        return f"<Lag of {of} as group {to}, {len(self.records_behind)} boxes>"

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if self._query is not None and self._query not in (progress.name, str(progress.id)):
            return
        for source in progress.sources:
            self._tell(source.endOffset, source.latestOffset)

    def _tell(self, end: str | None, latest: str | None) -> None:
        at, _ = _offset(end)
        heads, own = _offset(latest)
        group = self._group or own
        if group is None:
            return
        behind = offsets.pending(at, {box: place for box, place in heads.items() if box in at})
        self.records_behind |= {box: behind.get(box, 0) for box in at}
        self.seconds_behind |= {box: 0.0 for box in at if box not in behind}

        def report(box: str) -> None:
            place, records = at[box], behind.get(box, 0)
            if self._reported.get((group, box)) == (place, records) and not records:
                return
            try:
                self._client.box(box).group(group).commit(place.seq)
                if records:
                    self.seconds_behind[box] = self._age_s(box, place.seq)
                self._reported[group, box] = (place, records)
            except StreamsError as error:
                # A listener that raises is taken off the query. The next micro-batch reports it again.
                _log.warning("lag of %s was not reported: %s", box, error.message)

        with ThreadPoolExecutor(_REPORTS_AT_ONCE) as threads:
            list(threads.map(report, at))

    def _age_s(self, box: str, seq: int) -> float:
        """Of the first record after this one."""
        if self._shards is None:
            self._shards = Shards(self._client.url, key=self._key, retry=Retry(total_s=10))
        page = self._shards.scan_page(box, from_seq=seq, max_bytes=1, data=False, tags=False, meta=False)
        found = next((run.time_list()[0] for run in page.runs), None)
        return max(0.0, time.time() - found / 1000) if found is not None else 0.0


def _offset(text: str | None) -> tuple[offsets.Offset, str | None]:
    """An offset of ours, and the group it is for. A query may have sources of other kinds: of those there is
    nothing to tell."""
    try:
        found = json.loads(text or "{}")
        group = found.pop(offsets.GROUP, None)
        return offsets.load(found), group
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
    """From now on the cursors of streaming queries (all, or the one of this name or id) are those of `group`
    in each box they read: `streams group ls` and the console show them. Without a group, of each source the
    one that its option `group` names; sources without one are passed over. The listener that is returned
    has how far each box is behind, and can be taken off with `spark.streams.removeListener`."""
    listener = Lag(url, group, key=key, query=query)
    spark.streams.addListener(listener)
    return listener
