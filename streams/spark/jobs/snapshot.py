"""The newest record of each key of a box, up to a cursor, in a box beside it; then trim. Snapshot and follow.

Records of a snapshot are one transaction, so all of them appear at once. A *footer* after them says which
seqs they have and up to which seq of the box they go; it takes the snapshot before away in the same write.
So a reader that looks for the last footer always finds one whole snapshot, whatever was killed when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from streams.client._sync.client import Client
from streams.client.answers import Entry, Record
from streams.direct import Shards
from streams.protocol.errors import SeqMismatch
from streams.spark.jobs.plainly import plainly
from streams.spark.jobs.site import SCHEMA, JobRefused, Site, continued, states
from streams.spark.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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


@plainly
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
    snapshot covers, after its records have been counted in place."""
    site = Site(url, key)
    with site.client() as client, site.shards() as shards:
        state = states(shards, [box])[box]
        writer = f"job:snapshot:{box}:{state.generation}"
        footer = _finished(client, shards, box, state.generation, writer)
        after = state.earliest_seq - 1
        if footer is not None:
            after = continued(box, state, Place(footer.gen, footer.cursor), on_gap)
        cursor = state.head_seq
        if dry_run or after == cursor:
            keys = footer.keys if footer is not None else 0
            return Snapshot(box, after if not dry_run else cursor, state.generation, keys, 0, is_dry=dry_run)
        kept = client.box(box + SUFFIX)
        if not kept.exists():
            kept.create(durability="fsync")
        before = kept.position().head_seq
        rows = site.frame(spark, {box: after}, {box: cursor}, on_gap=on_gap).filter("data is not null")
        if rows.filter(f"tag is null or tag = '{FOOTER}'").limit(1).count():
            raise JobRefused(f"{box} has records without a tag (or tagged {FOOTER}); the tag is the key")
        if footer is not None:
            rows = _earlier(site, spark, box, footer).unionByName(rows.select("tag", "data", "seq"))
        folded = _folded(rows, drop_null)
        # The cursor is the epoch: it grows from snapshot to snapshot.
        site.write(folded, writer=writer, epoch=cursor, box=box + SUFFIX, node="snapshot")
        found = _close(client, box, Place(state.generation, cursor), before)
        trimmed = client.box(box).delete(before_seq=cursor + 1).deleted if trim else 0
    return Snapshot(box, cursor, state.generation, found.keys, trimmed)


def _folded(rows: DataFrame, drop_null: bool) -> DataFrame:
    newest = rows.groupBy("tag").agg(sql.max_by("data", "seq").alias("data"))
    return newest.filter("data != 'null'") if drop_null else newest


def _earlier(site: Site, spark: SparkSession, box: str, footer: _Footer) -> DataFrame:
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
        return _close(client, box, Place(gen, done), footer.last_seq + 1 if footer is not None else 0)
    return footer


def _close(client: Client, box: str, place: Place, before: int) -> _Footer:
    """Ends the snapshot that stands after `before`, and takes away what was before it."""
    kept = client.box(box + SUFFIX)
    head = kept.position().head_seq
    footer = _Footer(place.seq, place.gen, head - before, before + 1, head)
    try:
        kept.append_batch(
            [Entry(msgspec.to_builtins(footer), tag=FOOTER)], match_seq=head + 1, trim_before_seq=before + 1
        )
    except SeqMismatch as error:
        raise JobRefused(f"another snapshot of {box} is being made; start again when it has ended") from error
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
    site = Site(url, key)
    with site.client() as client:
        footer: Any = last_footer(client, box)
    if footer is None:
        raise JobRefused(f"there is no snapshot of {box}; make one with streams.spark.jobs.snapshot")
    return _earlier(site, spark, box, footer).select("tag", "data"), footer.cursor
