"""Formats server-sent events and the head of an event-stream response (v0 §7.2). Pure."""

from __future__ import annotations

from gateway.requests.request import NO_STORE, Live, Request, Response
from streams.protocol.errors import NotAcceptable

MEDIA_TYPE = "text/event-stream"
#: Browsers reconnect after this many milliseconds.
_RETRY_LINE = b"retry: 2000\n"


def opening(id: bytes = b"") -> bytes:
    """Return the first bytes of a stream.

    An id without data is no event, but browsers store it and send it when they reconnect. So no event is lost
    if the connection breaks before the first event arrives.
    """
    return _RETRY_LINE + (b"id: %b\n\n" % id if id else b"\n")


def event(name: bytes, data: bytes, id: bytes = b"") -> bytes:
    if id:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (id, name, data)
    return b"event: %b\ndata: %b\n\n" % (name, data)


def one_value(json: bytes) -> bytes:
    """Format JSON as the value of a `data:` field.

    Line breaks between JSON tokens would end the event, so each one starts a new `data:` line.
    """
    if b"\r" in json:
        json = json.replace(b"\r", b" ")
    return json.replace(b"\n", b"\ndata: ") if b"\n" in json else json


def heartbeat(now_ms: int) -> bytes:
    """Return a comment, which keeps the connection alive and moves no cursor."""
    return b": hb %d\n\n" % now_ms


def check_accepts(request: Request) -> None:
    """Raise `NotAcceptable` if the `Accept` header excludes event streams."""
    accept = request.headers.get("accept")
    if accept is None:
        return
    for item in accept.lower().split(","):
        kind, _, parameters = item.partition(";")
        if kind.strip() in (MEDIA_TYPE, "text/*", "*/*") and "q=0" not in parameters.replace(" ", "").split(
            ";"
        ):
            return
    raise NotAcceptable(f"accept: this route returns {MEDIA_TYPE} only", field="accept")


def response(live: Live) -> Response:
    answer = Response(200, content_type=b"text/event-stream; charset=utf-8", live=live)
    answer.headers.append(NO_STORE)
    answer.headers.append((b"x-accel-buffering", b"no"))
    return answer
