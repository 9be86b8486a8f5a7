"""What all streams of a gateway share: feeds, sessions, slots of connections, and their common end.

    api/watch.py, api/websockets.py ──► Watch.look_at ──► the boxes as they are now: heads, generations
                                     Watch.opened ──► PlainBody: a stream without a session
                                     Watch.create_session, open_session ──► SessionBody: one that is kept
    a front runs the body ──► `stream.py` writes into its sink, fed by `feeds.py`

A `SessionBody` saves the cursors of its stream to the shard that keeps the session, every five seconds and at
its end. A second connection to a session ends the first: the shard gives each taker a higher epoch, and a
stream whose save is refused knows that it is over.

Limits: a slot for each stream and socket (`admission/limits.py`), of the server and of its key. The stream of
a key that is taken out ends at once. When the gateway drains, all of them end.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec
import structlog
import trio

from gateway.admission.limits import Slot, StreamSlots
from gateway.admission.memory import EVERYONE, owner_of
from gateway.requests import sse
from gateway.requests.request import Sink
from gateway.shards.dispatch import Dispatch
from gateway.watch.cursors import Cursor
from gateway.watch.feeds import Feeds
from gateway.watch.merge import Merge, Track
from gateway.watch.page import ANOTHER_LIFE, Encoding, Place
from gateway.watch.plan import Plan
from gateway.watch.sessions import SavedTrack, Session, SessionState, SessionStore
from gateway.watch.stream import STALL_S, SseWording, Stream, Wording
from streams.protocol import wire
from streams.protocol.access.keys import Key, KeyRing
from streams.protocol.errors import (
    BoxNotFound,
    Busy,
    Forbidden,
    InvalidRequest,
    ShuttingDown,
    StreamsError,
    Uncertain,
)
from streams.protocol.messages.replies import WatchedBox

log = structlog.get_logger()

#: How old saved cursors may be when a gateway dies, and so how much a client without an id is told twice.
_SAVE_EVERY_S = 5.0
#: How long a shard may take to start again before whoever opens a stream is refused, for a browser that is
#: answered 503 never comes back; and how often it is asked.
OPEN_S_MAX, _OPEN_RETRY_S, _OPEN_RETRY_S_MAX = 10.0, 0.05, 0.5
_REVOKED = "the key of this stream is not valid any more"
_TAKEN_OVER = "another connection has taken this session over"
#: What a stream that ends may take to save its cursors, and another to wait for that: as long as a shard may
#: take to start again. Where nobody can come back, because we drain, that is not worth waiting for.
_CLOSE_S_MAX, _CLOSE_S_DRAINING = 10.0, 2.0


class BoxView(msgspec.Struct):
    """What a watcher is told of a box before it starts."""

    head_seq: int
    earliest_seq: int
    generation: int
    config: _ConfigView


class _ConfigView(msgspec.Struct):
    durability: str


_decode_view = msgspec.json.Decoder(BoxView).decode


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Ends(Protocol):
    """What is ended when the gateway drains: a stream, a WebSocket."""

    def end(self) -> None: ...


class Watch:
    def __init__(
        self,
        dispatch: Dispatch,
        *,
        connections_max: int,
        node_bytes_max: int,
        connections_per_key_max: int = 0,
        gateways: int = 1,
        stall_s: float = STALL_S,
    ) -> None:
        self.node_bytes_max = node_bytes_max
        self.feeds = Feeds(dispatch)
        self.sessions = SessionStore(dispatch)
        self._dispatch = dispatch
        self.slots = StreamSlots(connections_max, connections_per_key_max, gateways)
        self.stall_s = stall_s
        self._streams: set[Ends] = set()
        self._open: dict[str, SessionBody] = {}
        self.is_draining = False

    def __repr__(self) -> str:
        return f"<Watch {len(self.slots)} connections, {len(self._open)} sessions open>"

    @property
    def connections(self) -> int:
        return len(self.slots)

    async def run(
        self, draining: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.feeds.run)
            task_status.started()
            await draining.wait()
            self.is_draining = True
            for stream in list(self._streams):
                stream.end()
            await trio.sleep_forever()

    # -- connections

    def take_slot(self, key: Key | None, *, is_of_ring: bool = True, is_session: bool = False) -> Slot:
        """Whoever takes one gives it back, however its stream ends."""
        if self.is_draining:
            raise ShuttingDown
        return self.slots.take(key, is_of_ring=is_of_ring, is_session=is_session)

    def keys_changed(self, ring: KeyRing) -> int:
        """Ends the streams of keys that are gone. How many those were."""
        return self.slots.revoke_all_but(ring)

    def track(self, stream: Ends) -> None:
        self._streams.add(stream)
        if self.is_draining:
            stream.end()

    def forget(self, stream: Ends) -> None:
        self._streams.discard(stream)

    # -- boxes

    async def look_at(self, plan: Plan, *, lenient: bool, wait_s: float = 0.0) -> dict[str, BoxView]:
        """Every box of the plan as it is now. Raises `BoxNotFound` for one that is not there; `lenient` drops
        it, unless none is left. Shards that start again are waited for, for so long."""
        views: dict[str, BoxView | StreamsError] = {}
        until_s = trio.current_time() + wait_s

        async def look(box: str) -> None:
            head = wire.RequestHead(box, "touch=false")
            while True:
                try:
                    answer = await self._dispatch.to_owner(wire.OP_GET_STATE, head, b"")
                    views[box] = _decode_view(answer.body)
                    return
                except StreamsError as error:
                    views[box] = error
                    if not isinstance(error, (Busy, Uncertain)) or trio.current_time() >= until_s:
                        return
                await trio.sleep(_OPEN_RETRY_S)

        async with trio.open_nursery() as nursery:
            for box in plan.starts:
                nursery.start_soon(look, box)
        found: dict[str, BoxView] = {}
        missing: StreamsError | None = None
        for box in plan.starts:
            view = views[box]
            if isinstance(view, BoxView):
                _check_strong(box, view, plan.encoding)
                found[box] = view
            elif isinstance(view, BoxNotFound) and lenient:
                missing = view
            else:
                raise view
        if missing is not None and not found:
            raise missing
        return found

    # -- bodies

    async def create_session(self, plan: Plan, views: dict[str, BoxView], key: Key | None = None) -> str:
        boxes = {box: SavedTrack(*_place_in(plan, box, view), view.head_seq) for box, view in views.items()}
        state = SessionState(
            boxes=boxes,
            encoding=plan.encoding,
            heartbeat_ms=plan.heartbeat_ms,
            owner=key.id if key is not None else "",
        )
        return await self.sessions.create(state)

    async def open_session(self, wid: str, told: Cursor | None, key: Key | None = None) -> SessionBody:
        slot = self.take_slot(key)
        try:
            before = self._open.get(wid)
            if before is not None:
                _check_owner(before.session, key)
                before.stream.end(_TAKEN_OVER)
                with trio.move_on_after(_CLOSE_S_MAX):
                    await before.closed.wait()
            session = await self._take(wid, key, has_cursor=told is not None)
            _check_owner(session, key)
            if told is not None:
                await self._resume(session, told)
        except BaseException:
            slot.give()
            raise
        stream = self.stream(session.merge, session.encoding, session.heartbeat_ms, owner=owner_of(key))
        body = self._open[wid] = SessionBody(self, stream, slot, session)
        return body

    async def _take(self, wid: str, key: Key | None, *, has_cursor: bool) -> Session:
        until_s = trio.current_time() + OPEN_S_MAX
        retry_s = _OPEN_RETRY_S
        while True:
            try:
                owner = key.id if key is not None else ""
                return await self.sessions.take(wid, owner, has_cursor=has_cursor)
            except (Busy, Uncertain):
                if trio.current_time() > until_s:
                    raise
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, _OPEN_RETRY_S_MAX)

    async def _resume(self, session: Session, told: Cursor) -> None:
        lives: dict[str, int] = {}
        strangers = session.merge.strangers(told) if session.was_cut_off else []
        if strangers:
            asked = Plan(dict.fromkeys(strangers), session.encoding, session.heartbeat_ms)
            with suppress(BoxNotFound):  # when none of them is there
                views = await self.look_at(asked, lenient=True, wait_s=OPEN_S_MAX)
                lives = {box: view.generation for box, view in views.items()}
        session.merge.resume(told, may_advance=session.was_cut_off, lives=lives)

    def opened(self, plan: Plan, views: dict[str, BoxView], key: Key | None = None) -> PlainBody:
        """A stream without a session."""
        slot = self.take_slot(key)
        merge = merge_of(plan, views)
        stream = self.stream(merge, plan.encoding, plan.heartbeat_ms, owner=owner_of(key))
        return PlainBody(self, stream, slot)

    def stream(
        self,
        merge: Merge,
        encoding: Encoding,
        heartbeat_ms: int,
        wording: Wording | None = None,
        turn: trio.Lock | None = None,
        owner: str = EVERYONE,
    ) -> Stream:
        return Stream(
            self.feeds,
            merge,
            encoding,
            wording or SseWording(now_ms),
            heartbeat_ms=heartbeat_ms,
            stall_s=self.stall_s,
            turn=turn,
            owner=owner,
        )

    def closed(self, body: SessionBody) -> None:
        if self._open.get(body.session.wid) is body:
            del self._open[body.session.wid]


class PlainBody:
    """A one-step watch (v0 §7.4): nothing of it is left when it ends."""

    def __init__(self, watch: Watch, stream: Stream, slot: Slot) -> None:
        self.stream = stream
        self._watch = watch
        self._slot = slot
        slot.on_revoked(partial(stream.end, _REVOKED))

    async def run(self, sink: Sink) -> None:
        sink.put(sse.opening(self.stream.merge.id()))
        self._watch.track(self.stream)
        await self.stream.run(sink)

    def close(self) -> None:
        self._watch.forget(self.stream)
        self._slot.give()


class SessionBody(PlainBody):
    """The open stream of a session: it saves where it is, now and then and at its end."""

    def __init__(self, watch: Watch, stream: Stream, slot: Slot, session: Session) -> None:
        super().__init__(watch, stream, slot)
        self.session = session
        self.closed = trio.Event()
        self._is_ours = True

    async def run(self, sink: Sink) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_saving)
                await super().run(sink)
                nursery.cancel_scope.cancel()
        finally:
            # The connection may be gone and this task cancelled; where it got to is worth some seconds. A
            # shard that has just died has forgotten the session, and only we can put it back.
            wait_s = _CLOSE_S_DRAINING if self._watch.is_draining else _CLOSE_S_MAX
            with trio.CancelScope(deadline=trio.current_time() + wait_s, shield=True):
                while not await self._save(is_open=False):  # noqa: ASYNC110 (the shard says no such thing)
                    await trio.sleep(_OPEN_RETRY_S)

    async def _keep_saving(self) -> None:
        while self._is_ours:
            await self._save(is_open=True)
            await trio.sleep(_SAVE_EVERY_S)
        self.stream.end(_TAKEN_OVER)

    async def _save(self, *, is_open: bool) -> bool:
        """Whether that is settled. If not, its shard is away, and the next save may find it."""
        if not self._is_ours:
            return True
        try:
            self._is_ours = await self._watch.sessions.save(self.session, is_open=is_open)
        except StreamsError as error:
            log.debug("a session could not be saved", error=error.message)
            return not isinstance(error, (Busy, Uncertain))
        return True

    def close(self) -> None:
        super().close()
        self._watch.closed(self)
        self.closed.set()


def _check_owner(session: Session, key: Key | None) -> None:
    """A session is for the key that made it (v0 §11), and for boxes that the key may still read."""
    if key is None:
        return
    if session.owner != key.id:
        raise Forbidden("wid: this session was made with another key", field="wid")
    for box in session.merge.tracks:
        key.grant.require_name(box, "wid")


def starts_shown(plan: Plan, views: dict[str, BoxView]) -> dict[str, WatchedBox]:
    return {
        box: WatchedBox(_place_in(plan, box, view).seq, view.head_seq, view.earliest_seq)
        for box, view in views.items()
    }


def merge_of(plan: Plan, views: dict[str, BoxView]) -> Merge:
    return Merge(Track(box, _place_in(plan, box, view), view.head_seq) for box, view in views.items())


def _place_in(plan: Plan, box: str, view: BoxView) -> Place:
    start = plan.starts[box]
    if start is None:
        return Place(view.head_seq, view.generation)
    return Place(start.seq, view.generation if start.is_of(view.generation) else ANOTHER_LIFE)


def _check_strong(box: str, view: BoxView, encoding: Encoding) -> None:
    if encoding.strong and view.config.durability == "memory":
        raise InvalidRequest(
            f"consistency: {box} is a memory box, nothing in it is ever on the disk; use eventual",
            field="consistency",
            box=box,
        )
