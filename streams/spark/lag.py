"""How far streaming queries are, told to the server: a query is a consumer like any other.

Written from the progress of each micro-batch, which is exact. What Spark tells the source itself comes a
batch late, and for the last batch of an AvailableNow run never.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from streams.client._sync.client import Client
from streams.client.retry import Retry
from streams.protocol.errors import StreamsError
from streams.spark import offsets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("streams.spark")


class Lag(StreamingQueryListener):
    """Commits the cursors of queries to a group of each box, and keeps how far each box is behind in
    `records_behind`."""

    def __init__(
        self, url: str | None, group: str, *, key: str | None = None, query: str | None = None
    ) -> None:
        self._client = Client(url, key=key, retry=Retry(total_s=10))
        self._group = group
        self._query = query
        #: Box -> records that a query still has before it, as of its last micro-batch.
        self.records_behind: dict[str, int] = {}

    def __repr__(self) -> str:
        of = self._query or "all queries"
        return f"<Lag of {of} as group {self._group}, {len(self.records_behind)} boxes>"

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if self._query is not None and self._query not in (progress.name, str(progress.id)):
            return
        for source in progress.sources:
            self._tell(source.endOffset, source.latestOffset)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass

    def _tell(self, end: str | None, latest: str | None) -> None:
        at = _offset(end)
        heads = _offset(latest)
        for box, place in at.items():
            behind = offsets.pending({box: place}, {box: heads[box]} if box in heads else {})
            self.records_behind[box] = behind.get(box, 0)
            try:
                self._client.box(box).group(self._group).commit(place.seq)
            except StreamsError as error:
                # A listener that raises is taken off the query. The next micro-batch tells it again.
                _log.warning("lag of %s was not told: %s", box, error.message)


def _offset(text: str | None) -> offsets.Offset:
    """An offset of ours. A query may have sources of other kinds: of those there is nothing to tell."""
    try:
        return offsets.load(json.loads(text or "{}"))
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def follow_lag(
    spark: SparkSession,
    *,
    group: str,
    url: str | None = None,
    key: str | None = None,
    query: str | None = None,
) -> Lag:
    """From now on the cursors of streaming queries (all, or the one of this name or id) are those of `group`
    in each box they read: `streams group ls`, the console and metrics show them. The listener that is
    returned can be taken off with `spark.streams.removeListener`."""
    listener = Lag(url, group, key=key, query=query)
    spark.streams.addListener(listener)
    return listener
