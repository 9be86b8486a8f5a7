"""A real S3-protocol server on loopback, and a proxy in front of it that misbehaves when told to.

    cold store under test ──HTTP──► Proxy (faults, by request) ──HTTP──► ObjectServer (moto in a thread)

Both listen before their constructor returns, on ports the kernel chose, so nobody waits for them to be ready.
`ObjectServer` is also the back door: it looks at, replaces and damages objects without the code under test.

`Proxy` relays one request at a time on each connection. A fault is for the next `times` requests, or until
`heal`; while it is `gone` nothing listens and the kernel refuses. What arrived is kept in `requests`.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_bucket_numbers = itertools.count(1)
_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "keep-alive")
#: moto wants requests to be signed and does not look at the signature.
_ANYONE = "AWS4-HMAC-SHA256 Credential=someone/20260101/us-east-1/s3/aws4_request"
#: A slow answer is sent in this many pieces a second.
_PIECES_PER_S = 50


class ObjectServer:
    """moto's S3 behind werkzeug's threaded server. Buckets are cheap; take a new one for each test."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="object server", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ObjectServer 127.0.0.1:{self.port}>"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def new_bucket(self) -> str:
        bucket = f"bucket-{next(_bucket_numbers)}"
        self._ask("PUT", f"/{bucket}")
        return bucket

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._ask("PUT", f"/{bucket}/{key}", content)

    def get(self, bucket: str, key: str) -> bytes:
        return self._ask("GET", f"/{bucket}/{key}")

    def keys(self, bucket: str) -> list[str]:
        return re.findall(r"<Key>(.*?)</Key>", self._ask("GET", f"/{bucket}?list-type=2").decode())

    def unfinished_uploads(self, bucket: str) -> int:
        return self._ask("GET", f"/{bucket}?uploads").count(b"<UploadId>")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"authorization": _ANYONE})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, f"{method} {path}: {answer.status} {content!r}"
            return content
        finally:
            connection.close()


@dataclass
class _Fault:
    kind: str
    amount: int
    times: int | None
    method: str | None


