"""Sessions: watch streams that a client can resume, and the shards that store them (v0 §7.1, §7.2).

The name of a session determines its shard, like the name of a box. So every gateway finds the session, and a
gateway restart loses nothing. While a stream is open, its gateway has the current cursors and saves them
every few seconds; when it ends it saves them once more. If the gateway dies instead, the saved cursors may be
old and are marked so (`is_open`): then the client's `Last-Event-ID` may move them forward or back.

A shard that dies loses its sessions. Open streams restore theirs; requests for the others get 404. If two
gateways have streams of one session, the later one wins, whichever restores the session first
(`shard/core/watch/sessions.py`). A restored session may be old: a newer stream may have got further and
ended. So `Last-Event-ID` may then also move the cursors forward or back, and a client without one waits until
every open stream has restored its session."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gateway.shards.dispatch import Dispatch
from gateway.watch.merge import Merge, Track
from gateway.watch.page import Encoding, Place
from streams.protocol import wire
from streams.protocol.errors import Busy, NotFound, SeqMismatch, ShardUnavailable, StreamsError
from streams.protocol.messages.commands import SessionReply

SESSION_TTL_MS = 300_000
_WID_BYTES = 18  # 144 random bits, 24 characters
_WID_CHARS_MAX = 64
_encode_head = wire.head_encoder.encode


class SavedTrack(NamedTuple):
    seq: int
    generation: int | None
    is_gone: bool
    head_seq: int


class SessionState(msgspec.Struct, kw_only=True):
    boxes: dict[str, SavedTrack]
    encoding: Encoding
    heartbeat_ms: int
    #: True if it was saved while a stream was open: the stream may have got further.
    is_open: bool = False
    #: Id of the key that created it; empty on a server without keys.
    owner: str = ""

    def merge(self) -> Merge:
        tracks = [
            Track(box, Place(track.seq, track.generation, track.is_gone), track.head_seq)
            for box, track in self.boxes.items()
        ]
        return Merge(tracks)


class _TakeReply(SessionReply, frozen=True):
    """A `SessionReply` whose state is decoded."""

    state: SessionState | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(_TakeReply).decode


class Session:
    """One session whose stream is open in this gateway."""

    def __init__(self, wid: str, epoch: int, state: SessionState) -> None:
        self.wid = wid
        self.epoch = epoch
        self.merge = state.merge()
        self._state = state

    def __repr__(self) -> str:
        return f"<Session {self.wid[:8]}… epoch {self.epoch}>"

    @property
    def heartbeat_ms(self) -> int:
        return self._state.heartbeat_ms

    @property
    def encoding(self) -> Encoding:
        return self._state.encoding

    @property
    def owner(self) -> str:
        return self._state.owner

    @property
    def was_cut_off(self) -> bool:
        return self._state.is_open

    def encode_state(self, *, is_open: bool) -> bytes:
        boxes = {box: SavedTrack(*track.place, track.head_seq) for box, track in self.merge.tracks.items()}
        state = SessionState(
            boxes=boxes,
            encoding=self._state.encoding,
            heartbeat_ms=self._state.heartbeat_ms,
            is_open=is_open,
            owner=self._state.owner,
        )
        return msgspec.json.encode(state)


class SessionStore:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._next_shard = 0

    def __repr__(self) -> str:
        return f"<SessionStore over {len(self._dispatch.links)} shards>"

    async def create(self, state: SessionState) -> str:
        """Create a session and return its name. Shards take turns; one that is down or full is skipped."""
        shards = len(self._dispatch.links)
        refusal: StreamsError = ShardUnavailable()
        for step in range(shards):
            wid = self._name_on((self._next_shard + step) % shards)
            try:
                owner = {"owner": state.owner}
                await self._call(wire.OP_PUT_SESSION, wid, owner, msgspec.json.encode(state))
            except Busy as error:
                refusal = error
                continue
            self._next_shard = (self._next_shard + step + 1) % shards
            return wid
        raise refusal

    async def take(self, wid: str, owner: str = "", *, has_cursor: bool = False) -> Session:
        """Take a session over for a new stream. Raises `NotFound` if it does not exist, `Forbidden` if
        another key created it, and `Busy` if its shard has just started and the client sent no cursor."""
        if not (wid.startswith("wid_") and wid.isascii() and len(wid) <= _WID_CHARS_MAX):
            raise NotFound("wid: this is not the name of a session; create one with POST /v0/watch")
        params: dict[str, int | str] = {"owner": owner, "has_cursor": int(has_cursor)}
        reply = _decode((await self._call(wire.OP_TAKE_SESSION, wid, params, b"")).body)
        assert reply.state is not None
        return Session(wid, reply.epoch, reply.state)

    async def save(self, session: Session, *, is_open: bool) -> bool:
        """Save the cursors of a session. Returns False if a newer stream has taken it over."""
        params = {"epoch": session.epoch}
        try:
            try:
                state = session.encode_state(is_open=is_open)
                await self._call(wire.OP_KEEP_SESSION, session.wid, params, state)
            except NotFound:  # its shard has restarted
                state = session.encode_state(is_open=True)
                await self._call(wire.OP_PUT_SESSION, session.wid, {**params, "owner": session.owner}, state)
        except SeqMismatch:
            return False
        return True

    def _name_on(self, shard: int) -> str:
        """Return a random name that belongs to a shard. Takes about as many tries as there are shards."""
        while True:
            wid = f"wid_{secrets.token_urlsafe(_WID_BYTES)}"
            if self._dispatch.placement.shard_of(wid) == shard:
                return wid

    async def _call(self, op: int, wid: str, more: Mapping[str, int | str], body: bytes) -> wire.Message:
        params: dict[str, int | str] = {"ttl_ms": SESSION_TTL_MS, **more}
        query = "&".join(f"{name}={value}" for name, value in params.items())
        return await self._dispatch.to_owner(op, wire.RequestHead(wid, query), body)
