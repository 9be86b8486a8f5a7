"""Cuts the last micro-batch of a stopped query anew.

Spark writes the end of a micro-batch to its offset log before it runs the batch, and runs it again to the
same end after a restart. So a batch that is over a limit of the server fails for ever, however small
`maxRecordsPerTrigger` is by then. `recut` moves the end in the log.

That is safe as long as no shard has committed the batch: then it has not happened. Rows that are held for it
are dropped first, so that no process of the stopped query can commit them any more.
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
#: Lines of an entry of the offset log before those of the sources: its version, and facts of the batch.
_HEAD_LINES = 2
#: As Spark writes the offset of a source that has none yet.
_UNKNOWN = "-"


class NotRecut(Refused):
    """The checkpoint is left as it is."""

    code = "not_recut"


class Recut(msgspec.Struct, frozen=True):
    batch: int
    #: Records of the batch before and now.
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
    """Shortens the micro-batch that a stopped query has planned and not committed to about `records` records.
    The next start of the query runs it so. `writer` is the sink's `txnAppId`, if it has one.

    `NotRecut` when there is no such batch, or when some shards have committed it: then raise the limit that
    it has met, and start the query as it is. The checkpoint must be a local folder.
    """
    folder = _folder(checkpoint)
    batch = _newest(folder / "offsets")
    if batch is None or batch == _newest(folder / "commits"):
        raise NotRecut(f"{folder} has no micro-batch that is planned and not committed")
    query = str(msgspec.json.decode((folder / "metadata").read_bytes())["id"])
    with Client(url, key=key, retry=_RETRY) as client, Shards(client.url, key=key, retry=_RETRY) as shards:
        _release(shards, writer or query, batch)
    entry = folder / "offsets" / str(batch)
    lines = entry.read_text().splitlines()
    earlier: Sequence[str] = ()
    if batch > 0:
        earlier = (folder / "offsets" / str(batch - 1)).read_text().splitlines()
    found = Recut(batch, 0, 0)
    for at in range(_HEAD_LINES, len(lines)):
        lines[at], before, now = _shortened(
            earlier[at] if at < len(earlier) else _UNKNOWN, lines[at], records
        )
        found = Recut(batch, found.before + before, found.records + now)
    # Spark compares a file with its checksum, if there is one.
    (entry.parent / f".{batch}.crc").unlink(missing_ok=True)
    part = folder / f"recut-{batch}"
    part.write_text("\n".join(lines))
    os.replace(part, entry)
    return found


def _folder(checkpoint: str) -> Path:
    if "://" in checkpoint and not checkpoint.startswith("file://"):
        raise NotRecut(f"{checkpoint}: only a checkpoint in a local folder can be cut anew; copy it to one")
    return Path(unquote(checkpoint.removeprefix("file://")))


def _newest(folder: Path) -> int | None:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def _release(shards: Shards, writer: str, batch: int) -> None:
    for shard in range(shards.count):
        shards.txn_abort(shard, Txn(writer, batch))
    for shard in range(shards.count):
        for mark in shards.txn_list(shard, prefix=writer).marks:
            if mark.writer == writer and mark.epoch >= batch:
                raise NotRecut(
                    f"shard {shard} has committed micro-batch {batch}: raise the limit that the others have "
                    f"met, and start the query as it is"
                )


def _shortened(start: str, end: str, records: int) -> tuple[str, int, int]:
    """The new end of one source, and its records before and now. Sources of other kinds keep theirs."""
    try:
        last: dict[str, Any] = json.loads(end)
        upto = offsets.load(last)
        begin = offsets.start_of({} if start == _UNKNOWN else json.loads(start), last)
    except (AttributeError, KeyError, TypeError, ValueError):
        return end, 0, 0
    if start == _UNKNOWN and offsets.FIRST not in last:
        raise NotRecut("an older version has planned the first micro-batch: its beginning is not known")
    kept = {key: value for key, value in last.items() if key == offsets.FIRST}
    cut = offsets.admit(begin, upto, records)
    before, now = (sum(offsets.pending(begin, each).values()) for each in (upto, cut))
    return json.dumps(offsets.dump(cut) | kept), before, now
