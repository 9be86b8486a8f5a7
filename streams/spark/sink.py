"""Writes rows in transactions: tasks send hidden rows to the shards, and the driver's commit publishes them.

    writer   name of the transaction's owner: the streaming query, `txnAppId`, or one `save()`
    epoch    number of the transaction: the micro-batch, `txnVersion`, or 1
    attempt  one run of the epoch: a new attempt drops the rows of earlier ones
    parcel   the rows that one attempt of one task sent, under a unique name

    task     write ─► send_rows ─► Packer (`columns.py`) ─► Parcel (`direct/parcels.py`, op 90) ─► shard
    driver   commit_tasks ─► Shards.txn_commit (`direct/shards.py`, op 91): first dry on all shards

In the shard, `shard/core/transactions/handlers.py` takes rows, and
`shard/core/transactions/commit_handlers.py` commits them.

The commit lists the parcels of the tasks that Spark counts. In the same step the shard drops all other rows
of the epoch: from failed attempts, speculative duplicates, or an application that died. A second commit of an
epoch changes nothing, even if its rows are partitioned differently.

Parcel names made of batch, partition and chunk would not work: if an epoch runs again with other partitions,
the same name means other rows, and rows would be duplicated.
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
from streams.spark.bad_rows import SOURCE, split_bad_rows
from streams.spark.columns import Packer, split_batch
from streams.spark.options import BadOption, SparkWriteOptions
from streams.spark.reads import open_client, open_shards

#: Task properties with the micro-batch and the query; Spark offers no other way. They are not public, but
#: have not changed for years. A task without them refuses to write.
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"

#: Shards that commit concurrently.
_COMMITS_AT_ONCE = 16

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
    """Some shards have committed, and others could not be reached."""

    code = "partial_commit"


class AlreadyCommitted(WriterConflict):
    """The version is already committed, and `txnIfDone=fail` makes that an error."""

    code = "already_committed"

    @classmethod
    def of(cls, txn: Txn) -> AlreadyCommitted:
        return cls(
            f"epoch {txn.epoch} of writer {txn.writer} is already committed; nothing was written",
            writer=txn.writer,
            epoch=txn.epoch,
        )


def check_columns(schema: StructType, options: SparkWriteOptions) -> None:
    """Raise `BadOption` for columns that cannot be written: nothing is dropped or converted silently."""
    names = schema.names
    allowed_types = dict(_TYPES)
    if options.dead_letter_box is not None:
        allowed_types[SOURCE] = (StringType,)
    unknown = [name for name in names if name not in allowed_types]
    if unknown:
        raise BadOption(
            f"column {unknown[0]}: is not written; the columns are {', '.join(_TYPES)}. To put it into data: "
            f'select(to_json(struct("*")).alias("data"))'
        )
    if "data" not in names:
        raise BadOption(
            'there is no column data; add one, for example with select(to_json(struct("*")).alias("data"))'
        )
    if "box" not in names and options.box is None:
        raise BadOption("there is no column box; add one, or set the option box for all rows")
    for each in schema.fields:
        if not isinstance(each.dataType, allowed_types[each.name]):
            hint = f'; use to_json(col("{each.name}"))' if each.name in ("data", "meta") else ""
            raise BadOption(f"column {each.name}: cannot be {each.dataType.simpleString()}{hint}")


@dataclass(frozen=True)
class TaskCommit(WriterCommitMessage):
    """The commit message of one task: its parcel, its rows, and (shard, chunks) for each shard."""

    txn: Txn
    parcel: str
    rows: int
    chunks: tuple[tuple[int, int], ...]


def send_rows(options: SparkWriteOptions, txn: Txn, batches: Iterator[pa.RecordBatch]) -> TaskCommit:
    """Send the rows of a task to the shards."""
    with open_shards(options.server) as shards:
        delivery = _open_delivery(options, shards, txn)
        packer = Packer(
            shards.shard_of,
            box=options.box,
            default_node=options.node,
            create=None if options.create else False,
        )
        dead_letter_packer = Packer(shards.shard_of, box=options.dead_letter_box, default_node=options.node)
        creator = _BoxCreator(options, shards) if options.durability is not None else None
        rows = 0

        def put(piece: pa.RecordBatch, packer: Packer) -> None:
            for shard, message in packer.pack(piece):
                if creator is not None:
                    creator.create_missing(message.boxes)
                delivery.put(shard, message)

        try:
            for batch in batches:
                for piece in split_batch(batch):
                    rows += piece.num_rows
                    if options.dead_letter_box is not None:
                        piece, dead_letters = split_bad_rows(piece, options.box)
                        if dead_letters is not None:
                            put(dead_letters, dead_letter_packer)
                    put(piece, packer)
            return TaskCommit(txn, delivery.name, rows, delivery.close())
        except BaseException:
            # Spark may not report this attempt to the driver, so drop its rows here.
            _drop_rows(options, txn, [delivery.name])
            raise


def _open_delivery(
    options: SparkWriteOptions, shards: Shards, txn: Txn
) -> _TxnDelivery | _KeyedDelivery | _AppendDelivery:
    match options.delivery:
        case "txn":
            return _TxnDelivery(shards, txn)
        case "keyed":
            return _KeyedDelivery(shards, txn)
        case _:
            return _AppendDelivery(shards)


class _TxnDelivery:
    """Sends rows that stay hidden until the commit."""

    def __init__(self, shards: Shards, txn: Txn) -> None:
        self._shards = shards
        self._txn = txn
        self._parcels: dict[int, Parcel] = {}
        self.name = uuid.uuid4().hex

    def put(self, shard: int, message: PackedColumns) -> None:
        parcel = self._parcels.get(shard)
        if parcel is None:
            parcel = self._parcels[shard] = Parcel(self._shards, shard, self._txn, self.name)
        parcel.put(message)

    def close(self) -> tuple[tuple[int, int], ...]:
        return tuple((shard, parcel.close()) for shard, parcel in sorted(self._parcels.items()))


class _AppendDelivery:
    """Appends rows that are visible at once. At least once: a retried task appends them again."""

    name = ""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def put(self, shard: int, message: PackedColumns) -> None:
        self._append(message, uuid.uuid4().hex)

    def _append(self, columns: PackedColumns, key: str) -> list[BoxResult]:
        """Append a message; retry all of it while any box is busy. The key makes the other boxes skip it."""

        def append_once() -> list[BoxResult]:
            results = self._shards.put_columns(columns, idempotency_key=key)
            for result in results:
                if result.error is not None:
                    code, message, detail = result.error
                    raise BY_CODE.get(code, StreamsError)(f"{result.box}: {message}", **detail)
            return results

        return self._shards.connections.attempt(append_once, follows=False)

    def close(self) -> tuple[tuple[int, int], ...]:
        return ()


class _KeyedDelivery(_AppendDelivery):
    """Appends rows that are visible at once, each message under a key that a second attempt repeats.

    If a box has the key already, its records are compared with the rows. A rerun that partitions its rows
    differently raises `WriterConflict`; it neither duplicates rows nor loses them.
    """

    def __init__(self, shards: Shards, txn: Txn) -> None:
        super().__init__(shards)
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        # A writer's name may be too long for a key.
        writer = hashlib.sha256(txn.writer.encode()).hexdigest()[:32]
        self._task = f"spark-{writer}-{txn.epoch}-{partition}"
        self._chunks: dict[int, int] = {}

    def put(self, shard: int, message: PackedColumns) -> None:
        chunk = self._chunks[shard] = self._chunks.get(shard, -1) + 1
        duplicates = [each for each in self._append(message, f"{self._task}-{chunk}") if each.deduped]
        for result in duplicates:
            self._compare(result, message)

    def _compare(self, result: BoxResult, message: PackedColumns) -> None:
        index = message.boxes.index(result.box)
        first, count = sum(message.counts[:index]), message.counts[index]
        own_rows = [bytes(each) for each in msgspec.json.decode(message.data, type=list[msgspec.Raw])]
        stored_rows = [
            data
            for page in self._shards.scan(result.box, from_seq=result.first_seq - 1, to_seq=result.last_seq)
            for run in page.runs
            for data in run.datas()
        ]
        # If some records have been deleted since, only the count can be compared.
        has_all = len(stored_rows) == result.last_seq - result.first_seq + 1
        if result.last_seq - result.first_seq + 1 != count or (
            has_all and stored_rows != own_rows[first : first + count]
        ):
            raise WriterConflict(
                f"{result.box}: records {result.first_seq} to {result.last_seq} have the key of these rows "
                f"and are other rows: this run partitions its rows differently from the one before. Use "
                f"delivery=txn for plans that change",
                box=result.box,
            )


class _BoxCreator:
    """Creates missing boxes with the durability of the option."""

    def __init__(self, options: SparkWriteOptions, shards: Shards) -> None:
        self._options = options
        self._shards = shards
        #: At most as many as the job has boxes.
        self._checked_boxes: set[str] = set()

    def create_missing(self, boxes: Sequence[str]) -> None:
        new_boxes = [box for box in boxes if box not in self._checked_boxes]
        if not new_boxes:
            return
        existing_boxes = {each.box for each in self._shards.states(boxes=new_boxes)}
        with open_client(self._options.server) as client:
            for box in new_boxes:
                if box not in existing_boxes:
                    client.box(box).create(durability=self._options.durability)  # type: ignore[arg-type]
        self._checked_boxes.update(new_boxes)


def commit_tasks(options: SparkWriteOptions, task_commits: Sequence[TaskCommit | None]) -> int:
    """Publish the rows of these tasks, in their order, and return how many there are.

    Every shard commits, including shards without rows, so that all of them record the end of the epoch. If a
    shard refuses or cannot be reached in the dry run, nothing is published. If a shard fails after that,
    `PartialCommit` names it.
    """
    commits = [message for message in task_commits if message is not None]
    if not commits or options.delivery != "txn":
        return sum(message.rows for message in commits)
    txn = commits[0].txn
    assert all(message.txn == txn for message in commits), "the tasks of one commit belong to one transaction"
    parcels: dict[int, list[tuple[str, int]]] = {}
    for message in commits:
        for shard, chunks in message.chunks:
            parcels.setdefault(shard, []).append((message.parcel, chunks))
    with open_shards(options.server, retry_s=options.commit_s) as shards:

        def commit_shard(shard: int, *, dry: bool) -> StreamsError | None:
            retry = Retry(total_s=options.commit_s)
            try:
                reply = shards.txn_commit(shard, txn, parcels.get(shard, []), retry=retry, dry=dry)
            except StreamsError as error:
                return error
            if dry and reply.is_done and options.if_done == "fail":
                return AlreadyCommitted.of(txn)
            return None

        count = shards.count
        with ThreadPoolExecutor(min(count, _COMMITS_AT_ONCE)) as threads:
            # Shards commit independently, so a dry run finds every refusal before the first commit.
            for error in threads.map(partial(commit_shard, dry=True), range(count)):
                if error is not None:
                    raise error
            errors = threads.map(partial(commit_shard, dry=False), range(count))
            failures = {shard: error for shard, error in enumerate(errors) if error is not None}
    if failures:
        details = "; ".join(f"shard {shard}: {error.message}" for shard, error in failures.items())
        raise PartialCommit(
            f"epoch {txn.epoch} of writer {txn.writer} is not committed on {len(failures)} of {count} "
            f"shards ({details}). Run it again with the same txnAppId and txnVersion, or resume from the "
            f"same checkpoint: the missing rows are added and none is duplicated",
            writer=txn.writer,
            epoch=txn.epoch,
            shards=sorted(failures),
        )
    return sum(message.rows for message in commits)


def abort_epoch(
    options: SparkWriteOptions, txn: Txn | None, task_commits: Sequence[TaskCommit | None]
) -> None:
    """Drop all uncommitted rows of the epoch, including parcels that Spark does not know.

    If Spark dies before this call, the next attempt drops them, or the shards do after a timeout.
    """
    txn = next((message.txn for message in task_commits if message is not None), txn)
    if txn is not None:
        _drop_rows(options, txn, [])


def _drop_rows(options: SparkWriteOptions, txn: Txn, parcels: Sequence[str]) -> None:
    if options.delivery != "txn":
        return
    with open_shards(options.server, retry_s=0) as shards:
        try:
            for shard in range(shards.count):
                shards.txn_abort(shard, txn, parcels)
        except StreamsError:
            pass  # the shards drop the rows by timeout; the user needs the error that failed the job


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: SparkWriteOptions) -> None:
        self._options = options
        # One for each save(), pickled with this object: all tasks share it.
        attempt = uuid.uuid4().hex
        self._txn = (
            Txn(f"spark-{attempt}", 1, once=True)
            if options.app_id is None
            else Txn(options.app_id, options.version or 0, reset=options.reset, attempt=attempt)
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send_rows(self._options, self._txn, iterator)

    def commit(self, messages: list[Any]) -> None:
        commit_tasks(self._options, messages)

    def abort(self, messages: list[Any]) -> None:
        abort_epoch(self._options, self._txn, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer of a streaming query.

    Spark creates one for the tasks of a micro-batch and another one for its commit: only commit messages pass
    between them.
    """

    def __init__(self, options: SparkWriteOptions) -> None:
        self._options = options
        #: Shared by all tasks. At the first row of a new attempt, a shard drops the rows of earlier attempts.
        self._attempt = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "Spark runs this in a task"
        batch, query = context.getLocalProperty(_BATCH_ID), context.getLocalProperty(_QUERY_ID)
        if batch is None or query is None:
            raise StreamsError(
                "this version of Spark does not pass the micro-batch to tasks; use foreachBatch and a batch "
                "write with txnAppId and txnVersion"
            )
        return send_rows(self._options, self._txn(int(batch), query, self._attempt), iterator)

    def _txn(self, batch: int, query: str, attempt: str = "") -> Txn:
        writer = self._options.app_id if self._options.app_id is not None else query
        return Txn(writer, batch, query, self._options.reset, attempt=attempt)

    def commit(self, messages: list[Any], batchId: int) -> None:
        commit_tasks(self._options, messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        query = _query_id(self._options.checkpoint)
        abort_epoch(self._options, self._txn(batchId, query) if query is not None else None, messages)


def _query_id(checkpoint: str | None) -> str | None:
    """Return the id of the query with this checkpoint, or None if only Spark can read the checkpoint.

    Spark does not pass the id to `abort`, and may pass no task message that has it.
    """
    if checkpoint is None or ("://" in checkpoint and not checkpoint.startswith("file://")):
        return None
    try:
        metadata = Path(unquote(checkpoint.removeprefix("file://")), "metadata").read_bytes()
        return str(msgspec.json.decode(metadata)["id"])
    except (OSError, KeyError, msgspec.DecodeError):
        return None
