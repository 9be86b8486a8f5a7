"""Streams that can be found again: their state, and the shards that keep it (v0 §7.1, §7.2).

A session's name says which shard keeps it, as a box's does, so every gateway finds it, and a gateway that is
restarted has lost nothing. While a stream is open its gateway rules and saves the cursors now and then; when
it ends they are saved as they are. If the gateway dies instead, the saved cursors may be old and say so
(`is_open`): then what the client has had, its `Last-Event-ID`, counts in both directions.

A shard that dies forgets the sessions it kept. Open streams put theirs back; the others are answered 404. Of
two streams of one session, on two gateways, the one that took it later wins, whichever comes back first
(`shard/core/watch/sessions.py`). What is put back is never the last word: a newer stream may have got
further, and may be gone. So `Last-Event-ID` counts in both directions then too, and a client without one
waits until every open stream has put its session back.
"""

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
    #: Saved while a stream was open: it may have got further than this says.
    is_open: bool = False
    #: Id of the key that made it; empty when no key was asked for.
    owner: str = ""

    def merge(self) -> Merge:
        tracks = [
            Track(box, Place(saved.seq, saved.generation, saved.is_gone), saved.head_seq)
            for box, saved in self.boxes.items()
        ]
        return Merge(tracks)


class _Taken(msgspec.Struct):
    epoch: int
    state: SessionState | None = None


_decode = msgspec.json.Decoder(_Taken).decode


class Session:
    """One session whose stream is open here."""

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

    def saved(self, *, is_open: bool) -> bytes:
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
        """A new session's name. Shards take turns; one that is away or full is passed over."""
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
        """The session is this stream's from now on. Raises `NotFound` when there is none of that name,
        `Forbidden` when another key made it, and `Busy` when its shard has just started and the client does
        not say what it has had."""
        if not (wid.startswith("wid_") and wid.isascii() and len(wid) <= _WID_CHARS_MAX):
            raise NotFound("wid: this is not the name of a session; make one with POST /v0/watch")
        given: dict[str, int | str] = {"owner": owner, "has_cursor": int(has_cursor)}
        taken = _decode((await self._call(wire.OP_TAKE_SESSION, wid, given, b"")).body)
        assert taken.state is not None
        return Session(wid, taken.epoch, taken.state)

    async def save(self, session: Session, *, is_open: bool) -> bool:
        """Whether the session is still this stream's."""
        kept = {"epoch": session.epoch}
        try:
            try:
                state = session.saved(is_open=is_open)
                await self._call(wire.OP_KEEP_SESSION, session.wid, kept, state)
            except NotFound:  # its shard has started anew
                state = session.saved(is_open=True)
                await self._call(wire.OP_PUT_SESSION, session.wid, {**kept, "owner": session.owner}, state)
        except SeqMismatch:
            return False
        return True

    def _name_on(self, shard: int) -> str:
        """A name that this shard keeps. Takes as many tries as there are shards, more or less."""
        while True:
            wid = f"wid_{secrets.token_urlsafe(_WID_BYTES)}"
            if self._dispatch.placement.shard_of(wid) == shard:
                return wid

    async def _call(self, op: int, wid: str, more: Mapping[str, int | str], body: bytes) -> wire.Message:
        given: dict[str, int | str] = {"ttl_ms": SESSION_TTL_MS, **more}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return await self._dispatch.to_owner(op, wire.RequestHead(wid, query), body)
