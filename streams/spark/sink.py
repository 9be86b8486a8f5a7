"""Writing: tasks put rows to the shards, hidden; the driver's commit shows them, each row once.

    writer   who writes: the streaming query, `txnAppId`, or one `save()`
    epoch    which of its transactions: the micro-batch, `txnVersion`, or 1
    attempt  which run of the epoch: a new one drops what an earlier one has sent
    parcel   what one attempt of one task sent: a name never used before

    task     write ─► send ─► Packer (`columns.py`) ─► Parcel (`direct/parcels.py`, op 90) ─► shard: held
    driver   commit ─► Shards.txn_commit (`direct/shards.py`, op 91): dry on all shards, then for good

In the shard, both are handled in `shard/core/transactions/handlers.py`.

The commit lists the parcels of the tasks that Spark counts; whatever else was sent for the epoch (attempts
that failed, twins of speculation, an application that died) is dropped by the shard in the same step. An
epoch that was committed before changes nothing, however its rows are cut this time.

Names by batch, partition and chunk would not do: when an epoch runs again with other partitions, they name
other rows, and rows come twice.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    VarcharType,
)

from streams.client.retry import Retry
from streams.direct import BoxResult, PackedColumns, Parcel, Shards, Txn
from streams.protocol.errors import BY_CODE, StreamsError, Uncertain, WriterConflict
from streams.spark.columns import Packer, pieces
from streams.spark.options import BadOption, Writing
from streams.spark.reads import open_client, open_shards

#: The only way in which Spark tells a task which micro-batch of which query it belongs to. Not public, but
#: the same for years; a task that does not find them refuses to write rather than guess.
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"

#: Shards that are told of a commit at the same time.
_TOLD_AT_ONCE = 16

_TEXT: tuple[type[DataType], ...] = (StringType, BinaryType, VarcharType)
_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "box": (StringType, VarcharType),
    "data": _TEXT,
    "tag": (StringType, VarcharType),
    "node": (StringType, VarcharType),
    "meta": (*_TEXT, MapType),
    "ts": (TimestampType, LongType),
}


class PartialCommit(Uncertain):
    """Some shards have committed and others could not be reached."""

    code = "partial_commit"


class AlreadyCommitted(WriterConflict):
    """This version was committed before, and `txnIfDone=fail` asks for an error then."""

    code = "already_committed"

    @classmethod
    def of(cls, txn: Txn) -> AlreadyCommitted:
        return cls(
            f"epoch {txn.epoch} of writer {txn.writer} was committed before; nothing was written",
            writer=txn.writer,
            epoch=txn.epoch,
        )


def check_columns(schema: StructType, asked: Writing) -> None:
    """Nothing is dropped or turned into text silently."""
    names = schema.names
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise BadOption(
            f"column {unknown[0]}: is not written; there are {', '.join(_TYPES)}. To have it in the record: "
            f'select(to_json(struct("*")).alias("data"))'
        )
    if "data" not in names:
        raise BadOption('there is no column data; for example select(to_json(struct("*")).alias("data"))')
    if "box" not in names and asked.box is None:
        raise BadOption("there is no column box, and the option box does not say where the rows go")
    for each in schema.fields:
        if not isinstance(each.dataType, _TYPES[each.name]):
            hint = f'; use to_json(col("{each.name}"))' if each.name in ("data", "meta") else ""
            raise BadOption(f"column {each.name}: cannot be {each.dataType.simpleString()}{hint}")


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """What one task has put, and to which shards: (shard, chunks)."""

    txn: Txn
    parcel: str
    rows: int
    chunks: tuple[tuple[int, int], ...]


def send(asked: Writing, txn: Txn, batches: Iterator[pa.RecordBatch]) -> Sent:
    """The rows of a task."""
    with open_shards(asked.server) as shards:
        target = _target(asked, shards, txn)
        packer = Packer(
            shards.shard_of, box=asked.box, default_node=asked.node, create=None if asked.create else False
        )
        makers = _Maker(asked, shards) if asked.durability is not None else None
        rows = 0
        try:
            for batch in batches:
                for piece in pieces(batch):
                    for shard, packed in packer.pack(piece):
                        if makers is not None:
                            makers.make(packed.boxes)
                        target.put(shard, packed)
                    rows += piece.num_rows
            return Sent(txn, target.name, rows, target.close())
        except BaseException:
            # Spark may never mention this attempt again.
            _drop(asked, txn, [target.name])
            raise


def _target(asked: Writing, shards: Shards, txn: Txn) -> _Hold | _Keyed | _Append:
    match asked.delivery:
        case "txn":
            return _Hold(shards, txn)
        case "keyed":
            return _Keyed(shards, txn)
        case _:
            return _Append(shards)


class _Hold:
    """Rows that are hidden until the commit."""

    def __init__(self, shards: Shards, txn: Txn) -> None:
        self._shards = shards
        self._txn = txn
        self._parcels: dict[int, Parcel] = {}
        self.name = uuid.uuid4().hex

    def put(self, shard: int, packed: PackedColumns) -> None:
        parcel = self._parcels.get(shard)
        if parcel is None:
            parcel = self._parcels[shard] = Parcel(self._shards, shard, self._txn, self.name)
        parcel.put(packed)

    def close(self) -> tuple[tuple[int, int], ...]:
        return tuple((shard, parcel.close()) for shard, parcel in sorted(self._parcels.items()))


class _Append:
    """Rows that are there at once: at least once, for a task that is tried again sends them again."""

    name = ""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def put(self, shard: int, packed: PackedColumns) -> None:
        self._append(packed, uuid.uuid4().hex)

    def _append(self, packed: PackedColumns, key: str) -> list[BoxResult]:
        """Boxes that are busy are tried again with all others: those know the key by then."""

        def ask() -> list[BoxResult]:
            results = self._shards.put_columns(packed, idempotency_key=key)
            for result in results:
                if result.error is not None:
                    code, message, detail = result.error
                    raise BY_CODE.get(code, StreamsError)(f"{result.box}: {message}", **detail)
            return results

        return self._shards.connections.attempt(ask, follows=False)

    def close(self) -> tuple[tuple[int, int], ...]:
        return ()


class _Keyed(_Append):
    """Rows that are there at once, each message under a name that a second attempt gives it too. What a box
    knows by its name already is compared with what it holds: a plan that cuts rows otherwise this time is a
    conflict, and not rows that come twice or not at all."""

    def __init__(self, shards: Shards, txn: Txn) -> None:
        super().__init__(shards)
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        # A writer's name may be longer than what is left for it in a key.
        writer = hashlib.sha256(txn.writer.encode()).hexdigest()[:32]
        self._task = f"spark-{writer}-{txn.epoch}-{partition}"
        self._chunks: dict[int, int] = {}

    def put(self, shard: int, packed: PackedColumns) -> None:
        chunk = self._chunks[shard] = self._chunks.get(shard, -1) + 1
        known = [each for each in self._append(packed, f"{self._task}-{chunk}") if each.deduped]
        for result in known:
            self._compare(result, packed)

    def _compare(self, result: BoxResult, packed: PackedColumns) -> None:
        at = packed.boxes.index(result.box)
        first, count = sum(packed.counts[:at]), packed.counts[at]
        sent = [bytes(each) for each in msgspec.json.decode(packed.data, type=list[msgspec.Raw])]
        found = [
            data
            for page in self._shards.scan(result.box, from_seq=result.first_seq - 1, to_seq=result.last_seq)
            for run in page.runs
            for data in run.datas()
        ]
        # Records that were deleted or dropped since cannot be compared: then their number must do.
        has_all = len(found) == result.last_seq - result.first_seq + 1
        if result.last_seq - result.first_seq + 1 != count or (
            has_all and found != sent[first : first + count]
        ):
            raise WriterConflict(
                f"{result.box}: records {result.first_seq} to {result.last_seq} were written under the same "
                f"key and are other rows: this run cuts its rows otherwise than the one before. Use "
                f"delivery=txn for plans that change",
                box=result.box,
            )


class _Maker:
    """Makes boxes of the durability that was asked for, where there are none yet."""

    def __init__(self, asked: Writing, shards: Shards) -> None:
        self._asked = asked
        self._shards = shards
        #: As many as the job has boxes.
        self._seen: set[str] = set()

    def make(self, boxes: Sequence[str]) -> None:
        new = [box for box in boxes if box not in self._seen]
        if not new:
            return
        there = {each.box for each in self._shards.states(boxes=new)}
        with open_client(self._asked.server) as client:
            for box in new:
                if box not in there:
                    client.box(box).create(durability=self._asked.durability)  # type: ignore[arg-type]
        self._seen.update(new)


def commit(asked: Writing, messages: Sequence[Sent | None]) -> int:
    """Shows what these tasks have put, in their order, and returns how many rows that were. Every shard is
    told, also one that has none of them: then all know that the epoch is over. What is refused, or a shard
    that cannot be reached, leaves nothing shown; a shard that goes away in between is `PartialCommit`."""
    sent = [message for message in messages if message is not None]
    if not sent or asked.delivery != "txn":
        return sum(message.rows for message in sent)
    txn = sent[0].txn
    assert all(message.txn == txn for message in sent), "the tasks of one commit belong to one transaction"
    parcels: dict[int, list[tuple[str, int]]] = {}
    for message in sent:
        for shard, chunks in message.chunks:
            parcels.setdefault(shard, []).append((message.parcel, chunks))
    with open_shards(asked.server, retry_s=asked.commit_s) as shards:

        def tell(shard: int, *, dry: bool) -> StreamsError | None:
            retry = Retry(total_s=asked.commit_s)
            try:
                answer = shards.txn_commit(shard, txn, parcels.get(shard, []), retry=retry, dry=dry)
            except StreamsError as error:
                return error
            if dry and answer.is_done and asked.if_done == "fail":
                return AlreadyCommitted.of(txn)
            return None

        count = shards.count
        with ThreadPoolExecutor(min(count, _TOLD_AT_ONCE)) as threads:
            # Shards commit each for itself, so what one of them would refuse is found out before any has.
            for error in threads.map(partial(tell, dry=True), range(count)):
                if error is not None:
                    raise error
            told = threads.map(partial(tell, dry=False), range(count))
            undone = {shard: error for shard, error in enumerate(told) if error is not None}
    if undone:
        shown = "; ".join(f"shard {shard}: {error.message}" for shard, error in undone.items())
        raise PartialCommit(
            f"epoch {txn.epoch} of writer {txn.writer} is not committed on {len(undone)} of {count} "
            f"shards "
            f"({shown}). Run the same again with the same txnAppId and txnVersion, or go on from the same "
            f"checkpoint: what is missing is added and nothing is doubled",
            writer=txn.writer,
            epoch=txn.epoch,
            shards=sorted(undone),
        )
    return sum(message.rows for message in sent)


def abort(asked: Writing, txn: Txn | None, messages: Sequence[Sent | None]) -> None:
    """Drops what is held of the whole epoch, whether or not Spark knows the parcels. If Spark dies before,
    the next attempt does it, or the shards do after a while."""
    txn = next((message.txn for message in messages if message is not None), txn)
    if txn is not None:
        _drop(asked, txn, [])


def _drop(asked: Writing, txn: Txn, parcels: Sequence[str]) -> None:
    if asked.delivery != "txn":
        return
    with open_shards(asked.server, retry_s=0) as shards:
        try:
            for shard in range(shards.count):
                shards.txn_abort(shard, txn, parcels)
        except StreamsError:
            pass  # a server that is away will forget by itself; what failed the job is the error to see


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, asked: Writing) -> None:
        self._asked = asked
        # Created once for each save() and pickled with this object: all of its tasks have the same.
        attempt = uuid.uuid4().hex
        self._txn = (
            Txn(f"spark-{attempt}", 1, once=True)
            if asked.app_id is None
            else Txn(asked.app_id, asked.version or 0, reset=asked.reset, attempt=attempt)
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send(self._asked, self._txn, iterator)

    def commit(self, messages: list[Any]) -> None:
        commit(self._asked, messages)

    def abort(self, messages: list[Any]) -> None:
        abort(self._asked, self._txn, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Created once for the tasks of a micro-batch, and again for its commit: only messages pass between."""

    def __init__(self, asked: Writing) -> None:
        self._asked = asked
        #: The same for all tasks: rows of an earlier run of the micro-batch are dropped when the first row
        #: comes.
        self._attempt = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "Spark runs this in a task"
        batch, query = context.getLocalProperty(_BATCH_ID), context.getLocalProperty(_QUERY_ID)
        if batch is None or query is None:
            raise StreamsError(
                "this Spark does not tell tasks which micro-batch they belong to; use foreachBatch and a "
                "batch "
                "write with txnAppId and txnVersion"
            )
        return send(self._asked, self._txn(int(batch), query, self._attempt), iterator)

    def _txn(self, batch: int, query: str, attempt: str = "") -> Txn:
        writer = self._asked.app_id if self._asked.app_id is not None else query
        return Txn(writer, batch, query, self._asked.reset, attempt=attempt)

    def commit(self, messages: list[Any], batchId: int) -> None:
        commit(self._asked, messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        query = _query_id(self._asked.checkpoint)
        abort(self._asked, self._txn(batchId, query) if query is not None else None, messages)


def _query_id(checkpoint: str | None) -> str | None:
    """The id of the query that has this checkpoint. Spark does not pass it to `abort`, and may pass no
    message of a task that would say it. None where the checkpoint is in a store that only Spark can read."""
    if checkpoint is None or ("://" in checkpoint and not checkpoint.startswith("file://")):
        return None
    try:
        found = Path(unquote(checkpoint.removeprefix("file://")), "metadata").read_bytes()
        return str(msgspec.json.decode(found)["id"])
    except (OSError, KeyError, msgspec.DecodeError):
        return None
