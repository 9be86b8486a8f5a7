"""Stores watch sessions for the gateways, so that any gateway can resume a session (v0 §7.1).

A session is a name and a text that only gateways understand. Sessions are not logged: if a
session dies with its shard, its watcher needs a new `POST /v0/watch`, and no record is lost. A clean stop
stores them in the last snapshot, so a restart of the server drops none.

Rules of the file
- Time is an argument. A session expires when it was not touched for its time to live. All sessions have the
  same time to live, so the oldest is always first in the dict, and every call removes expired ones there.
- `epoch` grows each time a session is taken. Only the holder of the newest epoch may save its position.
- A killed shard has lost the epochs. Open streams put their sessions back with their epochs, in any order: a
  newer epoch replaces an older one, an older one is refused. A new epoch is above those of earlier starts
  (`begin`), so it never equals the epoch of a stream that has not come back yet.
- A session that was put back may be stale until all open streams have saved. Until then only a client that
  sends its own cursor gets it.

Bounds: `sessions_max` sessions and `_STATE_BYTES_MAX` of text.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from shard.core.snapshot_facts import SessionFacts, ShardState
from streams.protocol.errors import (
    Forbidden,
    NotFound,
    SeqMismatch,
    ShardUnavailable,
    StreamsError,
    Throttled,
)
from streams.protocol.messages.commands import (
    KeepSession,
    PutSession,
    SessionCommand,
    SessionReply,
    TakeSession,
)

#: A life of the shard that begins a millisecond later has epochs that are this many bits higher. An epoch
#: stays below 2**53 until the year 3084.
_LIFE_BITS = 8

#: Open streams save every 5 s. So long after a killed shard starts they have put back what they have.
_PUT_BACK_MS = 7_000

#: A session of eight boxes takes about 500 bytes, so this is no limit to ten thousand of them; one of 256
#: long names takes 100 KB, and ten thousand of those would not fit into a small machine.
_STATE_BYTES_MAX = 256 * 1024 * 1024

#: The id of a key is shorter.
_DIGEST_CHARS = 64


class _Session:
    __slots__ = ("epoch", "gone_ms", "owner", "state", "was_put_back")

    def __init__(self, epoch: int, state: bytes, gone_ms: int, owner: str) -> None:
        self.epoch = epoch
        self.state = state
        self.gone_ms = gone_ms
        self.owner = owner
        #: True if a stream brought it to a shard that had forgotten it.
        self.was_put_back = False


class Sessions:
    def __init__(self, sessions_max: int) -> None:
        #: 0 is no limit.
        self._max = sessions_max
        #: The one that lapses next comes first.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._bytes = 0
        self._first_epoch = 0
        #: Until then sessions that were put back may be old.
        self._unsure_until_ms = 0
        #: Sessions of each key that has any.
        self._by_owner: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Sessions {len(self._sessions)}, {self._bytes} B>"

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, wid: str) -> bool:
        return wid in self._sessions

    def begin(self, at_ms: int) -> None:
        """Set the first epoch of this start of the shard."""
        self._first_epoch = at_ms << _LIFE_BITS
        self._unsure_until_ms = at_ms + _PUT_BACK_MS

    def count_of(self, owner: str) -> int:
        return self._by_owner[owner]

    def facts(self) -> list[SessionFacts]:
        return [
            (wid, each.epoch, each.state, each.gone_ms, each.owner) for wid, each in self._sessions.items()
        ]

    def take_snapshot(self, state: ShardState) -> None:
        """A shard that stops cleanly takes its sessions along. Otherwise gateways put them back."""
        state.sessions = self.facts() if state.stopped_clean else []

    def restore(self, snapshot: ShardState) -> None:
        for wid, epoch, state, gone_ms, owner in snapshot.sessions:
            if len(owner) == _DIGEST_CHARS:  # from a server whose keys had no ids: nobody could open it
                continue
            self._touch(wid, _Session(epoch, b"", 0, owner), state, gone_ms)

    def rewound(self, ms: int) -> None:
        """Move expiry times back by `ms` after the clock went back: the remaining lifetimes stay the same."""
        for session in self._sessions.values():
            session.gone_ms -= ms

    def clear(self) -> None:
        self._sessions.clear()
        self._by_owner.clear()
        self._bytes = 0

    def handle(self, command: SessionCommand, now_ms: int) -> SessionReply | StreamsError:
        self.drop_lapsed(now_ms)
        if isinstance(command, PutSession):
            return self._put(command, now_ms)
        session = self._sessions.get(command.wid)
        if session is None:
            return NotFound("wid: the session does not exist or has expired; create one with POST /v0/watch")
        if isinstance(command, TakeSession):
            if command.owner != session.owner:  # before the epoch moves: its own stream must not notice
                return Forbidden("wid: this session was created with another key", field="wid")
            if session.was_put_back and now_ms < self._unsure_until_ms and not command.has_cursor:
                return ShardUnavailable(
                    "wid: the shard of this watch session has just started; retry in a few seconds"
                )
            session.epoch = max(session.epoch, self._first_epoch) + 1
            self._touch(command.wid, session, session.state, now_ms + command.ttl_ms)
            return SessionReply(session.epoch, session.state)
        return self._keep(command, session, now_ms)

    def _put(self, command: PutSession, now_ms: int) -> SessionReply | StreamsError:
        existing = self._sessions.get(command.wid)
        if existing is not None:  # another stream has put it back
            keep = KeepSession(command.wid, command.epoch, command.state, command.ttl_ms)
            return self._keep(keep, existing, now_ms)
        if (self._max and len(self._sessions) >= self._max) or (
            self._bytes + len(command.state) > _STATE_BYTES_MAX
        ):
            return Throttled(
                f"too many watch sessions ({len(self._sessions)}); close some or wait until some expire",
                limit="watch_sessions",
            )
        session = _Session(command.epoch, b"", 0, command.owner)
        session.was_put_back = command.epoch > 0  # a new one has not been taken yet
        self._touch(command.wid, session, command.state, now_ms + command.ttl_ms)
        return SessionReply(session.epoch)

    def _keep(self, command: KeepSession, session: _Session, now_ms: int) -> SessionReply | StreamsError:
        if command.epoch < session.epoch:
            return SeqMismatch("wid: another connection has taken this session over")
        session.epoch = command.epoch  # a newer one, if an older stream came back first
        self._touch(command.wid, session, command.state, now_ms + command.ttl_ms)
        return SessionReply(session.epoch)

    def _touch(self, wid: str, session: _Session, state: bytes, gone_ms: int) -> None:
        if self._sessions.pop(wid, None) is None:  # it goes to the end: the front is what lapses next
            self._by_owner[session.owner] += 1
        self._sessions[wid] = session
        self._bytes += len(state) - len(session.state)
        session.state = state
        session.gone_ms = gone_ms

    def drop_lapsed(self, now_ms: int) -> None:
        while self._sessions:
            wid = next(iter(self._sessions))
            session = self._sessions[wid]
            if session.gone_ms > now_ms:
                return
            del self._sessions[wid]
            self._bytes -= len(session.state)
            self._by_owner[session.owner] -= 1
            if not self._by_owner[session.owner]:
                del self._by_owner[session.owner]

    def check(self) -> None:
        """Asserts SESSIONS: sums of bytes and by owner are those of the sessions. For tests."""
        sessions = self._sessions.values()
        assert self._bytes == sum(len(session.state) for session in sessions), "SESSIONS"
        assert self._by_owner == Counter(session.owner for session in sessions), "SESSIONS"
