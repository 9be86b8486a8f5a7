"""The data source `streams` as Spark sees it: what it is called, its columns, and its readers and writers.

Spark makes these objects in Python processes of its own, pickles them and makes them again: nothing here
holds a connection longer than a call, except the stream reader, which lives in one long process on the
driver.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from streams.direct import Shards
from streams.protocol.model.matches import Match
from streams.spark import offsets, reads
from streams.spark.columns import COLUMNS
from streams.spark.offsets import Head, Offset, Place, Range
from streams.spark.options import (
    BATCH,
    NO_TABLE,
    STREAM,
    STREAM_WRITE,
    WRITE,
    BadOption,
    Reading,
    reading,
    writing,
)
from streams.spark.reads import Task
from streams.spark.sink import BatchWriter, StreamWriter, check_columns

_SCHEMA = "box string, seq bigint, ts timestamp, data string, tag string, node string, meta string"
_GAP = "gap struct<from: bigint, to: bigint, reason: string, missed: bigint>"


class StreamsDataSource(DataSource):
    """Boxes of a streams server, read and written shard by shard."""

    @classmethod
    def name(cls) -> str:
        return "streams"

    def schema(self) -> str:
        if "provider" in self.options:
            raise BadOption(f"CREATE TABLE: {NO_TABLE}")
        # Spark does not say yet whether this will be a batch or a stream.
        is_emitting = str(self.options.get("onGap", "")).lower() == "emit"
        return f"{_SCHEMA}, {_GAP}" if is_emitting else _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        asked = reading(self.options, BATCH)
        return (PushingReader if asked.pushdown else BatchReader)(asked, _arrow(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(reading(self.options, STREAM), _arrow(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise BadOption("mode overwrite: a box is a log; delete or trim it first, then use mode append")
        asked = writing(self.options, WRITE)
        check_columns(schema, asked)
        return BatchWriter(asked)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        if overwrite:
            raise BadOption("outputMode complete: a box is a log; use foreachBatch, or the mode append")
        asked = writing(self.options, STREAM_WRITE)
        check_columns(schema, asked)
        return StreamWriter(asked)


def _arrow(schema: StructType) -> pa.Schema:
    """Spark's schema as Arrow must have it to the letter; some of our columns, in any order."""
    found = to_arrow_schema(schema, timezone="UTC")
    for each in found:
        known = COLUMNS.get(each.name)
        if known is None:
            raise BadOption(f"schema: there is no column {each.name}; there are {', '.join(COLUMNS)}")
        if each.name != "gap" and each.type != known:
            raise BadOption(f"schema: {each.name} is {known}, not {each.type}; use cast afterwards")
    return found


class BatchReader(DataSourceReader):
    def __init__(self, asked: Reading, schema: pa.Schema) -> None:
        self._asked = asked
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        with reads.open_shards(self._asked.server) as shards:
            known = reads.heads(shards, self._asked)
            start = reads.start_of(shards, self._asked, known)
            end = reads.end_of(shards, self._asked, known)
            wanted = self._narrowed(shards, offsets.ranges(start, end))
            tasks = reads.plan(shards, self._asked, start, end, wanted=wanted)
        return [InputPartition(task) for task in tasks] or [InputPartition(Task([]))]

    def _narrowed(self, shards: Shards, wanted: list[Range]) -> list[Range]:
        return wanted

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reads.pull(self._asked, partition.value, self._schema)


