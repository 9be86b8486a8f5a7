"""Decodes messages of bulk clients into commands, and encodes their replies (docs/reference/wire.md).

Rules of the file
- Everything comes from a client, so it is checked here. An error says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages import bulk, commands
from streams.protocol.model.names import check_readable_name, check_text
from streams.protocol.payloads import scans
from streams.protocol.payloads.appends import RecordLimits, check_idempotency_key, check_seq
from streams.protocol.payloads.packed import PackedHead, unpack

_packed_head = msgspec.msgpack.Decoder(PackedHead).decode
_put_head = msgspec.msgpack.Decoder(bulk.TxnPutHead).decode
_states_head = msgspec.msgpack.Decoder(bulk.States).decode
_locate_head = msgspec.msgpack.Decoder(bulk.Locate).decode
_commit_head = msgspec.msgpack.Decoder(bulk.TxnCommitHead).decode
_abort_head = msgspec.msgpack.Decoder(bulk.TxnAbortHead).decode
_list_head = msgspec.msgpack.Decoder(bulk.TxnListHead).decode


def decode_columns(
    head: bytes, body: bytes, limits: RecordLimits, account: str = ""
) -> list[commands.Append]:
    """Packed columns as the writes that they are, one for each box, under the limits of `account`."""
    try:
        columns_head = _packed_head(head)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"head: {error}") from None
    key = check_idempotency_key(columns_head.idempotency_key) if columns_head.idempotency_key else None
    return [
        commands.Append(
            box=rows.box,
            columns=rows.columns,
            idempotency_key=key,
            create=columns_head.create,
            return_seqs=False,
            account=account,
        )
        for rows in unpack(columns_head, body, limits)
    ]


def _scan(head: bytes, body: bytes, limits: RecordLimits) -> commands.Scan:
    request = scans.scan_head_decoder.decode(head)
    check_readable_name(request.box)
    if not 0 <= request.columns <= scans.ALL:
        raise InvalidRequest(f"columns: must be 0 to {scans.ALL}, got {request.columns}", field="columns")
    if min(request.from_seq, request.to_seq) < 0:
        raise InvalidRequest("from_seq, to_seq: must not be negative", field="from_seq")
    return commands.Scan(
        box=request.box,
        from_seq=check_seq(request.from_seq, "from_seq"),
        to_seq=check_seq(request.to_seq, "to_seq"),
        generation=request.generation,
        max_bytes=min(max(request.max_bytes, 1), scans.BYTES_MAX),
        columns=request.columns,
    )


def _states(head: bytes, body: bytes, limits: RecordLimits) -> bulk.States:
    request = _states_head(head)
    if not 1 <= request.limit <= bulk.STATES_MAX:
        raise InvalidRequest(f"limit: must be 1 to {bulk.STATES_MAX}, got {request.limit}", field="limit")
    if request.boxes is not None and len(request.boxes) > bulk.STATES_MAX:
        raise InvalidRequest(f"boxes: has {len(request.boxes)}, at most {bulk.STATES_MAX} are allowed")
    return request


def _locate(head: bytes, body: bytes, limits: RecordLimits) -> bulk.Locate:
    request = _locate_head(head)
    if len(request.lookups) > bulk.LOCATE_MAX:
        raise InvalidRequest(f"wanted: has {len(request.lookups)}, at most {bulk.LOCATE_MAX} are allowed")
    return request


def _check_txn(txn: bulk.Txn) -> None:
    for field, text in (("writer", txn.writer), ("query", txn.query)):
        check_text(text, field, bytes_max=bulk.WRITER_BYTES_MAX)
    check_text(txn.attempt, "attempt", bytes_max=bulk.ATTEMPT_BYTES_MAX)
    if not txn.writer:
        raise InvalidRequest("writer: must not be empty", field="writer")
    if not 0 <= txn.epoch <= bulk.EPOCH_MAX:
        raise InvalidRequest(f"epoch: must be 0 to {bulk.EPOCH_MAX}, got {txn.epoch}", field="epoch")


def _check_parcel(parcel: str) -> None:
    check_text(parcel, "parcel", bytes_max=bulk.PARCEL_BYTES_MAX)
    if not parcel:
        raise InvalidRequest("parcel: must not be empty", field="parcel")


def _put(head: bytes, body: bytes, limits: RecordLimits) -> bulk.TxnPut:
    request = _put_head(head)
    _check_txn(request.txn)
    _check_parcel(request.parcel)
    if not 0 <= request.chunk <= bulk.CHUNK_MAX:
        raise InvalidRequest(f"chunk: must be 0 to {bulk.CHUNK_MAX}, got {request.chunk}", field="chunk")
    rows = unpack(request.rows_head, body, limits)
    return bulk.TxnPut(request.txn, request.parcel, request.chunk, request.rows_head, body, rows)


def _commit(head: bytes, body: bytes, limits: RecordLimits) -> bulk.TxnCommit:
    request = _commit_head(head)
    _check_txn(request.txn)
    if len(request.parcels) > bulk.PARCELS_MAX:
        raise InvalidRequest(f"parcels: has {len(request.parcels)}, at most {bulk.PARCELS_MAX} are allowed")
    if len({parcel for parcel, _ in request.parcels}) != len(request.parcels):
        raise InvalidRequest("parcels: one is named twice", field="parcels")
    return bulk.TxnCommit(request.txn, request.parcels, request.dry)


def _abort(head: bytes, body: bytes, limits: RecordLimits) -> bulk.TxnAbort:
    request = _abort_head(head)
    _check_txn(request.txn)
    return bulk.TxnAbort(request.txn, request.parcels, request.forgets)


def _list(head: bytes, body: bytes, limits: RecordLimits) -> bulk.TxnList:
    return bulk.TxnList(_list_head(head).prefix)


DECODERS: dict[int, Callable[[bytes, bytes, RecordLimits], commands.Command]] = {
    wire.OP_SCAN: _scan,
    wire.OP_STATES: _states,
    wire.OP_LOCATE: _locate,
    wire.OP_TXN_PUT: _put,
    wire.OP_TXN_COMMIT: _commit,
    wire.OP_TXN_ABORT: _abort,
    wire.OP_TXN_LIST: _list,
}


def decode(op: int, head: bytes, body: bytes, limits: RecordLimits) -> commands.Command:
    try:
        return DECODERS[op](head, body, limits)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"head: {error}") from None


REPLIES: tuple[type[Any], ...] = (
    bulk.Positions,
    bulk.LocateReply,
    bulk.PutColumnsReply,
    bulk.TxnPutReply,
    bulk.TxnCommitReply,
    bulk.TxnAbortReply,
    bulk.TxnState,
)

_encode = msgspec.msgpack.Encoder().encode


def encode(reply: Any) -> bytes:
    return _encode(reply)
