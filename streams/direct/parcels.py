"""`Parcel`: the rows that one attempt of one task writes in a transaction, with several messages in flight.

A transaction has many parcels, one for each attempt of a task. A `Parcel` is the part of one parcel for one
shard. It is sent in numbered chunks (op 90, `TxnPut`). The shard holds them, invisible to readers
(`shard/core/transactions/handlers.py`). The commit (op 91, `Shards.txn_commit`) names the parcels to write,
each with its number of chunks, and drops all others. So a parcel that is not finished has no effect.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from streams.direct.links import Link
from streams.direct.shards import Shards, encode_put
from streams.protocol import wire
from streams.protocol.errors import Busy, Uncertain
from streams.protocol.messages.bulk import Txn, TxnPutReply
from streams.protocol.payloads.packed import PackedColumns


class _InFlightChunk(NamedTuple):
    link: Link
    #: Of the connection that it was sent on.
    life: int
    id: int
    chunk: int
    columns: PackedColumns


class Parcel:
    """Puts chunks of one parcel to one shard, at most `depth` of them without an answer.

    After a lost connection, unanswered chunks are sent again under their numbers; the shard takes each once.
    `close` waits for the last answer and returns how many chunks there are, for the commit.
    """

    def __init__(self, shards: Shards, shard: int, txn: Txn, name: str, *, depth: int = 2) -> None:
        self._shards = shards
        self._shard = shard
        self._txn = txn
        self.name = name
        self._depth = depth
        self._in_flight: deque[_InFlightChunk] = deque()
        self.chunks = 0
        self.records = 0
        #: The epoch was committed by an earlier run: there is nothing to write.
        self.is_done = False

    def __repr__(self) -> str:
        return (
            f"<Parcel {self.name} to shard {self._shard}: {self.chunks} chunks, {len(self._in_flight)} sent>"
        )

    def put(self, columns: PackedColumns) -> None:
        """Send a chunk, after waiting until fewer than `depth` are unanswered. The caller must not change
        `columns` before `close` returns: a chunk may be sent again."""
        while len(self._in_flight) >= self._depth:
            self._settle()
        chunk = self.chunks
        self.chunks += 1
        self.records += columns.count
        head = encode_put(self._txn, self.name, chunk, columns)
        try:
            link = self._shards.connections.to_shard(self._shard, columns.boxes)
            with link.lock:
                id = link.send(wire.OP_TXN_PUT, head, columns.buffers())
                life = link.life
        except (Busy, Uncertain):  # nothing was sent: send it with retries
            self._note(self._shards.txn_put(self._shard, self._txn, self.name, chunk, columns))
            return
        self._in_flight.append(_InFlightChunk(link, life, id, chunk, columns))

    def _settle(self) -> None:
        """Wait for the answer to the oldest chunk. Send the chunk again if its answer is lost."""
        oldest = self._in_flight.popleft()
        try:
            with oldest.link.lock:
                if oldest.link.life != oldest.life:
                    raise Uncertain("the connection was lost")
                message = oldest.link.wait(oldest.id)
        except (Busy, Uncertain):
            answer = self._shards.txn_put(self._shard, self._txn, self.name, oldest.chunk, oldest.columns)
        else:
            answer = msgspec.msgpack.decode(message.body, type=TxnPutReply)
        self._note(answer)

    def _note(self, answer: TxnPutReply) -> None:
        self.is_done = self.is_done or answer.is_done

    def close(self) -> int:
        """Wait for all answers. Returns how many chunks of this parcel the shard holds."""
        while self._in_flight:
            self._settle()
        return self.chunks
