"""One request and one response, shared by both fronts: the edge (HTTP/1.1) and the Quart app (the rest).

A front owns bytes, framing, deadlines and the connection. It builds a `Request`, awaits the handler and sends
the `Response`. Handlers do not depend on a front.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from gateway.admission.memory import owner_of

if TYPE_CHECKING:
    import trio

    from gateway.admission.memory import Charge, MemoryBudget
    from streams.protocol.access.grants import Grant
    from streams.protocol.access.keys import Key
    from streams.protocol.telemetry.histogram import Histogram

#: One buffer of a response body. Bodies are lists of buffers, so a shard's bytes are not copied to append
#: the gateway's own.
Buffer = bytes | bytearray | memoryview

#: Path prefix of the S2 API (`gateway/s2/`).
S2_PREFIX = "/v1/"
#: Content type of an S2 session in frames.
SESSION_TYPE = "s2s/proto"


def media_type(value: str | None) -> str:
    """Return the first media type of a header value, without parameters."""
    return "" if value is None else value.partition(",")[0].partition(";")[0].strip().lower()


def is_full_duplex(method: str, path: str, content_type: str | None) -> bool:
    """Return True for an append session: its response starts while its body is still arriving."""
    return method == "POST" and path.startswith(S2_PREFIX) and media_type(content_type) == SESSION_TYPE


WatchPeer = Callable[["trio.CancelScope"], Awaitable[None]]


class Request:
    """A complete request: its body is read, within the limit, and without transfer framing.

    `path` is the raw path, percent-encoded and without the query. `query` is raw too.
    Header names are lower case; a header sent twice has its values joined with ", ".
    """

    __slots__ = (
        "body",
        "charge",
        "headers",
        "incoming",
        "key",
        "memory",
        "method",
        "page_charge",
        "path",
        "query",
        "started_ns",
        "times",
        "waited_s",
        "watch_peer",
    )

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
        #: The latency histogram of its route, once the route is known.
        self.times: Histogram | None = None
        #: Seconds that the front delayed reading it because of overload.
        self.waited_s = 0.0
        #: The arriving body of a full-duplex request (`is_full_duplex`); `body` is empty then. Iterating may
        #: raise `BodyBroken`.
        self.incoming: AsyncIterator[bytes] | None = None
        #: Waits until the client disconnects, then cancels the given scope. Handlers that only wait run it in
        #: parallel. Handlers that write do not: the outcome of a cancelled write would be unknown.
        self.watch_peer: WatchPeer | None = None
        #: The key of the request; None if the server has no keys.
        self.key: Key | None = None
        #: The budget of bodies, and this request's charge in it (None for small bodies). The front closes the
        #: charge after the handler has returned.
        self.memory: MemoryBudget | None = None
        self.charge: Charge | None = None
        #: The charge for the page in a shard's reply. The handler hands it over to its response.
        self.page_charge: Charge | None = None

    @property
    def grant(self) -> Grant | None:
        return None if self.key is None else self.key.grant

    @property
    def passed_on(self) -> Grant | None:
        """Return the grant that the shard must check itself, if any."""
        return None if self.key is None else self.key.shard_grant

    @property
    def owner(self) -> str:
        """Return the owner to charge its memory to (`gateway/admission/memory.py`)."""
        return owner_of(self.key)

    def open_charge(self) -> Charge | None:
        """Return the request's charge in the budget of bodies, opened if needed; None without a budget."""
        if self.charge is None and self.memory is not None:
            self.charge = self.memory.open(self.owner)
        return self.charge

    @property
    def account(self) -> str:
        """Return the id of the key if shards enforce limits of it, else ""."""
        return "" if self.key is None else self.key.account

    def require_name(self, name: str, field: str) -> None:
        """Raise `Forbidden` if the key may not use a name in the body."""
        if self.key is not None:
            self.key.grant.require_name(name, field)

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} {len(self.body)} B>"


class BodyBroken(Exception):
    """A full-duplex body broke its framing or ended too early. The bytes before that are valid."""


class ClientStalled(Exception):
    """The client of a live response has read nothing for the allowed time."""


