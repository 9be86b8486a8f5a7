"""Authenticates and authorizes requests under `/v1` (s2 §17).

A request is one or more operations on a basin and a stream. An **access token**, issued by this API, allows
the operations of its scope. Any other bearer is a key of the server. A server without keys allows everything,
as `s2 lite` does.

Revocation: a gateway caches the register's reply about a token for `_CACHE_S`, so a revocation takes effect
everywhere within a second. While the register's shard is down, the cached reply stays valid until the token
expires, so that the streams of other shards stay available. A session ends within `_RECHECK_S` after its
token is revoked or expires.

Limits: a token has the limits of a key, counted separately.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from gateway.requests.request import Request
from gateway.requests.s2_errors import S2Error
from gateway.s2.shard_calls import ShardCalls
from streams.protocol.access.grants import Grant
from streams.protocol.access.keys import Key
from streams.protocol.errors import Busy, StreamsError
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import EVERY_NAME, AccessToken, NameSet, box_of

READ, WRITE = "read", "write"

#: Operation -> (group, read or write, the scope that a key of the server needs for it).
OPERATIONS: Final[dict[str, tuple[str, str, str]]] = {
    "list-basins": ("account", READ, "read"),
    "create-basin": ("account", WRITE, "admin"),
    "delete-basin": ("account", WRITE, "delete"),
    "reconfigure-basin": ("account", WRITE, "admin"),
    "get-basin-config": ("account", READ, "read"),
    "issue-access-token": ("account", WRITE, "admin"),
    "revoke-access-token": ("account", WRITE, "admin"),
    "list-access-tokens": ("account", READ, "admin"),
    "account-metrics": ("account", READ, "read"),
    "list-locations": ("account", READ, "read"),
    "get-default-location": ("account", READ, "read"),
    "set-default-location": ("account", WRITE, "admin"),
    "list-streams": ("basin", READ, "read"),
    "create-stream": ("basin", WRITE, "admin"),
    "delete-stream": ("basin", WRITE, "delete"),
    "get-stream-config": ("basin", READ, "read"),
    "reconfigure-stream": ("basin", WRITE, "admin"),
    "basin-metrics": ("basin", READ, "read"),
    "check-tail": ("stream", READ, "read"),
    "read": ("stream", READ, "read"),
    "append": ("stream", WRITE, "write"),
    "trim": ("stream", WRITE, "delete"),
    "fence": ("stream", WRITE, "write"),
    "stream-metrics": ("stream", READ, "read"),
}

_CACHE_S = 1.0
#: How often a session checks that its token is still valid.
_RECHECK_S = 5.0
_CACHE_TOKENS_MAX = 1024


class Permit:
    """The permissions of one caller. This base class allows everything."""

    #: The first operation that was checked, and its basin. The request is counted as this operation. Every
    #: handler must check at least one (`endpoints.py` asserts it).
    checked_operation: tuple[str, str] | None = None

    #: Added to every stream name that the caller sends, and removed from every name in responses.
    prefix = ""

    #: The names that the caller may list. A key of the server lists all names of a kind or none.
    basins = streams = tokens = EVERY_NAME

    @property
    def sees_every_basin(self) -> bool:
        return True

    def allows(self, operation: str, basin: str = "", stream: str = "") -> bool:
        return True

    def sees_basin(self, name: str) -> bool:
        return True

    def sees_stream(self, basin: str, name: str) -> bool:
        return True

    def check(self, operation: str, basin: str = "", stream: str = "") -> None:
        if self.checked_operation is None:
            self.checked_operation = (operation, basin)
        if not self.allows(operation, basin, stream):
            raise S2Error("permission_denied", f"the access token does not allow {operation} here")

    def check_token_id(self, id: str) -> None:
        """Raise `permission_denied` if the caller may not issue or revoke a token with this id."""
        if not self.tokens.holds(id):
            raise S2Error("permission_denied", "id: is outside the scope of the calling token")

    def restrict(self, token: AccessToken) -> AccessToken:
        """Return the token that the caller may issue: never wider than the caller's own permissions."""
        return token

    async def wait_revoked(self) -> None:
        """Wait until the permit is no longer valid. Never returns for permits without a token."""
        await trio.sleep_forever()


