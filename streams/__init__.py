"""streams: a persistent event engine that a Python team can own.

    import streams

    with streams.Client("http://127.0.0.1:4000") as client:
        client.box("orders").append({"item": "tea"})

`__all__` lists the public API. Each name is loaded at its first use: a server needs none of it.

client/     the Python client                  protocol/   what clients, gateways and shards agree on
direct/     the wire of shards, without HTTP   spark/      boxes in Spark
cli/        the `streams` command              testing, pytest_plugin    a real server for tests
brokers/    Celery, Dramatiq and Taskiq on queues
config      the one table of settings          logs, process, progress, unsent, startup_imports: shared code
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from streams.client._async.box import AsyncBox, AsyncGroup
    from streams.client._async.client import AsyncClient
    from streams.client._async.producer import AsyncProducer, AsyncTicket
    from streams.client._async.queue import AsyncQueue
    from streams.client._async.reader import AsyncReader
    from streams.client._async.snapshots import AsyncBoxSnapshots, AsyncStoredSnapshots
    from streams.client._async.watch import AsyncBoxWatch, AsyncWatch
    from streams.client._async.worker import AsyncWorker
    from streams.client._sync.box import Box, Group
    from streams.client._sync.client import Client
    from streams.client._sync.producer import Producer, Ticket
    from streams.client._sync.queue import Queue
    from streams.client._sync.reader import Reader
    from streams.client._sync.snapshots import BoxSnapshots, StoredSnapshots
    from streams.client._sync.watch import BoxWatch, Watch
    from streams.client._sync.worker import Worker
    from streams.client.answers import BoxDeleted, CaughtUp, Entry, Job, Page, Record, Tombstone
    from streams.client.errors import AnswerLost, Closed, NotAnAnswer, NotJson, Unreachable, WriteOverCap
    from streams.client.framing import Restored, is_snapshot
    from streams.client.options import BoxSettings, ReadOptions, WriteOptions
    from streams.client.retry import Retry
    from streams.client.stores import FolderStore, ObjectStore
    from streams.client.working import JobOutputs, Nack, ProducerStatistics, WorkerStatistics
    from streams.direct import ShardWriter
    from streams.protocol.errors import (
        AccessTokenNotFound,
        BasinDeletionPending,
        BasinNotFound,
        BatchTooLarge,
        BoxExistsIncompatible,
        BoxFull,
        BoxNotEmpty,
        BoxNotFound,
        Busy,
        CipherMismatch,
        ColdStoreUnavailable,
        DataDamaged,
        DiskFull,
        FencingTokenMismatch,
        Forbidden,
        GroupNotFound,
        InvalidRequest,
        LeaseLost,
        MethodNotAllowed,
        NotAcceptable,
        NotAQueue,
        NotFound,
        NotReady,
        OutcomeUnknown,
        PayloadTooLarge,
        PositionUnwritten,
        RecordTooLarge,
        Refused,
        ResourceAlreadyExists,
        RouterCycle,
        RouterNotFound,
        ScheduleNotFound,
        SeqMismatch,
        ShardUnavailable,
        ShuttingDown,
        StreamDeletionPending,
        StreamNotFound,
        StreamsError,
        Throttled,
        Unauthorized,
        Uncertain,
        UnsupportedMediaType,
        WriterConflict,
    )

_HOMES = {
    "AccessTokenNotFound": "streams.protocol.errors",
    "AnswerLost": "streams.client.errors",
    "AsyncBox": "streams.client._async.box",
    "AsyncBoxSnapshots": "streams.client._async.snapshots",
    "AsyncBoxWatch": "streams.client._async.watch",
    "AsyncClient": "streams.client._async.client",
    "AsyncGroup": "streams.client._async.box",
    "AsyncProducer": "streams.client._async.producer",
    "AsyncQueue": "streams.client._async.queue",
    "AsyncReader": "streams.client._async.reader",
    "AsyncStoredSnapshots": "streams.client._async.snapshots",
    "AsyncTicket": "streams.client._async.producer",
    "AsyncWatch": "streams.client._async.watch",
    "AsyncWorker": "streams.client._async.worker",
    "BasinDeletionPending": "streams.protocol.errors",
    "BasinNotFound": "streams.protocol.errors",
    "BatchTooLarge": "streams.protocol.errors",
    "Box": "streams.client._sync.box",
    "BoxDeleted": "streams.client.answers",
    "BoxExistsIncompatible": "streams.protocol.errors",
    "BoxFull": "streams.protocol.errors",
    "BoxNotEmpty": "streams.protocol.errors",
    "BoxNotFound": "streams.protocol.errors",
    "BoxSettings": "streams.client.options",
    "BoxSnapshots": "streams.client._sync.snapshots",
    "BoxWatch": "streams.client._sync.watch",
    "Busy": "streams.protocol.errors",
    "CaughtUp": "streams.client.answers",
    "CipherMismatch": "streams.protocol.errors",
    "Client": "streams.client._sync.client",
    "Closed": "streams.client.errors",
    "ColdStoreUnavailable": "streams.protocol.errors",
    "DataDamaged": "streams.protocol.errors",
    "DiskFull": "streams.protocol.errors",
    "Entry": "streams.client.answers",
    "FencingTokenMismatch": "streams.protocol.errors",
    "FolderStore": "streams.client.stores",
    "Forbidden": "streams.protocol.errors",
    "Group": "streams.client._sync.box",
    "GroupNotFound": "streams.protocol.errors",
    "InvalidRequest": "streams.protocol.errors",
    "Job": "streams.client.answers",
    "JobOutputs": "streams.client.working",
    "LeaseLost": "streams.protocol.errors",
    "MethodNotAllowed": "streams.protocol.errors",
    "Nack": "streams.client.working",
    "NotAQueue": "streams.protocol.errors",
    "NotAcceptable": "streams.protocol.errors",
    "NotAnAnswer": "streams.client.errors",
    "NotFound": "streams.protocol.errors",
    "NotJson": "streams.client.errors",
    "NotReady": "streams.protocol.errors",
    "ObjectStore": "streams.client.stores",
    "OutcomeUnknown": "streams.protocol.errors",
    "Page": "streams.client.answers",
    "PayloadTooLarge": "streams.protocol.errors",
    "PositionUnwritten": "streams.protocol.errors",
    "Producer": "streams.client._sync.producer",
    "ProducerStatistics": "streams.client.working",
    "Queue": "streams.client._sync.queue",
    "ReadOptions": "streams.client.options",
    "Reader": "streams.client._sync.reader",
    "Record": "streams.client.answers",
    "RecordTooLarge": "streams.protocol.errors",
    "Refused": "streams.protocol.errors",
    "ResourceAlreadyExists": "streams.protocol.errors",
    "Restored": "streams.client.framing",
    "Retry": "streams.client.retry",
    "RouterCycle": "streams.protocol.errors",
    "RouterNotFound": "streams.protocol.errors",
    "ScheduleNotFound": "streams.protocol.errors",
    "SeqMismatch": "streams.protocol.errors",
    "ShardUnavailable": "streams.protocol.errors",
    "ShardWriter": "streams.direct",
    "ShuttingDown": "streams.protocol.errors",
    "StoredSnapshots": "streams.client._sync.snapshots",
    "StreamDeletionPending": "streams.protocol.errors",
    "StreamNotFound": "streams.protocol.errors",
    "StreamsError": "streams.protocol.errors",
    "Throttled": "streams.protocol.errors",
    "Ticket": "streams.client._sync.producer",
    "Tombstone": "streams.client.answers",
    "Unauthorized": "streams.protocol.errors",
    "Uncertain": "streams.protocol.errors",
    "Unreachable": "streams.client.errors",
    "UnsupportedMediaType": "streams.protocol.errors",
    "Watch": "streams.client._sync.watch",
    "Worker": "streams.client._sync.worker",
    "WorkerStatistics": "streams.client.working",
    "WriteOptions": "streams.client.options",
    "WriteOverCap": "streams.client.errors",
    "WriterConflict": "streams.protocol.errors",
    "is_snapshot": "streams.client.framing",
}

__all__ = [
    "AccessTokenNotFound",
    "AnswerLost",
    "AsyncBox",
    "AsyncBoxSnapshots",
    "AsyncBoxWatch",
    "AsyncClient",
    "AsyncGroup",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncReader",
    "AsyncStoredSnapshots",
    "AsyncTicket",
    "AsyncWatch",
    "AsyncWorker",
    "BasinDeletionPending",
    "BasinNotFound",
    "BatchTooLarge",
    "Box",
    "BoxDeleted",
    "BoxExistsIncompatible",
    "BoxFull",
    "BoxNotEmpty",
    "BoxNotFound",
    "BoxSettings",
    "BoxSnapshots",
    "BoxWatch",
    "Busy",
    "CaughtUp",
    "CipherMismatch",
    "Client",
    "Closed",
    "ColdStoreUnavailable",
    "DataDamaged",
    "DiskFull",
    "Entry",
    "FencingTokenMismatch",
    "FolderStore",
    "Forbidden",
    "Group",
    "GroupNotFound",
    "InvalidRequest",
    "Job",
    "JobOutputs",
    "LeaseLost",
    "MethodNotAllowed",
    "Nack",
    "NotAQueue",
    "NotAcceptable",
    "NotAnAnswer",
    "NotFound",
    "NotJson",
    "NotReady",
    "ObjectStore",
    "OutcomeUnknown",
    "Page",
    "PayloadTooLarge",
    "PositionUnwritten",
    "Producer",
    "ProducerStatistics",
    "Queue",
    "ReadOptions",
    "Reader",
    "Record",
    "RecordTooLarge",
    "Refused",
    "ResourceAlreadyExists",
    "Restored",
    "Retry",
    "RouterCycle",
    "RouterNotFound",
    "ScheduleNotFound",
    "SeqMismatch",
    "ShardUnavailable",
    "ShardWriter",
    "ShuttingDown",
    "StoredSnapshots",
    "StreamDeletionPending",
    "StreamNotFound",
    "StreamsError",
    "Throttled",
    "Ticket",
    "Tombstone",
    "Unauthorized",
    "Uncertain",
    "Unreachable",
    "UnsupportedMediaType",
    "Watch",
    "Worker",
    "WorkerStatistics",
    "WriteOptions",
    "WriteOverCap",
    "WriterConflict",
    "__version__",
    "is_snapshot",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'streams' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
