"""The text of server-sent events, and the head of an answer that is made of them (v0 §7.2). Pure."""

from __future__ import annotations

from gateway.requests.request import NO_STORE, Live, Request, Response
from streams.protocol.errors import NotAcceptable

MEDIA_TYPE = "text/event-stream"
#: How long a browser waits before it connects again.
_RETRY_LINE = b"retry: 2000\n"


def opening(id: bytes = b"") -> bytes:
    """How a stream begins. An id without data is no event, but a browser keeps it and comes back with it, so
    that nothing is lost if the line breaks before the first event has arrived."""
    return _RETRY_LINE + (b"id: %b\n\n" % id if id else b"\n")


def event(name: bytes, data: bytes, id: bytes = b"") -> bytes:
    if id:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (id, name, data)
    return b"event: %b\ndata: %b\n\n" % (name, data)


def one_value(json: bytes) -> bytes:
    """JSON as the value of a `data:` field. Outside its strings JSON may have line breaks, where they mean
    nothing; here they would end the event, so each becomes the start of a further `data:` line."""
    if b"\r" in json:
        json = json.replace(b"\r", b" ")
    return json.replace(b"\n", b"\ndata: ") if b"\n" in json else json


def heartbeat(now_ms: int) -> bytes:
    """A comment: it shows that the line is alive and moves no cursor."""
    return b": hb %d\n\n" % now_ms


def check_accepts(request: Request) -> None:
    """`Accept` must name the type; a request without one takes anything."""
    accepted = request.headers.get("accept")
    if accepted is None:
        return
    for item in accepted.lower().split(","):
        kind, _, parameters = item.partition(";")
        if kind.strip() in (MEDIA_TYPE, "text/*", "*/*") and "q=0" not in parameters.replace(" ", "").split(
            ";"
        ):
            return
    raise NotAcceptable(f"accept: this address answers {MEDIA_TYPE} only", field="accept")


def response(live: Live) -> Response:
    answer = Response(200, content_type=b"text/event-stream; charset=utf-8", live=live)
    answer.headers.append(NO_STORE)
    answer.headers.append((b"x-accel-buffering", b"no"))
    return answer
