"""Opens the streams and sessions of a gateway, and holds their shared state: feeds, session store, slots.

    api/watch.py, api/websockets.py ──► Watch.view_boxes ──► current heads and generations of the boxes
                                     Watch.open_stream ──► PlainBody: a stream without a session
                                     Watch.create_session, open_session ──► SessionBody: one with a session
    a front runs the body ──► `subscription.py` writes into its sink, fed by `feeds.py`

A `SessionBody` saves the cursors of its stream to the shard that stores the session, every five seconds and
at its end. A second connection to a session ends the first: the shard gives each connection a higher epoch,
and a stream whose save is refused ends.

Limits: a slot for each stream and socket (`admission/limits.py`), of the server and of its key. When a key is
revoked, its streams end at once. When the gateway drains, all streams end.
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
from gateway.watch.page import OTHER_GENERATION, Encoding, Place
from gateway.watch.plan import WatchPlan
from gateway.watch.sessions import SavedTrack, Session, SessionState, SessionStore
from gateway.watch.subscription import STALL_S, EventEncoder, SseEncoder, Subscription
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
from streams.protocol.messages.replies import BoxState, WatchedBox

log = structlog.get_logger()

#: How old saved cursors may be when a gateway dies: a client without an id gets this much twice.
_SAVE_EVERY_S = 5.0
#: How long a new stream waits for a shard that restarts, and how often it retries. A browser that gets a 503
#: never reconnects.
OPEN_S_MAX, _OPEN_RETRY_S, _OPEN_RETRY_S_MAX = 10.0, 0.05, 0.5
_REVOKED = "the key of this stream is no longer valid"
_REPLACED = "another connection has taken this session over"
#: How long a stream that ends may take to save its cursors, and how long its successor waits for that: as
#: long as a shard may take to restart. While draining no client can reconnect here, so the wait is shorter.
_CLOSE_S_MAX, _CLOSE_S_DRAINING = 10.0, 2.0


_decode_view = msgspec.json.Decoder(BoxState).decode


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Endable(Protocol):
    """A stream or WebSocket that ends when the gateway drains."""

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
        self._streams: set[Endable] = set()
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
        """Take a slot for a stream. The caller gives it back when the stream ends. Raises `Throttled`."""
        if self.is_draining:
            raise ShuttingDown
        return self.slots.take(key, is_of_ring=is_of_ring, is_session=is_session)

    def on_keys_change(self, ring: KeyRing) -> int:
        """End the streams of revoked keys. Returns how many those were."""
        return self.slots.revoke_all_but(ring)

    def track(self, stream: Endable) -> None:
        self._streams.add(stream)
        if self.is_draining:
            stream.end()

    def forget(self, stream: Endable) -> None:
        self._streams.discard(stream)

    # -- boxes

    async def view_boxes(self, plan: WatchPlan, *, lenient: bool, wait_s: float = 0.0) -> dict[str, BoxState]:
        """Return the current state of every box of the plan. Raises `BoxNotFound` for a missing box;
        `lenient` drops it, unless none remains. Waits up to `wait_s` for shards that restart."""
        views: dict[str, BoxState | StreamsError] = {}
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
        boxes: dict[str, BoxState] = {}
        missing: StreamsError | None = None
        for box in plan.starts:
            view = views[box]
            if isinstance(view, BoxState):
                _check_strong(box, view, plan.encoding)
                boxes[box] = view
            elif isinstance(view, BoxNotFound) and lenient:
                missing = view
            else:
                raise view
        if missing is not None and not boxes:
            raise missing
        return boxes

    # -- bodies

    async def create_session(
        self, plan: WatchPlan, views: dict[str, BoxState], key: Key | None = None
    ) -> str:
        boxes = {box: SavedTrack(*_place_in(plan, box, view), view.head_seq) for box, view in views.items()}
        state = SessionState(
            boxes=boxes,
            encoding=plan.encoding,
            heartbeat_ms=plan.heartbeat_ms,
            owner=key.id if key is not None else "",
        )
        return await self.sessions.create(state)

    async def open_session(self, wid: str, cursor: Cursor | None, key: Key | None = None) -> SessionBody:
        slot = self.take_slot(key)
        try:
            before = self._open.get(wid)
            if before is not None:
                _check_owner(before.session, key)
                before.stream.end(_REPLACED)
                with trio.move_on_after(_CLOSE_S_MAX):
                    await before.on_session_close.wait()
            session = await self._take(wid, key, has_cursor=cursor is not None)
            _check_owner(session, key)
            if cursor is not None:
                await self._resume(session, cursor)
        except BaseException:
            slot.give_back()
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

    async def _resume(self, session: Session, cursor: Cursor) -> None:
        generations: dict[str, int] = {}
        boxes = session.merge.boxes_of_other_generations(cursor) if session.was_cut_off else []
        if boxes:
            plan = WatchPlan(dict.fromkeys(boxes), session.encoding, session.heartbeat_ms)
            with suppress(BoxNotFound):  # when none of them is there
                views = await self.view_boxes(plan, lenient=True, wait_s=OPEN_S_MAX)
                generations = {box: view.generation for box, view in views.items()}
        session.merge.resume(cursor, may_advance=session.was_cut_off, generations=generations)

    def open_stream(self, plan: WatchPlan, views: dict[str, BoxState], key: Key | None = None) -> PlainBody:
        """Open a stream without a session."""
        slot = self.take_slot(key)
        merge = merge_of(plan, views)
        stream = self.stream(merge, plan.encoding, plan.heartbeat_ms, owner=owner_of(key))
        return PlainBody(self, stream, slot)

    def stream(
        self,
        merge: Merge,
        encoding: Encoding,
        heartbeat_ms: int,
        encoder: EventEncoder | None = None,
        turn: trio.Lock | None = None,
        owner: str = EVERYONE,
    ) -> Subscription:
        return Subscription(
            self.feeds,
            merge,
            encoding,
            encoder or SseEncoder(now_ms),
            heartbeat_ms=heartbeat_ms,
            stall_s=self.stall_s,
            turn=turn,
            owner=owner,
        )

    def on_session_close(self, body: SessionBody) -> None:
        if self._open.get(body.session.wid) is body:
            del self._open[body.session.wid]


class PlainBody:
    """A one-step watch (v0 §7.4), without a session."""

    def __init__(self, watch: Watch, stream: Subscription, slot: Slot) -> None:
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
        self._slot.give_back()


class SessionBody(PlainBody):
    """The open stream of a session. It saves its cursors every `_SAVE_EVERY_S` seconds and at its end."""

    def __init__(self, watch: Watch, stream: Subscription, slot: Slot, session: Session) -> None:
        super().__init__(watch, stream, slot)
        self.session = session
        self.on_session_close = trio.Event()
        self._is_ours = True

    async def run(self, sink: Sink) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_saving)
                await super().run(sink)
                nursery.cancel_scope.cancel()
        finally:
            # The client may have disconnected and this task be cancelled, but saving the cursors is worth
            # some seconds. A shard that has just died has lost the session, and only this stream can restore
            # it.
            wait_s = _CLOSE_S_DRAINING if self._watch.is_draining else _CLOSE_S_MAX
            with trio.CancelScope(deadline=trio.current_time() + wait_s, shield=True):
                while not await self._save(is_open=False):  # noqa: ASYNC110 (the shard sends no event for it)
                    await trio.sleep(_OPEN_RETRY_S)

    async def _keep_saving(self) -> None:
        while self._is_ours:
            await self._save(is_open=True)
            await trio.sleep(_SAVE_EVERY_S)
        self.stream.end(_REPLACED)

    async def _save(self, *, is_open: bool) -> bool:
        """Save the cursors. Returns False if the shard does not answer and the save must be repeated."""
        if not self._is_ours:
            return True
        try:
            self._is_ours = await self._watch.sessions.save(self.session, is_open=is_open)
        except StreamsError as error:
            log.debug("watch session not saved, retrying", error=error.message)
            return not isinstance(error, (Busy, Uncertain))
        return True

    def close(self) -> None:
        super().close()
        self._watch.on_session_close(self)
        self.on_session_close.set()


def _check_owner(session: Session, key: Key | None) -> None:
    """Check that the key created the session (v0 §11) and may still read its boxes."""
    if key is None:
        return
    if session.owner != key.id:
        raise Forbidden("wid: this session was created with another key", field="wid")
    for box in session.merge.tracks:
        key.grant.require_name(box, "wid")


def starts_in(plan: WatchPlan, views: dict[str, BoxState]) -> dict[str, WatchedBox]:
    return {
        box: WatchedBox(_place_in(plan, box, view).seq, view.head_seq, view.earliest_seq)
        for box, view in views.items()
    }


def merge_of(plan: WatchPlan, views: dict[str, BoxState]) -> Merge:
    return Merge(Track(box, _place_in(plan, box, view), view.head_seq) for box, view in views.items())


def _place_in(plan: WatchPlan, box: str, view: BoxState) -> Place:
    start = plan.starts[box]
    if start is None:
        return Place(view.head_seq, view.generation)
    return Place(start.seq, view.generation if start.is_of(view.generation) else OTHER_GENERATION)


def _check_strong(box: str, view: BoxState, encoding: Encoding) -> None:
    if encoding.strong and view.config.durability == "memory":
        raise InvalidRequest(
            f"consistency: {box} is a memory box, whose records are never on disk; use eventual",
            field="consistency",
            box=box,
        )
