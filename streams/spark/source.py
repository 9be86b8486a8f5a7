"""The data source `streams` as Spark sees it: its name, its columns, its readers and writers.

Spark creates these objects in separate Python processes, pickles them, and unpickles them elsewhere. So no
object here keeps a connection beyond one call, except the stream reader, which lives in one process on the
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
from streams.spark.offsets import BoxHead, Cursor, Offset, SeqRange
from streams.spark.options import (
    BATCH,
    NO_TABLE,
    STREAM,
    STREAM_WRITE,
    WRITE,
    BadOption,
    SparkReadOptions,
    parse_read_options,
    parse_write_options,
)
from streams.spark.reads import ReadTask
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
        # Spark does not tell here whether this is a batch or a stream.
        is_emitting = str(self.options.get("onGap", "")).lower() == "emit"
        return f"{_SCHEMA}, {_GAP}" if is_emitting else _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_read_options(self.options, BATCH)
        return (PushdownReader if options.pushdown else BatchReader)(options, _arrow_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(parse_read_options(self.options, STREAM), _arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise BadOption("mode overwrite: a box is a log; delete or trim it first, then use mode append")
        options = parse_write_options(self.options, WRITE)
        check_columns(schema, options)
        return BatchWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        if overwrite:
            raise BadOption("outputMode complete: a box is a log; use foreachBatch, or the mode append")
        options = parse_write_options(self.options, STREAM_WRITE)
        check_columns(schema, options)
        return StreamWriter(options)


def _arrow_schema(schema: StructType) -> pa.Schema:
    """Convert a schema to Arrow, and check that it has only columns of this source, in any order."""
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    for column in arrow_schema:
        expected_type = COLUMNS.get(column.name)
        if expected_type is None:
            raise BadOption(f"schema: there is no column {column.name}; the columns are {', '.join(COLUMNS)}")
        if column.name != "gap" and column.type != expected_type:
            raise BadOption(
                f"schema: {column.name} is {expected_type}, not {column.type}; cast the column after the read"
            )
    return arrow_schema


class BatchReader(DataSourceReader):
    def __init__(self, options: SparkReadOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        with reads.open_shards(self._options.server) as shards:
            heads = reads.read_heads(shards, self._options)
            start = reads.resolve_start(shards, self._options, heads)
            end = reads.resolve_end(shards, self._options, heads)
            ranges = self._narrow(shards, offsets.ranges(start, end))
            tasks = reads.plan_read(shards, self._options, start, end, ranges=ranges)
        return [InputPartition(task) for task in tasks] or [InputPartition(ReadTask([]))]

    def _narrow(self, shards: Shards, ranges: list[SeqRange]) -> list[SeqRange]:
        return ranges

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reads.read_task(self._options, partition.value, self._schema)


class PushdownReader(BatchReader):
    """Applies filters on box, seq, ts and tag before rows reach Spark.

    It is a separate class, because Spark fails every read of a reader that has `pushFilters` unless
    `spark.sql.python.filterPushdown.enabled` is set, and it is off by default.
    """

    def __init__(self, options: SparkReadOptions, schema: pa.Schema) -> None:
        super().__init__(options, schema)
        self._boxes: set[str] | None = None
        self._after, self._to = 0, (1 << 63) - 1
        self._from_ms: int | None = None
        self._until_ms: int | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Return the filters that Spark must still apply.

        Filters on ts only narrow the range here, because Spark's times are finer than ours.
        """
        return [each for each in filters if not self._push_filter(each)]

    def _push_filter(self, each: Filter) -> bool:
        match each:
            case EqualTo(("box",), str(box)):
                self._restrict_boxes({box})
            case In(("box",), values):
                self._restrict_boxes({value for value in values if isinstance(value, str)})
            case EqualTo(("tag",), str(tag)):
                return self._push_tag_match(Match(tag))
            case StringStartsWith(("tag",), str(tag)):
                return self._push_tag_match(Match(tag, is_prefix=True))
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

    def _push_tag_match(self, match: Match) -> bool:
        """Take a filter on the tag, if there is none yet. Spark applies the others."""
        if self._options.match is not None:
            return False
        self._options = replace(self._options, match=match)
        return True

    def _restrict_boxes(self, boxes: set[str]) -> None:
        self._boxes = boxes if self._boxes is None else self._boxes & boxes

    def _narrow(self, shards: Shards, ranges: list[SeqRange]) -> list[SeqRange]:
        selected_ranges = [each for each in ranges if self._boxes is None or each.box in self._boxes]
        boxes = [each.box for each in selected_ranges]
        begins = shards.locate(dict.fromkeys(boxes, self._from_ms)) if self._from_ms is not None else {}
        ends = shards.locate(dict.fromkeys(boxes, self._until_ms)) if self._until_ms is not None else {}
        narrow_ranges = []
        for each in selected_ranges:
            after, to = max(each.after, self._after), min(each.to, self._to)
            if each.box in begins:
                after = max(after, begins[each.box][1] - 1)
            if each.box in ends:
                to = min(to, ends[each.box][1] - 1)
            if after < to:
                narrow_ranges.append(SeqRange(each.box, each.gen, after, to))
        return narrow_ranges


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SparkReadOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._shards: Shards | None = None
        #: Heads at the start of an AvailableNow run, where it ends.
        self._final_heads: dict[str, BoxHead] | None = None
        self._last_batch_s = time.monotonic()
        #: True once it is known whether the options or a checkpoint define the start.
        self._start_is_settled = False
        #: Start of a new query, as its options define it.
        self._initial: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the tasks, without the connection."""
        return self.__dict__ | {"_shards": None, "_frozen": None}

    def _open(self) -> Shards:
        if self._shards is None:
            self._shards = reads.open_shards(self._options.server)
        return self._shards

    def _heads(self) -> dict[str, BoxHead]:
        return (
            self._final_heads
            if self._final_heads is not None
            else reads.read_heads(self._open(), self._options)
        )

    def initialOffset(self) -> dict[str, Any]:
        self._start_is_settled = True
        shards = self._open()
        self._initial = offsets.to_json(
            reads.resolve_start(shards, self._options, reads.read_heads(shards, self._options))
        )
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_records is not None:
            return cast(ReadLimit, ReadMaxRows(self._options.max_records))
        if self._options.max_bytes is not None:
            return cast(ReadLimit, ReadMaxBytes(self._options.max_bytes))
        return cast(ReadLimit, ReadAllAvailable())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._warn_if_start_is_ignored()
        start_cursors = offsets.from_json(start)
        heads = self._heads()
        cursors = {box: head.cursor for box, head in heads.items()}
        if self._is_too_early(start_cursors, cursors):
            return start
        end = offsets.next_end(start_cursors, cursors, self._record_limit(limit, start_cursors, heads))
        if end == start_cursors:
            return start
        if offsets.pending_counts(start_cursors, end):
            self._last_batch_s = time.monotonic()
        return offsets.to_json(end) | ({offsets.FIRST: start} if start == self._initial else {})

    def _warn_if_start_is_ignored(self) -> None:
        """Warn if the query has a start option and resumes from a checkpoint.

        Spark calls `initialOffset` for new queries only.
        """
        if not self._start_is_settled and self._options.starting_option is not None:
            print(
                f"streams: {self._options.starting_option} is ignored: the query resumes from its checkpoint",
                file=sys.stderr,
            )
        self._start_is_settled = True

    def _is_too_early(self, start: Offset, ends: dict[str, Cursor]) -> bool:
        if self._options.min_records is None or self._final_heads is not None:
            return False
        waiting = sum(offsets.pending_counts(start, ends).values())
        waited_ms = (time.monotonic() - self._last_batch_s) * 1000
        return waiting < self._options.min_records and waited_ms < self._options.max_delay_ms

    def _record_limit(self, limit: ReadLimit, start: Offset, heads: dict[str, BoxHead]) -> int | None:
        """Return the most records of the next batch: Spark's limit and our own; None if there is no limit."""
        if isinstance(limit, ReadAllAvailable):
            return None
        limits = []
        if isinstance(limit, ReadMaxRows):
            limits.append(limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        if bytes_max is not None:
            limits.append(offsets.bytes_to_records(start, heads, bytes_max))
        return max(1, min(limits)) if limits else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._final_heads = reads.read_heads(self._open(), self._options)

    def reportLatestOffset(self) -> dict[str, Any]:
        heads = reads.read_heads(self._open(), self._options)
        offset = offsets.to_json({box: head.cursor for box, head in heads.items()})
        return offset | ({offsets.GROUP: self._options.group} if self._options.group is not None else {})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin = offsets.batch_start(start, end)
        tasks = reads.plan_read(self._open(), self._options, begin, offsets.from_json(end))
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reads.read_task(self._options, partition.value, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark calls this one batch late, and never for the last batch of a run."""

    def stop(self) -> None:
        if self._shards is not None:
            self._shards.close()
            self._shards = None
