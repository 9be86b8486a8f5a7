"""One connection to one shard, from a plain blocking socket.

Several requests may be in flight at once; answers come in the order in which they are ready, and the link
keeps each for its caller.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from streams.client.errors import AnswerLost, Unreachable, class_of
from streams.protocol import wire
from streams.protocol.errors import Busy, Refused, StreamsError, Uncertain
from streams.protocol.messages.requests import failure_decoder
from streams.protocol.payloads.packed import Buffer

CONNECT_S: Final = 5.0
#: As a gateway waits.
ANSWER_S: Final = 60.0
#: A Unix socket's path is at most 107 bytes; longer ones are reached through the directory's descriptor.
_PATH_BYTES_MAX: Final = 107


class BoxMoved(Busy):
    """The box belongs to another shard now; nothing was done."""

    code = "moved"


class Link:
    """One connection to one shard, at the path of a Unix socket or at host:port. The caller holds its
    `lock`."""

    def __init__(self, path: str, key: str = "") -> None:
        self.lock = threading.Lock()
        self._path = path
        self._key = key
        self._sock: socket.socket | None = None
        self._receiver = wire.Receiver()
        self._ids = 0
        #: Requests without an answer yet, and answers that nobody has taken yet: together at most as many as
        #: their senders have on the way.
        self._open_ids: set[int] = set()
        self._answers: dict[int, wire.Message] = {}
        #: How often it was connected. An answer to a request of another connection will never come.
        self.life = 0

    def __repr__(self) -> str:
        return f"<Link {self._path} {'up' if self._sock else 'down'}, {len(self._open_ids)} on the way>"

    @property
    def is_up(self) -> bool:
        return self._sock is not None

    def connect(self) -> None:
        """`Unreachable` when there is nobody. The hello is answered by the shard itself: that a connection
        was accepted proves nothing, for the supervisor keeps the socket while a shard is starting again."""
        try:
            sock = _open_socket(self._path)
        except OSError as error:
            raise Unreachable(f"{self._path}: {error.strerror or error}", path=self._path) from error
        self._sock, self._receiver = sock, wire.Receiver()
        self._open_ids, self._answers = set(), {}
        self.life += 1
        try:
            self.call(wire.OP_HELLO, b"", (self._key.encode(),), answer_s=CONNECT_S)
        except Refused:
            self.close()
            raise
        except Uncertain as error:  # a hello changes nothing
            raise Unreachable(f"{self._path}: {error.message}", path=self._path) from error

    def locked_call(self, op: int, head: bytes, body: Sequence[Buffer]) -> wire.Message:
        """Takes the lock and calls."""
        with self.lock:
            return self.call(op, head, body)

    def call(
        self, op: int, head: bytes, body: Sequence[Buffer], *, answer_s: float = ANSWER_S
    ) -> wire.Message:
        """Raises what the shard raised, or `AnswerLost`. Without a connection, `Unreachable`."""
        return self.wait(self.send(op, head, body, answer_s=answer_s), answer_s=answer_s)

    def send(self, op: int, head: bytes, body: Sequence[Buffer], *, answer_s: float = ANSWER_S) -> int:
        """Sends a request; its number is for `wait`."""
        sock = self._sock
        if sock is None:
            raise Unreachable(f"{self._path}: not connected", path=self._path)
        self._ids += 1
        views = [memoryview(piece).cast("B") for piece in body]
        frame = wire.frame(wire.REQUEST, 0, op, self._ids, head, sum(map(len, views)))
        with self._broken_by_failure():
            sock.settimeout(answer_s)
            _send_all(sock, [memoryview(frame), *views])
        self._open_ids.add(self._ids)
        return self._ids

    def wait(self, id: int, *, answer_s: float = ANSWER_S) -> wire.Message:
        """The answer to a request, however many others come before it."""
        sock = self._sock
        if sock is None or (id not in self._open_ids and id not in self._answers):
            raise AnswerLost(f"{self._path}: the connection was lost", path=self._path)
        with self._broken_by_failure():
            sock.settimeout(answer_s)
            while id not in self._answers:
                count = sock.recv_into(self._receiver.space())
                if count == 0:
                    raise ConnectionResetError("the shard closed the connection")
                for message in self._receiver.parse(count):
                    if message.kind == wire.REPLY and message.id in self._open_ids:
                        self._open_ids.remove(message.id)
                        self._answers[message.id] = message
        message = self._answers.pop(id)
        if message.flags & wire.FAILED:
            failure = failure_decoder.decode(message.body)
            raise error_of_failure(failure.code, failure.message, failure.detail)
        return message

    @contextmanager
    def _broken_by_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, wire.WireError) as error:
            self.close()
            raise AnswerLost(f"{self._path}: no answer came ({error})", path=self._path) from error
        except BaseException:  # in the middle of a message, nobody can go on here
            self.close()
            raise

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def error_of_failure(code: str, message: str, detail: dict[str, object]) -> StreamsError:
    """Return the error that a shard has reported."""
    kind = BoxMoved if code == BoxMoved.code else class_of(code, detail)
    return kind(message, **detail)


def _send_all(sock: socket.socket, pieces: list[memoryview]) -> None:
    """All in one call when the socket takes them; nothing is copied to be framed."""
    # Not `streams.unsent`: this socket blocks, so nothing is ever left to be sent later.
    sent_bytes = sock.sendmsg(pieces)
    for piece in pieces:
        if sent_bytes < len(piece):
            sock.sendall(piece[sent_bytes:])
            sent_bytes = 0
        else:
            sent_bytes -= len(piece)


def _open_socket(path: str) -> socket.socket:
    """A connection to a path, or to host:port."""
    if not path.startswith("/"):
        host, _, port = path.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_S)
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
