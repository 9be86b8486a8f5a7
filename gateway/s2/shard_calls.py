"""What shards are asked for the S2 API, and making a stream that is not there when its basin says so.

Which cipher a stream has is its shard's to say. It is remembered here so that an append need not ask first: a
shard refuses what is closed in another way than its stream's, and then it is done again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import trio

from gateway.admission.memory import EVERYONE, MemoryBudget
from gateway.s2.append_window import AppendWindow
from gateway.s2.ciphers import Sealing
from gateway.s2.messages import Input
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
_decode_appended = msgspec.msgpack.Decoder(AppendStreamReply).decode

#: Streams whose cipher is remembered; those without one are not.
_CIPHERS_MAX = 10_000


class PostedAppend:
    """An append on its way to its shard. It holds its permit and its place in the append limiter until it has
    a result, or is closed."""

    __slots__ = ("metered", "result", "withdraw")

    def __init__(self, metered: int) -> None:
        self.metered = metered
        self.result: AppendStreamReply | StreamsError | None = None
        self.withdraw: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<PostedAppend {self.metered} B, {self.result!r}>"

    def close(self) -> None:
        if self.result is None:
            self.withdraw()


class PendingRead:
    """A page that a shard has been asked for."""

    __slots__ = ("_answer", "_id", "_is_here", "_link")

    def __init__(self, link: Link, head: ReadHead) -> None:
        self._link = link
        self._is_here = trio.Event()
        self._answer: wire.Message | StreamsError | None = None
        self._id = 0
        try:
            self._id = link.post(wire.OP_READ_STREAM, _encode(head), b"", self._on_answer)
        except StreamsError as error:
            self._on_answer(error)

    def __repr__(self) -> str:
        return f"<PendingRead {self._id}, {'here' if self._is_here.is_set() else 'on its way'}>"

    def _on_answer(self, answer: wire.Message | StreamsError) -> None:
        self._answer = answer
        self._is_here.set()

    async def page(self) -> StreamRecords:
        try:
            await self._is_here.wait()
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
        self.inflight = AppendWindow()
        self.history = UsageHistory(dispatch, int(time.time()))
        self._ciphers: dict[str, Cipher] = {}
        #: Set when a basin was deleted through this gateway.
        self.basin_deleted = trio.Event()

    def __repr__(self) -> str:
        return f"<ShardCalls {self._dispatch!r}>"

    @property
    def shards(self) -> int:
        return len(self._dispatch.links)

    @property
    def answers(self) -> MemoryBudget:
        """What bounds the answers of this gateway."""
        return self._dispatch.answers

    # -- asking

    async def ask(self, shard: int, command: s2.ControlCommand, reply: type[_R]) -> _R:
        link = self._dispatch.links[shard]
        message = await link.call(wire.OP_S2_CONTROL, _encode(command), b"")
        return msgspec.msgpack.decode(message.body, type=reply)

    async def ask_register(self, command: s2.BasinCommand, reply: type[_R]) -> _R:
        return await self.ask(0, command, reply)

    async def ask_owner(self, box: str, command: s2.StreamCommand, reply: type[_R]) -> _R:
        return await self.ask(self._dispatch.placement.shard_of(box), command, reply)

    async def basin(self, name: str) -> s2.Basin:
        found = (await self.ask_register(s2.GetBasin(name), s2.GetBasinReply)).basin
        if found is None:
            raise BasinNotFound(f"basin {name} does not exist", basin=name)
        return found

    async def _call(self, op: int, box: str, head: bytes, body: bytes) -> wire.Message:
        return await self._dispatch.links[self._dispatch.placement.shard_of(box)].call(op, head, body)

    # -- records

    async def append(self, box: str, given: Input, key: str) -> AppendStreamReply:
        """Without a key it is tried in the open, so that a shard judges first whether there is a stream."""
        await self.inflight.enter(given.metered)
        try:
            return await self.append_as(self._ciphers.get(box) if key else None, box, given, key)
        except CipherMismatch as mismatch:
            cipher = mismatch.detail["cipher"]
            self._remember(box, cipher)
            return await self.append_as(cipher, box, given, key)
        finally:
            self.inflight.leave(given.metered)

    async def append_as(
        self,
        cipher: Cipher | None,
        box: str,
        given: Input,
        key: str,
    ) -> AppendStreamReply:
        """Appends what is closed like this; the stream must say the same. Whoever calls has a permit for its
        bytes. It waits in the append limiter of its shard, as any append does."""
        since_s = trio.current_time()
        tails = given.tails if cipher is None else Sealing(cipher, key, box).sealed(given)
        head, body = given.wire(box, cipher=cipher, tails=tails, chain="")
        limiter = self._dispatch.append_limiters[self._dispatch.placement.shard_of(box)]
        await limiter.enter(given.account or EVERYONE, len(body))
        try:
            message = await self._call(wire.OP_APPEND_STREAM, box, head, body)
        finally:
            limiter.leave(len(body))
        return self._acked(box, given, since_s, message)

    async def post_append(
        self, box: str, given: Input, sealing: Sealing | None, chain: str, on_settled: Callable[[], None]
    ) -> PostedAppend:
        """Sends an append without waiting for its answer: waits for a permit and for the append limiter.
        Appends that one task posts reach the shard in this order. `on_settled` is called when there is a
        result."""
        since_s = trio.current_time()
        shard = self._dispatch.placement.shard_of(box)
        link = self._dispatch.links[shard]
        await self.inflight.enter(given.metered)
        try:
            cipher = None if sealing is None else sealing.cipher
            tails = given.tails if sealing is None else sealing.sealed(given)
            head, body = given.wire(box, cipher=cipher, tails=tails, chain=chain)
            limiter = self._dispatch.append_limiters[shard]
            await limiter.enter_from_session(given.account or EVERYONE, len(body))
        except BaseException:
            self.inflight.leave(given.metered)
            raise
        posted = PostedAppend(given.metered)

        def leave() -> None:
            limiter.leave(len(body))
            self.inflight.leave(given.metered)

        def settle(answer: wire.Message | StreamsError) -> None:
            leave()
            if not isinstance(answer, StreamsError):
                posted.result = self._acked(box, given, since_s, answer)
            else:
                posted.result = answer
            on_settled()

        try:
            sent = link.post(wire.OP_APPEND_STREAM, head, body, settle)
        except BaseException:
            leave()
            raise

        def withdraw() -> None:
            link.withdraw(sent)
            leave()

        posted.withdraw = withdraw
        return posted

    def _acked(self, box: str, given: Input, since_s: float, message: wire.Message) -> AppendStreamReply:
        took_s = trio.current_time() - since_s
        self.inflight.acked(records=len(given.tails), size=given.metered, took_s=took_s)
        self.history.tally.appended(box.partition("/")[0], given.metered)
        return _decode_appended(message.body)

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
        """Asks for a page that is awaited later. Its caller closes it."""
        return PendingRead(self._dispatch.links[self._dispatch.placement.shard_of(head.box)], head)

    async def tail(self, box: str) -> s2.StreamTail:
        return await self.ask_owner(box, s2.GetStreamTail(box), s2.StreamTail)

    # -- streams that are not there

    async def making(
        self,
        basin: str,
        stream: str,
        asked: Spec | None,
        *,
        is_append: bool,
        call: Callable[[], Awaitable[_R]],
        account: str = "",
    ) -> _R:
        """What the call comes to; a stream that is not there is made first if its basin says so. `account`
        is the key whose limits count for that."""
        try:
            return await call()
        except StreamNotFound as missing:
            found = await self.basin(basin)
            if not (found.config.create_on_append if is_append else found.config.create_on_read):
                raise missing from None
        try:
            await self.put_stream(found, stream, asked or Spec(), account=account)
        except ResourceAlreadyExists:
            pass  # somebody else has made it
        return await call()

    async def put_stream(
        self,
        basin: s2.Basin,
        stream: str,
        asked: Spec,
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
            asked=asked,
            defaults=basin.config.defaults,
            cipher=basin.config.cipher,
            token=token,
            ensures=ensures,
            may_update=may_update,
            account=account,
        )
        return await self.ask_owner(box, command, s2.PutStreamReply)
