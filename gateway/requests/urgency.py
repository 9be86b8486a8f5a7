"""How a request says that it is urgent: the header `X-Streams-Urgent: 1` or the query flag `urgent=true`.

Both stand in the head of a request, so a gateway knows that a request is urgent before it has read a body,
and never looks into one for it.
"""

from __future__ import annotations

import re

from gateway.requests.request import Buffer, Request
from streams.protocol.errors import InvalidRequest
from streams.protocol.model.names import shown

HEADER = "x-streams-urgent"
_HEADER_TITLE = "X-Streams-Urgent"

_in_query = re.compile(r"(?:^|&)urgent=(?:true|1)(?:&|$)").search
_in_head = re.compile(
    rb"\A[^\r\n]*[?&]urgent=(?:true|1)[& ]|\r\nx-streams-urgent:[ \t]*(?:1|true)[ \t]*(?:\r\n|\Z)",
    re.IGNORECASE,
).search
_END = b"\r\n\r\n"


def is_urgent(request: Request) -> bool:
    """Return True if the request has the flag. Raises `InvalidRequest` for a header that is no flag."""
    value = request.headers.get(HEADER)
    if value is not None:
        if value in ("1", "true"):
            return True
        if value not in ("0", "false"):
            raise InvalidRequest(f"{_HEADER_TITLE}: {shown(value)} is neither 1 nor 0", field=_HEADER_TITLE)
    return "urgent" in request.query and _in_query(request.query) is not None


def head_is_urgent(data: Buffer) -> bool:
    """Return True if the head at the start of `data`, or as much of it as there is, has the flag. It only
    decides about the order in which requests are read: `is_urgent` has the last word."""
    start = bytes(data)
    end = start.find(_END)
    head = start if end < 0 else start[:end]
    return (b"rgent" in head or b"RGENT" in head) and _in_head(head) is not None
