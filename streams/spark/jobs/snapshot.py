"""Writes the newest record of each key of a box to the box NAME.snap, then optionally trims.

A reader loads the snapshot and follows the box from its cursor. The records of a snapshot are one
transaction, so they appear at once. A *footer* after them has their seqs and the cursor; the same write
deletes the snapshot before it. So a reader that takes the last footer always finds one complete snapshot, no
matter when a run was killed.
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
from streams.spark.offsets import Cursor

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SUFFIX = ".snap"
#: The tag of a footer. Keys are tags, so a record with this tag is refused.
FOOTER = "$snapshot"


class Snapshot(msgspec.Struct, frozen=True):
    box: str
    #: Last seq in the snapshot, and its generation of the box; follow from here.
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
    """Write a new snapshot: the last one, updated with the records that have come since.

    It has the newest record of each tag. With `drop_null`, a record whose data is `null` removes its key.
    `trim` then deletes the records that the snapshot covers from the box, after it was read back and
    compared.
    """
    context = JobContext(url, key)
    with context.client() as client, context.shards() as shards:
        state = box_positions(shards, [box])[box]
        writer = f"job:snapshot:{box}:{state.generation}"
        if dry_run:
            footer = last_footer(client, box)
        else:
            footer = _finish_last_snapshot(client, shards, box, state.generation, writer)
        after = state.earliest_seq - 1
        if footer is not None:
            after = resume_seq(box, state, Cursor(footer.gen, footer.cursor), on_gap)
        cursor = state.head_seq
        if dry_run:
            return Snapshot(box, cursor, state.generation, footer.keys if footer else 0, 0, is_dry=True)
        if after < cursor:
            rows = context.frame(spark, {box: after}, {box: cursor}, on_gap=on_gap).filter("data is not null")
            if rows.filter(f"tag is null or tag = '{FOOTER}'").limit(1).count():
                raise JobRefused(
                    f"{box} has records without a tag (or tagged {FOOTER}); every record needs its key as tag"
                )
            rows = rows.select("tag", "data", "seq")
            if footer is not None:
                rows = _snapshot_rows(context, spark, box, footer).unionByName(rows)
            snapshot_box = client.box(box + SUFFIX)
            if not snapshot_box.exists():
                snapshot_box.create(durability="fsync")
            footer = _write_snapshot(
                context,
                snapshot_box,
                _newest_by_tag(rows, drop_null),
                writer,
                Cursor(state.generation, cursor),
            )
        assert footer is not None or cursor == after, "new records are in the snapshot"
        # Also trims for an earlier run that was killed before this line.
        deleted_records = (
            client.box(box).delete(before_seq=cursor + 1).deleted if trim and footer is not None else 0
        )
    return Snapshot(box, cursor, state.generation, footer.keys if footer is not None else 0, deleted_records)


def _write_snapshot(
    context: JobContext, snapshot_box: Box, rows: DataFrame, writer: str, cursor: Cursor
) -> _Footer:
    """Write the records of a snapshot, read them back, compare, and write the footer."""
    before = snapshot_box.position().head_seq
    # The cursor serves as the epoch: it grows with every snapshot.
    metrics = context.write_observed(
        rows,
        {"fingerprint": _fingerprint()},
        writer=writer,
        epoch=cursor.seq,
        box=snapshot_box.name,
        node="snapshot",
    )
    last = snapshot_box.position().head_seq
    stored_rows = context.frame(rows.sparkSession, {snapshot_box.name: before}, {snapshot_box.name: last})
    stored_metrics = stored_rows.agg(
        sql.count(sql.lit(1)).alias("rows"), _fingerprint().alias("fingerprint")
    ).collect()[0]
    if (stored_metrics["rows"], stored_metrics["fingerprint"]) != (metrics["rows"], metrics["fingerprint"]):
        raise JobRefused(
            f"the records read back from {snapshot_box.name} are not the records written; nothing was "
            f"trimmed. Another snapshot at the same time can cause this: run the job again"
        )
    return _write_footer(snapshot_box, cursor, before)


def _fingerprint() -> Column:
    return sql.bit_xor(sql.xxhash64("tag", "data"))


def _newest_by_tag(rows: DataFrame, drop_null: bool) -> DataFrame:
    newest = rows.groupBy("tag").agg(sql.max_by("data", "seq").alias("data"))
    return newest.filter("data != 'null'") if drop_null else newest


def _snapshot_rows(context: JobContext, spark: SparkSession, box: str, footer: _Footer) -> DataFrame:
    """Return the records of a snapshot with seq 0, older than any record of the box."""
    if not footer.keys:
        return spark.createDataFrame([], SCHEMA).select("tag", "data", "seq")
    name = box + SUFFIX
    rows = context.frame(spark, {name: footer.first_seq - 1}, {name: footer.last_seq})
    return rows.select("tag", "data", sql.lit(0).cast("bigint").alias("seq"))


def _finish_last_snapshot(client: Client, shards: Shards, box: str, gen: int, writer: str) -> _Footer | None:
    """Return the last footer.

    If a run was killed between its transaction and its footer, write that footer first. The writer's last
    committed epoch on the shard is its cursor.
    """
    footer = last_footer(client, box)
    snapshot_box = client.box(box + SUFFIX)
    if not snapshot_box.exists():
        return footer
    marks = shards.txn_list(shards.shard_of(snapshot_box.name), prefix=writer).marks
    committed_seq = next((mark.epoch for mark in marks if mark.writer == writer), -1)
    if committed_seq > (footer.cursor if footer is not None and footer.gen == gen else -1):
        return _write_footer(
            snapshot_box, Cursor(gen, committed_seq), footer.last_seq + 1 if footer is not None else 0
        )
    return footer


def _write_footer(snapshot_box: Box, cursor: Cursor, before: int) -> _Footer:
    """Write the footer of the snapshot after seq `before`, and delete the records up to there."""
    head = snapshot_box.position().head_seq
    footer = _Footer(cursor.seq, cursor.gen, head - before, before + 1, head)
    try:
        snapshot_box.append_batch(
            [Entry(msgspec.to_builtins(footer), tag=FOOTER)], match_seq=head + 1, trim_before_seq=before + 1
        )
    except SeqMismatch as error:
        raise JobRefused(
            f"another run is writing a snapshot to {snapshot_box.name}; run the job again when it has ended"
        ) from error
    return footer


def last_footer(client: Client, box: str) -> _Footer | None:
    snapshot_box = client.box(box + SUFFIX)
    if not snapshot_box.exists():
        return None
    footers = [item for item in snapshot_box.tail(1, match=FOOTER) if isinstance(item, Record)]
    return msgspec.convert(footers[-1].data, _Footer) if footers else None


def read_snapshot(
    spark: SparkSession, box: str, *, url: str | None = None, key: str | None = None
) -> tuple[DataFrame, int]:
    """Return the last snapshot as a frame (tag, data), and the seq of the box to follow from."""
    context = JobContext(url, key)
    with context.client() as client:
        footer: Any = last_footer(client, box)
    if footer is None:
        raise JobRefused(f"there is no snapshot of {box}; create one with streams pipeline snapshot")
    return _snapshot_rows(context, spark, box, footer).select("tag", "data"), footer.cursor
