"""Authenticates and limits peers over TCP: remote Spark executors and producers, each with a key.

A Unix socket is protected by its directory's mode and by a check of the peer's user. A TCP peer is a stranger
until it has sent a valid key in its first message, the hello. Then the shard checks every message against the
grants of the key, exactly as over HTTP, and against the boxes that it owns: a peer with an old slot map must
not create a second box of the same name.

Bounds: `PEERS_MAX` connections with a key, at most `KEY_PEERS_MAX` of one key; besides them, `STRANGERS_MAX`
connections without a key. A new stranger beyond that replaces the oldest one. A client with a key sends it in
its first message, so it is authenticated long before it could be replaced. The hello has `HELLO_S` seconds
and `HELLO_BYTES_MAX`; a later message is at most a body and `_HEAD_BYTES_MAX`. All of this leaves
`_DESCRIPTORS_KEPT` of the process's file descriptors to the log and the segments.
"""

from __future__ import annotations

import itertools
import resource
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import msgspec
import structlog

from streams.protocol import wire
from streams.protocol.access.keys import Key, KeyRing
from streams.protocol.access.rates import RequestRates
from streams.protocol.errors import Busy, Throttled, Unauthorized
from streams.protocol.messages.bulk import Caller, States
from streams.protocol.messages.commands import Append, Command
from streams.protocol.messages.op_access import boxes_of, check_boxes, check_op
from streams.protocol.messages.requests import decode_command
from streams.protocol.model.slots import slot_of
from streams.protocol.payloads.appends import RecordLimits

log = structlog.get_logger()

#: A connection costs a buffer of 256 KiB and a task.
PEERS_MAX = 1024
#: One key may use three quarters of `PEERS_MAX`; the rest is left to other keys.
KEY_PEERS_MAX = 768
#: At a thousand new connections a second, a client has a quarter of a second for its hello.
STRANGERS_MAX = 256
#: If an address has a quarter of all strangers, its next stranger replaces the oldest one of this address.
_ADDRESS_PART = 4
#: For log files, open segments, links of gateways and the files of a backup. Normally less than 100 are open.
_DESCRIPTORS_KEPT = 256
#: Minimum time between two warnings of one kind; each counts all occurrences since the last one.
_WARN_EVERY_S = 10.0
HELLO_S = 5.0
HELLO_BYTES_MAX = 4096
#: Bytes of a message beside its body: names, a query, an idempotency key.
_HEAD_BYTES_MAX = 64 * 1024
#: TCP keep-alive: a dead peer is detected after a minute.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_EVERY_S, _KEEP_ALIVE_TIMES = 30, 10, 3


class BoxMoved(Busy):
    """Another shard owns this box; read the map again (`GET /v0/placement`)."""

    code = "moved"


class SlotMap(msgspec.Struct):
    """The part of the placement that a shard needs."""

    slots: list[tuple[int, int, int]]