class KeyPermit(Permit):
    """The permissions of a key. For its prefixes, a basin is the prefix of its streams' box names."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant

    def allows(self, operation: str, basin: str = "", stream: str = "") -> bool:
        return self._has(OPERATIONS[operation][2], box_of(basin, stream) if basin else "")

    def sees_basin(self, name: str) -> bool:
        return self._has("read", box_of(name, ""))

    def sees_stream(self, basin: str, name: str) -> bool:
        return self._has("read", box_of(basin, name))

    def _has(self, scope: str, name: str) -> bool:
        return self._grant.allows(scope, name)

    @property
    def sees_every_basin(self) -> bool:
        return self._has("read", "")

    def restrict(self, token: AccessToken) -> AccessToken:
        for operation in token.ops:
            if not self.allows(operation):
                raise S2Error("permission_denied", f"scope: the calling key does not allow {operation}")
        return token


class TokenPermit(Permit):
    def __init__(self, token: AccessToken, authenticator: Authenticator) -> None:
        self._token = token
        self._authenticator = authenticator
        self.prefix = (token.streams.prefix or "") if token.auto_prefix else ""
        self.basins, self.streams, self.tokens = token.basins, token.streams, token.tokens

    @property
    def sees_every_basin(self) -> bool:
        return self.basins.is_every_name

    def allows(self, operation: str, basin: str = "", stream: str = "") -> bool:
        token = self._token
        return (
            operation in token.ops
            and (not basin or token.basins.holds(basin))
            and (not stream or token.streams.holds(stream))
        )

    def sees_basin(self, name: str) -> bool:
        return self._token.basins.holds(name)

    def sees_stream(self, basin: str, name: str) -> bool:
        return self._token.streams.holds(name)

    def restrict(self, token: AccessToken) -> AccessToken:
        """Require operations and names within the caller's own; limit the expiry to the caller's."""
        own = self._token
        sets: tuple[tuple[NameSet, NameSet], ...] = (
            (token.basins, own.basins),
            (token.streams, own.streams),
            (token.tokens, own.tokens),
        )
        if not (set(token.ops) <= set(own.ops) and all(inner.within(outer) for inner, outer in sets)):
            raise S2Error("permission_denied", "scope: is wider than that of the calling token")
        self.check_token_id(token.id)
        if not own.expires_ms:
            return token
        if token.expires_ms > own.expires_ms:
            raise S2Error("permission_denied", "expires_at: is later than that of the calling token")
        return msgspec.structs.replace(token, expires_ms=token.expires_ms or own.expires_ms)

    async def wait_revoked(self) -> None:
        counts = True
        while counts:
            await trio.sleep(_RECHECK_S)
            counts = await self._authenticator.is_still_valid(self._token)


#: Returns the grant of a request's key. Raises `Unauthorized`. None: the server has no keys.
Admit = Callable[[Request], Grant]


class Authenticator:
    """Finds the permit of a request: by access token, by key, or for a server without keys."""

    def __init__(self, calls: ShardCalls, admit: Admit | None = None) -> None:
        self._calls = calls
        self._admit = admit
        #: Digest -> (reply of the register, time at which it becomes stale).
        self._cache: dict[str, tuple[s2.FindTokenReply, float]] = {}

    def __repr__(self) -> str:
        return f"<Authenticator with {len(self._cache)} cached tokens>"

    async def permit(self, request: Request) -> Permit:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secret:
            lookup = await self._find(digest_of(secret.strip()))
            if lookup.token is not None and not _has_expired(lookup.token.expires_ms):
                request.key = Key(lookup.token.digest)
                return TokenPermit(lookup.token, self)
            if lookup.is_known:
                raise S2Error("authn", "authorization: the access token has expired")
        return Permit() if self._admit is None else KeyPermit(self._admit(request))

    async def is_still_valid(self, token: AccessToken) -> bool:
        """Return True if the token is unchanged and not expired, or if the register cannot be reached."""
        if _has_expired(token.expires_ms):
            return False
        try:
            return (await self._find(token.digest)).token == token
        except StreamsError:
            return True

    async def _find(self, digest: str) -> s2.FindTokenReply:
        now_s = time.monotonic()
        cache_entry = self._cache.get(digest)
        if cache_entry is not None and now_s < cache_entry[1]:
            return cache_entry[0]
        try:
            lookup = await self._calls.call_shard(0, s2.FindToken(digest), s2.FindTokenReply)
        except Busy:
            if cache_entry is not None:
                return cache_entry[0]
            raise
        self._cache.pop(digest, None)
        self._cache[digest] = (lookup, now_s + _CACHE_S)
        if len(self._cache) > _CACHE_TOKENS_MAX:
            del self._cache[next(iter(self._cache))]
        return lookup


def _has_expired(expires_ms: int) -> bool:
    """Return True if a token has expired, by this gateway's clock."""
    return 0 < expires_ms <= time.time() * 1000


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
