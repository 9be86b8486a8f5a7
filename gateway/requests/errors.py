"""Maps error codes to `/v0` statuses and builds error responses (v0 §0.6)."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.requests.request import Response
from streams.protocol.errors import StreamsError

STATUS_OF: dict[str, int] = {
    "invalid_request": 400,
    "batch_too_large": 400,
    "record_too_large": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "box_not_found": 404,
    "router_not_found": 404,
    "schedule_not_found": 404,
    "not_found": 404,
    "group_not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "router_cycle": 409,
    "box_exists_incompatible": 409,
    "box_not_empty": 409,
    "not_a_queue": 409,
    "lease_lost": 409,
    "writer_conflict": 409,
    "stream_not_found": 404,
    "basin_not_found": 404,
    "access_token_not_found": 404,
    "stream_deletion_pending": 409,
    "basin_deletion_pending": 409,
    "resource_already_exists": 409,
    "cipher_mismatch": 409,
    "position_unwritten": 416,
    "seq_mismatch": 412,
    "fencing_token_mismatch": 412,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "box_full": 422,
    "throttled": 429,
    "internal": 500,
    "not_ready": 503,
    "shutting_down": 503,
    "shard_unavailable": 503,
    "cold_store_unavailable": 503,
    "data_damaged": 503,
    "disk_full": 507,
}

#: Codes that no `/v0` route returns: S2 streams (which have their own error format) and transactions on the
#: shard wire.
NOT_IN_V0: frozenset[str] = frozenset(
    (
        "stream_not_found",
        "basin_not_found",
        "access_token_not_found",
        "stream_deletion_pending",
        "basin_deletion_pending",
        "resource_already_exists",
        "cipher_mismatch",
        "position_unwritten",
        "writer_conflict",
    )
)

#: Default `Retry-After` in seconds, for the codes that require one.
RETRY_AFTER_S: dict[str, int] = {
    "throttled": 1,
    "not_ready": 1,
    "shutting_down": 2,
    "shard_unavailable": 1,
    "cold_store_unavailable": 5,
    "data_damaged": 60,
    "disk_full": 5,
}


#: Upper bound of the pause before the next request of a throttled connection is read.
PAUSE_S_MAX = 1.0


def error_response(
    code: str, message: str, detail: dict[str, Any] | None = None, *, server_total_ms: float | None = None
) -> Response:
    error: dict[str, Any] = {"code": code, "message": message}
    if detail:
        error["detail"] = detail
    answer: dict[str, Any] = {"error": error}
    if server_total_ms is not None:
        answer["performance"] = {"server_total_ms": round(server_total_ms, 3)}
    response = Response(STATUS_OF[code], orjson.dumps(answer))
    if code in RETRY_AFTER_S:
        wait_ms = (detail or {}).get("retry_after_ms")
        wait_s = RETRY_AFTER_S[code]
        if isinstance(wait_ms, int):
            wait_s = -(-wait_ms // 1000)
            response.pause_s = min(wait_ms / 1000, PAUSE_S_MAX)
        response.headers.append((b"retry-after", b"%d" % max(1, wait_s)))
    if code == "unauthorized":
        response.headers.append((b"www-authenticate", b"Bearer"))
    if code == "method_not_allowed" and detail and "allow" in detail:
        response.headers.append((b"allow", ", ".join(detail["allow"]).encode()))
    return response


def response_for(error: StreamsError, *, server_total_ms: float | None = None) -> Response:
    return error_response(error.code, error.message, error.detail or None, server_total_ms=server_total_ms)
