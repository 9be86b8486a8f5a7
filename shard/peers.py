"""Peers that come over TCP: remote Spark executors and producers, each with a key (architecture §3).

A Unix socket is trusted by its directory's mode and by who is at the other end. A TCP peer is a stranger
until its first message, the hello, has brought a key; then every message is held to what the key allows,
exactly as over HTTP, and to boxes that this shard owns: a peer with an old map must not make a second box of
a name.

Bounds: `PEERS_MAX` connections, strangers included; `HELLO_S` and `HELLO_BYTES_MAX` for the hello; after it,
a message is at most a body and a little.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from streams.protocol import wire
from streams.protocol.appends import RecordLimits
from streams.protocol.bulk import Caller, States
from streams.protocol.commands import Append, Command
from streams.protocol.errors import Busy, Unauthorized
from streams.protocol.keys import Key, KeyRing
from streams.protocol.op_access import boxes_of, check_boxes, check_op
from streams.protocol.requests import decode_command
from streams.protocol.slots import slot_of

log = structlog.get_logger()

#: A connection costs a buffer of 256 KiB and a task; a thousand executors of one job fit.
PEERS_MAX = 1024
HELLO_S = 5.0
HELLO_BYTES_MAX = 4096
#: What a message has beside its body: names, a query, an idempotency key.
_HEAD_BYTES_MAX = 64 * 1024
#: A peer that has vanished without a word is noticed after a minute.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_EVERY_S, _KEEP_ALIVE_TIMES = 30, 10, 3


class Moved(Busy):
    """Another shard owns this box; read the map again (`GET /v0/placement`)."""

    code = "moved"


class _Map(msgspec.Struct):
    slots: list[tuple[int, int, int]]


class Peers:
    """What all TCP connections of a shard share."""

    def __init__(self, *, shard: int, keys_file: str, placement: str, body_bytes_max: int) -> None:
        self.shard = shard
        self.message_bytes_max = min(body_bytes_max + _HEAD_BYTES_MAX, wire.MESSAGE_BYTES_MAX)
        self._keys_file = keys_file
        self._ring = KeyRing.from_json(Path(keys_file).read_bytes())
        ranges = msgspec.json.decode(placement, type=_Map).slots
        own = [range(start, end) for start, end, owner in ranges if owner == shard]
        self._own = frozenset(itertools.chain.from_iterable(own))
        self._peers: set[Peer] = set()

    def __repr__(self) -> str:
        return f"<Peers {len(self._peers)} of {PEERS_MAX}>"

    def accept(self, sock: socket.socket) -> Peer | None:
        """None when there are too many already."""
        if len(self._peers) >= PEERS_MAX:
            log.warning("refused a connection over TCP: there are enough", peers=len(self._peers))
            return None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_TIMES)
        peer = Peer(self, sock)
        self._peers.add(peer)
        return peer

    def forget(self, peer: Peer) -> None:
        self._peers.discard(peer)

    def find(self, secret: bytes) -> Key:
        key = self._ring.find(secret.decode("utf-8", "replace"))
        if key is None:
            raise Unauthorized("hello: this key is not known here" if secret else "hello: it brings no key")
        return key

    def owns(self, box: str) -> bool:
        return slot_of(box) in self._own

    def read_keys_again(self) -> None:
        """Peers whose key is gone, or allows something else now, lose their connection."""
        self._ring = KeyRing.from_json(Path(self._keys_file).read_bytes())
        revoked = [peer for peer in self._peers if peer.key is not None and not self._ring.holds(peer.key)]
        for peer in revoked:
            peer.cut_off()
        log.info("keys read again", keys=len(self._ring.keys), connections_ended=len(revoked))


class Peer:
    """One connection over TCP; a stranger until it has a key."""

    def __init__(self, peers: Peers, sock: socket.socket) -> None:
        self._peers = peers
        self._sock = sock
        self.key: Key | None = None

    def __repr__(self) -> str:
        return f"<Peer {'with a key' if self.key else 'unknown'}>"

    def greet(self, message: wire.Message) -> bytes:
        """The answer to its hello, which alone a stranger may send."""
        if message.op != wire.OP_HELLO:
            raise Unauthorized("hello: must come first, with a key")
        self.key = self._peers.find(message.body)
        return b'{"shard":%d}' % self._peers.shard

    @property
    def message_bytes_max(self) -> int:
        return self._peers.message_bytes_max

    def check(self, op: int) -> None:
        """Raises `Forbidden` unless its key allows this op; comes before anything else is done for it."""
        assert self.key is not None
        check_op(self.key.grant, op)

    def command_of(self, message: wire.Message, limits: RecordLimits) -> Command:
        """What it asks for, if that is for boxes of its key and of this shard."""
        assert self.key is not None
        command = decode_command(message.op, message.head, message.body, limits, self.key.grant)
        if message.op in wire.TXN_OPS:
            command = msgspec.structs.replace(command, caller=Caller(self.key.id, self.key.grant))
        boxes = boxes_of(command)
        check_boxes(self.key.grant, message.op, boxes)
        if not isinstance(command, States):  # it asks for what is here
            self._check_owned(boxes or ())
        return command

    def check_writes(self, writes: Sequence[Append]) -> None:
        """Packed columns, which are as many writes as there are boxes."""
        assert self.key is not None
        for write in writes:
            self.key.grant.require_name(write.box)
        self._check_owned([write.box for write in writes])

    def _check_owned(self, boxes: Sequence[str]) -> None:
        for box in boxes:
            if not self._peers.owns(box):
                raise Moved(box=box)

    def cut_off(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone already
