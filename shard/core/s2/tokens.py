"""The registry of access tokens of the S2 API: their names, permissions and expiry times (s2 §17).

Shard 0 keeps it for the whole server. It stores digests, never a secret: a token is found by its digest. The
gateways check the permissions of a token.

Rules of the file
- An expired token does not exist for clients: it is neither listed nor found, and its name is free.
- Every reply waits until the last change of the registry is durable: no client sees a change that a crash can
  undo.
"""

from __future__ import annotations

from sortedcontainers import SortedDict

from shard.core import changes
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import AccessTokenNotFound, ResourceAlreadyExists, StreamsError, Throttled
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import AccessToken

#: A token costs about a kilobyte here, and all of them are in every snapshot of the first shard.
TOKENS_MAX = 10_000


class Tokens:
    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_check(self.check)
        context.on_snapshot(self._take_snapshot, self._restore)
        self.tokens: SortedDict[str, AccessToken] = SortedDict()
        self._by_digest: dict[str, AccessToken] = {}
        #: The last change of the register.
        self.lsn = 0
        context.on_command(s2.IssueToken, self._issue)
        context.on_command(s2.RevokeToken, self._revoke)
        context.on_command(s2.ListTokens, self._list)
        context.on_command(s2.FindToken, self._find)
        context.on_change(changes.TokenIssued, self._apply_issued)
        context.on_change(changes.TokenRevoked, self._apply_revoked)

    def __repr__(self) -> str:
        return f"<Tokens {len(self.tokens)}>"

    # -- deciding

    def _issue(self, command: s2.IssueToken, now_ms: int, entries: LogEntries) -> Outcome:
        token = command.token
        existing: AccessToken | None = self.tokens.get(token.id)
        if existing is not None and _is_valid(existing, now_ms):
            return self._answer(entries, ResourceAlreadyExists(f"access token {token.id} already exists"))
        if existing is None and len(self.tokens) >= TOKENS_MAX:
            self._drop_expired(now_ms, entries)
            if len(self.tokens) >= TOKENS_MAX:
                full = f"there are {len(self.tokens)} access tokens already; revoke some"
                return self._answer(entries, Throttled(full, limit="access_tokens"))
        self._context.log(changes.TokenIssued(token), entries)
        return self._answer(entries, s2.FindTokenReply(token))

    def _drop_expired(self, now_ms: int, entries: LogEntries) -> None:
        for token in [token for token in self.tokens.values() if not _is_valid(token, now_ms)]:
            self._context.log(changes.TokenRevoked(token.id), entries)

    def _revoke(self, command: s2.RevokeToken, now_ms: int, entries: LogEntries) -> Outcome:
        token: AccessToken | None = self.tokens.get(command.id)
        if token is None or not _is_valid(token, now_ms):
            return self._answer(entries, AccessTokenNotFound(f"access token {command.id} does not exist"))
        self._context.log(changes.TokenRevoked(command.id), entries)
        return self._answer(entries, s2.FindTokenReply(token))

    def _list(self, command: s2.ListTokens, now_ms: int, entries: LogEntries) -> Outcome:
        page: list[AccessToken] = []
        more = False
        for id in self.tokens.irange(minimum=max(command.prefix, command.after)):
            if not id.startswith(command.prefix):
                break
            token = self.tokens[id]
            if id <= command.after or not _is_valid(token, now_ms):
                continue
            if len(page) == command.limit:
                more = True
                break
            page.append(token)
        return self._answer(entries, s2.TokenPage(page, more))

    def _find(self, command: s2.FindToken, now_ms: int, entries: LogEntries) -> Outcome:
        token = self._by_digest.get(command.digest)
        is_valid = token is not None and _is_valid(token, now_ms)
        return self._answer(entries, s2.FindTokenReply(token if is_valid else None, token is not None))

    def _answer(self, entries: LogEntries, reply: s2.Reply | StreamsError) -> Outcome:
        return self._context.when_registered(reply, self.lsn, entries)

    # -- applying

    def _apply_issued(self, change: changes.TokenIssued, lsn: int) -> None:
        self._forget(change.token.id)
        self._take(change.token)
        self.lsn = lsn

    def _apply_revoked(self, change: changes.TokenRevoked, lsn: int) -> None:
        self._forget(change.id)
        self.lsn = lsn

    def _take(self, token: AccessToken) -> None:
        self.tokens[token.id] = token
        self._by_digest[token.digest] = token

    def _forget(self, id: str) -> None:
        token = self.tokens.pop(id, None)
        if token is not None:
            del self._by_digest[token.digest]

    def _take_snapshot(self, state: ShardState) -> None:
        state.tokens = list(self.tokens.values())

    def _restore(self, state: ShardState) -> None:
        for token in state.tokens:
            self._take(token)

    def check(self) -> None:
        """Asserts TOKENS: tokens are found by their ids and by their digests. For tests."""
        assert all(token.id == id for id, token in self.tokens.items()), "TOKENS"
        assert self._by_digest == {token.digest: token for token in self.tokens.values()}, "TOKENS"


def _is_valid(token: AccessToken, now_ms: int) -> bool:
    return not token.expires_ms or now_ms < token.expires_ms
