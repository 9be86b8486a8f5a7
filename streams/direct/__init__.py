"""The shard wire from plain blocking sockets, without the gateway: for heavy producers and for tasks of a
data pipeline on the server's machine. No event loop is needed.

    links.py      one connection to one shard
    ways.py       which shard owns a box, connections to all of them, what is tried again
    writer.py     `ShardWriter`: appends as over HTTP
    shards.py     `Shards`: many boxes and many records at a time, transactions
    runs.py       what a scan brings: stretches of stored records
    parcels.py    `Parcel`: what one task writes of a transaction, with several messages on the way
"""

from streams.direct.links import BoxMoved
from streams.direct.parcels import Parcel
from streams.direct.runs import Run, ScanPage
from streams.direct.shards import Shards
from streams.direct.writer import ShardWriter
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
from streams.protocol.payloads.packed import Packed, pack

__all__ = [
    "BoxMoved",
    "BoxPosition",
    "BoxResult",
    "CommittedEpoch",
    "Packed",
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
