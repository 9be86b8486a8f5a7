"""Sends one request once. The only file that uses the HTTP library.

The result is an `Answer` of any status, `Unreachable` when nothing was sent, or `AnswerLost` when the request
was sent and no whole answer came. It never retries and never follows a redirect: `retry.py` decides that.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

import anyio
import httpx2

from streams import __version__
from streams.client.errors import AnswerLost, NotAnAnswer, Unreachable
from streams.protocol.errors import InvalidRequest, StreamsError

#: The gateway gives up on a shard after 60 s and answers so; the client waits a little longer for that
#: answer.
ANSWER_S = 65.0
CONNECT_S = 5.0
#: Connections that a client keeps. Each is one request at a time: readers, workers and producers have one
#: each.
CONNECTIONS_MAX = 256

#: Nothing of the request can have left when one of these is raised.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def _options(url: str, key: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"url: {url!r} must start with http:// or https://", field="url")
    # A field that the server does not know is a mistake of ours, or of a caller: it is to be refused.
    headers = {
        "user-agent": f"streams-python/{__version__}",
        "accept-encoding": "identity",
        "prefer": "handling=strict",
    }
    if key:
        headers["authorization"] = f"Bearer {key}"
    return {
        "base_url": url,
        "headers": headers,
        "trust_env": False,
        "limits": httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
        # Reading the machine's certificates takes longer than many a command; plain HTTP needs none.
        "verify": True if url.startswith("https://") else _no_tls(),
    }


@lru_cache(maxsize=1)
def _no_tls() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _timeout(answer_s: float) -> httpx2.Timeout:
    return httpx2.Timeout(answer_s, connect=CONNECT_S, pool=CONNECT_S)


def _translate(error: Exception, url: str) -> StreamsError:
    what = f"{error}" or type(error).__name__
    if isinstance(error, _NOT_SENT):
        return Unreachable(f"{url} cannot be reached ({what})", url=url)
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError | httpx2.InvalidURL):
        return NotAnAnswer(f"{url}: {what}", url=url)
    return AnswerLost(f"{url}: no answer came ({what})", url=url)


@contextmanager
def _translating(url: str) -> Iterator[None]:
    """Raises our own error where the HTTP library raises one of its."""
    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _translate(error, url) from error


def _request_options(
    body: bytes | None, headers: Mapping[str, str] | None, answer_s: float
) -> dict[str, Any]:
    return {"content": body, "headers": headers, "timeout": _timeout(answer_s)}


def _whole(response: httpx2.Response) -> Answer:
    return Answer(response.status_code, response.headers, response.content)


class _AsyncStream:
    """The context of an answer that is read as it comes.

    Not a generator: a watch that is left early is a generator inside of this context. When asyncio ends, it
    closes all generators at once, and complains of one that another is closing at that moment. For the same
    reason the generators of the HTTP library are closed here, and a client that is closed waits for that.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        url: str,
        method: str,
        path: str,
        headers: Mapping[str, str] | None,
        silence_s: float,
        open_streams: set[_AsyncStream],
    ) -> None:
        self._http = http
        self._url = url
        self._request = (method, path, headers, silence_s)
        self._response: httpx2.Response | None = None
        self._pieces: AsyncGenerator[bytes, None] | None = None
        self._open_streams = open_streams
        self._is_closing = False
        self._close_event = anyio.Event()

    def __repr__(self) -> str:
        return f"<_AsyncStream {self._request[:2]}>"

    async def __aenter__(self) -> tuple[Answer, AsyncIterator[bytes]]:
        method, path, headers, silence_s = self._request
        self._open_streams.add(self)
        try:
            with _translating(self._url):
                request = self._http.build_request(method, path, headers=headers, timeout=_timeout(silence_s))
                self._response = response = await self._http.send(request, stream=True)
                body = b"" if response.is_success else await response.aread()
        except BaseException:
            await self.aclose()
            raise
        self._pieces = response.aiter_raw()
        return Answer(response.status_code, response.headers, body), self._pieces

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
            raise _translate(error, self._url) from error

    async def aclose(self) -> None:
        """Close the answer, or wait until another task has closed it."""
        if self._is_closing:
            await self._close_event.wait()
            return
        self._is_closing = True
        try:
            if self._pieces is not None and not getattr(self._pieces, "ag_running", False):
                await self._pieces.aclose()
            if self._response is not None:
                await self._response.aclose()
        finally:
            self._open_streams.discard(self)
            self._close_event.set()


class AsyncTransport:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._http = httpx2.AsyncClient(**_options(url, key))
        #: Answers that are read as they come, until they are closed.
        self._open_streams: set[_AsyncStream] = set()

    def __repr__(self) -> str:
        return f"<AsyncTransport {self.url}>"

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_S,
    ) -> Answer:
        with _translating(self.url):
            return _whole(await self._http.request(method, path, **_request_options(body, headers, answer_s)))

    def stream(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, silence_s: float = ANSWER_S
    ) -> _AsyncStream:
        """The head of an answer, and its body as it comes. With a status that is no success the body is in
        the answer. `AnswerLost` after `silence_s` without a byte."""
        return _AsyncStream(self._http, self.url, method, path, headers, silence_s, self._open_streams)

    async def aclose(self) -> None:
        for stream in list(self._open_streams):
            await stream.aclose()
        await self._http.aclose()


class Transport:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._http = httpx2.Client(**_options(url, key))

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
        with _translating(self.url):
            return _whole(self._http.request(method, path, **_request_options(body, headers, answer_s)))

    @contextmanager
    def stream(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, silence_s: float = ANSWER_S
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """The head of an answer, and its body as it comes. With a status that is no success the body is in
        the answer. `AnswerLost` after `silence_s` without a byte."""
        timeout = _timeout(silence_s)
        with (
            _translating(self.url),
            self._http.stream(method, path, headers=headers, timeout=timeout) as response,
        ):
            body = b"" if response.is_success else response.read()
            yield Answer(response.status_code, response.headers, body), response.iter_raw()

    def close(self) -> None:
        self._http.close()
