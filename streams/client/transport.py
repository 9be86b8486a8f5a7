"""Sends one request once, for threads, with the standard library. `async_transport.py` does it for tasks.

The result is an `Answer` of any status, `Unreachable` when nothing was sent, or `AnswerLost` when the request
was sent and no whole answer came. It never retries and never follows a redirect: `retry.py` decides that.

Why not the HTTP library that tasks use: importing it costs 0.24 s of CPU, three times as much as all the rest
of a command, and it writes a line of log for each request.

Connections: one request at a time each, at most `CONNECTIONS_MAX`, kept open between requests. A request that
finds all of them busy waits `CONNECT_S` for one.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from streams import __version__
from streams.client.errors import AnswerLost, NotAnAnswer, Unreachable
from streams.protocol.errors import InvalidRequest

#: The gateway gives up on a shard after 60 s and answers so; the client waits a little longer for that
#: answer.
ANSWER_S = 65.0
CONNECT_S = 5.0
#: Connections that a client keeps. Each is one request at a time: readers, workers and producers have one
#: each.
CONNECTIONS_MAX = 256
_PIECE_BYTES = 64 * 1024


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def split_url(url: str) -> SplitResult:
    """Return the parts of a server's URL, or raise `InvalidRequest`."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"url: {url!r} must start with http:// or https://", field="url")
    parts = urlsplit(url)
    try:
        is_valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidRequest(f"url: {url!r} must name a host, and a port from 1 to 65535 if any", field="url")
    return parts


def common_headers(parts: SplitResult, key: str | None) -> dict[str, str]:
    """Return the headers of every request. A name and password in the URL are for a proxy on the way."""
    # A field that the server does not know is a mistake of ours, or of a caller: it is to be refused.
    headers = {
        "user-agent": f"streams-python/{__version__}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "prefer": "handling=strict",
    }
    if key:
        headers["authorization"] = f"Bearer {key}"
    elif parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["authorization"] = f"Basic {b64encode(secret.encode()).decode()}"
    return headers


class _Connection:
    """One connection, and whether it can take another request."""

    __slots__ = ("_http", "_sock", "is_reusable")

    def __init__(self, http: http.client.HTTPConnection) -> None:
        self._http = http
        #: Ours, because `_http` forgets it once an answer says that it is the last.
        self._sock: socket.socket | None = None
        self.is_reusable = False

    def __repr__(self) -> str:
        return f"<_Connection to {self._http.host}:{self._http.port}>"

    def connect(self) -> None:
        self._http.connect()
        self._sock = self._http.sock
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def is_idle(self) -> bool:
        """False once the server has closed the connection, or sent what nobody asked for."""
        sock = self._http.sock
        if sock is None:
            return False
        if not hasattr(select, "poll"):  # Windows, where `select` has no limit of its own
            return not select.select([sock], [], [], 0)[0]
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(0)

    def request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], silence_s: float
    ) -> http.client.HTTPResponse:
        """Send a request and read the head of its answer. No read waits longer than `silence_s`."""
        self.is_reusable = False
        self._http.sock.settimeout(silence_s)
        try:
            self._http.request(method, target, body, dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            # A server may refuse a large body before it has read all of it. Its answer says why.
            pass
        return self._http.getresponse()

    def shut_down(self) -> None:
        """End the connection while another thread uses it: that thread sees its end, and closes it."""
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was faster

    def close(self) -> None:
        self._http.close()


class Transport:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._parts = split_url(url)
        self._headers = common_headers(self._parts, key)
        self._tls: ssl.SSLContext | None = None
        self._free_slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        #: Guards what follows; never held over a wait.
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Transport {self.url}>"

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_S,
    ) -> Answer:
        with self._exchange(method, path, body, headers, answer_s) as (connection, response):
            if response.length is None and not response.chunked and 200 <= response.status < 300:
                # It ends when the connection does, so a part of it looks like all of it.
                raise http.client.HTTPException("it does not say how long it is")
            content = response.read()
            connection.is_reusable = not response.will_close
            return Answer(response.status, _headers_of(response), content)

    @contextmanager
    def stream(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, silence_s: float = ANSWER_S
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """The head of an answer, and its body as it comes. With a status that is no success the body is in
        the answer. `AnswerLost` after `silence_s` without a byte."""
        with self._exchange(method, path, None, headers, silence_s) as (_, response):
            body = b"" if 200 <= response.status < 300 else response.read()
            pieces = iter(lambda: response.read1(_PIECE_BYTES), b"")
            yield Answer(response.status, _headers_of(response), body), pieces

    @contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        silence_s: float,
    ) -> Iterator[tuple[_Connection, http.client.HTTPResponse]]:
        connection = self._take()
        try:
            response = connection.request(
                method, self._parts.path + path, body, {**self._headers, **(headers or {})}, silence_s
            )
            with response:
                yield connection, response
        except http.client.InvalidURL as error:
            raise NotAnAnswer(f"{self.url}: {error}", url=self.url) from error
        except (OSError, http.client.HTTPException) as error:
            what = f"{error}" or type(error).__name__
            raise AnswerLost(f"{self.url}: no answer came ({what})", url=self.url) from error
        finally:
            self._give_back(connection)

    def _take(self) -> _Connection:
        """Return a connection that is open: one that is idle, or a new one."""
        if not self._free_slots.acquire(timeout=CONNECT_S):
            raise self._unreachable(f"all {CONNECTIONS_MAX} connections are busy")
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
                if connection is not None:
                    self._busy.add(connection)
            if connection is None:
                return self._connect()
            if connection.is_idle():
                return connection
            with self._lock:
                self._busy.discard(connection)
            connection.close()

    def _connect(self) -> _Connection:
        connection = _Connection(self._new_http())
        try:
            connection.connect()
        except OSError as error:
            self._free_slots.release()
            raise self._unreachable(f"{error}" or type(error).__name__) from error
        except BaseException:
            self._free_slots.release()
            raise
        with self._lock:
            self._busy.add(connection)
        return connection

    def _new_http(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        if self._tls is None:
            import truststore

            self._tls = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=self._tls)

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            self._busy.discard(connection)
            is_kept = connection.is_reusable and not self._is_closed
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()
        self._free_slots.release()

    def _unreachable(self, what: str) -> Unreachable:
        return Unreachable(f"{self.url} cannot be reached ({what})", url=self.url)

    def close(self) -> None:
        """Close all connections. Requests of other threads end with `AnswerLost`."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.shut_down()
        for connection in idle:
            connection.close()


def _headers_of(response: http.client.HTTPResponse) -> Mapping[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}
