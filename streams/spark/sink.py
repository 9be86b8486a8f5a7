"""Writing: tasks put rows to the shards, hidden; the driver's commit shows them, each row once.

    writer   who writes: the streaming query, `txnAppId`, or one `save()`
    epoch    which of its transactions: the micro-batch, `txnVersion`, or 1
    parcel   what one attempt of one task sent: a name never used before

The commit lists the parcels of the tasks that Spark counts; whatever else was sent for the epoch (attempts
that failed, twins of speculation, an application that died) is dropped by the shard in the same step. An
epoch that was committed before changes nothing, however its rows are cut this time.

Names by batch, partition and chunk would not do: when an epoch runs again with other partitions, they name
other rows, and rows come twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructType,
    TimestampType,
    VarcharType,
)

from streams.client.retry import Retry
from streams.direct import Packed, Parcel, Shards, Txn
from streams.protocol.errors import BY_CODE, Refused, StreamsError, Uncertain
from streams.spark.columns import Packer, pieces
from streams.spark.options import BadOption, Writing
from streams.spark.reads import open_client, open_shards

#: The only way in which Spark tells a task which micro-batch of which query it belongs to. Not public, but
#: the same for years; a task that does not find them refuses to write rather than guess.
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"

_TEXT: tuple[type[DataType], ...] = (StringType, BinaryType, VarcharType)
_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "box": (StringType, VarcharType),
    "data": _TEXT,
    "tag": (StringType, VarcharType),
    "node": (StringType, VarcharType),
    "meta": _TEXT,
    "ts": (TimestampType, LongType),
}


class PartialCommit(Uncertain):
    """Some shards have committed and others could not be reached."""

    code = "partial_commit"


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
        target: _Append | _Hold = _Append(shards) if asked.delivery == "append" else _Hold(shards, txn)
        packer = Packer(
            shards.shard_of, box=asked.box, default_node=asked.node, create=None if asked.create else False
        )
        makers = _Maker(asked, shards) if asked.durability is not None else None
        rows = 0
        for batch in batches:
            for piece in pieces(batch):
                for shard, packed in packer.pack(piece):
                    if makers is not None:
                        makers.make(packed.boxes)
                    target.put(shard, packed)
                rows += piece.num_rows
        return Sent(txn, target.name, rows, target.close())


class _Hold:
    """Rows that are hidden until the commit."""

    def __init__(self, shards: Shards, txn: Txn) -> None:
        self._shards = shards
        self._txn = txn
        self._parcels: dict[int, Parcel] = {}
        self.name = uuid.uuid4().hex

    def put(self, shard: int, packed: Packed) -> None:
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

    def put(self, shard: int, packed: Packed) -> None:
        for result in self._shards.put_columns(packed):
            if result.error is not None:
                code, message, detail = result.error
                raise BY_CODE.get(code, StreamsError)(f"{result.box}: {message}", **detail)

    def close(self) -> tuple[tuple[int, int], ...]:
        return ()


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
                    client.box(box).create(durability=self._asked.durability)
        self._seen.update(new)


def commit(asked: Writing, messages: Sequence[Sent | None]) -> int:
    """Shows what these tasks have put, in their order, and returns how many rows that were. Every shard is
    told, also one that has none of them: then all know that the epoch is over."""
    sent = [message for message in messages if message is not None]
    if not sent or asked.delivery == "append":
        return sum(message.rows for message in sent)
    txn = sent[0].txn
    assert all(message.txn == txn for message in sent), "the tasks of one commit belong to one transaction"
    parcels: dict[int, list[tuple[str, int]]] = {}
    for message in sent:
        for shard, chunks in message.chunks:
            parcels.setdefault(shard, []).append((message.parcel, chunks))
    undone: dict[int, StreamsError] = {}
    with open_shards(asked.server, retry_s=asked.commit_s) as shards:
        for shard in range(shards.count):
            try:
                shards.txn_commit(shard, txn, parcels.get(shard, []), retry=Retry(total_s=asked.commit_s))
            except StreamsError as error:
                if isinstance(error, Refused) and shard == 0:
                    raise  # nothing was committed anywhere
                undone[shard] = error
    if undone:
        shown = "; ".join(f"shard {shard}: {error.message}" for shard, error in undone.items())
        raise PartialCommit(
            f"epoch {txn.epoch} of writer {txn.writer} is not committed on {len(undone)} of {shards.count} "
            f"shards "
            f"({shown}). Run the same again with the same txnAppId and txnVersion, or go on from the same "
            f"checkpoint: what is missing is added and nothing is doubled",
            writer=txn.writer,
            epoch=txn.epoch,
            shards=sorted(undone),
        )
    return sum(message.rows for message in sent)


def abort(asked: Writing, txn: Txn | None, messages: Sequence[Sent | None]) -> None:
    """Drops what is held. A hint only: Spark may know none of the parcels, or die before it says so, and then
    the shards drop them after a while by themselves."""
    txn = next((message.txn for message in messages if message is not None), txn)
    if txn is None or asked.delivery == "append":
        return
    with open_shards(asked.server, retry_s=0) as shards:
        try:
            for shard in range(shards.count):
                shards.txn_abort(shard, txn)
        except StreamsError:
            pass  # a server that is away will forget by itself; what failed the job is the error to see


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, asked: Writing) -> None:
        self._asked = asked
        # Made once for each save() and pickled with this object: all of its tasks have the same.
        writer = asked.app_id if asked.app_id is not None else f"spark-{uuid.uuid4().hex}"
        self._txn = Txn(writer, asked.version if asked.version is not None else 1, reset=asked.reset)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send(self._asked, self._txn, iterator)

    def commit(self, messages: list[Any]) -> None:
        commit(self._asked, messages)

    def abort(self, messages: list[Any]) -> None:
        abort(self._asked, self._txn, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for each `write` and each `commit`: only messages are carried over."""

    def __init__(self, asked: Writing) -> None:
        self._asked = asked

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
        writer = self._asked.app_id if self._asked.app_id is not None else query
        return send(self._asked, Txn(writer, int(batch), query, self._asked.reset), iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:
        commit(self._asked, messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        abort(self._asked, None, messages)
