"""One HTTP/2 connection by prior knowledge, frame by frame, for what no client library lets a test do."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import h2.config
import h2.connection
import h2.events


class H2c:
    """Blocking. What comes is kept by stream, and waited for by `until`."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._host = f"127.0.0.1:{port}"
        self.status: dict[int, int] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.is_closed = False
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(10 << 20)
        self.flush()

    def __enter__(self) -> H2c:
        return self

    def __exit__(self, *failure: object) -> None:
        self._sock.close()

    def flush(self) -> None:
        self._sock.sendall(self.connection.data_to_send())

    def request(self, method: str, path: str, headers: Mapping[str, str], *, ends: bool) -> int:
        stream = self.connection.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", self._host)]
        self.connection.send_headers(stream, [*pseudo, *headers.items()], end_stream=ends)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        for at in range(0, max(1, len(data)), 16_000):
            part = data[at : at + 16_000]
            self.connection.send_data(stream, part, end_stream=ends and at + 16_000 >= len(data))
        self.flush()

    def send_raw(self, data: bytes) -> None:
        """Bytes of frames that the library would not send."""
        self.flush()
        self._sock.sendall(data)

    def until(self, condition: Any) -> None:
        while not condition():
            data = self._sock.recv(65_536)
            if not data:
                self.is_closed = True
                assert condition(), "the server has closed the connection"
                return
            for event in self.connection.receive_data(data):
                self._note(event)
            self.flush()

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            headers = {str(name): str(value) for name, value in event.headers or ()}
            self.status[event.stream_id or 0] = int(headers.pop(":status"))
            self.headers[event.stream_id or 0] = headers
        elif isinstance(event, h2.events.DataReceived):
            stream = event.stream_id or 0
            self.data[stream] = self.data.get(stream, b"") + (event.data or b"")
            self.connection.acknowledge_received_data(event.flow_controlled_length or 0, stream)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id or 0)

    def answered(self, stream: int) -> bytes:
        """All of an answer's body, once it has ended."""
        self.until(lambda: stream in self.ended)
        return self.data.get(stream, b"")
