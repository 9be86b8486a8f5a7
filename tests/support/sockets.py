"""A blocking WebSocket client, over wsproto."""

from __future__ import annotations

import json
import socket
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

PATIENCE_S = 120.0


class Refused(Exception):
    """The server answered the handshake with a status of its own."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.error = json.loads(body)["error"]


class Closed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class WebSocket:
    def __init__(self, port: int, path: str = "/v0/ws", **headers: str) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: list[Any] = []
        self._text = ""
        host = headers.pop("Host", f"127.0.0.1:{port}")
        extra = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        request = Request(host=host, target=path, extra_headers=extra)
        self._sock.sendall(self._protocol.send(request))
        first = self._next()
        if isinstance(first, RejectConnection):
            body = b""
            while True:
                part = self._next()
                assert isinstance(part, RejectData)
                body += part.data
                if part.body_finished:
                    self._sock.close()
                    raise Refused(first.status_code, body)
        assert isinstance(first, AcceptConnection)

    def _next(self) -> Any:
        while not self._events:
            data = self._sock.recv(65536)
            self._protocol.receive_data(data or None)
            self._events += list(self._protocol.events())
        return self._events.pop(0)

    def send(self, message: Any) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        self._sock.sendall(self._protocol.send(TextMessage(text)))

    def send_bytes(self, message: bytes) -> None:
        self._sock.sendall(self._protocol.send(BytesMessage(message)))

    def receive_text(self) -> str:
        while True:
            event = self._next()
            if isinstance(event, TextMessage):
                self._text += event.data
                if event.message_finished:
                    text, self._text = self._text, ""
                    return text
            elif isinstance(event, Ping):
                self._sock.sendall(self._protocol.send(event.response()))
            elif isinstance(event, CloseConnection):
                self._sock.sendall(self._protocol.send(event.response()))
                raise Closed(event.code)

    def receive(self) -> Any:
        return json.loads(self.receive_text())

    def ask(self, message: Any) -> Any:
        """Sends a command; its answer, which must be the next message."""
        self.send(message)
        return self.receive()

    def until(self, op: str) -> Any:
        while True:
            message = self.receive()
            if message["op"] == op:
                return message

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
