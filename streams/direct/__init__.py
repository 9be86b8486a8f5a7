"""The shard wire from plain blocking sockets, without the gateway: for heavy producers and for tasks of a
data pipeline on the server's machine. No event loop is needed.

    links.py                one connection to one shard
    shard_connections.py    connections to all shards, placement of boxes, retries
    shard_writer.py         `ShardWriter`: appends as over HTTP
    shards.py               `Shards`: many boxes and many records at a time, transactions
    runs.py                 pages of a scan: runs of stored records
    parcels.py              `Parcel`: the rows of one task in a transaction, with several messages in flight
"""

from streams.direct.links import BoxMoved
from streams.direct.parcels import Parcel
from streams.direct.runs import Run, ScanPage
from streams.direct.shard_writer import ShardWriter
from streams.direct.shards import Shards
from streams.protocol.messages.bulk import (
    BoxPosition,
    BoxResult,
    CommittedEpoch,
    PendingTxn,
    Txn,
    TxnCommitReply,
    TxnPutReply,
    TxnState,
)
from streams.protocol.payloads.packed import PackedColumns, pack

__all__ = [
    "BoxMoved",
    "BoxPosition",
    "BoxResult",
    "CommittedEpoch",
    "PackedColumns",
    "Parcel",
    "PendingTxn",
    "Run",
    "ScanPage",
    "ShardWriter",
    "Shards",
    "Txn",
    "TxnCommitReply",
    "TxnPutReply",
    "TxnState",
    "pack",
]