class RateLimitedWarning:
    """A warning that is logged at most once every `_WARN_EVERY_S`, with the number of occurrences."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._times = 0
        self._next_s = 0.0

    def __repr__(self) -> str:
        return f"<RateLimitedWarning {self._event!r}>"

    def note(self, **facts: object) -> None:
        self._times += 1
        now_s = monotonic()
        if now_s >= self._next_s:
            log.warning(self._event, times=self._times, **facts)
            self._times, self._next_s = 0, now_s + _WARN_EVERY_S


class Peers:
    """All TCP connections of a shard: their keys, limits and counts."""

    def __init__(self, *, shard: int, keys_file: str, placement: str, body_bytes_max: int) -> None:
        self.shard = shard
        self.message_bytes_max = min(body_bytes_max + _HEAD_BYTES_MAX, wire.MESSAGE_BYTES_MAX)
        self._keys_file = keys_file
        self._ring = KeyRing.from_json(Path(keys_file).read_bytes())
        ranges = msgspec.json.decode(placement, type=SlotMap).slots
        own = [range(start, end) for start, end, owner in ranges if owner == shard]
        self._own = frozenset(itertools.chain.from_iterable(own))
        #: Each shard admits its share of a key's rate, because the boxes of a key are spread over all shards.
        self.rates = RequestRates(len({owner for _, _, owner in ranges}))
        descriptors = max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _DESCRIPTORS_KEPT)
        self._strangers_max = max(1, min(STRANGERS_MAX, descriptors // 4))
        self._peers_max = max(1, min(PEERS_MAX, descriptors - self._strangers_max))
        #: Peers without a key, the oldest first: all of them, and by address.
        self._strangers: dict[Peer, None] = {}
        self._strangers_of: dict[str, dict[Peer, None]] = {}
        #: Peers with a key, and their number by key id.
        self._peers: set[Peer] = set()
        self._peers_of: Counter[str] = Counter()
        self._evictions = RateLimitedWarning(
            "closed the oldest connections over TCP without a key, to make room for new ones"
        )
        self._refusals = RateLimitedWarning("refused connections over TCP: the limit is reached")
        self.silent_connections = RateLimitedWarning("closed connections over TCP that sent no hello in time")
        self.broken_connections = RateLimitedWarning("connections over TCP ended with an error")
        self.accept_failures = RateLimitedWarning("cannot accept connections over TCP")

    def __repr__(self) -> str:
        return f"<Peers {len(self._peers)} of {self._peers_max}, {len(self._strangers)} strangers>"

    def accept(self, sock: socket.socket) -> Peer:
        """Return a new peer without a key. If there are too many of these, disconnect the oldest one."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_TIMES)
        peer = Peer(self, sock, _address_of(sock))
        if len(self._strangers) >= self._strangers_max:
            same = self._strangers_of.get(peer.address, {})
            oldest = next(iter(same if len(same) * _ADDRESS_PART >= self._strangers_max else self._strangers))
            self._evictions.note(address=oldest.address, strangers=len(self._strangers))
            self.forget(oldest)
            oldest.disconnect()
        self._strangers[peer] = None
        self._strangers_of.setdefault(peer.address, {})[peer] = None
        return peer

    def admit(self, peer: Peer, key: Key) -> None:
        """Admit a peer with its key. Raises `Throttled` if all peers, or those of this key, are at their
        limit."""
        of_key = self._peers_of[key.id]
        limit = ""
        if of_key >= KEY_PEERS_MAX:
            limit = f"key {key.id} has {of_key} connections to this shard, the limit of one key"
        elif len(self._peers) >= self._peers_max:
            limit = f"this shard has {len(self._peers)} connections over TCP, its limit"
        if limit:
            self._refusals.note(key=key.id, of_key=of_key, peers=len(self._peers))
            raise Throttled(f"hello: {limit}; close some, or try again later")
        self.forget(peer)
        self._peers.add(peer)
        self._peers_of[key.id] += 1
        peer.key = key

    def forget(self, peer: Peer) -> None:
        if peer in self._peers:
            assert peer.key is not None
            self._peers.discard(peer)
            self._peers_of[peer.key.id] -= 1
            if not self._peers_of[peer.key.id]:
                del self._peers_of[peer.key.id]
        elif self._strangers.pop(peer, peer) is None:
            same = self._strangers_of[peer.address]
            del same[peer]
            if not same:
                del self._strangers_of[peer.address]

    def find(self, secret: bytes) -> Key:
        key = self._ring.find(secret.decode("utf-8", "replace"))
        if key is None:
            raise Unauthorized(
                "hello: this key does not exist" if secret else "hello: the message has no key"
            )
        return key

    def owns(self, box: str) -> bool:
        return slot_of(box) in self._own

    def read_keys_again(self) -> None:
        """Read the keys again, and disconnect peers whose key was removed or has other grants now."""
        self._ring = KeyRing.from_json(Path(self._keys_file).read_bytes())
        revoked_peers = [
            peer for peer in self._peers if peer.key is not None and not self._ring.holds(peer.key)
        ]
        by_digest = {key.digest: key for key in self._ring.keys}
        for peer in self._peers:
            if peer.key is not None and self._ring.holds(peer.key):
                peer.key = by_digest[peer.key.digest]  # with its current limits
        for peer in revoked_peers:
            peer.disconnect()
        log.info("keys reloaded", keys=len(self._ring.keys), connections_ended=len(revoked_peers))


class Peer:
    """One connection over TCP; a stranger until it has sent a valid key."""

    def __init__(self, peers: Peers, sock: socket.socket, address: str) -> None:
        self._peers = peers
        self._sock = sock
        self.address = address
        self.key: Key | None = None

    def __repr__(self) -> str:
        return f"<Peer {'with a key' if self.key else 'unknown'}>"

    def authenticate(self, message: wire.Message) -> bytes:
        """Authenticate the peer by its hello, and return the answer. Any other first message is refused."""
        if message.op != wire.OP_HELLO:
            raise Unauthorized("hello: it must be the first message and have a key")
        self._peers.admit(self, self._peers.find(message.body))
        return b'{"shard":%d}' % self._peers.shard

    @property
    def message_bytes_max(self) -> int:
        return self._peers.message_bytes_max

    @property
    def account(self) -> str:
        """The id of its key, if the key has limits that this shard enforces; otherwise empty."""
        return "" if self.key is None else self.key.account

    def check(self, op: int) -> None:
        """Check a message before it is decoded. Raises `Forbidden` if the key does not allow this op, and
        `Throttled` if the key has sent too many messages."""
        assert self.key is not None
        check_op(self.key.grant, op)
        if self.key.limits.requests_per_s:
            self._peers.rates.take(self.key, monotonic())

    def command_of(self, message: wire.Message, limits: RecordLimits) -> Command:
        """Decode a command. Raises if the key does not allow its boxes, or another shard owns one of them."""
        assert self.key is not None
        command = decode_command(message.op, message.head, message.body, limits, self.key)
        if message.op in wire.TXN_OPS:
            command = msgspec.structs.replace(command, caller=Caller(self.key.id, self.key.grant))
        boxes = boxes_of(command)
        check_boxes(self.key.grant, message.op, boxes)
        if not isinstance(command, States):  # it lists only boxes of this shard
            self._check_owned(boxes or ())
        return command

    def check_writes(self, writes: Sequence[Append]) -> None:
        """Check the writes of packed columns, one for each box, against the key and the slots of this
        shard."""
        assert self.key is not None
        for write in writes:
            self.key.grant.require_name(write.box)
        self._check_owned([write.box for write in writes])

    def _check_owned(self, boxes: Sequence[str]) -> None:
        for box in boxes:
            if not self._peers.owns(box):
                raise BoxMoved(box=box)

    def note_silent(self) -> None:
        """Count a connection that is closed because it sent no hello in time."""
        self._peers.silent_connections.note(address=self.address)

    def note_error(self, error: Exception) -> None:
        """Count a connection that broke, or sent messages of another protocol."""
        self._peers.broken_connections.note(address=self.address, error=str(error))

    def disconnect(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already closed


def _address_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""  # already closed
