"""One request and one response, as both fronts see them: the edge (HTTP/1.1) and the Quart app (all else).

A front owns bytes, framing, deadlines and connection life. It builds a `Request`, awaits the handler and
sends the `Response`. A handler knows neither front.
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

#: One buffer of a response body. Bodies are lists of buffers so that a shard's bytes are never copied
#: just to stand next to ours.
Buffer = bytes | bytearray | memoryview

#: Addresses of the S2 API (`gateway/s2/`).
S2_PREFIX = "/v1/"
#: The type of a session of frames of the S2 API.
SESSION_TYPE = "s2s/proto"


def media_type(value: str | None) -> str:
    """The first media type of a header, without its parameters."""
    return "" if value is None else value.partition(",")[0].partition(";")[0].strip().lower()


def is_full_duplex(method: str, path: str, content_type: str | None) -> bool:
    """Return True for an append session: it is answered while its body is still arriving."""
    return method == "POST" and path.startswith(S2_PREFIX) and media_type(content_type) == SESSION_TYPE


WatchPeer = Callable[["trio.CancelScope"], Awaitable[None]]


class Request:
    """A whole request: the body has been read and is within the limit, transfer framing is undone.

    `path` is the raw path as it came, still percent-encoded, without the query. `query` is raw too.
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
        #: Where the time that it took is counted, once its route is known.
        self.times: Histogram | None = None
        #: How long it was left unread because there was too much to do.
        self.waited_s = 0.0
        #: The body as it arrives, where the answer begins before its end (`is_full_duplex`); `body` is empty
        #: then. Reading it may raise `BodyBroken`.
        self.incoming: AsyncIterator[bytes] | None = None
        #: Waits until whoever asked has gone, and cancels the scope it is given. A handler that only waits
        #: runs it beside that; one that writes does not, for a write would be left in doubt.
        self.watch_peer: WatchPeer | None = None
        #: Whose request it is; None when this gateway asks for no keys.
        self.key: Key | None = None
        #: What bounds the bodies of this gateway, and what this request has of it. The front closes the
        #: charge when the handler has returned. None for a body too small to count.
        self.memory: MemoryBudget | None = None
        self.charge: Charge | None = None
        #: The memory of the page that a shard has answered with. The handler passes it on to its response.
        self.page_charge: Charge | None = None

    @property
    def grant(self) -> Grant | None:
        return None if self.key is None else self.key.grant

    @property
    def passed_on(self) -> Grant | None:
        """What the shard has to look at itself."""
        return None if self.key is None else self.key.passed_on

    @property
    def owner(self) -> str:
        """To whom its memory is charged (`gateway/admission/memory.py`)."""
        return owner_of(self.key)

    def open_charge(self) -> Charge | None:
        """What this request has of the budget of bodies; None where there is no budget."""
        if self.charge is None and self.memory is not None:
            self.charge = self.memory.open(self.owner)
        return self.charge

    @property
    def account(self) -> str:
        """The key, if it has limits that shards enforce."""
        return "" if self.key is None else self.key.account

    def require_name(self, name: str, field: str) -> None:
        """Raises `Forbidden` for a name out of the body that the key may not use."""
        if self.key is not None:
            self.key.grant.require_name(name, field)

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} {len(self.body)} B>"


class BodyBroken(Exception):
    """A body that is read as it arrives broke its framing, or ended too early. What came before it counts."""


class ClientStalled(Exception):
    """The peer of a live answer has taken nothing for as long as was allowed."""


class Progress(Protocol):
    """Hears how many bytes a client has taken."""

    def note_progress(self, count: int) -> None: ...


class Sink(Protocol):
    """Where a live answer goes. `put` never waits: what the peer does not take at once is kept, so whoever
    puts looks at `unsent_bytes` first and bounds it."""

    #: Set while somebody waits for what is unsent to be sent (`gateway/requests/unsent_charge.py`).
    charge: Progress | None

    @property
    def unsent_bytes(self) -> int: ...

    def put(self, data: bytes) -> None:
        """Sends now what can be sent now. May be called from any task. Drops everything once the peer has
        gone; the front then cancels `Live.run`."""

    async def wait_sent(self, stall_s: float) -> None:
        """Wait until every byte is sent; always a checkpoint.

        Raises `ClientStalled` if the client reads nothing for `stall_s` seconds.
        """


class Live(Protocol):
    """A body that is written as things happen. An iterator costs two changes of task for each piece; where
    one event goes to a thousand peers, that is most of the price, so here the owner of the event writes."""

    async def run(self, sink: Sink) -> None:
        """Writes the body; its return is the body's end. Cancelled when the peer goes away."""

    def close(self) -> None:
        """Called by the front exactly once, whether `run` was called or not (a HEAD, a peer that left)."""


_JSON = b"application/json"
_NOSNIFF = (b"x-content-type-options", b"nosniff")
#: Answers are not for caches: they are of one moment, and of one key.
NO_STORE = (b"cache-control", b"no-store")
_JSON_HEADERS = ((b"content-type", _JSON), _NOSNIFF, NO_STORE)


class Response:
    """A status, headers (lower-case names) and a body: `parts`, or a `stream` that ends when it ends, or a
    `live` one.

    Fronts add `content-length` (or the framing of a stream), `date` and `connection`; handlers never do.
    A HEAD request gets the same headers and no body: the front sees to it.
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
        #: What a large body has of the budget of answers. The front closes it when the body is sent.
        self.charge: Charge | None = None
        #: How long the front leaves the next request of this connection unread. A client that was told when
        #: to come back and comes at once would cost as much in refusals as it was refused for.
        self.pause_s = 0.0

    @property
    def is_streamed(self) -> bool:
        return self.stream is not None or self.live is not None

    def __repr__(self) -> str:
        size = "stream" if self.is_streamed else f"{sum(map(len, self.parts))} B"
        return f"<Response {self.status} {size}>"


Handler = Callable[[Request], Awaitable[Response]]


class Socket(Protocol):
    """An open WebSocket: whole messages in and out. Its handler is cancelled when the peer goes away."""

    async def receive(self) -> bytes: ...

    async def send(self, text: bytes) -> None: ...


class RefusedEarly(Exception):
    """Ends a request before its handler is called, with an answer in the form of its API."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


#: Authenticates a request by its head (path, headers, query) before its body is read, and returns the owner
#: of the body (`admission/memory.py`). Raises `StreamsError` or `RefusedEarly`. None: the server has no keys.
Admit = Callable[[str, dict[str, str], str], Awaitable[str]]

#: Serves one WebSocket. It is given the request's headers and a way to accept; what it raises before that is
#: answered as to any request. Its return closes the socket.
SocketHandler = Callable[[dict[str, str], Callable[[], Awaitable[Socket]]], Awaitable[None]]
