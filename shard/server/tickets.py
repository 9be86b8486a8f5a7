"""Tickets: each command that a connection submits has one, which receives its reply.

A ticket encodes the reply, puts it into the replies of its connection, and counts its time. Packed columns
are several commands with one reply, which their tickets collect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.protocol import wire
from streams.protocol.errors import BoxNotFound, NotAQueue, StreamsError
from streams.protocol.messages import requests
from streams.protocol.messages.bulk import BoxResult, PutColumnsReply
from streams.protocol.messages.commands import Append, AppendResult, DiffResult, FollowResult, Reply
from streams.protocol.payloads.scans import ScanReply

if TYPE_CHECKING:
    from shard.server.connection import Connection

_encode_head = wire.head_encoder.encode
_CLAIM_OPS = frozenset((wire.OP_CLAIM, wire.OP_WORK))


class MessageTicket:
    """Receives the reply to one message."""

    __slots__ = ("began_ns", "connection", "id", "op")

    def __init__(self, connection: Connection, op: int, id: int) -> None:
        self.connection = connection
        self.op = op
        self.id = id
        #: Arrival time. 0 if the request has waited for a record or a job: then its time is not counted.
        self.began_ns = connection.received_ns

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        if isinstance(reply, StreamsError):
            self.connection.replies.put(self.op, self.id, wire.FAILED, b"", requests.encode_failure(reply))
            return
        if type(reply) is FollowResult:
            head = _encode_head(requests.page_head(reply))
            self.connection.replies.put(self.op, self.id, 0, head, reply.records)
            self._note_read()
            return
        if type(reply) is ScanReply:
            self.connection.replies.put_in_parts(self.op, self.id, _encode_head(reply.head), reply.parts)
            self._note_read()
            return
        if type(reply) is DiffResult:
            head = _encode_head(wire.ReplyHead(records_scanned=reply.records_scanned))
            self._note_read()
        else:
            head = wire.encode_write_head(requests.status_of(reply), fsync_ms, wal_append_ms)
            if self.op == wire.OP_APPEND:
                self.connection.times.note_ack(self.began_ns)
            elif self.op in _CLAIM_OPS and self.began_ns:
                self.connection.times.note_claim(self.began_ns)
        self.connection.replies.put(self.op, self.id, 0, head, requests.encode_reply(reply))

    def _note_read(self) -> None:
        if self.began_ns:
            self.connection.times.note_read(self.began_ns)


class InvalidRequestTicket:
    """Receives the result of the existence check of an invalid request, and answers with the first error."""

    __slots__ = ("_error", "_ticket")

    def __init__(self, ticket: MessageTicket, error: StreamsError) -> None:
        self._ticket = ticket
        self._error = error

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        is_first = isinstance(reply, (BoxNotFound, NotAQueue))
        self._ticket.answer(reply if is_first else self._error, 0.0, 0.0)


class WaitingTicket(MessageTicket):
    """Receives a reply that may have to wait. The peer may cancel the request meanwhile."""

    __slots__ = ()

    def __init__(self, connection: Connection, op: int, id: int) -> None:
        super().__init__(connection, op, id)
        connection.waiting[id] = self

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        self.connection.waiting.pop(self.id, None)
        super().answer(reply, fsync_ms, wal_append_ms)


class ColumnsReply:
    """Collects the results of packed columns, and answers when the result of every box has come."""

    __slots__ = ("_remaining", "_results", "_ticket")

    def __init__(self, ticket: MessageTicket, writes: list[Append]) -> None:
        self._ticket = ticket
        self._results = [BoxResult(write.box) for write in writes]
        self._remaining = len(writes)

    def take(self, at: int, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        box = self._results[at].box
        if isinstance(reply, StreamsError):
            self._results[at] = BoxResult(box, error=(reply.code, reply.message, reply.detail))
        else:
            assert isinstance(reply, AppendResult)
            self._results[at] = BoxResult(box, reply.first_seq, reply.last_seq, reply.created, reply.deduped)
        self._remaining -= 1
        if self._remaining == 0:
            self._ticket.answer(PutColumnsReply(self._results), fsync_ms, wal_append_ms)


class ColumnsTicket:
    """Receives the reply to the write of one box."""

    __slots__ = ("_at", "_reply")

    def __init__(self, reply: ColumnsReply, at: int) -> None:
        self._reply = reply
        self._at = at

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        self._reply.take(self._at, reply, fsync_ms, wal_append_ms)


class DiscardTicket:
    """Discards its reply: the client is gone."""

    def answer(self, reply: Reply | StreamsError, fsync_ms: float, wal_append_ms: float) -> None:
        pass
