"""The shard wire, sans-IO: bytes in, messages out, and back. Gateways, direct writers and tasks use it.

    0        4    5     6     8          16         20
    ┌────────┬────┬─────┬─────┬──────────┬──────────┬────── head length ──────┬──── the rest ────┐
    │ length │kind│flags│ op  │ id (u64) │ head len │ head (msgpack)          │ body (raw)       │
    └────────┴────┴─────┴─────┴──────────┴──────────┴─────────────────────────┴──────────────────┘
    little endian; `length` counts everything after itself.

Rules of the file
- A body is never copied to be framed: a message is sent as [header + head, body].
- `Receiver` holds at most one partial message plus one read; a message over `message_bytes_max` is
  refused before it is buffered, because its length alone says so.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from streams.protocol.access.grants import Grant

HEADER = struct.Struct("<IBBHQI")
HEADER_BYTES = HEADER.size
_AFTER_LENGTH = HEADER_BYTES - 4

#: A body is at most 64 MiB by default; pages carry at most 16 MiB of records. Four times the body leaves room
#: for a raised limit without letting a broken peer ask for gigabytes.
MESSAGE_BYTES_MAX = 256 * 1024 * 1024
_READ_BYTES = 256 * 1024

# kind
REQUEST, REPLY, PUSH = 1, 2, 3
# flags of a reply
FAILED = 1

# op: numbers are on the wire and therefore frozen.
OP_HELLO = 1
#: The hello of a connection whose messages are few and must not wait behind those of others.
HELLO_URGENT = b"urgent"
OP_PUT_BOX = 10
OP_GET_STATE = 11
OP_LIST_BOXES = 12
OP_DELETE_BOX = 13
OP_APPEND = 20
OP_DIFF = 21
OP_GET_RECORD = 22
OP_GET_TAIL = 23
OP_DELETE_RECORDS = 24
OP_SET_FENCE = 25
OP_STATS = 30
#: The sender of the request with this id no longer waits for its reply.
OP_FORGET = 31
#: The gateway has no memory for pages, and has it again. Neither gets a reply. A connection starts with room.
OP_HOLD_PAGES = 32
OP_SEND_PAGES = 33
OP_FOLLOW = 40
OP_PUT_SESSION = 41
OP_TAKE_SESSION = 42
OP_KEEP_SESSION = 43
OP_COLLECT = 50
OP_REPORT_DELIVERY = 51
OP_FORWARD = 52
OP_FORWARDING = 53
OP_CLAIM = 60
OP_ACK = 61
OP_NACK = 62
OP_EXTEND = 63
OP_WORK = 64
OP_WORK_END = 65
OP_REQUIRE_QUEUE = 66
OP_PLAN_REQUEUE = 67
OP_AWAIT_MOVES = 68
OP_SET_PAUSED = 69
OP_RESCHEDULE = 74
OP_REPRIORITIZE = 75
OP_ACK_WITH_OUTPUTS = 76
OP_CHECK_OUTPUT = 77
OP_LIST_JOBS = 78
OP_COMMIT_GROUP = 70
OP_GET_GROUP = 71
OP_LIST_GROUPS = 72
OP_DELETE_GROUP = 73
OP_EXPORT = 80
OP_EXPORT_RENEW = 81
OP_EXPORT_END = 82
OP_PUT_COLUMNS = 84
OP_SCAN = 85
OP_STATES = 86
OP_LOCATE = 87
OP_TXN_PUT = 90
OP_TXN_COMMIT = 91
OP_TXN_ABORT = 92
OP_TXN_LIST = 93
OP_PUT_SCHEDULE = 94
OP_FIND_SCHEDULE = 95
OP_LIST_SCHEDULES = 96
OP_DROP_SCHEDULE = 97
OP_RUN_SCHEDULE = 98
OP_APPEND_STREAM = 100
OP_READ_STREAM = 101
OP_S2_CONTROL = 102
OP_REPORT = 120
OP_PING = 121
OP_EXCHANGE_USE = 122

#: Ops that a shard refuses when it cannot keep up.
WRITE_OPS = frozenset((OP_APPEND, OP_PUT_COLUMNS, OP_TXN_PUT))

#: Ops that belong to the key that began a transaction.
TXN_OPS = frozenset((OP_TXN_PUT, OP_TXN_COMMIT, OP_TXN_ABORT, OP_TXN_LIST))

#: Ops that may wait for data on the shard, and that `OP_FORGET` ends.
WAITING_OPS = frozenset((OP_DIFF, OP_FOLLOW, OP_CLAIM, OP_READ_STREAM))

#: Ops whose answers can be large: a shard answers them when the connection has room. The end of a stream of
#: jobs is among them because it must not overtake the claims of its stream.
PAGE_OPS = frozenset(
    (
        OP_DIFF,
        OP_FOLLOW,
        OP_READ_STREAM,
        OP_SCAN,
        OP_GET_RECORD,
        OP_CLAIM,
        OP_WORK,
        OP_WORK_END,
        OP_LIST_BOXES,
        OP_LIST_GROUPS,
        OP_LIST_JOBS,
        OP_LIST_SCHEDULES,
        OP_STATES,
        OP_LOCATE,
    )
)

#: Not commands of the machine: see `shard/transfer/exports.py`.
EXPORT_OPS = frozenset((OP_EXPORT, OP_EXPORT_RENEW, OP_EXPORT_END))


class WireError(Exception):
    """The peer does not speak this wire, or broke off in the middle of it."""


class RequestHead(msgspec.Struct, array_like=True, gc=False):
    """The head of a request from a gateway. The shard parses the query itself."""

    box: str = ""
    query: str = ""
    form: int = 0
    idempotency_key: str = ""
    #: The grant of the request's key, for names and options in the body, which only the shard decodes. A
    #: shard trusts a gateway, and sets the grant itself for a peer with a key.
    grant: Grant | None = None
    #: The key whose limits count (`access/key_limits.py`); empty when it has none that a shard enforces.
    account: str = ""


#: Values of `RequestHead.form`: how the body is written.
FORM_JSON, FORM_NDJSON = 0, 1


class ReplyHead(msgspec.Struct, array_like=True, gc=False):
    """Status and cost of a reply. A negative figure means that it does not apply."""

    status: int = 200
    fsync_ms: float = -1.0
    wal_append_ms: float = -1.0
    records_scanned: int = -1


class FollowHead(msgspec.Struct, array_like=True, gc=False):
    """The head of a live read. The body is empty."""

    box: str
    from_seq: int = 0
    generation: int | None = None
    limit: int = 256
    max_bytes: int = 256 * 1024
    nodes: tuple[str, ...] = ()
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    wait_ms: int = 0
    strong: bool = False
    awaits_box: bool = False
    #: False if the read does not count for the priority of the box.
    touch: bool = True


class PageHead(msgspec.Struct, array_like=True, gc=False):
    """The head of a reply to `FollowHead`: the position after its page. The body is records, comma-joined."""

    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    #: gap_from, gap_to, reason, or None.
    gap: tuple[int, int, str] | None = None
    #: When the box was last appended to, by the shard's clock.
    appended_ms: int = 0


class Message(NamedTuple):
    kind: int
    flags: int
    op: int
    id: int
    head: bytes
    body: bytes


request_head_decoder = msgspec.msgpack.Decoder(RequestHead)
reply_head_decoder = msgspec.msgpack.Decoder(ReplyHead)
follow_head_decoder = msgspec.msgpack.Decoder(FollowHead)
page_head_decoder = msgspec.msgpack.Decoder(PageHead)
head_encoder = msgspec.msgpack.Encoder()

#: `ReplyHead` of a write as msgpack: an array of four, a byte, two doubles, and -1 for `records_scanned`.
_WRITE_HEAD = struct.Struct(">BBBBdBdB")


def encode_write_head(status: int, fsync_ms: float, wal_append_ms: float) -> bytes:
    """Encode the `ReplyHead` of a write: the same bytes as `head_encoder`, in a quarter of its time."""
    return _WRITE_HEAD.pack(0x94, 0xCC, status, 0xCB, round(fsync_ms, 3), 0xCB, round(wal_append_ms, 3), 0xFF)


def frame(kind: int, flags: int, op: int, id: int, head: bytes, body_bytes: int) -> bytes:
    """Return header and head of a message; the body follows separately."""
    return (
        HEADER.pack(_AFTER_LENGTH + len(head) + body_bytes, kind, flags, op, id, len(head)) + head
        if head
        else HEADER.pack(_AFTER_LENGTH + body_bytes, kind, flags, op, id, 0)
    )


class Receiver:
    """Turns a byte stream into messages.

    view = receiver.space()          # where to receive into
    n = sock.recv_into(view)
    for message in receiver.received(n): ...
    """

    __slots__ = ("_buffer", "_end", "_start", "_view", "message_bytes_max")

    def __init__(self, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.message_bytes_max = message_bytes_max

    def __repr__(self) -> str:
        return f"<Receiver {self._end - self._start} of {len(self._buffer)} B>"

    @property
    def is_between_messages(self) -> bool:
        return self._start == self._end

    def space(self) -> memoryview:
        return self._view[self._end :]

    def parse(self, count: int) -> list[Message]:
        self._end += count
        messages: list[Message] = []
        view, start, end = self._view, self._start, self._end
        while end - start >= HEADER_BYTES:
            length, kind, flags, op, id, head_bytes = HEADER.unpack_from(view, start)
            total = length + 4
            if (
                length < _AFTER_LENGTH
                or head_bytes > length - _AFTER_LENGTH
                or total > self.message_bytes_max
            ):
                raise WireError(f"a message of {total} bytes with a head of {head_bytes} bytes is not valid")
            if end - start < total:
                break
            body_at = start + HEADER_BYTES + head_bytes
            messages.append(
                Message(
                    kind,
                    flags,
                    op,
                    id,
                    view[start + HEADER_BYTES : body_at].tobytes(),
                    view[body_at : start + total].tobytes(),
                )
            )
            start += total
        self._start = start
        self._make_room()
        return messages

    def _make_room(self) -> None:
        unread_bytes = self._end - self._start
        if unread_bytes == 0:
            self._start = self._end = 0
            if len(self._buffer) > 16 * _READ_BYTES:
                self._resize(_READ_BYTES)
            return
        size = _READ_BYTES
        if unread_bytes >= HEADER_BYTES:
            size = max(size, HEADER.unpack_from(self._view, self._start)[0] + 4)
        if size > len(self._buffer):
            self._resize(size)
        elif self._start and (
            self._start + size > len(self._buffer) or len(self._buffer) - self._end < _READ_BYTES // 4
        ):
            self._buffer[:unread_bytes] = self._buffer[self._start : self._end]
            self._start, self._end = 0, unread_bytes

    def _resize(self, size: int) -> None:
        unread = bytes(self._view[self._start : self._end])
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._buffer[: len(unread)] = unread
        self._start, self._end = 0, len(unread)
