"""One request and one response, as both fronts see them: the edge (HTTP/1.1) and the Quart app (all else).

A front owns bytes, framing, deadlines and connection life. It builds a `Request`, awaits the handler and
sends the `Response`. A handler knows neither front.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

#: One buffer of a response body. Bodies are lists of buffers so that a shard's bytes are never copied
#: just to stand next to ours.
Buffer = bytes | bytearray | memoryview


class Request:
    """A whole request: the body has been read and is within the limit, transfer framing is undone.

    `path` is the raw path as it came, still percent-encoded, without the query. `query` is raw too.
    Header names are lower case; a header sent twice has its values joined with ", ".
    """

    __slots__ = ("body", "headers", "method", "path", "query", "started_ns")

    def __init__(
        self,
        method: str,
        path: str,
        query: str,
        headers: dict[str, str],
        body: Buffer = b"",
        started_ns: int = 0,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.started_ns = started_ns

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} {len(self.body)} B>"


class Response:
    """A status, headers (lower-case names) and a body: either `parts`, or a `stream` that ends when it ends.

    Fronts add `content-length` (or the framing of a stream), `date` and `connection`; handlers never do.
    A HEAD request gets the same headers and no body: the front sees to it.
    """

    __slots__ = ("headers", "parts", "status", "stream")

    def __init__(
        self,
        status: int,
        *parts: Buffer,
        content_type: bytes = b"application/json",
        stream: AsyncIterator[bytes] | None = None,
    ) -> None:
        self.status = status
        self.parts: list[Buffer] = list(parts)
        self.headers: list[tuple[bytes, bytes]] = [(b"content-type", content_type)]
        self.stream = stream

    def __repr__(self) -> str:
        size = "stream" if self.stream is not None else f"{sum(map(len, self.parts))} B"
        return f"<Response {self.status} {size}>"


Handler = Callable[[Request], Awaitable[Response]]
