"""streams: a persistent event engine that a Python team can own.

    import streams

    with streams.Client("http://127.0.0.1:4000") as client:
        client.box("orders").append({"item": "tea"})

`__all__` lists the public API. Each name is loaded at its first use: a server needs none of it.

client/     the Python client                  protocol/   what clients, gateways and shards agree on
direct/     the wire of shards, without HTTP   spark/      boxes in Spark
cli/        the `streams` command              testing, pytest_plugin    a real server for tests
config      the one table of settings          logs, process, progress, unsent, startup_imports: shared code
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from streams.client._async.client import AsyncClient
    from streams.client._sync.client import Client
    from streams.client.answers import BoxDeleted, CaughtUp, Entry, Job, Record, Tombstone
    from streams.client.framing import Restored
    from streams.client.retry import Retry
    from streams.client.working import Nack
    from streams.direct import ShardWriter
    from streams.protocol.errors import Busy, Refused, StreamsError, Uncertain

_HOMES = {
    "AsyncClient": "streams.client._async.client",
    "BoxDeleted": "streams.client.answers",
    "Busy": "streams.protocol.errors",
    "CaughtUp": "streams.client.answers",
    "Client": "streams.client._sync.client",
    "Entry": "streams.client.answers",
    "Job": "streams.client.answers",
    "Nack": "streams.client.working",
    "Record": "streams.client.answers",
    "Refused": "streams.protocol.errors",
    "Restored": "streams.client.framing",
    "Retry": "streams.client.retry",
    "ShardWriter": "streams.direct",
    "StreamsError": "streams.protocol.errors",
    "Tombstone": "streams.client.answers",
    "Uncertain": "streams.protocol.errors",
}

__all__ = [
    "AsyncClient",
    "BoxDeleted",
    "Busy",
    "CaughtUp",
    "Client",
    "Entry",
    "Job",
    "Nack",
    "Record",
    "Refused",
    "Restored",
    "Retry",
    "ShardWriter",
    "StreamsError",
    "Tombstone",
    "Uncertain",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'streams' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
