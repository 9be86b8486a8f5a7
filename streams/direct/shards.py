"""`Shards`: sends requests about many boxes and records, and transactions, to the shards without a gateway.

Every method blocks until it has its answer, and retries like the rest of the client: each call may be
repeated. A parameter `shard` is the number of a shard in `placement()`. Rows for boxes that this shard does
not own are refused with `BoxMoved` before anything is sent; then the caller sorts them by shard again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict, TypeVar, Unpack

import msgspec

from streams.client.retry import Retry
from streams.direct.runs import ScanPage, read_page
from streams.direct.shard_connections import Access, Closing, ShardConnections
from streams.protocol import wire
from streams.protocol.messages import bulk
from streams.protocol.messages.bulk import BoxPosition, BoxResult, Txn, TxnCommitReply, TxnPutReply, TxnState
from streams.protocol.messages.server_replies import Placement
from streams.protocol.model.names import check_readable_name
from streams.protocol.payloads import scans
from streams.protocol.payloads.packed import Buffer, PackedColumns

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class ScanOptions(TypedDict, total=False):
    """How large the pages of a scan are, and which columns they have."""

    max_bytes: int
    data: bool
    tags: bool
    nodes: bool
    meta: bool


class Shards(Closing):
    def __init__(self, url: str | None = None, **access: Unpack[Access]) -> None:
        """`url`: of a gateway, as for `streams.Client`."""
        self.connections = ShardConnections(url, **access)
        self.retry = self.connections.retry

    def __repr__(self) -> str:
        return f"<Shards {self.connections!r}>"

    def close(self) -> None:
        self.connections.close()

    # -- finding

    def placement(self) -> Placement:
        """The map of slots to shards, as it is known here."""
        return self.connections.placement()

    @property
    def count(self) -> int:
        return self.placement().shards

    def shard_of(self, box: str) -> int:
        return self.connections.owner(check_readable_name(box))

    def states(self, *, prefix: str = "", boxes: Sequence[str] | None = None) -> list[BoxPosition]:
        """Return positions of boxes, sorted by name: those with this prefix, or those of `boxes` that
        exist."""
        positions: list[BoxPosition] = []
        if boxes is not None and len(boxes) > bulk.STATES_MAX:
            for at in range(0, len(boxes), bulk.STATES_MAX):
                positions += self.states(boxes=boxes[at : at + bulk.STATES_MAX])
            return sorted(positions, key=lambda position: position.box)
        for shard, names in self._by_shard(boxes):
            after = ""
            while True:
                request = bulk.States(prefix, after, bulk.STATES_MAX, names)
                page = self._ask(wire.OP_STATES, shard, _encode(request), (), bulk.Positions, names or ())
                positions += page.boxes
                if not page.more:
                    break
                after = page.boxes[-1].box
        return sorted(positions, key=lambda position: position.box)

    def locate(self, times: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """For each box its generation and the first seq with `$ts` at or after this time, `head_seq + 1` when
        no record is that new. Boxes that are not there are left out."""
        places: dict[str, tuple[int, int]] = {}
        for shard, names in self._by_shard(list(times)):
            for at in range(0, len(names or ()), bulk.LOCATE_MAX):
                some = (names or [])[at : at + bulk.LOCATE_MAX]
                request = bulk.Locate([(name, times[name]) for name in some])
                answer = self._ask(wire.OP_LOCATE, shard, _encode(request), (), bulk.LocateReply, some)
                places.update(
                    {name: place for name, place in zip(some, answer.seqs, strict=True) if place is not None}
                )
        return places

    def _by_shard(self, boxes: Sequence[str] | None) -> list[tuple[int, list[str] | None]]:
        if boxes is None:
            return [(shard, None) for shard in range(self.count)]
        names: dict[int, list[str]] = {}
        for box in boxes:
            names.setdefault(self.shard_of(box), []).append(box)
        return [(shard, mine) for shard, mine in sorted(names.items())]

    # -- reading

    def scan(
        self,
        box: str,
        *,
        from_seq: int = 0,
        to_seq: int = 0,
        generation: int | None = None,
        **options: Unpack[ScanOptions],
    ) -> Iterator[ScanPage]:
        """Records after `from_seq` and up to `to_seq` (0: the head when the scan began), a page of about
        `max_bytes` at a time. A page that has a tombstone tells of loss before its first run."""
        while True:
            page = self.scan_page(box, from_seq=from_seq, to_seq=to_seq, generation=generation, **options)
            to_seq = to_seq or page.head_seq
            yield page
            if page.next_from_seq >= min(to_seq, page.head_seq):
                return
            from_seq, generation = page.next_from_seq, page.generation

    def scan_page(
        self,
        box: str,
        *,
        from_seq: int = 0,
        to_seq: int = 0,
        generation: int | None = None,
        max_bytes: int = scans.BYTES_DEFAULT,
        data: bool = True,
        tags: bool = True,
        nodes: bool = True,
        meta: bool = True,
    ) -> ScanPage:
        """One page of a scan; the next begins at its `next_from_seq`."""
        columns = scans.DATA * data + scans.TAGS * tags + scans.NODES * nodes + scans.META * meta
        head = _encode(
            scans.ScanHead(check_readable_name(box), from_seq, to_seq, generation, max_bytes, columns)
        )
        message = self.connections.call_box(box, wire.OP_SCAN, head, ())
        return read_page(box, message.head, message.body)

    # -- writing

    def put_columns(self, columns: PackedColumns, *, idempotency_key: str | None = None) -> list[BoxResult]:
        """Append rows to boxes that one shard owns. Returns a result for each box, in their order.

        One invalid row refuses them all. Without a key it generates one, so that a retry writes nothing
        twice; an empty key turns that off."""
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        shard = self.shard_of(columns.boxes[0])
        head = _encode(columns.head(key))
        answer = self._ask(
            wire.OP_PUT_COLUMNS, shard, head, columns.buffers(), bulk.PutColumnsReply, columns.boxes
        )
        return answer.results

    def txn_put(self, shard: int, txn: Txn, parcel: str, chunk: int, columns: PackedColumns) -> TxnPutReply:
        """Send one chunk of a parcel, whose rows the shard holds. (`Parcel` numbers chunks and has several in
        flight.)"""
        head = encode_put(txn, parcel, chunk, columns)
        return self._ask(wire.OP_TXN_PUT, shard, head, columns.buffers(), TxnPutReply, columns.boxes)

    def txn_commit(
        self,
        shard: int,
        txn: Txn,
        parcels: Sequence[tuple[str, int]],
        *,
        retry: Retry | None = None,
        dry: bool = False,
    ) -> TxnCommitReply:
        """Commit the rows of exactly these parcels, in this order. The shard must hold the given number of
        chunks of each. Send it to every shard, also to those without parcels: then all of them know that the
        epoch is committed. With `dry` it raises what a commit would raise, and changes nothing."""
        head = _encode(bulk.TxnCommitHead(txn, list(parcels), dry))
        return self._ask(wire.OP_TXN_COMMIT, shard, head, (), TxnCommitReply, (), retry)

    def txn_abort(
        self, shard: int, txn: Txn, parcels: Sequence[str] = (), *, forgets: bool = False
    ) -> bulk.TxnAbortReply:
        """Drop the rows that the shard holds of these parcels, or of the whole epoch.

        With `forgets` it also forgets the mark of the writer: a later commit of the same epoch would write
        its rows again."""
        head = _encode(bulk.TxnAbortHead(txn, list(parcels), forgets))
        return self._ask(wire.OP_TXN_ABORT, shard, head, (), bulk.TxnAbortReply)

    def txn_list(self, shard: int, *, prefix: str = "") -> TxnState:
        """Return uncommitted transactions, and the last committed epoch of each writer."""
        return self._ask(wire.OP_TXN_LIST, shard, _encode(bulk.TxnListHead(prefix)), (), TxnState)

    def _ask(
        self,
        op: int,
        shard: int,
        head: bytes,
        body: Sequence[Buffer],
        kind: type[T],
        boxes: Sequence[str] = (),
        retry: Retry | None = None,
    ) -> T:
        def ask() -> wire.Message:
            return self.connections.to_shard(shard, boxes).locked_call(op, head, body)

        message = self.connections.attempt(ask, retry, follows=False)
        return msgspec.msgpack.decode(message.body, type=kind)


def encode_put(txn: Txn, parcel: str, chunk: int, columns: PackedColumns) -> bytes:
    """The head of a put; its body is that of the packed columns."""
    return _encode(bulk.TxnPutHead(txn, parcel, chunk, columns.head()))
