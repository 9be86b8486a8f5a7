"""Sends requests of the S2 API to shards, and creates missing streams if their basin allows it.

Ciphers: the shard knows the cipher of a stream. The gateway caches it so that an append needs no extra
request. If the cached cipher is wrong, the shard rejects the append, and the gateway encrypts and sends it
again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import trio

from gateway.admission.memory import EVERYONE, MemoryBudget
from gateway.s2.append_window import AppendWindow
from gateway.s2.ciphers import RecordCipher
from gateway.s2.record_formats import Input
from gateway.s2.usage_history import UsageHistory
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from streams.protocol import wire
from streams.protocol.errors import (
    BasinDeletionPending,
    BasinNotFound,
    CipherMismatch,
    ResourceAlreadyExists,
    StreamNotFound,
    StreamsError,
)
from streams.protocol.messages import s2, s2_requests
from streams.protocol.messages.s2 import AppendStreamReply, Cipher, ReadHead, Spec, StreamRecords

_R = TypeVar("_R")
_encode = msgspec.msgpack.Encoder().encode
_decode_append_reply = msgspec.msgpack.Decoder(AppendStreamReply).decode

#: Size of the cipher cache. Streams without a cipher are not cached.
_CIPHERS_MAX = 10_000


class PostedAppend:
    """An append in flight.

    It holds its permit and its place in the append limiter until it has a result or is closed.
    """

    __slots__ = ("metered_bytes", "result", "withdraw")

    def __init__(self, metered_bytes: int) -> None:
        self.metered_bytes = metered_bytes
        self.result: AppendStreamReply | StreamsError | None = None
        self.withdraw: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<PostedAppend {self.metered_bytes} B, {self.result!r}>"

    def close(self) -> None:
        if self.result is None:
            self.withdraw()


class PendingRead:
    """A read in flight to a shard."""

    __slots__ = ("_answer", "_has_answer", "_id", "_link")

    def __init__(self, link: Link, head: ReadHead) -> None:
        self._link = link
        self._has_answer = trio.Event()
        self._answer: wire.Message | StreamsError | None = None
        self._id = 0
        try:
            self._id = link.post(wire.OP_READ_STREAM, _encode(head), b"", self._on_answer)
        except StreamsError as error:
            self._on_answer(error)

    def __repr__(self) -> str:
        return f"<PendingRead {self._id}, {'done' if self._has_answer.is_set() else 'in flight'}>"

    def _on_answer(self, answer: wire.Message | StreamsError) -> None:
        self._answer = answer
        self._has_answer.set()

    async def page(self) -> StreamRecords:
        try:
            await self._has_answer.wait()
        finally:
            self.close()
        assert self._answer is not None
        if isinstance(self._answer, StreamsError):
            raise self._answer
        return s2_requests.decode_records(self._answer.body)

    def close(self) -> None:
        if self._answer is None:
            self._link.withdraw(self._id)


class ShardCalls:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self.append_window = AppendWindow()
        self.history = UsageHistory(dispatch, int(time.time()))
        self._ciphers: dict[str, Cipher] = {}
        #: Set when this gateway deletes a basin.
        self.has_deleted_basin = trio.Event()

    def __repr__(self) -> str:
        return f"<ShardCalls {self._dispatch!r}>"

    @property
    def shards(self) -> int:
        return len(self._dispatch.links)

    @property
    def answers(self) -> MemoryBudget:
        """Return the memory budget of the gateway's responses."""
        return self._dispatch.answers

    # -- requests

    async def call_shard(self, shard: int, command: s2.ControlCommand, reply: type[_R]) -> _R:
        link = self._dispatch.links[shard]
        message = await link.call(wire.OP_S2_CONTROL, _encode(command), b"")
        return msgspec.msgpack.decode(message.body, type=reply)

    async def call_register(self, command: s2.BasinCommand, reply: type[_R]) -> _R:
        return await self.call_shard(0, command, reply)

    async def call_owner(self, box: str, command: s2.StreamCommand, reply: type[_R]) -> _R:
        return await self.call_shard(self._dispatch.placement.shard_of(box), command, reply)

    async def basin(self, name: str) -> s2.Basin:
        basin = (await self.call_register(s2.GetBasin(name), s2.GetBasinReply)).basin
        if basin is None:
            raise BasinNotFound(f"basin {name} does not exist", basin=name)
        return basin

    async def _call(self, op: int, box: str, head: bytes, body: bytes) -> wire.Message:
        return await self._dispatch.links[self._dispatch.placement.shard_of(box)].call(op, head, body)

    # -- records

    async def append(self, box: str, batch: Input, key: str) -> AppendStreamReply:
        """Append a batch and return its ack.

        Without a key the batch is sent in plain text first, so that the shard can report a missing stream.
        """
        await self.append_window.enter(batch.metered_bytes)
        try:
            return await self.append_with_cipher(self._ciphers.get(box) if key else None, box, batch, key)
        except CipherMismatch as mismatch:
            cipher = mismatch.detail["cipher"]
            self._remember(box, cipher)
            return await self.append_with_cipher(cipher, box, batch, key)
        finally:
            self.append_window.leave(batch.metered_bytes)

    async def append_with_cipher(
        self,
        cipher: Cipher | None,
        box: str,
        batch: Input,
        key: str,
    ) -> AppendStreamReply:
        """Append a batch encrypted with `cipher`; the shard rejects it if the stream has another cipher.

        The caller holds a permit for the bytes. Like any append, it waits in the limiter of its shard.
        """
        since_s = trio.current_time()
        tails = batch.tails if cipher is None else RecordCipher(cipher, key, box).encrypt_batch(batch)
        head, body = batch.wire(box, cipher=cipher, tails=tails, chain="")
        limiter = self._dispatch.append_limiters[self._dispatch.placement.shard_of(box)]
        await limiter.enter(batch.account or EVERYONE, len(body))
        try:
            message = await self._call(wire.OP_APPEND_STREAM, box, head, body)
        finally:
            limiter.leave(len(body))
        return self._on_ack(box, batch, since_s, message)

    async def post_append(
        self,
        box: str,
        batch: Input,
        record_cipher: RecordCipher | None,
        chain: str,
        on_settled: Callable[[], None],
    ) -> PostedAppend:
        """Send an append without waiting for its reply, after waiting for a permit and for the limiter.

        The shard receives the appends of one task in the order of its calls. `on_settled` is called when
        the append has a result.
        """
        since_s = trio.current_time()
        shard = self._dispatch.placement.shard_of(box)
        link = self._dispatch.links[shard]
        await self.append_window.enter(batch.metered_bytes)
        try:
            cipher = None if record_cipher is None else record_cipher.cipher
            tails = batch.tails if record_cipher is None else record_cipher.encrypt_batch(batch)
            head, body = batch.wire(box, cipher=cipher, tails=tails, chain=chain)
            limiter = self._dispatch.append_limiters[shard]
            await limiter.enter_from_session(batch.account or EVERYONE, len(body))
        except BaseException:
            self.append_window.leave(batch.metered_bytes)
            raise
        append = PostedAppend(batch.metered_bytes)

        def leave() -> None:
            limiter.leave(len(body))
            self.append_window.leave(batch.metered_bytes)

        def settle(answer: wire.Message | StreamsError) -> None:
            leave()
            if not isinstance(answer, StreamsError):
                append.result = self._on_ack(box, batch, since_s, answer)
            else:
                append.result = answer
            on_settled()

        try:
            request_id = link.post(wire.OP_APPEND_STREAM, head, body, settle)
        except BaseException:
            leave()
            raise

        def withdraw() -> None:
            link.withdraw(request_id)
            leave()

        append.withdraw = withdraw
        return append

    def _on_ack(self, box: str, batch: Input, since_s: float, message: wire.Message) -> AppendStreamReply:
        took_s = trio.current_time() - since_s
        self.append_window.observe_ack(records=len(batch.tails), size=batch.metered_bytes, took_s=took_s)
        self.history.counters.count_append(box.partition("/")[0], batch.metered_bytes)
        return _decode_append_reply(message.body)

    def _remember(self, box: str, cipher: Cipher | None) -> None:
        self._ciphers.pop(box, None)
        if cipher is not None:
            self._ciphers[box] = cipher
            if len(self._ciphers) > _CIPHERS_MAX:
                del self._ciphers[next(iter(self._ciphers))]

    async def read(self, head: ReadHead) -> StreamRecords:
        message = await self._call(wire.OP_READ_STREAM, head.box, _encode(head), b"")
        return s2_requests.decode_records(message.body)

    def begin_read(self, head: ReadHead) -> PendingRead:
        """Start a read that is awaited later. The caller closes it."""
        return PendingRead(self._dispatch.links[self._dispatch.placement.shard_of(head.box)], head)

    async def tail(self, box: str) -> s2.StreamTail:
        return await self.call_owner(box, s2.GetStreamTail(box), s2.StreamTail)

    # -- creating streams on demand

    async def call_or_create(
        self,
        basin: str,
        stream: str,
        spec: Spec | None,
        *,
        is_append: bool,
        call: Callable[[], Awaitable[_R]],
        account: str = "",
    ) -> _R:
        """Run `call`; if its stream is missing and the basin allows it, create the stream and run it again.

        `account` is the key whose limits apply to the new stream.
        """
        try:
            return await call()
        except StreamNotFound as missing:
            basin_state = await self.basin(basin)
            if not (basin_state.config.create_on_append if is_append else basin_state.config.create_on_read):
                raise missing from None
        try:
            await self.put_stream(basin_state, stream, spec or Spec(), account=account)
        except ResourceAlreadyExists:
            pass  # another request has created it
        return await call()

    async def put_stream(
        self,
        basin: s2.Basin,
        stream: str,
        spec: Spec,
        *,
        token: str = "",
        ensures: bool = False,
        may_update: bool = True,
        account: str = "",
    ) -> s2.PutStreamReply:
        if basin.deleted_ms:
            raise BasinDeletionPending(f"basin {basin.name} is being deleted", basin=basin.name)
        box = s2.box_of(basin.name, stream)
        command = s2.PutStream(
            box=box,
            basin_number=basin.number,
            asked=spec,
            defaults=basin.config.defaults,
            cipher=basin.config.cipher,
            token=token,
            ensures=ensures,
            may_update=may_update,
            account=account,
        )
        return await self.call_owner(box, command, s2.PutStreamReply)
