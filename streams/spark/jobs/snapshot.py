"""The newest record of each key of a box, up to a cursor, in a box beside it; then trim. Snapshot and follow.

Records of a snapshot are one transaction, so all of them appear at once. A *footer* after them says which
seqs they have and up to which seq of the box they go; it takes the snapshot before away in the same write.
So a reader that looks for the last footer always finds one whole snapshot, whatever was killed when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.client._sync.box import Box
from streams.client._sync.client import Client
from streams.client.answers import Entry, Record
from streams.direct import Shards
from streams.protocol.errors import SeqMismatch
from streams.spark.jobs.job_context import SCHEMA, JobContext, JobRefused, box_positions, resume_seq
from streams.spark.jobs.spark_errors import spark_job
from streams.spark.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SUFFIX = ".snap"
#: The tag of a footer. A key is a tag of the box; one that is called like this is refused.
FOOTER = "$snapshot"


class Snapshot(msgspec.Struct, frozen=True):
    box: str
    #: Goes up to this seq of the box, in this life of it; follow from here.
    cursor: int
    gen: int
    keys: int
    trimmed: int
    is_dry: bool = False


class _Footer(msgspec.Struct, frozen=True):
    cursor: int
    gen: int
    keys: int
    first_seq: int
    last_seq: int


@spark_job
def snapshot(
    spark: SparkSession,
    box: str,
    *,
    url: str | None = None,
    key: str | None = None,
    trim: bool = False,
    drop_null: bool = True,
    on_gap: str = "fail",
    dry_run: bool = False,
) -> Snapshot:
    """Folds what has come since the last snapshot into it: of each tag the newest record stays, and with
    `drop_null` one whose data is `null` takes its key away. `trim` then deletes from the box what the
    snapshot covers; its records have been read back by then, and are what was written."""
    site = JobContext(url, key)
    with site.client() as client, site.shards() as shards:
        state = box_positions(shards, [box])[box]
        writer = f"job:snapshot:{box}:{state.generation}"
        if dry_run:
            footer = last_footer(client, box)
        else:
            footer = _finished(client, shards, box, state.generation, writer)
        after = state.earliest_seq - 1
        if footer is not None:
            after = resume_seq(box, state, Place(footer.gen, footer.cursor), on_gap)
        cursor = state.head_seq
        if dry_run:
            return Snapshot(box, cursor, state.generation, footer.keys if footer else 0, 0, is_dry=True)
        if after < cursor:
            rows = site.frame(spark, {box: after}, {box: cursor}, on_gap=on_gap).filter("data is not null")
            if rows.filter(f"tag is null or tag = '{FOOTER}'").limit(1).count():
                raise JobRefused(f"{box} has records without a tag (or tagged {FOOTER}); the tag is the key")
            rows = rows.select("tag", "data", "seq")
            if footer is not None:
                rows = _earlier(site, spark, box, footer).unionByName(rows)
            kept = client.box(box + SUFFIX)
            if not kept.exists():
                kept.create(durability="fsync")
            footer = _put(site, kept, _folded(rows, drop_null), writer, Place(state.generation, cursor))
        assert footer is not None or cursor == after, "what is new has been folded"
        # Also what a run has left there that was killed before this line.
        trimmed = client.box(box).delete(before_seq=cursor + 1).deleted if trim and footer is not None else 0
    return Snapshot(box, cursor, state.generation, footer.keys if footer is not None else 0, trimmed)


def _put(site: JobContext, kept: Box, folded: DataFrame, writer: str, upto: Place) -> _Footer:
    """Writes the next snapshot, reads it back, and ends it."""
    before = kept.position().head_seq
    # The cursor is the epoch: it grows from snapshot to snapshot.
    sent = site.write_observed(
        folded,
        {"fingerprint": _fingerprint()},
        writer=writer,
        epoch=upto.seq,
        box=kept.name,
        node="snapshot",
    )
    last = kept.position().head_seq
    back = site.frame(folded.sparkSession, {kept.name: before}, {kept.name: last})
    held = back.agg(sql.count(sql.lit(1)).alias("rows"), _fingerprint().alias("fingerprint")).collect()[0]
    if (held["rows"], held["fingerprint"]) != (sent["rows"], sent["fingerprint"]):
        raise JobRefused(
            f"what was read back of {kept.name} is not what was written; nothing was trimmed. Another "
            f"snapshot at the same time does this: start again"
        )
    return _close(kept, upto, before)


def _fingerprint() -> Column:
    return sql.bit_xor(sql.xxhash64("tag", "data"))


def _folded(rows: DataFrame, drop_null: bool) -> DataFrame:
    newest = rows.groupBy("tag").agg(sql.max_by("data", "seq").alias("data"))
    return newest.filter("data != 'null'") if drop_null else newest


def _earlier(site: JobContext, spark: SparkSession, box: str, footer: _Footer) -> DataFrame:
    """The snapshot before, as records that are older than any of the box."""
    if not footer.keys:
        return spark.createDataFrame([], SCHEMA).select("tag", "data", "seq")
    name = box + SUFFIX
    rows = site.frame(spark, {name: footer.first_seq - 1}, {name: footer.last_seq})
    return rows.select("tag", "data", sql.lit(0).cast("bigint").alias("seq"))


def _finished(client: Client, shards: Shards, box: str, gen: int, writer: str) -> _Footer | None:
    """The last footer. A run that was killed after its transaction and before its footer is finished first:
    the shard's mark says up to where it went."""
    footer = last_footer(client, box)
    kept = client.box(box + SUFFIX)
    if not kept.exists():
        return footer
    marks = shards.txn_list(shards.shard_of(kept.name), prefix=writer).marks
    done = next((mark.epoch for mark in marks if mark.writer == writer), -1)
    if done > (footer.cursor if footer is not None and footer.gen == gen else -1):
        return _close(kept, Place(gen, done), footer.last_seq + 1 if footer is not None else 0)
    return footer


def _close(kept: Box, place: Place, before: int) -> _Footer:
    """Ends the snapshot that stands after `before`, and takes away what was before it."""
    head = kept.position().head_seq
    footer = _Footer(place.seq, place.gen, head - before, before + 1, head)
    try:
        kept.append_batch(
            [Entry(msgspec.to_builtins(footer), tag=FOOTER)], match_seq=head + 1, trim_before_seq=before + 1
        )
    except SeqMismatch as error:
        raise JobRefused(
            f"another snapshot is being made in {kept.name}; start again when it has ended"
        ) from error
    return footer


def last_footer(client: Client, box: str) -> _Footer | None:
    kept = client.box(box + SUFFIX)
    if not kept.exists():
        return None
    found = [item for item in kept.tail(1, match=FOOTER) if isinstance(item, Record)]
    return msgspec.convert(found[-1].data, _Footer) if found else None


def read_snapshot(
    spark: SparkSession, box: str, *, url: str | None = None, key: str | None = None
) -> tuple[DataFrame, int]:
    """The last snapshot as (tag, data), and the seq of the box to follow from."""
    site = JobContext(url, key)
    with site.client() as client:
        footer: Any = last_footer(client, box)
    if footer is None:
        raise JobRefused(f"there is no snapshot of {box}; make one with streams.spark.jobs.snapshot")
    return _earlier(site, spark, box, footer).select("tag", "data"), footer.cursor
