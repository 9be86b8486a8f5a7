"""Blocking connections to the shards of a running server on the same machine."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from gateway.shards.unix_sockets import connectable_path
from streams.protocol import wire
from streams.protocol.errors import BY_CODE, Busy, Refused, ShardUnavailable, StreamsError

#: Before it answers, a shard writes its unsealed records to disk: up to half a gigabyte.
_TIMEOUT_S: Final = 600.0
#: A shard drops an export after a minute without renewal.
_RENEW_S: Final = 10.0


class ShardLink:
    """One connection to a shard; one request at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        self._receiver = wire.Receiver()
        self._mutex = threading.Lock()
        try:
            with connectable_path(path) as short:
                self._socket.connect(short)
        except OSError as error:
            self._socket.close()
            raise ShardUnavailable(f"{path}: cannot connect to the shard ({error.strerror})") from error

    def __repr__(self) -> str:
        return f"<ShardLink {self._path}>"

    def close(self) -> None:
        self._socket.close()

    def ask(self, op: int, **fields: object) -> dict[str, Any]:
        """Send a request and return the reply. Raises the error that the shard answers with."""
        body = msgspec.json.encode(fields)
        head = wire.head_encoder.encode(wire.RequestHead())
        try:
            with self._mutex:
                self._socket.sendall(wire.frame(wire.REQUEST, 0, op, 1, head, len(body)) + body)
                message = self._receive()
        except (OSError, wire.WireError) as error:
            raise ShardUnavailable(f"{self._path}: the connection to the shard failed ({error})") from error
        if message.flags & wire.FAILED:
            code, text, _ = msgspec.json.decode(message.body)
            raise BY_CODE.get(code, StreamsError)(f"{self._path.stem}: {text}")
        reply: dict[str, Any] = msgspec.json.decode(message.body)
        return reply

    def _receive(self) -> wire.Message:
        while True:
            count = self._socket.recv_into(self._receiver.space())
            if count == 0:
                raise wire.WireError("the shard closed the connection")
            for message in self._receiver.parse(count):
                return message


class ShardExports:
    """Exports of all shards under one id, renewed until the block ends."""

    def __init__(self, sockets: list[Path], id: str) -> None:
        self._sockets = sockets
        self._id = id
        self._links: list[ShardLink] = []
        self._stop = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="renew", daemon=True)
        self.servers: list[dict[str, Any]] = []
        self.facts: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<ShardExports {self._id}: {len(self.facts)} of {len(self._sockets)} shards>"

    @property
    def usual_bytes_per_s(self) -> int:
        """The server's own limit for upkeep work; 0 is no limit."""
        return int(self.servers[0]["upkeep_bytes_per_s"])

    def loads(self) -> list[dict[str, Any] | None]:
        """Return the ack times of each shard (`load` of `shard/server/server.py`); None if not reported."""
        return [self._load(link) for link in self._links]

    def _load(self, link: ShardLink) -> dict[str, Any] | None:
        try:
            load: dict[str, Any] | None = link.ask(wire.OP_EXPORT_RENEW, id=self._id).get("load")
        except (Busy, Refused):
            return None
        return load

    def __enter__(self) -> ShardExports:
        self.open()
        return self

    def open(self) -> None:
        try:
            for path in self._sockets:
                link = ShardLink(path)
                self._links.append(link)
                self.servers.append(link.ask(wire.OP_HELLO))
            for link in self._links:  # before the first export: see `shard/transfer/move_hold.py`
                with suppress(Refused):  # earlier versions do not support `holds_moves`
                    link.ask(wire.OP_EXPORT, id=self._id, holds_moves=True)
            self._renewal.start()
            for link in self._links:
                self.facts.append(link.ask(wire.OP_EXPORT, id=self._id))
            for link in self._links:
                with suppress(Refused):
                    link.ask(wire.OP_EXPORT_RENEW, id=self._id, holds_moves=False)
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        for link in self._links:
            try:
                link.ask(wire.OP_EXPORT_END, id=self._id)
            except (Busy, Refused):  # the export expired, or the shard stopped, which ends it too
                pass
            link.close()

    def _renew(self) -> None:
        """Renew the exports. If that fails, they expire, their files are deleted, and the command fails."""
        while not self._stop.wait(_RENEW_S):
            for link in list(self._links):
                self._load(link)
