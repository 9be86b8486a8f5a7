"""The limits and checks that both fronts apply to every request, and the answer to a bug.

The edge (`edge.py`) and the Quart app (`hypercorn/app.py`) read bytes in different ways. Their refusals and
error messages are defined here, so that both give the same answers.
"""

from __future__ import annotations

import itertools
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import trio

from gateway.admission.memory import MemoryBudget
from gateway.requests.errors import error_response, response_for
from gateway.requests.request import S2_PREFIX, Handler, Request, Response
from gateway.requests.s2_errors import S2Error, early_s2_error
from streams.protocol.errors import InvalidRequest, PayloadTooLarge, StreamsError, Throttled

log = structlog.get_logger("gateway.front")

#: The framing of a body whose length is only known at its end.
CHUNKED = -1

BODY_BYTES_IN_FLIGHT = 512 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontLimits:
    """Every buffer, wait and queue of a front has its bound here."""

    head_bytes_max: int = 64 * 1024
    header_count_max: int = 128
    url_bytes_max: int = 16 * 1024
    body_bytes_max: int = 64 * 1024 * 1024
    #: For all connections of one gateway, shared by owner (`admission/memory.py`). A body over it is answered
    #: 429 at once. If bodies waited for room, each would hold its connection and the bytes it has, and enough
    #: of them could wait for each other forever. Clients know how to handle a 429.
    body_bytes_in_flight_max: int = BODY_BYTES_IN_FLIGHT
    connections_max: int = 10_000
    #: Connections of one client address; 0 is no limit (`admission/connection_table.py`).
    connections_per_address_max: int = 0
    #: From the first byte of a head to its last, however fast they come: normal clients send a head at once.
    head_timeout_s: float = 10.0
    #: A body or an answer has this long plus a second for each `rate_bytes_per_s_min` bytes of progress. A
    #: plain total would cut off 64 MiB on a slow line; a timeout that any byte resets would let a client with
    #: one byte every 29 s hold its share of `body_bytes_in_flight_max` for a year.
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    rate_bytes_per_s_min: int = 64 * 1024
    keep_alive_s: float = 75.0
    #: How long unread input is read and dropped after an answer, at most `body_bytes_max` of it.
    linger_s: float = 2.0
    drain_s: float = 10.0


def body_budget(limits: FrontLimits) -> MemoryBudget:
    """Return the memory budget of all request bodies of a gateway, including decompressed ones."""
    return MemoryBudget(
        limits.body_bytes_in_flight_max, limit="body_bytes_in_flight", what="the bodies of requests"
    )


_ABSOLUTE = re.compile(r"(?i:https?)://([^/?@]+)(/[^?]*)?(?:\?(.*))?")
_HOST = re.compile(r"[A-Za-z0-9\-._~%!$&'()*+;=:\[\]]*")
_WATCH_PREFIX = "/v0/watch/"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

#: Generated request ids: a random prefix of this process, and a number. A random id each would cost 2 µs.
_PROCESS_ID = uuid.uuid4().hex[:12]
_numbers = itertools.count(1)


def split_target(method: str, target: str) -> tuple[str, str]:
    """Return the raw path and raw query of a request target in origin, absolute or asterisk form."""
    if "#" in target:
        raise InvalidRequest("the request target has a fragment ('#'), which is never sent to a server")
    if target.startswith("/"):
        path, _, query = target.partition("?")
        return path, query
    if target == "*" and method == "OPTIONS":
        return target, ""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or method == "CONNECT":
        raise InvalidRequest("the request target is not a path, a URL, or '*' with OPTIONS")
    check_host(absolute[1])
    return absolute[2] or "/", absolute[3] or ""


def check_host(host: str | None) -> None:
    """Check the Host header. A Host that was sent twice is joined with a comma, and so is refused here
    too."""
    if host is None:
        raise InvalidRequest("the request has no Host header")
    if _HOST.fullmatch(host) is None:
        raise InvalidRequest("the host is not one host and optional port")