class PushingReader(BatchReader):
    """Takes filters on box, seq, ts and tag from Spark. A class of its own: Spark fails every read of a
    reader that has `pushFilters` while its conf `spark.sql.python.filterPushdown.enabled` is off, as it is
    by default."""

    def __init__(self, asked: Reading, schema: pa.Schema) -> None:
        super().__init__(asked, schema)
        self._boxes: set[str] | None = None
        self._after, self._to = 0, (1 << 63) - 1
        self._from_ms: int | None = None
        self._until_ms: int | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Gives back what Spark must still do itself. Times are only narrowed here: Spark's are finer."""
        return [each for each in filters if not self._take(each)]

    def _take(self, each: Filter) -> bool:
        match each:
            case EqualTo(("box",), str(box)):
                self._only({box})
            case In(("box",), values):
                self._only({value for value in values if isinstance(value, str)})
            case EqualTo(("tag",), str(tag)):
                return self._matching(Match(tag))
            case StringStartsWith(("tag",), str(tag)):
                return self._matching(Match(tag, is_prefix=True))
            case EqualTo(("seq",), int(seq)):
                self._after, self._to = max(self._after, seq - 1), min(self._to, seq)
            case GreaterThan(("seq",), int(seq)):
                self._after = max(self._after, seq)
            case GreaterThanOrEqual(("seq",), int(seq)):
                self._after = max(self._after, seq - 1)
            case LessThan(("seq",), int(seq)):
                self._to = min(self._to, seq - 1)
            case LessThanOrEqual(("seq",), int(seq)):
                self._to = min(self._to, seq)
            case GreaterThan(("ts",), moment) | GreaterThanOrEqual(("ts",), moment):
                self._from_ms = max(self._from_ms or 0, int(moment.timestamp() * 1000))
                return False
            case LessThan(("ts",), moment) | LessThanOrEqual(("ts",), moment):
                until = int(moment.timestamp() * 1000) + 1
                self._until_ms = until if self._until_ms is None else min(self._until_ms, until)
                return False
            case _:
                return False
        return True

    def _matching(self, match: Match) -> bool:
        """There can be one; what is more, Spark does."""
        if self._asked.match is not None:
            return False
        self._asked = replace(self._asked, match=match)
        return True

    def _only(self, boxes: set[str]) -> None:
        self._boxes = boxes if self._boxes is None else self._boxes & boxes

    def _narrowed(self, shards: Shards, wanted: list[Range]) -> list[Range]:
        kept = [each for each in wanted if self._boxes is None or each.box in self._boxes]
        names = [each.box for each in kept]
        begins = shards.locate(dict.fromkeys(names, self._from_ms)) if self._from_ms is not None else {}
        ends = shards.locate(dict.fromkeys(names, self._until_ms)) if self._until_ms is not None else {}
        found = []
        for each in kept:
            after, to = max(each.after, self._after), min(each.to, self._to)
            if each.box in begins:
                after = max(after, begins[each.box][1] - 1)
            if each.box in ends:
                to = min(to, ends[each.box][1] - 1)
            if after < to:
                found.append(Range(each.box, each.gen, after, to))
        return found


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, asked: Reading, schema: pa.Schema) -> None:
        self._asked = asked
        self._schema = schema
        self._shards: Shards | None = None
        #: Heads that an AvailableNow run goes up to.
        self._frozen: dict[str, Head] | None = None
        self._last_batch_s = time.monotonic()
        #: Whether it is settled that the options say where to begin, or that a checkpoint does.
        self._has_begun = False
        #: Where the options say that a new query begins.
        self._initial: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What goes to the tasks: no connection."""
        return self.__dict__ | {"_shards": None, "_frozen": None}

    def _open(self) -> Shards:
        if self._shards is None:
            self._shards = reads.open_shards(self._asked.server)
        return self._shards

    def _heads(self) -> dict[str, Head]:
        return self._frozen if self._frozen is not None else reads.heads(self._open(), self._asked)

    def initialOffset(self) -> dict[str, Any]:
        self._has_begun = True
        shards = self._open()
        self._initial = offsets.dump(reads.start_of(shards, self._asked, reads.heads(shards, self._asked)))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._asked.max_records is not None:
            return cast(ReadLimit, ReadMaxRows(self._asked.max_records))
        if self._asked.max_bytes is not None:
            return cast(ReadLimit, ReadMaxBytes(self._asked.max_bytes))
        return cast(ReadLimit, ReadAllAvailable())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._begin_from_checkpoint()
        at = offsets.load(start)
        known = self._heads()
        places = {box: head.place for box, head in known.items()}
        if self._is_too_early(at, places):
            return start
        end = offsets.admit(at, places, self._records_of(limit, at, known))
        if end == at:
            return start
        if offsets.pending(at, end):
            self._last_batch_s = time.monotonic()
        return offsets.dump(end) | ({offsets.FIRST: start} if start == self._initial else {})

    def _begin_from_checkpoint(self) -> None:
        """Spark asks for the first offset of a new query only."""
        if not self._has_begun and self._asked.starting_option is not None:
            print(
                f"streams: {self._asked.starting_option} is not used: this query goes on from its checkpoint",
                file=sys.stderr,
            )
        self._has_begun = True

    def _is_too_early(self, at: Offset, places: dict[str, Place]) -> bool:
        if self._asked.min_records is None or self._frozen is not None:
            return False
        waiting = sum(offsets.pending(at, places).values())
        waited_ms = (time.monotonic() - self._last_batch_s) * 1000
        return waiting < self._asked.min_records and waited_ms < self._asked.max_delay_ms

    def _records_of(self, limit: ReadLimit, at: Offset, known: dict[str, Head]) -> int | None:
        """What Spark allows, and both of our own limits where it does not say that all may go."""
        if isinstance(limit, ReadAllAvailable):
            return None
        found = []
        if isinstance(limit, ReadMaxRows):
            found.append(limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._asked.max_bytes
        if bytes_max is not None:
            found.append(offsets.bytes_to_records(at, known, bytes_max))
        return max(1, min(found)) if found else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._frozen = reads.heads(self._open(), self._asked)

    def reportLatestOffset(self) -> dict[str, Any]:
        known = reads.heads(self._open(), self._asked)
        shown = offsets.dump({box: head.place for box, head in known.items()})
        return shown | ({offsets.GROUP: self._asked.group} if self._asked.group is not None else {})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin = offsets.start_of(start, end)
        tasks = reads.plan(self._open(), self._asked, begin, offsets.load(end))
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reads.pull(self._asked, partition.value, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is freed on it: it comes a batch late, and for the last batch of a run never."""

    def stop(self) -> None:
        if self._shards is not None:
            self._shards.close()
            self._shards = None
