"""`ShardWriter`: the appends of HTTP, straight to the shards.

with ShardWriter("http://127.0.0.1:4000") as writer:
    writer.append("orders", [{"item": "tea"}])
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Unpack
from urllib.parse import urlencode

from streams.client import answers
from streams.client._sync.producer import Producer
from streams.client.answers import Entry
from streams.client.batching import Bounds
from streams.client.options import ProducerBounds, WriteFields
from streams.client.retry import Retry
from streams.direct.shard_connections import Access, Closing
from streams.direct.shards import Shards
from streams.protocol import wire
from streams.protocol.errors import BoxNotFound
from streams.protocol.messages.bulk import BoxResult
from streams.protocol.messages.replies import AppendReply, BoxState
from streams.protocol.model.names import check_box_name
from streams.protocol.payloads.packed import PackedColumns


class ShardWriter(Closing):
    """Appends straight to the shards that own the boxes."""

    def __init__(self, url: str | None = None, **access: Unpack[Access]) -> None:
        #: Bulk operations over the same connections.
        self.shards = Shards(url, **access)
        self.retry = self.shards.retry

    def __repr__(self) -> str:
        return f"<ShardWriter over {self.shards!r}>"

    def close(self) -> None:
        """Close the connections to the shards."""
        self.shards.close()

    # -- writing

    def append(
        self,
        box: str,
        entries: Iterable[Entry | Any],
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[WriteFields],
    ) -> AppendReply:
        """As `Box.append_batch`: all or none, with seqs in a row, once. `fields` are those of the HTTP
        body."""
        return self.append_encoded(
            box,
            answers.encode_entries(entries),
            key=idempotency_key or uuid.uuid4().hex,
            fields=fields,
        )

    def append_encoded(
        self,
        box: str,
        records: list[bytes],
        *,
        key: str,
        fields: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> AppendReply:
        """Append records that are JSON of an `Entry` each."""
        body = answers.append_body(records, key, fields)
        message = self._call(wire.OP_APPEND, box, {"return_seqs": "false"}, body, retry or self.retry)
        return answers.decode(message.body, AppendReply)

    def put_columns(self, columns: PackedColumns, *, idempotency_key: str | None = None) -> list[BoxResult]:
        """As `Shards.put_columns`: many boxes of one shard in one message. Without a key one is made up."""
        return self.shards.put_columns(columns, idempotency_key=idempotency_key or uuid.uuid4().hex)

    def state(self, box: str) -> BoxState:
        """Return positions, counts and settings of a box."""
        message = self._call(wire.OP_GET_STATE, box, {"touch": "false"}, b"", self.retry)
        return answers.decode(message.body, BoxState)

    def producer(
        self,
        box: str,
        *,
        settle_s: float = 60.0,
        stop_at_failure: bool = False,
        **bounds: Unpack[ProducerBounds],
    ) -> Producer:
        """As `Box.producer`, over the shard's own socket."""
        sender = _DirectBox(self, check_box_name(box))
        return Producer(sender, Bounds(**bounds), settle_s=settle_s, stop_at_failure=stop_at_failure)

    def _call(self, op: int, box: str, query: Mapping[str, str], body: bytes, retry: Retry) -> wire.Message:
        head = wire.head_encoder.encode(wire.RequestHead(check_box_name(box), urlencode(query)))
        return self.shards.connections.call_box(box, op, head, (body,), retry)


class _DirectBox:
    """The destination of a producer's batches."""

    def __init__(self, writer: ShardWriter, name: str) -> None:
        self._writer = writer
        self._name = name

    def __repr__(self) -> str:
        return f"<_DirectBox {self._name}>"

    def append_encoded(self, records: list[bytes], *, key: str, retry: Retry | None = None) -> AppendReply:
        return self._writer.append_encoded(self._name, records, key=key, retry=retry)

    def idempotency_window_ms(self) -> int | None:
        try:
            return self._writer.state(self._name).config.idempotency_window_ms
        except BoxNotFound:
            return None
