"""Sends one request once, for tasks of trio and asyncio. The only file that uses the HTTP library.

The results are those of `transport.py`. The library's client would write a line of log for each request, so
this uses the layer below it, which writes none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import anyio
import httpx2

from streams.client.errors import AnswerLost, NotAnAnswer, Unreachable
from streams.client.transport import (
    ANSWER_S,
    CONNECT_S,
    CONNECTIONS_MAX,
    Answer,
    common_headers,
    split_url,
)
from streams.protocol.errors import StreamsError

#: Nothing of the request can have left when one of these is raised.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


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


class _AsyncStream:
    """The context of an answer that is read as it comes.

    Not a generator: a watch that is left early is a generator inside of this context. When asyncio ends, it
    closes all generators at once, and complains of one that another is closing at that moment. For the same
    reason the generators of the HTTP library are closed here, and a client that is closed waits for that.
    """

    def __init__(
        self, transport: AsyncTransport, request: httpx2.Request, open_streams: set[_AsyncStream]
    ) -> None:
        self._transport = transport
        self._request = request
        self._response: httpx2.Response | None = None
        self._pieces: AsyncGenerator[bytes, None] | None = None
        self._open_streams = open_streams
        self._is_closing = False
        self._close_event = anyio.Event()

    def __repr__(self) -> str:
        return f"<_AsyncStream {self._request.method} {self._request.url}>"

    async def __aenter__(self) -> tuple[Answer, AsyncIterator[bytes]]:
        self._open_streams.add(self)
        try:
            with _translating(self._transport.url):
                self._response = response = await self._transport.handle(self._request)
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
            raise _translate(error, self._transport.url) from error

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
        parts = split_url(url)
        self._headers = common_headers(parts, key)
        limits = httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
        # Reading the machine's certificates takes longer than many a command; plain HTTP needs none.
        self._pool = httpx2.AsyncHTTPTransport(verify=parts.scheme == "https", trust_env=False, limits=limits)
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
            response = await self.handle(self._request(method, path, body, headers, answer_s))
            try:
                content = await response.aread()
            finally:
                await response.aclose()
            return Answer(response.status_code, response.headers, content)

    def stream(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, silence_s: float = ANSWER_S
    ) -> _AsyncStream:
        """The head of an answer, and its body as it comes. With a status that is no success the body is in
        the answer. `AnswerLost` after `silence_s` without a byte."""
        with _translating(self.url):
            request = self._request(method, path, None, headers, silence_s)
        return _AsyncStream(self, request, self._open_streams)

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        silence_s: float,
    ) -> httpx2.Request:
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_S, pool=CONNECT_S)
        extensions: dict[str, Any] = {"timeout": timeout.as_dict()}
        every = {**self._headers, **(headers or {})}
        return httpx2.Request(method, self.url + path, content=body, headers=every, extensions=extensions)

    async def handle(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return its answer, of which only the head has been read."""
        return await self._pool.handle_async_request(request)

    async def aclose(self) -> None:
        for stream in list(self._open_streams):
            await stream.aclose()
        await self._pool.aclose()
