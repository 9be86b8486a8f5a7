"""The shard wire from a plain blocking socket, without the gateway: for Spark tasks and heavy producers. No
event loop is needed. On the server's machine it uses the shards' Unix sockets; from another one their TCP
addresses, if the server has some (`STREAMS_SHARD_HOST`), with the key that it uses over HTTP.

    with ShardWriter("http://127.0.0.1:4000") as writer:
        writer.append("orders", [{"item": "tea"}])

Which shard owns a box is asked of a gateway (`GET /v0/placement`). The map changes only while the whole
server is down, and then every connection breaks. So a writer asks *after* it has connected, and uses the
connection only when the map still says the same: a box is never written to a shard that does not own it. A
shard that says `moved` is believed too.

One connection a shard, one request at a time on each; threads may share a writer. What a lost connection
leaves open is repeated with the same key, as over HTTP.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from streams.client import answers
from streams.client._sync.client import Client
from streams.client._sync.producer import Producer
from streams.client.answers import Appended, BoxState, Entry, Placement
from streams.client.batching import Bounds
from streams.client.errors import AnswerLost, Unreachable
from streams.client.retry import Retry
from streams.protocol import wire
from streams.protocol.errors import BY_CODE, BoxNotFound, Busy, Refused, StreamsError, Uncertain
from streams.protocol.names import check_box_name
from streams.protocol.requests import failure_decoder
from streams.protocol.slots import slot_of

_CONNECT_S: Final = 5.0
#: As a gateway waits.
_ANSWER_S: Final = 60.0
#: A Unix socket's path is at most 107 bytes; longer ones are reached through the directory's descriptor.
_PATH_BYTES_MAX: Final = 107


class Moved(Busy):
    """The box belongs to another shard now; nothing was done."""

    code = "moved"


class _Link:
    """One connection to one shard, at the path of a Unix socket or at host:port."""

    def __init__(self, path: str, key: str = "") -> None:
        self.lock = threading.Lock()
        self._path = path
        self._key = key
        self._sock: socket.socket | None = None
        self._receiver = wire.Receiver()
        self._ids = 0

    def __repr__(self) -> str:
        return f"<_Link {self._path} {'up' if self._sock else 'down'}>"

    @property
    def is_up(self) -> bool:
        return self._sock is not None

    def connect(self) -> None:
        """`Unreachable` when there is nobody. The hello is answered by the shard itself: that a connection
        was accepted proves nothing, for the supervisor keeps the socket while a shard is starting again."""
        try:
            sock = _connected(self._path)
        except OSError as error:
            raise Unreachable(f"{self._path}: {error.strerror or error}", path=self._path) from error
        self._sock, self._receiver = sock, wire.Receiver()
        try:
            self.call(wire.OP_HELLO, b"", self._key.encode(), answer_s=_CONNECT_S)
        except Refused:
            self.close()
            raise
        except Uncertain as error:  # a hello changes nothing
            raise Unreachable(f"{self._path}: {error.message}", path=self._path) from error

    def call(self, op: int, head: bytes, body: bytes, *, answer_s: float = _ANSWER_S) -> wire.Message:
        """Raises what the shard raised, or `AnswerLost`. Without a connection, `Unreachable`."""
        sock = self._sock
        if sock is None:
            raise Unreachable(f"{self._path}: not connected", path=self._path)
        self._ids += 1
        try:
            sock.settimeout(answer_s)
            _send_all(sock, wire.frame(wire.REQUEST, 0, op, self._ids, head, len(body)), body)
            message = self._receive(sock)
        except (OSError, wire.WireError) as error:
            self.close()
            raise AnswerLost(f"{self._path}: no answer came ({error})", path=self._path) from error
        except BaseException:  # in the middle of a message, nobody can go on here
            self.close()
            raise
        if message.flags & wire.FAILED:
            failure = failure_decoder.decode(message.body)
            kind = Moved if failure.code == Moved.code else BY_CODE.get(failure.code, StreamsError)
            raise kind(failure.message, **failure.detail)
        return message

    def _receive(self, sock: socket.socket) -> wire.Message:
        while True:
            count = sock.recv_into(self._receiver.space())
            if count == 0:
                raise ConnectionResetError("the shard closed the connection")
            for message in self._receiver.received(count):
                if message.kind == wire.REPLY and message.id == self._ids:
                    return message

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class ShardWriter:
    """Appends straight to the shards that own the boxes."""

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        retry: Retry | None = None,
        over_tcp: bool | None = None,
    ) -> None:
        """`over_tcp` says how to reach the shards; left out, by their Unix sockets where they can be seen."""
        self.retry = retry or Retry()
        self._client = Client(url, key=key, retry=self.retry)
        self._key = key or os.environ.get("STREAMS_KEY") or ""
        self._over_tcp = over_tcp
        self._lock = threading.Lock()
        self._placement: Placement | None = None
        self._slots = b""
        self._links: dict[str, _Link] = {}

    def __repr__(self) -> str:
        up = sum(link.is_up for link in self._links.values())
        return f"<ShardWriter {self._client.url}, {up} of {len(self._links)} shards connected>"

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for link in list(self._links.values()):
            with link.lock:
                link.close()
        self._client.close()

    # -- writing

    def append(
        self, box: str, entries: Iterable[Entry | Any], *, idempotency_key: str | None = None, **fields: Any
    ) -> Appended:
        """As `Box.append_batch`: all or none, with seqs in a row, once. `fields` are those of the HTTP
        body."""
        return self.append_encoded(
            box,
            [answers.encode_entry(entry) for entry in entries],
            key=idempotency_key or uuid.uuid4().hex,
            fields=fields,
        )

    def append_encoded(
        self,
        box: str,
        records: list[bytes],
        *,
        key: str,
        fields: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> Appended:
        """The same with each record as the JSON of an `Entry`."""
        body = answers.append_body(records, key, fields)
        message = self._call(wire.OP_APPEND, box, {"return_seqs": "false"}, body, retry or self.retry)
        return answers.decode(message.body, Appended)

    def state(self, box: str) -> BoxState:
        message = self._call(wire.OP_GET_STATE, box, {"touch": "false"}, b"", self.retry)
        return answers.decode(message.body, BoxState)

    def producer(self, box: str, *, settle_s: float = 60.0, **bounds: Any) -> Producer:
        """As `Box.producer`, over the shard's own socket."""
        return Producer(_DirectBox(self, check_box_name(box)), Bounds(**bounds), settle_s=settle_s)

    # -- finding the way

    def _call(self, op: int, box: str, query: Mapping[str, str], body: bytes, retry: Retry) -> wire.Message:
        """Repeats as the HTTP client does; everything sent from here may be repeated."""
        head = wire.head_encoder.encode(wire.RequestHead(check_box_name(box), urlencode(query)))
        began_s = time.monotonic()
        attempt = 0
        was_uncertain = False
        while True:
            try:
                link = self._link_to(box)
                with link.lock:
                    return link.call(op, head, body)
            except StreamsError as error:
                was_uncertain = was_uncertain or isinstance(error, Uncertain)
                if isinstance(error, Moved | Unreachable):
                    self._forget()
                pause_s = retry.pause_s(
                    error,
                    attempt=attempt,
                    spent_s=time.monotonic() - began_s,
                    is_repeatable=True,
                    luck=random.random(),
                )
                if pause_s is None:
                    if was_uncertain and isinstance(error, Busy):
                        raise AnswerLost(f"an attempt got no answer, and then: {error.message}") from error
                    raise
            attempt += 1
            time.sleep(pause_s)

    def _link_to(self, box: str) -> _Link:
        """A connection to the owner that was made before the map was read which says so."""
        slot = slot_of(box)
        for _ in range(3):
            placement = self._known_placement()
            path, key = self._way_to(placement, self._slots[slot])
            with self._lock:
                link = self._links.setdefault(path, _Link(path, key))
            with link.lock:
                if link.is_up:
                    return link
                link.connect()
            self._forget()
            if self._known_placement() == placement:
                return link
            with link.lock:
                link.close()
        raise Busy("the map of shards keeps changing; try again")

    def _way_to(self, placement: Placement, shard: int) -> tuple[str, str]:
        """Where the shard is, and the key to say there; a Unix socket wants none."""
        path = placement.sockets[shard]
        if self._over_tcp is False or (self._over_tcp is None and os.path.exists(path)):
            return path, ""
        if not placement.addresses:
            raise Unreachable(
                f"{path} is on another machine, and the shards do not listen on TCP (STREAMS_SHARD_HOST)",
                path=path,
            )
        host, _, port = placement.addresses[shard].rpartition(":")
        return f"{host or urlsplit(self._client.url).hostname}:{port}", self._key

    def _known_placement(self) -> Placement:
        with self._lock:
            if self._placement is not None:
                return self._placement
        placement = self._client.placement()
        slots = bytearray()
        for start, end, shard in placement.slots:
            slots += bytes([shard]) * (end - start)
        with self._lock:
            self._placement, self._slots = placement, bytes(slots)
        return placement

    def _forget(self) -> None:
        with self._lock:
            self._placement = None


