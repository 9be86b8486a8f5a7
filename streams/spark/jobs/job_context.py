"""What every job needs: the server, frames of its boxes, and the job's ledger.

A ledger is a box with a record for each step that a job has decided on, written before the step is taken. It
is appended to at an expected seq, so two runs of one job cannot both go on: the second is refused.
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
from streams.spark.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: A server that is started again is back well within it.
_RETRY = Retry(total_s=60)

#: Boxes that jobs write their steps to begin with one of these.
LEDGERS = ("archive.", "backfill.", "replay.")

SCHEMA = "box string, seq bigint, ts timestamp, data string, tag string, node string, meta string"


class JobRefused(Refused):
    """The job cannot run like this."""

    code = "job_refused"


@dataclass(frozen=True)
class JobContext:
    """A server, and how a job reaches it."""

    url: str | None = None
    key: str | None = field(default=None, repr=False)

    def client(self) -> Client:
        return Client(self.url, key=self.key, retry=_RETRY)

    def shards(self) -> Shards:
        return Shards(self.url, key=self.key, retry=_RETRY)

    def options(self) -> dict[str, str]:
        with self.client() as client:  # which resolves the address as everything else does
            found = {"url": client.url}
        return found | ({"token": self.key} if self.key else {})

    def frame(
        self,
        spark: SparkSession,
        start: Mapping[str, int],
        end: Mapping[str, int],
        *,
        on_gap: str = "fail",
        **options: object,
    ) -> DataFrame:
        """What these boxes hold after `start` and up to `end`."""
        reader = spark.read.format("streams").options(**self.options())
        reader = reader.option("onGap", on_gap).option("maxBoxes", max(1000, len(end)))
        reader = reader.option("startingOffsets", json.dumps(dict(start)))
        reader = reader.option("endingOffsets", json.dumps(dict(end)))
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load(",".join(end))

    def write(self, rows: DataFrame, *, writer: str, epoch: int, **options: object) -> int:
        """Each row once for this writer and epoch, however often it is run. How many rows were sent."""
        return int(self.write_observed(rows, {}, writer=writer, epoch=epoch, **options)["rows"])

    def write_observed(
        self, rows: DataFrame, seen: Mapping[str, Column], *, writer: str, epoch: int, **options: object
    ) -> dict[str, Any]:
        """The same, and what else is to be known of the rows that were sent."""
        noted = Observation()
        wanted = [column.alias(name) for name, column in seen.items()]
        watched = rows.observe(noted, sql.count(sql.lit(1)).alias("rows"), *wanted)
        sink = watched.write.format("streams")
        sink = sink.options(**self.options()).option("txnAppId", writer).option("txnVersion", str(epoch))
        for name, value in options.items():
            sink = sink.option(name, str(value))
        with unwrap_errors():
            sink.mode("append").save()
        return noted.get


def box_positions(shards: Shards, boxes: Sequence[str], *, least: int = 1) -> dict[str, BoxPosition]:
    """Of all of these boxes; `BoxNotFound` names those that are not there."""
    if len(boxes) < least:
        raise JobRefused("no box is named")
    found = {each.box: each for each in shards.states(boxes=list(boxes))}
    missing = [box for box in boxes if box not in found]
    if missing:
        raise BoxNotFound(f"there is no box {', '.join(missing)}", boxes=missing)
    return found


def boxes_with_prefix(shards: Shards, prefix: str | None, *, besides: str | None = None) -> list[str]:
    """Boxes whose names start with `prefix`, without the ones that jobs keep for themselves."""
    found = [each.box for each in shards.states(prefix=prefix or "") if each.box != besides]
    mine = [box for box in found if not box.startswith(LEDGERS)]
    if not mine:
        raise JobRefused(f"there is no box whose name starts with {prefix!r}")
    return mine


def select_boxes(
    shards: Shards, boxes: Sequence[str], prefix: str | None, *, besides: str | None = None
) -> list[str]:
    """The boxes of a job: those that are named, or those with a prefix."""
    if prefix is None:
        return list(boxes)
    if boxes:
        raise JobRefused("give boxes or a prefix of their names, not both")
    return boxes_with_prefix(shards, prefix, besides=besides)


def resume_seq(box: str, state: BoxPosition, place: Place, on_gap: str) -> int:
    """Where to go on after `place`: a box that was made anew is loss, and then begins at 0."""
    if state.generation == place.gen:
        return place.seq
    if on_gap == "fail":
        raise GapError.of(Gap(box, place.seq + 1, None, "recreated", None))
    return 0


class Ledger:
    def __init__(self, client: Client, box: str) -> None:
        self._box = client.box(box)
        self.entries: list[dict[str, Any]] = []
        #: When the last entry was appended; 0 without any.
        self.last_ms = 0
        self._next_seq = 1
        self._is_there = self._box.exists()
        if self._is_there:
            for item in self._box.read(0):
                if not isinstance(item, Record):
                    raise JobRefused(
                        f"{box} has lost records {item.gap_from} to {item.gap_to}: what this job did is "
                        f"not known"
                    )
                self.entries.append(item.data)
                self.last_ms = item.ts
            self._next_seq = self._box.position().next_seq

    def __repr__(self) -> str:
        return f"<Ledger {self._box.name}, {len(self.entries)} entries>"

    def append(self, entries: Iterable[dict[str, Any]], *, trims: bool = False) -> None:
        """All of them or none. `JobRefused` when somebody else has appended since it was read."""
        new = list(entries)
        if not self._is_there:
            self._box.create(durability="fsync")
            self._is_there = True
        try:
            appended = self._box.append_batch(
                new, match_seq=self._next_seq, trim_before_seq=self._next_seq if trims else None
            )
        except SeqMismatch as error:
            raise JobRefused(
                f"another run of this job has written to {self._box.name} meanwhile; start again when it "
                f"has ended"
            ) from error
        self.entries += new
        self._next_seq = appended.last_seq + 1

    def is_unchanged(self) -> bool:
        """True if nobody has appended since it was read."""
        return not self._is_there or self._box.position().next_seq == self._next_seq

    def replace(self, entries: list[dict[str, Any]]) -> None:
        """Puts these entries in the place of all others, in one write. `JobRefused` as with `append`."""
        self.append(entries, trims=True)
        self.entries = entries

    def note(self, entry: dict[str, Any]) -> None:
        """Appends what has happened, whether or not another run has appended meanwhile. If one has, the next
        `append` is refused."""
        appended = self._box.append_batch([entry])
        self.entries.append(entry)
        if appended.first_seq == self._next_seq:
            self._next_seq = appended.last_seq + 1


def summary(rows: DataFrame, *more: str) -> DataFrame:
    """For each box: how many, from where to where, and a number that changes with any field of any record."""
    fingerprint = sql.bit_xor(sql.xxhash64("seq", "ts", "data", "tag", "node", "meta"))
    return rows.groupBy("box", *more).agg(
        sql.count(sql.lit(1)).alias("records"),
        sql.count_distinct("seq").alias("seqs"),
        sql.min("seq").alias("first_seq"),
        sql.max("seq").alias("last_seq"),
        fingerprint.alias("fingerprint"),
    )
