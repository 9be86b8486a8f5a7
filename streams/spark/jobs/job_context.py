"""The context of a job: its server, frames of its boxes, and its ledger.

A ledger is a box with a record for each step that a job has planned, written before the step starts. Appends
have an expected seq, so of two concurrent runs of one job the second is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as sql

from streams.client._sync.client import Client
from streams.client.answers import Record
from streams.client.retry import Retry
from streams.direct import BoxPosition, Shards
from streams.protocol.errors import BoxNotFound, Refused, SeqMismatch
from streams.spark.gaps import Gap, GapError
from streams.spark.jobs.spark_errors import unwrap_errors
from streams.spark.offsets import Cursor

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Longer than a restart of the server takes.
_RETRY = Retry(total_s=60)

#: Prefixes of the names of ledgers.
LEDGERS = ("archive.", "backfill.", "replay.", "table.", "table-rollup.")

SCHEMA = "box string, seq bigint, ts timestamp, data string, tag string, node string, meta string"


class JobRefused(Refused):
    """The job cannot run with these arguments, or in this state."""

    code = "job_refused"


@dataclass(frozen=True)
class JobContext:
    """The server of a job, and reads and writes of its boxes."""

    url: str | None = None
    key: str | None = field(default=None, repr=False)

    def client(self) -> Client:
        return Client(self.url, key=self.key, retry=_RETRY)

    def shards(self) -> Shards:
        return Shards(self.url, key=self.key, retry=_RETRY)

    def options(self) -> dict[str, str]:
        with self.client() as client:  # the client resolves the default URL
            options = {"url": client.url}
        return options | ({"token": self.key} if self.key else {})

    def frame(
        self,
        spark: SparkSession,
        start: Mapping[str, int],
        end: Mapping[str, int],
        *,
        on_gap: str = "fail",
        **options: object,
    ) -> DataFrame:
        """Return a frame of the records after `start` and up to `end` of each box."""
        reader = spark.read.format("streams").options(**self.options())
        reader = reader.option("onGap", on_gap).option("maxBoxes", max(1000, len(end)))
        reader = reader.option("startingOffsets", json.dumps(dict(start)))
        reader = reader.option("endingOffsets", json.dumps(dict(end)))
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load(",".join(end))

    def write(self, rows: DataFrame, *, writer: str, epoch: int, **options: object) -> int:
        """Write rows, each once for this writer and epoch even if repeated. Return the number of rows."""
        return int(self.write_observed(rows, {}, writer=writer, epoch=epoch, **options)["rows"])

    def write_observed(
        self, rows: DataFrame, metrics: Mapping[str, Column], *, writer: str, epoch: int, **options: object
    ) -> dict[str, Any]:
        """Write rows as `write` does, and return their count with these aggregates over them."""
        observation = Observation()
        columns = [column.alias(name) for name, column in metrics.items()]
        observed_rows = rows.observe(observation, sql.count(sql.lit(1)).alias("rows"), *columns)
        sink = observed_rows.write.format("streams")
        sink = sink.options(**self.options()).option("txnAppId", writer).option("txnVersion", str(epoch))
        for name, value in options.items():
            sink = sink.option(name, str(value))
        with unwrap_errors():
            sink.mode("append").save()
        return observation.get


def box_positions(shards: Shards, boxes: Sequence[str], *, least: int = 1) -> dict[str, BoxPosition]:
    """Return the positions of these boxes. Raises `BoxNotFound` with the names of missing boxes."""
    if len(boxes) < least:
        raise JobRefused("no boxes; name at least one, or give a prefix")
    positions = {each.box: each for each in shards.states(boxes=list(boxes))}
    missing = [box for box in boxes if box not in positions]
    if missing:
        raise BoxNotFound(f"there is no box {', '.join(missing)}", boxes=missing)
    return positions


def boxes_with_prefix(shards: Shards, prefix: str | None, *, besides: str | None = None) -> list[str]:
    """Return the boxes whose names start with `prefix`, without ledgers and without `besides`."""
    names = [each.box for each in shards.states(prefix=prefix or "") if each.box != besides]
    user_boxes = [box for box in names if not box.startswith(LEDGERS)]
    if not user_boxes:
        raise JobRefused(f"there is no box whose name starts with {prefix!r}")
    return user_boxes


def select_boxes(
    shards: Shards, boxes: Sequence[str], prefix: str | None, *, besides: str | None = None
) -> list[str]:
    """Return the boxes of a job: `boxes`, or all boxes with the prefix."""
    if prefix is None:
        return list(boxes)
    if boxes:
        raise JobRefused("give boxes or a prefix of their names, not both")
    return boxes_with_prefix(shards, prefix, besides=besides)


def resume_seq(box: str, state: BoxPosition, cursor: Cursor, on_gap: str) -> int:
    """Return the seq to resume after. A box that was created again is a gap, and resumes at 0."""
    if state.generation == cursor.gen:
        return cursor.seq
    if on_gap == "fail":
        raise GapError.of(Gap(box, cursor.seq + 1, None, "recreated", None))
    return 0


class Ledger:
    """The entries of a job's ledger, and appends to it."""

    def __init__(self, client: Client, box: str) -> None:
        self._box = client.box(box)
        self.entries: list[dict[str, Any]] = []
        #: Time of the last entry; 0 without entries.
        self.last_ms = 0
        self._next_seq = 1
        self._exists = self._box.exists()
        if self._exists:
            for item in self._box.read(0):
                if not isinstance(item, Record):
                    raise JobRefused(
                        f"the ledger {box} has lost records {item.gap_from} to {item.gap_to}, so the "
                        f"progress of this job is unknown; compare source and target, and use another name"
                    )
                self.entries.append(item.data)
                self.last_ms = item.ts
            self._next_seq = self._box.position().next_seq

    def __repr__(self) -> str:
        return f"<Ledger {self._box.name}, {len(self.entries)} entries>"

    def append(self, entries: Iterable[dict[str, Any]], *, trims: bool = False) -> None:
        """Append all entries or none. Raises `JobRefused` if another run has appended since the last read."""
        new = list(entries)
        if not self._exists:
            self._box.create(durability="fsync")
            self._exists = True
        try:
            reply = self._box.append_batch(
                new, match_seq=self._next_seq, trim_before_seq=self._next_seq if trims else None
            )
        except SeqMismatch as error:
            raise JobRefused(
                f"another run of this job is writing to {self._box.name}; run the job again when it has ended"
            ) from error
        self.entries += new
        self._next_seq = reply.last_seq + 1

    def is_unchanged(self) -> bool:
        """Return True if no other run has appended since the last read."""
        return not self._exists or self._box.position().next_seq == self._next_seq

    def replace(self, entries: list[dict[str, Any]]) -> None:
        """Replace all entries by these, in one write. Raises `JobRefused` as `append` does."""
        self.append(entries, trims=True)
        self.entries = entries

    def note(self, entry: dict[str, Any]) -> None:
        """Append an entry unconditionally. If another run has appended, the next `append` is refused."""
        reply = self._box.append_batch([entry])
        self.entries.append(entry)
        if reply.first_seq == self._next_seq:
            self._next_seq = reply.last_seq + 1


def summary(rows: DataFrame, *more: str) -> DataFrame:
    """Return, for each box, counts, first and last seq, and a fingerprint of all fields of all records."""
    fingerprint = sql.bit_xor(sql.xxhash64("seq", "ts", "data", "tag", "node", "meta"))
    return rows.groupBy("box", *more).agg(
        sql.count(sql.lit(1)).alias("records"),
        sql.count_distinct("seq").alias("seqs"),
        sql.min("seq").alias("first_seq"),
        sql.max("seq").alias("last_seq"),
        fingerprint.alias("fingerprint"),
    )
