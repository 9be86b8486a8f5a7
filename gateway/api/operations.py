"""What each address takes and answers, as the OpenAPI document tells it. One line of facts an address.

`access/rules.py` says who may; this says what. `openapi.py` makes the document out of both, and a test sees
to it that no address is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from streams.protocol.messages import bodies, replies, server_replies
from streams.protocol.messages.requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.model.boxes import BoxPatch

Schema = Mapping[str, Any]

_NUMBER: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}


def _flag(default: bool) -> Schema:
    return {"type": "boolean", "default": default}


_PAGE: Mapping[str, Schema] = {
    "prefix": _TEXT,
    "page_size": {"type": "integer", "minimum": 1, "maximum": PAGE_SIZE_MAX, "default": PAGE_SIZE_DEFAULT},
    "cursor": {**_TEXT, "description": "`next_cursor` of the page before."},
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
}
_URGENT: Schema = {
    **_flag(False),
    "description": "Goes before others, and is not refused for pressure. So does `X-Streams-Urgent: 1`.",
}
_LINES: Mapping[str, Schema] = {
    "node": _TEXT,
    "idempotency_key": _TEXT,
    "create": {"type": "boolean"},
    "config": {**_TEXT, "description": "A box config as JSON; with lines as the body."},
    "disable_backpressure": {
        **_flag(False),
        "description": "Not refused for pressure; with lines as the body. It may still wait: see `urgent`.",
    },
    "match_seq": _NUMBER,
    "fencing_token": _TEXT,
    "trim_before_seq": _NUMBER,
}

EVENT_STREAM: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"

#: What can happen at every address but the probes, and at those with a body.
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
#: What reading or changing stored records can meet.
STORED_CODES: Final = ("cold_store_unavailable", "data_damaged")


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    tag: str
    summary: str
    body: type[Any] | None = None
    is_body_required: bool = True
    #: Also taken as the body, beside JSON.
    other_body: str = ""
    query: Mapping[str, Schema] = {}
    #: Parameters of the query without which it is refused.
    required: tuple[str, ...] = ()
    #: status -> the type of the answer; None is an event stream or a text.
    answers: Mapping[int, type[Any] | None] = {}
    answer_type: str = "application/json"
    #: The text that is answered, beside JSON, to those who do not ask for JSON.
    other_answer: str = ""
    codes: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


def _at_box(summary: str, answer: type[Any] | None, *codes: str, **more: Any) -> Operation:
    found = ("box_not_found", *codes, *STORED_CODES)
    given: dict[str, Any] = {"tag": "boxes", "answers": {200: answer}, "codes": found, **more}
    return Operation(summary=summary, **given)


def _at_queue(summary: str, answer: type[Any] | None, body: type[Any] | None, **more: Any) -> Operation:
    return _at_box(summary, answer, "not_a_queue", tag="queues", body=body, **more)


def _probe(summary: str, answer: type[Any], *codes: str) -> Operation:
    return Operation(tag="operation", summary=summary, answers={200: answer}, codes=codes)


def _page(summary: str, kind: str) -> Operation:
    return Operation(
        tag="operation",
        summary=summary,
        answers={200: None, 304: None},
        answer_type=kind,
        headers=("If-None-Match",),
    )


_HEALTH = _probe("The process answers.", server_replies.Health)
_READY = _probe("All shards serve.", server_replies.Ready)
_METRICS = Operation(
    tag="operation",
    summary="What the server has done and does: for Prometheus, or as JSON.",
    answers={200: server_replies.Metrics},
    other_answer="text/plain",
    codes=("not_acceptable",),
    headers=("Accept",),
)

OPERATIONS: Final[dict[str, Operation]] = {
    "PUT /v0/boxes/{box}": Operation(
        tag="boxes",
        summary="Create a box, or change the config of one that is there.",
        body=BoxPatch,
        is_body_required=False,
        answers={200: replies.PutBoxReply, 201: replies.PutBoxReply},
        codes=("box_exists_incompatible", *STORED_CODES),
    ),
    "GET /v0/boxes/{box}": _at_box("The state of a box.", replies.BoxState, query={"touch": _flag(True)}),
    "DELETE /v0/boxes/{box}": _at_box(
        "Delete a box with all that is in it and every router at it.",
        replies.DeleteBoxReply,
        "box_not_empty",
        query={"if_empty": _flag(False)},
    ),
    "POST /v0/boxes/{box}": _at_box(
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
    "POST /v0/boxes/{box}/diff": _at_box(
        "Read on from a position; wait for more.",
        replies.Diff,
        "group_not_found",
        tag="records",
        body=bodies.DiffBody,
        is_body_required=False,
        headers=("Prefer",),
    ),
    "POST /v0/boxes/{box}/delete": _at_box(
        "Delete records by seq or tag.", replies.DeleteRecordsReply, tag="records", body=bodies.DeleteBody
    ),
    "GET /v0/boxes/{box}/tail": _at_box("Where the box ends.", replies.Tail, tag="records"),
    "GET /v0/boxes/{box}/records/{seq}": _at_box(
        "One record.", replies.OneRecord, "not_found", tag="records"
    ),
    "PUT /v0/boxes/{box}/fence": _at_box(
        "Set the token that writers must show.",
        replies.SetFenceReply,
        "fencing_token_mismatch",
        body=bodies.FenceBody,
    ),
    "POST /v0/boxes/{box}/claim": _at_queue(
        "Lease jobs to a worker.", replies.ClaimReply, bodies.ClaimBody, headers=("Prefer",)
    ),
    "POST /v0/boxes/{box}/ack": _at_queue("Finish jobs.", replies.AckReply, bodies.AckBody),
    "POST /v0/boxes/{box}/nack": _at_queue("Give jobs back.", replies.NackReply, bodies.NackBody),
    "POST /v0/boxes/{box}/extend": _at_queue("Keep jobs for longer.", replies.ExtendReply, bodies.ExtendBody),
    "GET /v0/boxes/{box}/work": _at_queue(
        "A stream of jobs, leased to the connection.",
        None,
        None,
        query={"node": _TEXT, "max": {"type": "integer", "minimum": 1}, "lease_ms": _NUMBER},
        required=("node",),
        answer_type=EVENT_STREAM,
    ),
    "POST /v0/boxes/{box}/requeue": _at_queue(
        "Move dead letters back into the queue.", replies.RequeueReply, bodies.RequeueBody
    ),
    "GET /v0/boxes/{box}/groups": _at_box(
        "The groups of a box.", replies.GroupPage, tag="groups", query=_PAGE
    ),
    "PUT /v0/boxes/{box}/groups/{group}": _at_box(
        "Commit a group's cursor.",
        replies.CommitGroupReply,
        "seq_mismatch",
        tag="groups",
        body=bodies.CommitBody,
        answers={200: replies.CommitGroupReply, 201: replies.CommitGroupReply},
    ),
    "GET /v0/boxes/{box}/groups/{group}": _at_box(
        "Where a group is.", replies.GetGroupReply, "group_not_found", tag="groups"
    ),
    "DELETE /v0/boxes/{box}/groups/{group}": _at_box(
        "Forget a group.", replies.DeleteGroupReply, tag="groups"
    ),
    "GET /v0/boxes/{box}/watch": _at_box(
        "Watch one box.",
        None,
        tag="watch",
        query={"from_seq": _NUMBER, "tail": _flag(False), **_STREAM},
        answer_type=EVENT_STREAM,
        headers=("Last-Event-ID",),
    ),
    "GET /v0/boxes": Operation(
        tag="boxes", summary="All boxes, by name.", query=_PAGE, answers={200: replies.BoxPage}
    ),
    "PUT /v0/routers/{router}": Operation(
        tag="routers",
        summary="Copy what is appended to one box into another.",
        body=bodies.RouterBody,
        answers={200: replies.PutRouterReply, 201: replies.PutRouterReply},
        codes=("box_not_found", "router_cycle", *STORED_CODES),
    ),
    "GET /v0/routers/{router}": Operation(
        tag="routers",
        summary="A router and how far it is.",
        answers={200: replies.RouterState},
        codes=("router_not_found",),
    ),
    "DELETE /v0/routers/{router}": Operation(
        tag="routers", summary="End a router; copies stay.", answers={200: replies.DeleteRouterReply}
    ),
    "GET /v0/routers": Operation(
        tag="routers",
        summary="All routers, by name.",
        query={**_PAGE, "source": _TEXT, "dest": _TEXT},
        answers={200: replies.RouterPage},
    ),
    "POST /v0/watch": Operation(
        tag="watch",
        summary="Make a session that watches boxes.",
        body=bodies.WatchBody,
        query={"lenient": _flag(False)},
        answers={200: replies.WatchReply},
        headers=("Prefer",),
        codes=("box_not_found", *STORED_CODES),
    ),
    "GET /v0/watch/{wid}": Operation(
        tag="watch",
        summary="The events of a session, from where it is.",
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
        summary="The key of the request, its limits and what it uses of them.",
        answers={200: server_replies.WhoAmI},
    ),
    **{f"GET {path}": _HEALTH for path in ("/v0/health", "/health", "/healthz", "/ping")},
    **{f"GET {path}": _READY for path in ("/v0/ready", "/readyz")},
    **{f"GET {path}": _METRICS for path in ("/v0/metrics", "/metrics")},
    "GET /v0/status": _probe("How the server is, process by process.", server_replies.Status),
    "GET /v0/openapi.json": Operation(tag="operation", summary="This document.", answers={200: dict}),
    "GET /docs": Operation(
        tag="operation", summary="This document, for people.", answers={200: None}, answer_type="text/html"
    ),
    "GET /": _page("The console.", "text/html"),
    "GET /console/console.css": _page("How the console looks.", "text/css"),
    "GET /console/console.js": _page("What the console does.", "text/javascript"),
    "GET /console/api.js": _page("How the console asks.", "text/javascript"),
}