class Proxy:
    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.requests: list[str] = []
        self._faults: list[_Fault] = []
        self._connections: set[socket.socket] = set()
        self._healed = threading.Event()
        self._thread: threading.Thread
        self._mutex = threading.Lock()
        held = socket.create_server(("127.0.0.1", 0))
        self.port = int(held.getsockname()[1])
        self._listen(held)

    def __repr__(self) -> str:
        return f"<Proxy 127.0.0.1:{self.port}: {self._faults}, {len(self.requests)} requests>"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What a test tells it to do. `method` narrows a fault to requests of that method.

    def answer_500(self, times: int | None = None, *, method: str | None = None) -> None:
        self._add(_Fault("error", 500, times, method))

    def answer(self, status: int, times: int | None = None, *, method: str | None = None) -> None:
        self._add(_Fault("error", status, times, method))

    def reset_after(self, body_bytes: int, times: int | None = None, *, method: str | None = None) -> None:
        """Send the head and this many bytes of the answer's body, then reset the connection."""
        self._add(_Fault("reset", body_bytes, times, method))

    def reset_upload_after(self, body_bytes: int, times: int | None = None) -> None:
        """Take this many bytes of the request's body, then reset the connection."""
        self._add(_Fault("reset upload", body_bytes, times, "PUT"))

    def lose_answer(self, times: int | None = None, *, method: str | None = None) -> None:
        """Let the request take effect, then reset the connection instead of answering."""
        self._add(_Fault("lose answer", 0, times, method))

    def slow(self, bytes_per_s: int, *, method: str | None = None) -> None:
        self._add(_Fault("slow", bytes_per_s, None, method))

    def hang(self, times: int | None = None, *, method: str | None = None) -> None:
        """Take the request and never answer."""
        self._add(_Fault("hang", 0, times, method))

    def heal(self) -> None:
        """Behave again; what hangs is reset, what trickles is let go, and what was gone comes back."""
        if not self._thread.is_alive():
            self._held.listen(128)
            self._listen(self._held)
        with self._mutex:
            self._faults.clear()
            self._healed.set()
            self._healed = threading.Event()

    def vanish(self) -> None:
        """Stop listening and reset every connection. The port stays ours: connecting to it is refused."""
        if not self._thread.is_alive():
            return
        self._stop_listening()
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", self.port))

    def close(self) -> None:
        self.heal()
        self._stop_listening()

    # How it is done.

    def _add(self, fault: _Fault) -> None:
        with self._mutex:
            self._faults.append(fault)

    def _listen(self, listening: socket.socket) -> None:
        self._held = listening
        self._server = _Server(self, listening)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="proxy", daemon=True
        )
        self._thread.start()

    def _stop_listening(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._held.close()
        with self._mutex:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def next_fault(self, method: str, path: str) -> tuple[_Fault | None, threading.Event]:
        with self._mutex:
            self.requests.append(f"{method} {path}")
            for fault in self._faults:
                if fault.method in (None, method):
                    if fault.times is not None:
                        fault.times -= 1
                        if fault.times == 0:
                            self._faults.remove(fault)
                    return fault, self._healed
            return None, self._healed

    def opened(self, connection: socket.socket) -> None:
        with self._mutex:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._mutex:
            self._connections.discard(connection)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, proxy: Proxy, listening: socket.socket) -> None:
        super().__init__(listening.getsockname(), _Relay, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.proxy = proxy


class _Relay(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        self.server.proxy.opened(self.connection)
        try:
            super().handle()
        except OSError:
            pass  # The client or a fault ended the connection.
        finally:
            self.server.proxy.closed(self.connection)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _relay(self) -> None:
        fault, healed = self.server.proxy.next_fault(self.command, self.path)
        kind = fault.kind if fault else ""
        amount = fault.amount if fault else 0
        length = int(self.headers.get("content-length", 0))
        if kind == "reset upload":
            self.rfile.read(min(length, amount))
            self._reset()
        body = self.rfile.read(length)
        if kind == "hang":
            healed.wait()
            self._reset()
        if kind == "error":
            self.wfile.write(b"HTTP/1.1 %d Told So\r\ncontent-length: 0\r\n\r\n" % amount)
            return
        head, content = self._ask_upstream(body)
        if kind == "lose answer":
            self._reset()
        if kind == "reset":
            self.wfile.write(head + content[:amount])
            self._reset()
        if kind == "slow":
            self._trickle(head + content, amount // _PIECES_PER_S, healed)
        else:
            self.wfile.write(head + content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _relay

    def _ask_upstream(self, body: bytes) -> tuple[bytes, bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream_port, timeout=30)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        length = answer.getheader("content-length") if self.command == "HEAD" else str(len(content))
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}", f"content-length: {length}"]
        kept = [header for header in answer.getheaders() if header[0].lower() not in _HOP_BY_HOP]
        lines += [f"{name}: {value}" for name, value in kept]
        return "\r\n".join([*lines, "", ""]).encode("latin-1"), content

    def _trickle(self, content: bytes, piece_bytes: int, healed: threading.Event) -> None:
        for start in range(0, len(content), piece_bytes):
            self.wfile.write(content[start : start + piece_bytes])
            if healed.wait(1 / _PIECES_PER_S):
                self.wfile.write(content[start + piece_bytes :])
                return

    def _reset(self) -> NoReturn:
        """Close with unsent data thrown away, which the other side sees as a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for end in (self.rfile, self.wfile, self.connection):
            end.close()
        raise ConnectionResetError


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own, reached by the code under test only through a proxy of its own."""

    server: ObjectServer
    proxy: Proxy
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/some/prefix"

    def put(self, name: str, content: bytes) -> None:
        self.server.put(self.name, f"some/prefix/{name}", content)

    def get(self, name: str) -> bytes:
        return self.server.get(self.name, f"some/prefix/{name}")


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A new bucket, with the environment set so that S3 clients made in this test go through its proxy."""
    proxy = Proxy(object_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    yield Bucket(object_server, proxy, object_server.new_bucket())
    proxy.close()
