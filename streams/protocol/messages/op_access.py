"""The permissions that each op of the shard wire needs from a peer with a key (v0 §11). Pure.

Peers on the Unix sockets are trusted and not checked. A peer on the TCP listener has a grant, and each of its
messages passes `check_op` before it is decoded. An op without a line here is refused: a new op stays closed
until its line is added. The box that a command is for is checked when it is
decoded (`shard/server/peers.py`); names inside a body by the op's decoder (`RequestHead.grant`).
"""

from __future__ import annotations

from typing import NamedTuple

from streams.protocol import wire
from streams.protocol.access.grants import ADMIN, DELETE, READ, WRITE, Grant
from streams.protocol.errors import Forbidden
from streams.protocol.messages import bulk


class Need(NamedTuple):
    scopes: int
    #: The op is for all boxes, or for boxes whose names are not checked: a key with prefixes is refused.
    is_whole: bool = False
    names_boxes: bool = True


OPS: dict[int, Need] = {
    wire.OP_PUT_BOX: Need(ADMIN),
    wire.OP_GET_STATE: Need(READ),
    wire.OP_DELETE_BOX: Need(DELETE),
    wire.OP_APPEND: Need(WRITE),
    wire.OP_DIFF: Need(READ),
    wire.OP_GET_RECORD: Need(READ),
    wire.OP_GET_TAIL: Need(READ),
    wire.OP_DELETE_RECORDS: Need(DELETE),
    wire.OP_SET_FENCE: Need(WRITE),
    wire.OP_FOLLOW: Need(READ),
    wire.OP_CLAIM: Need(READ | WRITE),
    wire.OP_ACK: Need(WRITE),
    wire.OP_NACK: Need(WRITE),
    wire.OP_EXTEND: Need(WRITE),
    wire.OP_SET_PAUSED: Need(ADMIN),
    wire.OP_RESCHEDULE: Need(WRITE),
    wire.OP_REPRIORITIZE: Need(WRITE),
    wire.OP_LIST_JOBS: Need(READ),
    wire.OP_WORK: Need(READ | WRITE),
    wire.OP_WORK_END: Need(READ | WRITE),
    wire.OP_COMMIT_GROUP: Need(WRITE),
    wire.OP_GET_GROUP: Need(READ),
    wire.OP_LIST_GROUPS: Need(READ),
    wire.OP_DELETE_GROUP: Need(DELETE),
    wire.OP_PUT_COLUMNS: Need(WRITE),
    wire.OP_SCAN: Need(READ),
    wire.OP_STATES: Need(READ),
    wire.OP_LOCATE: Need(READ),
    wire.OP_TXN_PUT: Need(WRITE),
    # They name parcels, whose boxes were checked when they were put.
    wire.OP_TXN_COMMIT: Need(WRITE, names_boxes=False),
    wire.OP_TXN_ABORT: Need(WRITE, names_boxes=False),
    wire.OP_TXN_LIST: Need(READ, is_whole=True),
}

#: For gateways and tools on this machine only: sessions, routers, schedules, moves, exports and lists.
INTERNAL: frozenset[int] = frozenset(
    (
        wire.OP_STATS,
        wire.OP_FORGET,
        wire.OP_HOLD_PAGES,
        wire.OP_SEND_PAGES,
        wire.OP_LIST_BOXES,
        wire.OP_PUT_SESSION,
        wire.OP_TAKE_SESSION,
        wire.OP_KEEP_SESSION,
        wire.OP_COLLECT,
        wire.OP_REPORT_DELIVERY,
        wire.OP_FORWARD,
        wire.OP_FORWARDING,
        wire.OP_REQUIRE_QUEUE,
        wire.OP_PLAN_REQUEUE,
        wire.OP_AWAIT_MOVES,
        wire.OP_ACK_WITH_OUTPUTS,
        wire.OP_CHECK_OUTPUT,
        wire.OP_PUT_SCHEDULE,
        wire.OP_FIND_SCHEDULE,
        wire.OP_LIST_SCHEDULES,
        wire.OP_DROP_SCHEDULE,
        wire.OP_RUN_SCHEDULE,
        wire.OP_APPEND_STREAM,
        wire.OP_READ_STREAM,
        wire.OP_S2_CONTROL,
        wire.OP_REPORT,
        wire.OP_PING,
        wire.OP_EXCHANGE_USE,
        *wire.EXPORT_OPS,
    )
)


def check_op(grant: Grant, op: int) -> None:
    need = OPS.get(op)
    if need is None:
        raise Forbidden(f"op: {op} is not for peers with a key", field="op")
    grant.require(need.scopes)
    if need.is_whole and grant.prefixes:
        raise Forbidden(f"prefixes: op {op} is for all boxes, and the key is for some only", field="prefixes")


def boxes_of(command: object) -> list[str] | None:
    """Return the boxes that a command names; None when it names none."""
    if isinstance(command, bulk.TxnPut):
        return command.rows_head.boxes
    if isinstance(command, bulk.States):
        return [command.prefix] if command.boxes is None else command.boxes
    if isinstance(command, bulk.Locate):
        return [box for box, _ in command.lookups]
    box = getattr(command, "box", None)
    return [box] if isinstance(box, str) else None


def check_boxes(grant: Grant, op: int, boxes: list[str] | None) -> None:
    """Check the names of the boxes of a command; None when it names none."""
    need = OPS[op]
    for box in boxes or ():
        grant.require_name(box)
    if boxes is None and need.names_boxes and not need.is_whole:
        raise Forbidden(f"op: {op} names no box that a key could be checked for", field="op")
