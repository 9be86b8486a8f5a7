"""A front on a real socket, a handler that remembers, and clients that speak bytes."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson
import trio
import trio.testing

from gateway.admission.inline import need_task
from gateway.http.edge import Front, FrontLimits, FrontName, serve_front
from gateway.requests.request import Admit, Handler, Request, Response, SocketHandler
from gateway.shards.unix_sockets import BACKLOG

#: Nothing in these tests may take this long; it turns a hang into a failure.
PATIENCE_S = 60.0

#: A request id of our making: the life of the process and a number.
OUR_REQUEST_ID = "[0-9a-f]{12}-[0-9a-f]+"


class Recorder:
    """Echoes each request as JSON, and keeps it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Response:
        self.requests.append(request)
        answer = {
            "method": request.method,
            "path": request.path,
            "query": request.query,
            "headers": request.headers,
            "body": bytes(request.body).decode("latin-1"),
        }
        return Response(200, orjson.dumps(answer))

    @property
    def lines(self) -> list[str]:
        return [f"{request.method} {request.path}" for request in self.requests]


class EndlessAnswer:
    """Answers with a body that never ends; `cleaned` is set when the body is closed."""

    def __init__(self) -> None:
        self.cleaned = trio.Event()

    async def __call__(self, request: Request) -> Response:
        return Response(200, stream=self._body())

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1_000_000)
        finally:
            self.cleaned.set()


def in_task(handler: Handler) -> Handler:
    """A handler that may wait for anything."""

    async def handle(request: Request) -> Response:
        await need_task()
        return await handler(request)

    return handle


@dataclass
class Running:
    port: int
    front: Front
    draining: trio.Event

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def running_front(
    handler: Handler | Callable[[Request], Awaitable[Response]],
    *,
    front: FrontName = "edge",
    limits: FrontLimits | None = None,
    patience_s: float = 2 * PATIENCE_S,
    admit: Admit | None = None,
    socket_handler: SocketHandler | None = None,
) -> AsyncIterator[Running]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(BACKLOG)
    draining = trio.Event()
    async with trio.open_nursery() as nursery:
        port = listener.getsockname()[1]

        async def serve(task_status: trio.TaskStatus[Front] = trio.TASK_STATUS_IGNORED) -> None:
            await serve_front(
                listener,
                handler if isinstance(handler, Recorder | EndlessAnswer) else in_task(handler),
                draining=draining,
                limits=limits,
                front=front,
                admit=admit,
                socket_handler=socket_handler,
                task_status=task_status,
            )

        started = await nursery.start(serve)
        with trio.fail_after(patience_s):
            yield Running(port, started, draining)
        nursery.cancel_scope.cancel()


async def no_connections(running: Running) -> None:
    while running.front.statistics().connections:  # noqa: ASYNC110 - the front has no event for it
        await trio.sleep(0.01)


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """All that the server sends until it closes. A reset counts as a close."""
    received = b""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                data = await stream.receive_some(65536)
            except trio.BrokenResourceError:
                return received
            if not data:
                return received
            received += data


async def read_until(stream: trio.SocketStream, end: bytes) -> bytes:
    received = b""
    with trio.fail_after(PATIENCE_S):
        while end not in received:
            data = await stream.receive_some(65536)
            assert data, f"closed before {end!r}, after {received!r}"
            received += data
    return received


async def talk(running: Running, *pieces: bytes, half_close: bool = True) -> bytes:
    """Sends the pieces, each in its own packet, and reads until the server closes."""
    async with await running.connect() as stream:
        for piece in pieces:
            await stream.send_all(piece)
            await trio.testing.wait_all_tasks_blocked()
        if half_close:
            await stream.send_eof()
        return await read_to_end(stream)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    header_names: list[str]

    @property
    def json(self) -> dict[str, object]:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        return orjson.loads(self.body)["error"]["code"]


class Malformed(AssertionError):
    pass


_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [ -~]*")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9a-zA-Z-]+): ([\t -~\x80-\xff]*)")


def parse_answers(raw: bytes, *, methods: list[str] | None = None) -> list[Answer]:
    """A strict reading of everything a server sent; `methods` says which answers are to HEAD."""
    answers: list[Answer] = []
    while raw:
        head, found, raw = raw.partition(b"\r\n\r\n")
        if not found:
            raise Malformed(f"no end of head in {head!r}")
        first, *lines = head.split(b"\r\n")
        status_line = _STATUS_LINE.fullmatch(first)
        if status_line is None:
            raise Malformed(f"bad status line {first!r}")
        fields = [_FIELD.fullmatch(line) for line in lines]
        if not all(fields):
            raise Malformed(f"bad header in {head!r}")
        names = [field[1].decode() for field in fields if field]
        headers = {field[1].decode().lower(): field[2].decode("latin-1") for field in fields if field}
        status = int(status_line[1])
        if status < 200:
            continue
        is_head = methods is not None and len(answers) < len(methods) and methods[len(answers)] == "HEAD"
        body, raw = (b"", raw) if is_head or status == 204 else _cut_body(headers, raw)
        answers.append(Answer(status, headers, body, names))
    return answers


def _cut_body(headers: dict[str, str], raw: bytes) -> tuple[bytes, bytes]:
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size_line, found, raw = raw.partition(b"\r\n")
            if not found:
                raise Malformed("chunked answer broken off")
            size = int(size_line, 16)
            body += raw[:size]
            if raw[size : size + 2] != b"\r\n":
                raise Malformed("chunk without its end")
            raw = raw[size + 2 :]
            if size == 0:
                return body, raw
    if "content-length" not in headers:
        if headers.get("connection") != "close":
            raise Malformed("an answer without framing")
        return raw, b""
    size = int(headers["content-length"])
    if len(raw) < size:
        raise Malformed("answer broken off")
    return raw[:size], raw[size:]


def head_and(body: bytes = b"", *, line: str = "POST /v0/boxes/a HTTP/1.1", **headers: str) -> bytes:
    """A request as bytes, with a Host. Header names are given with underscores for hyphens."""
    fields = {"Host": "x", **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [line, *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