class ReadProgress(Protocol):
    """Receives the number of bytes that a client has read."""

    def note_progress(self, count: int) -> None: ...


class Sink(Protocol):
    """The output of a live response.

    `put` never waits: it buffers the bytes that the client does not read at once. The producer must check
    `unsent_bytes` first to bound the buffer.
    """

    #: Set while a task waits for the unsent bytes to be sent (`gateway/requests/unsent_charge.py`).
    charge: ReadProgress | None

    @property
    def unsent_bytes(self) -> int: ...

    def put(self, data: bytes) -> None:
        """Send as much as the socket takes now and buffer the rest. Any task may call it.

        After a disconnect the data is dropped, and the front cancels `Live.run`.
        """

    async def wait_sent(self, stall_s: float) -> None:
        """Wait until every byte is sent; always a checkpoint.

        Raises `ClientStalled` if the client reads nothing for `stall_s` seconds.
        """


class Live(Protocol):
    """A response body that is written as events happen.

    The producer of an event writes it to the sinks. An iterator would cost two task switches per piece, most
    of the cost when one event goes to a thousand clients.
    """

    async def run(self, sink: Sink) -> None:
        """Write the body and return at its end. Cancelled when the client disconnects."""

    def close(self) -> None:
        """Release resources.

        The front calls it exactly once, even if `run` was not called (for HEAD, say).
        """


_JSON = b"application/json"
_NOSNIFF = (b"x-content-type-options", b"nosniff")
#: Responses must not be cached: they are valid for one moment and one key.
NO_STORE = (b"cache-control", b"no-store")
_JSON_HEADERS = ((b"content-type", _JSON), _NOSNIFF, NO_STORE)


class Response:
    """A status, headers (lower-case names) and a body: `parts`, a `stream` to iterate, or a `live` writer.

    Fronts add `content-length` (or the framing of a stream), `date` and `connection`; handlers never do. For
    a HEAD request the front sends the headers without the body.
    """

    __slots__ = ("charge", "headers", "live", "parts", "pause_s", "status", "stream")

    def __init__(
        self,
        status: int,
        *parts: Buffer,
        content_type: bytes = _JSON,
        stream: AsyncIterator[bytes] | None = None,
        live: Live | None = None,
    ) -> None:
        self.status = status
        self.parts: list[Buffer] = list(parts)
        self.headers: list[tuple[bytes, bytes]] = (
            list(_JSON_HEADERS) if content_type is _JSON else [(b"content-type", content_type), _NOSNIFF]
        )
        self.stream = stream
        self.live = live
        #: The charge of a large body in the budget of answers. The front closes it when the body is sent.
        self.charge: Charge | None = None
        #: Seconds before the front reads the next request of this connection. It stops a client that ignores
        #: `Retry-After` from costing as much in rejections as in requests.
        self.pause_s = 0.0

    @property
    def is_streamed(self) -> bool:
        return self.stream is not None or self.live is not None

    def __repr__(self) -> str:
        size = "stream" if self.is_streamed else f"{sum(map(len, self.parts))} B"
        return f"<Response {self.status} {size}>"


#: Answers a request. The edge calls it inline: it calls `need_task` (`gateway/admission/inline.py`) before it
#: waits for anything but the answer of a link.
Handler = Callable[[Request], Awaitable[Response]]


class Socket(Protocol):
    """An open WebSocket: whole messages in and out. Its handler is cancelled when the peer goes away."""

    async def receive(self) -> bytes: ...

    async def send(self, text: bytes) -> None: ...


class EarlyRejection(Exception):
    """Rejects a request before its handler is called, with a response in the format of its API."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


#: Authenticates a request by its head (path, headers, query) before its body is read, and returns the owner
#: of the body (`admission/memory.py`). Raises `StreamsError` or `EarlyRejection`. None: the server has no
#: keys.
Admit = Callable[[str, dict[str, str], str], Awaitable[str]]

#: Serves one WebSocket, given the request's headers and an accept function. An error before the accept
#: becomes an error response. Returning closes the socket.
SocketHandler = Callable[[dict[str, str], Callable[[], Awaitable[Socket]]], Awaitable[None]]
