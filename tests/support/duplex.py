"""One full-duplex HTTP/1.1 exchange: a request whose body stays open while its answer arrives.

No client library does this over HTTP/1.1 except that of the Rust SDK of S2.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping


class Duplex:
    """Blocking. `send` sends a chunk of the body, `until` reads the answer as far as a test wants it."""

    def __init__(
        self,
        port: int,
        path: str,
        headers: Mapping[str, str],
        *,
        length: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """`length`: the body has this Content-Length, and no chunks."""
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._host = f"127.0.0.1:{port}"
        self._is_chunked = True
        self._received = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""
        self.has_ended = False
        self.request(path, headers, length=length)

    def __enter__(self) -> Duplex:
        return self

    def __exit__(self, *failure: object) -> None:
        self._sock.close()

    def request(self, path: str, headers: Mapping[str, str], *, length: int | None = None) -> None:
        """Sends the head of the next request; the answer before it must have ended."""
        self._is_chunked = length is None
        self.status, self.headers, self.data, self.has_ended = 0, {}, b"", False
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"POST {path} HTTP/1.1", f"host: {self._host}", framing]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.send_raw(("\r\n".join(lines) + "\r\n\r\n").encode())

    def send(self, data: bytes, *, ends: bool = False) -> None:
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"0\r\n\r\n" if ends else b""
        self.send_raw(data)

    def send_raw(self, data: bytes) -> None:
        """Bytes that are not framed."""
        self._sock.sendall(data)

    def close_sending(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def until(self, condition: Callable[[], bool]) -> None:
        """Reads on until the condition is true of what has come."""
        self._parse()
        while not condition():
            data = self._sock.recv(65_536)
            assert data, "the server has closed the connection"
            self._received += data
            self._parse()

    def answered(self) -> bytes:
        """All of the answer's body, once it has ended."""
        self.until(lambda: self.has_ended)
        return self.data

    def closed(self) -> bool:
        """Return True if the server closes the connection, False if it sends more."""
        return not self._sock.recv(1)

    def _parse(self) -> None:
        if not self.status:
            head, found, rest = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            self._received = rest
            first, *lines = head.decode().split("\r\n")
            self.status = int(first.split(" ")[1])
            if self.status == 100:
                self.status = 0
                self._parse()
                return
            self.headers = dict(line.lower().split(": ", 1) for line in lines)
        if "content-length" in self.headers:
            self.data += self._received
            self._received = b""
            self.has_ended = len(self.data) == int(self.headers["content-length"])
            return
        while not self.has_ended:
            line, found, rest = self._received.partition(b"\r\n")
            size = int(line, 16) if found else 0
            if not found or len(rest) < size + 2:
                return
            self.data += rest[:size]
            self._received = rest[size + 2 :]
            self.has_ended = size == 0
