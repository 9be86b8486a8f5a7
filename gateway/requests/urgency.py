"""Detects urgent requests: the header `X-Streams-Urgent: 1` or the query flag `urgent=true`.

Both are in the head of a request, so a gateway recognizes an urgent request before it reads the body.
"""

from __future__ import annotations

import re

from gateway.requests.request import Buffer, Request
from streams.protocol.errors import InvalidRequest
from streams.protocol.model.names import quote

HEADER = "x-streams-urgent"
_HEADER_TITLE = "X-Streams-Urgent"

_in_query = re.compile(r"(?:^|&)urgent=(?:true|1)(?:&|$)").search
_in_head = re.compile(
    rb"\A[^\r\n]*[?&]urgent=(?:true|1)[& ]|\r\nx-streams-urgent:[ \t]*(?:1|true)[ \t]*(?:\r\n|\Z)",
    re.IGNORECASE,
).search
_END = b"\r\n\r\n"


def is_urgent(request: Request) -> bool:
    """Return True if the request is urgent. Raises `InvalidRequest` for an invalid header value."""
    value = request.headers.get(HEADER)
    if value is not None:
        if value in ("1", "true"):
            return True
        if value not in ("0", "false"):
            raise InvalidRequest(f"{_HEADER_TITLE}: {quote(value)} is not 1 or 0", field=_HEADER_TITLE)
    return "urgent" in request.query and _in_query(request.query) is not None


def head_is_urgent(data: Buffer) -> bool:
    """Return True if the request head at the start of `data`, complete or not, has the flag.

    It only decides the order in which requests are read; `is_urgent` decides about the request.
    """
    start = bytes(data)
    end = start.find(_END)
    head = start if end < 0 else start[:end]
    return (b"rgent" in head or b"RGENT" in head) and _in_head(head) is not None
