"""The table of operations in the OpenAPI document: parameters, bodies and replies of each route.

`access/rules.py` has the access rules. `openapi.py` builds the document from both tables, and a test checks
that no route is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.shards import box_lists
from streams.protocol.messages import bodies, queue_requests, replies, server_replies
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.model.boxes import BoxPatch

Schema = Mapping[str, Any]

_NUMBER: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}


def _flag(default: bool) -> Schema:
    return {"type": "boolean", "default": default}


_TOUCH: Schema = {**_flag(True), "description": "False does not count as reading the box (priorities)."}
_PAGE: Mapping[str, Schema] = {
    "prefix": _TEXT,
    "page_size": {"type": "integer", "minimum": 1, "maximum": PAGE_SIZE_MAX, "default": PAGE_SIZE_DEFAULT},
    "cursor": {**_TEXT, "description": "`next_cursor` of the previous page."},
}
_STREAM: Mapping[str, Schema] = {
    "node": _TEXT,
    "limit": _NUMBER,
    "max_batch_bytes": _NUMBER,
    "heartbeat_ms": _NUMBER,
    "include_meta": _flag(True),
    "include_tags": _flag(False),
    "include_data": _flag(True),
    "consistency": {"enum": ["eventual", "strong"], "default": "eventual"},
    "touch": _TOUCH,
}
_URGENT: Schema = {
    **_flag(False),
    "description": "Served first and never rejected for overload, as with `X-Streams-Urgent: 1`.",
}
_LINES: Mapping[str, Schema] = {
    "node": _TEXT,
    "idempotency_key": _TEXT,
    "create": {"type": "boolean"},
    "config": {**_TEXT, "description": "A box config as JSON; for NDJSON bodies."},
    "disable_backpressure": {
        **_flag(False),
        "description": "Never rejected for overload; for NDJSON bodies. It may still wait: see `urgent`.",
    },
    "match_seq": _NUMBER,
    "fencing_token": _TEXT,
    "trim_before_seq": _NUMBER,
}

EVENT_STREAM: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"

#: Error codes of every route except probes, and additional codes of routes with a body.
COMMON_CODES: Final = (
    "invalid_request",
    "unauthorized",
    "forbidden",
    "throttled",
    "internal",
    "not_ready",
    "shutting_down",
    "shard_unavailable",
)
BODY_CODES: Final = ("payload_too_large", "unsupported_media_type")
#: Error codes of routes that read or change stored records.
STORED_CODES: Final = ("cold_store_unavailable", "data_damaged")


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    tag: str
    summary: str
    body: type[Any] | None = None
    is_body_required: bool = True
    #: Another media type that is accepted for the body.
    other_body: str = ""
    query: Mapping[str, Schema] = {}
    #: Names of the query parameters that are required.
    required_query: tuple[str, ...] = ()
    #: Status -> type of the reply; None for an event stream or plain text.
    answers: Mapping[int, type[Any] | None] = {}
    answer_type: str = "application/json"
    #: The media type for clients that do not ask for JSON.
    other_answer: str = ""
    codes: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


def _box_operation(summary: str, answer: type[Any] | None, *codes: str, **more: Any) -> Operation:
    error_codes = ("box_not_found", *codes, *STORED_CODES)
    fields: dict[str, Any] = {"tag": "boxes", "answers": {200: answer}, "codes": error_codes, **more}
    return Operation(summary=summary, **fields)


def _queue_operation(
    summary: str,
    answer: type[Any] | None,
    body: type[Any] | None,
    *,
    more_codes: tuple[str, ...] = (),
    **more: Any,
) -> Operation:
    return _box_operation(summary, answer, "not_a_queue", *more_codes, tag="queues", body=body, **more)


def _probe(summary: str, answer: type[Any], *codes: str) -> Operation:
    return Operation(tag="operation", summary=summary, answers={200: answer}, codes=codes)


def _page(summary: str, kind: str, *codes: str) -> Operation:
    return Operation(
        tag="operation",
        summary=summary,
        answers={200: None, 304: None},
        answer_type=kind,
        codes=codes,
        headers=("If-None-Match",),
    )


_HEALTH = _probe("Check that the process is alive.", server_replies.Health)
_READY = _probe("Check that all shards serve requests.", server_replies.Ready)
_METRICS = Operation(
    tag="operation",
    summary="Metrics of the server, for Prometheus or as JSON.",
    answers={200: server_replies.Metrics},
    other_answer="text/plain",
    codes=("not_acceptable",),
    headers=("Accept",),
)

OPERATIONS: Final[dict[str, Operation]] = {
    "PUT /v0/boxes/{box}": Operation(
        tag="boxes",
        summary="Create a box, or change the config of an existing one.",
        body=BoxPatch,
        is_body_required=False,
        answers={200: replies.PutBoxReply, 201: replies.PutBoxReply},
        codes=("box_exists_incompatible", *STORED_CODES),
    ),
    "GET /v0/boxes/{box}": _box_operation("The state of a box.", replies.BoxState, query={"touch": _TOUCH}),
    "DELETE /v0/boxes/{box}": _box_operation(
        "Delete a box, its records, and every router from or to it.",
        replies.DeleteBoxReply,
        "box_not_empty",
        query={"if_empty": _flag(False)},
    ),
    "POST /v0/boxes/{box}": _box_operation(
        "Append records, all or none.",
        replies.AppendReply,
        "batch_too_large",
        "record_too_large",
        "seq_mismatch",
        "fencing_token_mismatch",
        "box_full",
        tag="records",
        body=bodies.AppendBody,
        other_body=NDJSON,
        query={"return_seqs": _flag(True), "urgent": _URGENT, **_LINES},
        answers={200: replies.AppendReply, 201: replies.AppendReply},
        headers=("Idempotency-Key", "X-Streams-Urgent"),
    ),
    "POST /v0/boxes/{box}/diff": _box_operation(
        "Read records from a position; optionally wait for new ones.",
        replies.Diff,
        "group_not_found",
        tag="records",
        body=bodies.DiffBody,
        is_body_required=False,
        query={"touch": _TOUCH},
        headers=("Prefer",),
    ),
    "POST /v0/boxes/{box}/delete": _box_operation(
        "Delete records by seq or tag.", replies.DeleteRecordsReply, tag="records", body=bodies.DeleteBody
    ),
    "GET /v0/boxes/{box}/tail": _box_operation(
        "The end of a box: its last sequence number.", replies.Tail, tag="records"
    ),
    "GET /v0/boxes/{box}/records/{seq}": _box_operation(
        "One record.", replies.OneRecord, "not_found", tag="records"
    ),
    "PUT /v0/boxes/{box}/fence": _box_operation(
        "Set the fencing token that writers must send.",
        replies.SetFenceReply,
        "fencing_token_mismatch",
        body=bodies.FenceBody,
    ),
    "POST /v0/boxes/{box}/claim": _queue_operation(
        "Lease jobs to a worker.", replies.ClaimReply, bodies.ClaimBody, headers=("Prefer",)
    ),
    "POST /v0/boxes/{box}/ack": _queue_operation(
        "Acknowledge finished jobs, with outputs for other boxes.",
        replies.AckReply,
        bodies.AckBody,
        more_codes=("lease_lost", "record_too_large", "fencing_token_mismatch", "disk_full"),
        headers=("Idempotency-Key",),
    ),
    "POST /v0/boxes/{box}/nack": _queue_operation(
        "Return jobs to the queue.", replies.NackReply, bodies.NackBody
    ),
    "POST /v0/boxes/{box}/extend": _queue_operation(
        "Extend the leases of jobs.", replies.ExtendReply, bodies.ExtendBody
    ),
    "POST /v0/boxes/{box}/reschedule": _queue_operation(
        "Give waiting jobs another time.", replies.RescheduleReply, bodies.RescheduleBody
    ),
    "POST /v0/boxes/{box}/reprioritize": _queue_operation(
        "Give waiting jobs another priority.", replies.ReprioritizeReply, bodies.ReprioritizeBody
    ),
    "POST /v0/boxes/{box}/pause": _queue_operation(
        "Pause a queue: claims get no jobs.", replies.PauseReply, bodies.PauseBody, is_body_required=False
    ),
    "POST /v0/boxes/{box}/resume": _queue_operation(
        "Resume a paused queue.", replies.PauseReply, bodies.PauseBody, is_body_required=False
    ),
    "GET /v0/boxes/{box}/work": _queue_operation(
        "A stream of jobs, leased to the connection.",
        None,
        None,
        query={"node": _TEXT, "max": {"type": "integer", "minimum": 1}, "lease_ms": _NUMBER},
        required_query=("node",),
        answer_type=EVENT_STREAM,
    ),
    "GET /v0/boxes/{box}/leases": _queue_operation(
        "The jobs of a queue in one state, by seq.",
        replies.JobPage,
        None,
        query={
            "state": {"enum": [*queue_requests.JOB_STATES], "default": "leased"},
            "cursor": {**_TEXT, "description": "`next_cursor` of the previous page."},
            "page_size": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
        },
    ),
    "POST /v0/boxes/{box}/requeue": _queue_operation(
        "Move dead letters back into the queue.", replies.RequeueReply, bodies.RequeueBody
    ),
    "GET /v0/boxes/{box}/groups": _box_operation(
        "The groups of a box.", replies.GroupPage, tag="groups", query=_PAGE
    ),
    "PUT /v0/boxes/{box}/groups/{group}": _box_operation(
        "Commit a group's cursor.",
        replies.CommitGroupReply,
        "seq_mismatch",
        tag="groups",
        body=bodies.CommitBody,
        answers={200: replies.CommitGroupReply, 201: replies.CommitGroupReply},
    ),
    "GET /v0/boxes/{box}/groups/{group}": _box_operation(
        "The cursor of a group.", replies.GetGroupReply, "group_not_found", tag="groups"
    ),
    "DELETE /v0/boxes/{box}/groups/{group}": _box_operation(
        "Delete a group.", replies.DeleteGroupReply, tag="groups"
    ),
    "GET /v0/boxes/{box}/watch": _box_operation(
        "Watch one box.",
        None,
        tag="watch",
        query={"from_seq": _NUMBER, "tail": _flag(False), **_STREAM},
        answer_type=EVENT_STREAM,
        headers=("Last-Event-ID",),
    ),
    "GET /v0/boxes": Operation(
        tag="boxes",
        summary="All boxes, by name or sorted by a number; with filters.",
        query={
            **_PAGE,
            "kind": {"enum": [*box_lists.KINDS]},
            "durability": {"enum": [*box_lists.DURABILITIES]},
            "q": {**_TEXT, "maxLength": box_lists.Q_CHARS_MAX, "description": "Part of the name."},
            "sort": {"enum": [*box_lists.SORTS], "default": "name"},
            "order": {
                "enum": [*box_lists.ORDERS],
                "description": "The default is asc for `sort=name`, desc otherwise.",
            },
        },
        answers={200: replies.BoxPage},
    ),
    "PUT /v0/routers/{router}": Operation(
        tag="routers",
        summary="Create or replace a router, which copies records from one box into another.",
        body=bodies.RouterBody,
        answers={200: replies.PutRouterReply, 201: replies.PutRouterReply},
        codes=("box_not_found", "router_cycle", *STORED_CODES),
    ),
    "GET /v0/routers/{router}": Operation(
        tag="routers",
        summary="A router and its progress.",
        answers={200: replies.RouterState},
        codes=("router_not_found",),
    ),
    "DELETE /v0/routers/{router}": Operation(
        tag="routers", summary="Delete a router; its copies stay.", answers={200: replies.DeleteRouterReply}
    ),
    "GET /v0/routers": Operation(
        tag="routers",
        summary="All routers, by name.",
        query={**_PAGE, "source": _TEXT, "dest": _TEXT},
        answers={200: replies.RouterPage},
    ),
    "PUT /v0/schedules/{schedule}": Operation(
        tag="schedules",
        summary="Create or change a schedule, which appends a record whenever it is due.",
        body=bodies.ScheduleBody,
        answers={200: replies.PutScheduleReply, 201: replies.PutScheduleReply},
        codes=("box_not_found", "record_too_large", *STORED_CODES),
    ),
    "GET /v0/schedules/{schedule}": Operation(
        tag="schedules",
        summary="A schedule and its progress.",
        answers={200: replies.GetScheduleReply},
        codes=("schedule_not_found",),
    ),
    "DELETE /v0/schedules/{schedule}": Operation(
        tag="schedules",
        summary="Delete a schedule; its records stay.",
        answers={200: replies.DeleteScheduleReply},
    ),
    "POST /v0/schedules/{schedule}/run": Operation(
        tag="schedules",
        summary="Append the record of a schedule now.",
        answers={200: replies.RunScheduleReply},
        codes=("schedule_not_found", "box_full", "record_too_large", "fencing_token_mismatch", *STORED_CODES),
        headers=("Idempotency-Key",),
    ),
    "GET /v0/schedules": Operation(
        tag="schedules",
        summary="All schedules, by name.",
        query={**_PAGE, "box": _TEXT},
        answers={200: replies.SchedulePage},
    ),
    "POST /v0/watch": Operation(
        tag="watch",
        summary="Create a session that watches boxes.",
        body=bodies.WatchBody,
        query={"lenient": _flag(False)},
        answers={200: replies.WatchReply},
        headers=("Prefer",),
        codes=("box_not_found", *STORED_CODES),
    ),
    "GET /v0/watch/{wid}": Operation(
        tag="watch",
        summary="The events of a session, from its cursor.",
        answers={200: None},
        answer_type=EVENT_STREAM,
        codes=("not_found", *STORED_CODES),
        headers=("Last-Event-ID",),
    ),
    "GET /v0/ws": Operation(
        tag="watch", summary="Subscribe and publish over one WebSocket.", answers={101: None}
    ),
    "GET /v0/placement": Operation(
        tag="operation", summary="Which shard owns which slots.", answers={200: server_replies.Placement}
    ),
    "GET /v0/whoami": Operation(
        tag="operation",
        summary="The key of the request, its limits and its usage.",
        answers={200: server_replies.WhoAmI},
    ),
    **{f"GET {path}": _HEALTH for path in ("/v0/health", "/health", "/healthz", "/ping")},
    **{f"GET {path}": _READY for path in ("/v0/ready", "/readyz")},
    **{f"GET {path}": _METRICS for path in ("/v0/metrics", "/metrics")},
    "GET /v0/status": _probe("The state of the server, process by process.", server_replies.Status),
    "GET /v0/history": Operation(
        tag="operation",
        summary="The last 15 minutes of the server, by the second.",
        query={
            "series": {**_TEXT, "description": "Names, separated by commas; all of them by default."},
            "seconds": {"type": "integer", "minimum": 1, "maximum": 900, "default": 900},
        },
        answers={200: server_replies.History},
    ),
    "GET /v0/settings": Operation(
        tag="operation",
        summary="Every setting of the server with its value and the origin of the value.",
        answers={200: server_replies.Settings},
    ),
    "GET /v0/openapi.json": Operation(tag="operation", summary="This document.", answers={200: dict}),
    "GET /": _page("The console.", "text/html"),
    "GET /docs": _page("The API explorer.", "text/html"),
    "GET /console/{file}": _page("A file of the console.", "text/javascript", "not_found"),
    "GET /docs/guide/{file}": _page("A page of the guide (STREAMS_GUIDE).", "text/html", "not_found"),
}
