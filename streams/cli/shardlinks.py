"""The sockets of a running server's shards, from a plain blocking process on the same machine."""

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

#: A shard writes down what is not in segments before it answers: up to half a gigabyte.
_TIMEOUT_S: Final = 600.0
#: Exports lapse after a minute without a word.
_RENEW_S: Final = 10.0


class ShardLink:
    """One connection, one question at a time."""

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
            raise ShardUnavailable(f"{path}: the shard does not answer ({error.strerror})") from error

    def __repr__(self) -> str:
        return f"<ShardLink {self._path}>"

    def close(self) -> None:
        self._socket.close()

    def ask(self, op: int, **fields: object) -> dict[str, Any]:
        """The answer, or what it was refused with."""
        body = msgspec.json.encode(fields)
        head = wire.head_encoder.encode(wire.RequestHead())
        try:
            with self._mutex:
                self._socket.sendall(wire.frame(wire.REQUEST, 0, op, 1, head, len(body)) + body)
                message = self._receive()
        except (OSError, wire.WireError) as error:
            raise ShardUnavailable(f"{self._path}: the shard went away ({error})") from error
        if message.flags & wire.FAILED:
            code, text, _ = msgspec.json.decode(message.body)
            raise BY_CODE.get(code, StreamsError)(f"{self._path.stem}: {text}")
        found: dict[str, Any] = msgspec.json.decode(message.body)
        return found

    def _receive(self) -> wire.Message:
        while True:
            count = self._socket.recv_into(self._receiver.space())
            if count == 0:
                raise wire.WireError("it closed the connection")
            for message in self._receiver.received(count):
                return message


class Exported:
    """Exports of all shards under one id, kept alive until the block ends."""

    def __init__(self, sockets: list[Path], id: str) -> None:
        self._sockets = sockets
        self._id = id
        self._links: list[ShardLink] = []
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="renew", daemon=True)
        self.servers: list[dict[str, Any]] = []
        self.facts: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<Exported {self._id}: {len(self.facts)} of {len(self._sockets)} shards>"

    @property
    def usual_bytes_per_s(self) -> int:
        """How fast the server does such work by itself; 0 is without a limit."""
        return int(self.servers[0]["upkeep_bytes_per_s"])

    def loads(self) -> list[dict[str, Any] | None]:
        """How long each shard takes to ack (`load` of `shard/server/server.py`); None if it does not say."""
        return [self._load(link) for link in self._links]

    def _load(self, link: ShardLink) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] | None = link.ask(wire.OP_EXPORT_RENEW, id=self._id).get("load")
        except (Busy, Refused):
            return None
        return found

    def __enter__(self) -> Exported:
        self.open()
        return self

    def open(self) -> None:
        try:
            for path in self._sockets:
                link = ShardLink(path)
                self._links.append(link)
                self.servers.append(link.ask(wire.OP_HELLO))
            for link in self._links:  # before the first is captured: see `shard/transfer/move_hold.py`
                with suppress(Refused):  # a server of an earlier version holds nothing
                    link.ask(wire.OP_EXPORT, id=self._id, holds_moves=True)
            self._renewing.start()
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
        self._ended.set()
        for link in self._links:
            try:
                link.ask(wire.OP_EXPORT_END, id=self._id)
            except (Busy, Refused):  # it has lapsed, or the shard is gone and with it the export
                pass
            link.close()

    def _renew(self) -> None:
        """What does not renew lapses, and then the files that are read vanish; whoever reads notices that."""
        while not self._ended.wait(_RENEW_S):
            for link in list(self._links):
                self._load(link)
