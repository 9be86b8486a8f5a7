"""Maps errors to statuses and bodies of the S2 API (s2 §5). Pure."""

from __future__ import annotations

import orjson

from gateway.requests.errors import PAUSE_S_MAX, RETRY_AFTER_S
from gateway.requests.request import Response, media_type
from streams.protocol import errors
from streams.protocol.errors import StreamsError

STATUS_OF: dict[str, int] = {
    "bad_header": 400,
    "bad_path": 400,
    "bad_query": 400,
    "bad_json": 400,
    "bad_proto": 400,
    "bad_frame": 400,
    "decryption_failed": 400,
    "authn": 401,
    "permission_denied": 403,
    "quota_exhausted": 403,
    "basin_not_found": 404,
    "stream_not_found": 404,
    "access_token_not_found": 404,
    "resource_already_exists": 409,
    "basin_deletion_pending": 409,
    "stream_deletion_pending": 409,
    "unsupported_media_type": 415,
    "invalid": 422,
    "rate_limited": 429,
    "other": 500,
    "storage": 500,
    "not_implemented": 501,
    "hot_server": 502,
    "unavailable": 503,
    "server_draining": 503,
}

#: Code of `/v0` -> code of S2. Codes that promise "no side effect" are used only where that is certain.
_CODE_OF: dict[str, str] = {
    "invalid_request": "invalid",
    "batch_too_large": "invalid",
    "record_too_large": "invalid",
    "unauthorized": "authn",
    "forbidden": "permission_denied",
    "stream_not_found": "stream_not_found",
    "basin_not_found": "basin_not_found",
    "access_token_not_found": "access_token_not_found",
    "stream_deletion_pending": "stream_deletion_pending",
    "basin_deletion_pending": "basin_deletion_pending",
    "resource_already_exists": "resource_already_exists",
    "unsupported_media_type": "unsupported_media_type",
    "throttled": "rate_limited",
    "not_ready": "hot_server",
    "shard_unavailable": "hot_server",
    "disk_full": "hot_server",
    "shutting_down": "server_draining",
    "cipher_mismatch": "unavailable",
    "cold_store_unavailable": "unavailable",
    "data_damaged": "storage",
}
#: Limits on the number of things: retrying later does not help.
_QUOTAS = ("boxes", "basins", "access_tokens")


class S2Error(Exception):
    """An error in the format of the S2 API."""

    def __init__(
        self, code: str, message: str, *, body: bytes = b"", status: int = 0, retry_after_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.status = status or STATUS_OF[code]
        self.code = code
        self.body = body or orjson.dumps({"code": code, "message": message})

    @property
    def response(self) -> Response:
        response = Response(self.status, self.body)
        if self.retry_after_ms:
            response.headers.append((b"retry-after-ms", b"%d" % self.retry_after_ms))
            response.headers.append((b"retry-after", b"%d" % -(-self.retry_after_ms // 1000)))
            response.pause_s = min(self.retry_after_ms / 1000, PAUSE_S_MAX)
        return response


def early_s2_error(error: StreamsError, content_type: str | None) -> S2Error:
    """Build the error for a request whose body was not read: too long, malformed, or no memory for it."""
    if isinstance(error, (errors.InvalidRequest, errors.PayloadTooLarge)):
        is_protobuf = "protobuf" in media_type(content_type)
        return S2Error("bad_proto" if is_protobuf else "bad_json", error.message)
    return to_s2_error(error)


def to_s2_error(error: StreamsError) -> S2Error:
    """Translate an error of a shard or a link into an S2 error."""
    detail = error.detail
    if isinstance(error, errors.FencingTokenMismatch):
        body = orjson.dumps({"fencing_token_mismatch": detail["token"]})
        return S2Error("fencing_token_mismatch", error.message, body=body, status=412)
    if isinstance(error, errors.SeqMismatch):
        body = orjson.dumps({"seq_num_mismatch": detail["next_seq"]})
        return S2Error("seq_num_mismatch", error.message, body=body, status=412)
    if isinstance(error, errors.PositionUnwritten):
        tail = {"seq_num": detail["seq_num"], "timestamp": detail["timestamp"]}
        return S2Error("range_not_satisfiable", error.message, body=orjson.dumps({"tail": tail}), status=416)
    code = _CODE_OF.get(error.code, "other")
    if isinstance(error, errors.Uncertain):
        code = "unavailable"
    elif isinstance(error, errors.Throttled) and detail.get("limit") in _QUOTAS:
        code = "quota_exhausted"
    wait_ms = 0
    if code == "rate_limited" or isinstance(error, errors.DiskFull):
        wait_ms = int(detail.get("retry_after_ms") or 1000 * RETRY_AFTER_S[error.code])
    return S2Error(code, error.message, retry_after_ms=wait_ms)