def check_url_length(url_bytes: int, limits: FrontLimits) -> None:
    if url_bytes > limits.url_bytes_max:
        raise InvalidRequest(f"the request target is longer than {limits.url_bytes_max} bytes")


def content_length_of(value: str | None) -> int:
    """Return the length in a Content-Length header. "5, 5" and "+5" are not lengths."""
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise InvalidRequest("the Content-Length header is not one decimal number")
    return int(value)


def check_body_length(length: int, limits: FrontLimits) -> None:
    if length > limits.body_bytes_max:
        raise PayloadTooLarge(
            f"the body is larger than {limits.body_bytes_max} bytes", limit_bytes=limits.body_bytes_max
        )


def request_id_of(headers: Mapping[str, str]) -> str:
    """Return the client's request id if it is printable and short, else a new one."""
    client_id = headers.get("x-request-id")
    if client_id is not None and _REQUEST_ID.fullmatch(client_id):
        return client_id
    return f"{_PROCESS_ID}-{next(_numbers):x}"


def no_free_connection_error() -> Throttled:
    """Return the error for a stream on a connection of the reserve."""
    return Throttled(
        "the gateway has no free connections, so it opens no stream; close some, or raise "
        "STREAMS_MAX_CONNECTIONS",
        limit="connections",
    )


def refusal(error: StreamsError, headers: Mapping[str, str], started_ns: int, path: str = "") -> Response:
    """Return the error response for a request that never reached the handler, in the format of its API."""
    if path.startswith(S2_PREFIX):
        response = early_s2_error(error, headers.get("content-type")).response
    else:
        response = response_for(error, server_total_ms=(time.perf_counter_ns() - started_ns) / 1e6)
    response.headers.append((b"x-request-id", request_id_of(headers).encode()))
    return response


async def answer(handler: Handler, request: Request) -> Response:
    """Return the handler's answer. Only a bug makes a handler raise; the answer is then a 500 and a log
    entry."""
    try:
        return await handler(request)
    except Exception as error:
        return bug_response(request, error)


def loggable_path(path: str) -> str:
    """Return the path without the name of a session, which is a secret: it gives access to the session."""
    return f"{_WATCH_PREFIX}…" if path.startswith(_WATCH_PREFIX) else path


def bug_response(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request.headers)
    log.error(
        "request failed because of a bug; please report it",
        request_id=request_id,
        method=request.method,
        path=loggable_path(request.path),
        exc_info=error,
    )
    message = f"the server failed; its log has the reason under request id {request_id}"
    if request.path.startswith(S2_PREFIX):
        response = S2Error("other", message).response
    else:
        spent_ms = (time.perf_counter_ns() - request.started_ns) / 1e6
        response = error_response("internal", message, {"request_id": request_id}, server_total_ms=spent_ms)
    response.headers.append((b"x-request-id", request_id.encode()))
    return response


def check_response_header(name: bytes, value: bytes) -> None:
    """Refuse a line break in a value: it would let the author of the value inject headers."""
    if b"\n" in value or b"\r" in value:
        raise ValueError(f"the response header {name!r} has a line break in it")


def has_no_body(method: str, status: int) -> bool:
    return method == "HEAD" or status < 200 or status in (204, 304)


async def refused_stream(request: Request, response: Response) -> Response:
    """Return the refusal of a stream, because the gateway has no free connection for it."""
    await close_body(response)
    return refusal(no_free_connection_error(), request.headers, request.started_ns, request.path)


async def close_body(response: Response) -> None:
    """Close the body of a streamed answer. A stream that ended early still runs its cleanup, for at most a
    second."""
    if response.live is not None:
        response.live.close()
    aclose = getattr(response.stream, "aclose", None)
    if aclose is None:
        return
    with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
        try:
            await aclose()
        except Exception as error:
            log.error("a response stream failed while closing", exc_info=error)
