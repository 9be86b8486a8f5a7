"""What each op of the shard wire asks of a peer that came with a key (v0-api §11, architecture §3). Pure.

Peers on the Unix sockets are ours and are asked nothing. A peer on the TCP listener has a grant, and every
one of its messages passes `check_op`. An op without a line here is refused to it: a new op stays closed until
somebody has said what it needs. Names inside a body are looked at by the op's decoder (`RequestHead.grant`).
"""

from __future__ import annotations

from streams.protocol import bulk, wire
from streams.protocol.access import ADMIN, DELETE, READ, WRITE, Grant
from streams.protocol.errors import Forbidden

#: Of bulk clients: these name any number of boxes, or none.
BULK_OPS: dict[int, int] = {
    wire.OP_PUT_COLUMNS: WRITE,
    wire.OP_SCAN: READ,
    wire.OP_STATES: READ,
    wire.OP_LOCATE: READ,
    wire.OP_TXN_PUT: WRITE,
    wire.OP_TXN_COMMIT: WRITE,
    wire.OP_TXN_ABORT: WRITE,
    wire.OP_TXN_LIST: READ,
}

#: op -> the scopes it takes. All but the bulk ones name their box in the head.
OPS: dict[int, int] = {
    wire.OP_PUT_BOX: ADMIN,
    wire.OP_GET_STATE: READ,
    wire.OP_DELETE_BOX: DELETE,
    wire.OP_APPEND: WRITE,
    wire.OP_DIFF: READ,
    wire.OP_GET_RECORD: READ,
    wire.OP_GET_TAIL: READ,
    wire.OP_DELETE_RECORDS: DELETE,
    wire.OP_SET_FENCE: WRITE,
    wire.OP_FOLLOW: READ,
    wire.OP_CLAIM: READ | WRITE,
    wire.OP_ACK: WRITE,
    wire.OP_NACK: WRITE,
    wire.OP_EXTEND: WRITE,
    wire.OP_WORK: READ | WRITE,
    wire.OP_WORK_END: READ | WRITE,
    wire.OP_COMMIT_GROUP: WRITE,
    wire.OP_GET_GROUP: READ,
    wire.OP_LIST_GROUPS: READ,
    wire.OP_DELETE_GROUP: DELETE,
    **BULK_OPS,
}

#: Ours alone: sessions, routers, moves, exports and lists are for gateways and tools on this machine.
INTERNAL: frozenset[int] = frozenset(
    (
        wire.OP_STATS,
        wire.OP_LIST_BOXES,
        wire.OP_PUT_SESSION,
        wire.OP_TAKE_SESSION,
        wire.OP_KEEP_SESSION,
        wire.OP_COLLECT,
        wire.OP_CARRIED,
        wire.OP_FORWARD,
        wire.OP_FORWARDING,
        wire.OP_REQUIRE_QUEUE,
        wire.OP_PLAN_REQUEUE,
        wire.OP_AWAIT_MOVES,
        wire.OP_APPEND_STREAM,
        wire.OP_READ_STREAM,
        wire.OP_ASK_STREAMS,
        wire.OP_REPORT,
        wire.OP_PING,
        *wire.EXPORT_OPS,
    )
)


def boxes_of(command: object) -> list[str]:
    """The boxes that a command names."""
    if isinstance(command, bulk.TxnPut):
        return command.packed.boxes
    if isinstance(command, bulk.States):
        return command.boxes or []
    if isinstance(command, bulk.Locate):
        return [box for box, _ in command.wanted]
    box = getattr(command, "box", None)
    return [box] if isinstance(box, str) else []


def check_bulk(grant: Grant, op: int, command: object) -> None:
    """A commit and an abort name parcels, whose boxes were looked at when they were put."""
    grant.require(OPS[op])
    for box in boxes_of(command):
        grant.require_name(box)
    if isinstance(command, bulk.States) and command.boxes is None:
        grant.require_name(command.prefix, "prefix")
    if isinstance(command, bulk.TxnList) and grant.prefixes:
        raise Forbidden("prefixes: this shows all writers, and the key is for some names only")


def check_known(op: int) -> None:
    if op not in OPS:
        raise Forbidden(f"op: {op} is not for peers with a key", field="op")


def check_op(grant: Grant, op: int, box: str) -> None:
    grant.require(OPS[op])
    grant.require_name(box)
