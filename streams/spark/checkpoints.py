"""Shortens the last planned micro-batch of a stopped query.

Spark writes the end of a micro-batch to its offset log before it runs the batch. After a restart it runs the
batch again, to the same end. So a batch that exceeds a limit of the server fails forever, even with a smaller
`maxRecordsPerTrigger`. `recut` moves the end in the log.

This is safe while no shard has committed the batch. `recut` first drops the batch's uncommitted rows, so that
no process left over from the stopped query can commit them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from streams.client._sync.client import Client
from streams.client.retry import Retry
from streams.direct import Shards, Txn
from streams.protocol.errors import Refused
from streams.spark import offsets

_RETRY = Retry(total_s=60)
#: Lines of an offset log entry before the lines of its sources: the version, and metadata of the batch.
_HEAD_LINES = 2
#: Spark writes this for a source that has no offset yet.
_UNKNOWN = "-"


class NotRecut(Refused):
    """The micro-batch cannot be shortened; the checkpoint is unchanged."""

    code = "not_recut"


class Recut(msgspec.Struct, frozen=True):
    """The micro-batch that `recut` shortened."""

    batch: int
    #: Records of the batch before and after.
    before: int
    records: int


def recut(
    checkpoint: str,
    records: int,
    *,
    url: str | None = None,
    key: str | None = None,
    writer: str | None = None,
) -> Recut:
    """Shorten the planned, uncommitted micro-batch of a stopped query to about `records` records.

    The next start of the query runs the shorter batch. `writer` is the sink's `txnAppId`, if it has one. The
    checkpoint must be a local folder.

    Raises `NotRecut` if there is no such batch, or if some shards have committed it. In the second case,
    raise the limit that the batch exceeded and start the query unchanged.
    """
    folder = _folder(checkpoint)
    batch = _newest_batch(folder / "offsets")
    if batch is None or batch == _newest_batch(folder / "commits"):
        raise NotRecut(
            f"{folder} has no micro-batch that is planned but not committed; start the query as it is"
        )
    query = str(msgspec.json.decode((folder / "metadata").read_bytes())["id"])
    with Client(url, key=key, retry=_RETRY) as client, Shards(client.url, key=key, retry=_RETRY) as shards:
        _drop_uncommitted_rows(shards, writer or query, batch)
    entry = folder / "offsets" / str(batch)
    lines = entry.read_text().splitlines()
    previous_lines: Sequence[str] = ()
    if batch > 0:
        previous_lines = (folder / "offsets" / str(batch - 1)).read_text().splitlines()
    result = Recut(batch, 0, 0)
    for at in range(_HEAD_LINES, len(lines)):
        lines[at], before, now = _shorten(
            previous_lines[at] if at < len(previous_lines) else _UNKNOWN, lines[at], records
        )
        result = Recut(batch, result.before + before, result.records + now)
    # Spark verifies a file against its checksum file, if there is one.
    (entry.parent / f".{batch}.crc").unlink(missing_ok=True)
    part = folder / f"recut-{batch}"
    part.write_text("\n".join(lines))
    os.replace(part, entry)
    return result


def _folder(checkpoint: str) -> Path:
    if "://" in checkpoint and not checkpoint.startswith("file://"):
        raise NotRecut(
            f"{checkpoint} is not a local folder; copy the checkpoint to one, run recut, and copy it back"
        )
    return Path(unquote(checkpoint.removeprefix("file://")))


def _newest_batch(folder: Path) -> int | None:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def _drop_uncommitted_rows(shards: Shards, writer: str, batch: int) -> None:
    for shard in range(shards.count):
        shards.txn_abort(shard, Txn(writer, batch))
    for shard in range(shards.count):
        for mark in shards.txn_list(shard, prefix=writer).marks:
            if mark.writer == writer and mark.epoch >= batch:
                raise NotRecut(
                    f"shard {shard} has committed micro-batch {batch}, so it cannot be shortened; raise the "
                    f"limit that the batch exceeds on the other shards, and start the query as it is"
                )


def _shorten(start: str, end: str, records: int) -> tuple[str, int, int]:
    """Return the new end of one source, and its record counts before and after.

    Sources of other formats keep their end.
    """
    try:
        last: dict[str, Any] = json.loads(end)
        upto = offsets.from_json(last)
        begin = offsets.batch_start({} if start == _UNKNOWN else json.loads(start), last)
    except (AttributeError, KeyError, TypeError, ValueError):
        return end, 0, 0
    if start == _UNKNOWN and offsets.FIRST not in last:
        raise NotRecut(
            "an older version planned the first micro-batch without its start; use a new checkpoint"
        )
    first = {key: value for key, value in last.items() if key == offsets.FIRST}
    cut = offsets.next_end(begin, upto, records)
    before, now = (sum(offsets.pending_counts(begin, each).values()) for each in (upto, cut))
    return json.dumps(offsets.to_json(cut) | first), before, now
