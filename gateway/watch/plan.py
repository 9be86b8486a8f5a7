"""The options of a watch request, checked and with their defaults (v0 §7.1, §7.4). Pure."""

from __future__ import annotations

import msgspec

from gateway.watch import cursors
from gateway.watch.page import Encoding
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.bodies import (
    HEARTBEAT_MS_DEFAULT,
    WATCH_BYTES_DEFAULT,
    WATCH_LIMIT_DEFAULT,
    WATCHED_BOXES_MAX,
    WatchBody,
    WatchOptions,
)
from streams.protocol.messages.query import Query
from streams.protocol.messages.requests import DIFF_LIMIT_MAX, NODES_MAX
from streams.protocol.model.names import check_readable_name, check_text
from streams.protocol.payloads.appends import check_seq, decode_json

_BYTES_FOR_ZERO, _BYTES_MAX = 1024 * 1024, 8 * 1024 * 1024
_HEARTBEAT_MS_MIN, _HEARTBEAT_MS_MAX = 1_000, 60_000

_decode_body = msgspec.json.Decoder(WatchBody).decode

#: The start in a box: after this entry, or None for the head.
Start = cursors.CursorEntry | None


class WatchPlan(msgspec.Struct, frozen=True):
    starts: dict[str, Start]
    encoding: Encoding
    heartbeat_ms: int


WATCH_FIELDS = frozenset(WatchBody.__struct_encode_fields__)


def plan_of_body(body: bytes, node_bytes_max: int) -> WatchPlan:
    request: WatchBody = decode_json(_decode_body, body or b"{}")
    if not 1 <= len(request.boxes) <= WATCHED_BOXES_MAX:
        raise InvalidRequest(
            f"boxes: has {len(request.boxes)} names, from 1 to {WATCHED_BOXES_MAX} are allowed", field="boxes"
        )
    starts: dict[str, Start] = {}
    for box, start in request.boxes.items():
        check_readable_name(box)
        if start.tail and start.from_seq is not None:
            raise InvalidRequest(f"boxes.{box}.tail: cannot be given together with from_seq", field="boxes")
        from_seq = check_seq(start.from_seq or 0, f"boxes.{box}.from_seq")
        starts[box] = None if start.tail else cursors.CursorEntry(from_seq)
    if request.cursor is not None:
        cursor = request.cursor
        entries = (
            cursors.decode_untrusted(cursor, "cursor")
            if isinstance(cursor, str)
            else cursors.from_map(cursor, "cursor")
        )
        starts.update({box: entry for box, entry in entries.items() if box in starts})
    return WatchPlan(starts, _encoding(request, node_bytes_max), _heartbeat(request.heartbeat_ms))


def plan_of_query(box: str, query: str, last_event_id: str | None, node_bytes_max: int) -> WatchPlan:
    """Return the plan of a one-step watch. A browser sends its cursor in `Last-Event-ID`."""
    check_readable_name(box)
    params = Query(query)
    from_seq = params.number("from_seq")
    tail = bool(params.flag("tail", False))
    if tail and from_seq is not None:
        raise InvalidRequest("tail: cannot be given together with from_seq", field="tail")
    node = params.text("node")
    consistency = params.text("consistency") or "eventual"
    if consistency not in ("eventual", "strong"):
        raise InvalidRequest("consistency: must be eventual or strong", field="consistency")
    limit, size, heartbeat_ms = (params.number(n) for n in ("limit", "max_batch_bytes", "heartbeat_ms"))
    options = WatchOptions(
        node=node,
        limit=WATCH_LIMIT_DEFAULT if limit is None else limit,
        max_batch_bytes=WATCH_BYTES_DEFAULT if size is None else size,
        heartbeat_ms=HEARTBEAT_MS_DEFAULT if heartbeat_ms is None else heartbeat_ms,
        include_meta=bool(params.flag("include_meta", True)),
        include_tags=bool(params.flag("include_tags", False)),
        include_data=bool(params.flag("include_data", True)),
        consistency="strong" if consistency == "strong" else "eventual",
        touch=bool(params.flag("touch", True)),
    )
    params.reject_unknown()
    start: Start = None if tail else cursors.CursorEntry(from_seq or 0)
    if last_event_id:
        start = cursors.decode_untrusted(last_event_id, "last-event-id").get(box, start)
    return WatchPlan({box: start}, _encoding(options, node_bytes_max), _heartbeat(options.heartbeat_ms))


def _heartbeat(asked_ms: int) -> int:
    return min(max(asked_ms, _HEARTBEAT_MS_MIN), _HEARTBEAT_MS_MAX)


def _encoding(options: WatchOptions, node_bytes_max: int) -> Encoding:
    nodes = [options.node] if isinstance(options.node, str) else options.node or []
    if len(nodes) > NODES_MAX:
        raise InvalidRequest(f"node: has {len(nodes)} names, at most {NODES_MAX} are allowed", field="node")
    for node in nodes:
        check_text(node, "node", bytes_max=node_bytes_max)
    return Encoding(
        limit=min(options.limit or WATCH_LIMIT_DEFAULT, DIFF_LIMIT_MAX),
        max_bytes=min(options.max_batch_bytes or _BYTES_FOR_ZERO, _BYTES_MAX),
        nodes=tuple(sorted({node for node in nodes if node})),
        include_tags=options.include_tags,
        include_meta=options.include_meta,
        include_data=options.include_data,
        strong=options.consistency == "strong",
        touch=options.touch,
    )