class _DirectBox:
    """What a producer sends its batches to."""

    def __init__(self, writer: ShardWriter, name: str) -> None:
        self._writer = writer
        self._name = name

    def __repr__(self) -> str:
        return f"<_DirectBox {self._name}>"

    def append_encoded(self, records: list[bytes], *, key: str, retry: Retry | None = None) -> Appended:
        return self._writer.append_encoded(self._name, records, key=key, retry=retry)

    def idempotency_window_ms(self) -> int | None:
        try:
            return self._writer.state(self._name).config.idempotency_window_ms
        except BoxNotFound:
            return None


def _send_all(sock: socket.socket, head: bytes, body: bytes) -> None:
    """Both in one call when the socket takes them; a body is never copied to be framed."""
    sent = sock.sendmsg([head, body])
    if sent < len(head):
        sock.sendall(head[sent:])
        sent = len(head)
    if sent < len(head) + len(body):
        sock.sendall(memoryview(body)[sent - len(head) :])


def _connected(path: str) -> socket.socket:
    """A connection to a path, or to host:port."""
    if not path.startswith("/"):
        host, _, port = path.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        with _connectable(path) as short:
            sock.connect(short)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def _connectable(path: str) -> Iterator[str]:
    """The path, or a shorter one to the same socket."""
    if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
