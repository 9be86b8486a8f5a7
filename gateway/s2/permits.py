"""Who may do what under `/v1` (s2 §17): operations, and what a token or a key allows of them.

A request is one or more operations on a basin and a stream. A **token** that this API has issued allows what
its scope says, wherever it is presented. Any other bearer is a key of the server, which its guard knows; on a
server without keys everything is allowed, as in `s2 lite`.

What the register said of a token counts for a second, so a revocation counts everywhere after that; and for
as long as the register cannot be reached, so that its shard does not take the streams of all others with it;
but never longer than until the token expires.
A session of a token that is revoked or expires ends within `_LOOK_AGAIN_S` of that.

A token counts against the limits of a key as a key of its own.
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

#: Operation -> (its group, whether it reads or writes, what a key of ours must allow for it).
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

_KEPT_S = 1.0
#: How often a session looks whether its token still counts.
_LOOK_AGAIN_S = 5.0
_KEPT_MAX = 1024


class Permit:
    """What one caller may do. This one may do everything."""

    #: The first operation that it was asked for, and on which basin. Nothing is answered by code that has not
    #: asked (`endpoints.py`). A request is this operation; what else it is asked for goes with it.
    asked: tuple[str, str] | None = None

    #: What is put before every name of a stream that this caller gives, and taken off those it gets.
    prefix = ""

    #: The names within which this caller lists. A key of ours lists a kind of thing whole or not at all.
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
        if self.asked is None:
            self.asked = (operation, basin)
        if not self.allows(operation, basin, stream):
            raise S2Error("permission_denied", f"the access token does not allow {operation} here")

    def check_token_id(self, id: str) -> None:
        """Raise `permission_denied` if the caller may not issue or revoke a token with this id."""
        if not self.tokens.holds(id):
            raise S2Error("permission_denied", "id: is outside the scope of the token that asks")

    def limited(self, token: AccessToken) -> AccessToken:
        """The token as this caller may issue it: never more than the caller has itself."""
        return token

    async def wait_void(self) -> None:
        """Returns when this permit does not count any more. Most end with the request, or with their key."""
        await trio.sleep_forever()


class KeyPermit(Permit):
    """A basin counts as the beginning of its streams' boxes."""

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

    def limited(self, token: AccessToken) -> AccessToken:
        for operation in token.ops:
            if not self.allows(operation):
                raise S2Error("permission_denied", f"scope: the key that asks does not allow {operation}")
        return token


class TokenPermit(Permit):
    def __init__(self, token: AccessToken, doorkeeper: Authenticator) -> None:
        self._token = token
        self._doorkeeper = doorkeeper
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

    def limited(self, token: AccessToken) -> AccessToken:
        """Operations and names must be within the caller's own. The caller's expiry is the default and the
        latest."""
        own = self._token
        sets: tuple[tuple[NameSet, NameSet], ...] = (
            (token.basins, own.basins),
            (token.streams, own.streams),
            (token.tokens, own.tokens),
        )
        if not (set(token.ops) <= set(own.ops) and all(inner.within(outer) for inner, outer in sets)):
            raise S2Error("permission_denied", "scope: is wider than that of the token that asks")
        self.check_token_id(token.id)
        if not own.expires_ms:
            return token
        if token.expires_ms > own.expires_ms:
            raise S2Error("permission_denied", "expires_at: is later than that of the token that asks")
        return msgspec.structs.replace(token, expires_ms=token.expires_ms or own.expires_ms)

    async def wait_void(self) -> None:
        counts = True
        while counts:
            await trio.sleep(_LOOK_AGAIN_S)
            counts = await self._doorkeeper.still_holds(self._token)


#: The guard of the server: whose request it is. Raises `Unauthorized`. None: the server has no keys.
Admit = Callable[[Request], Grant]


class Authenticator:
    def __init__(self, calls: ShardCalls, admit: Admit | None = None) -> None:
        self._calls = calls
        self._admit = admit
        #: Digest -> (what the register said, until when that counts).
        self._kept: dict[str, tuple[s2.FindTokenReply, float]] = {}

    def __repr__(self) -> str:
        return f"<Authenticator with {len(self._kept)} tokens at hand>"

    async def permit(self, request: Request) -> Permit:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secret:
            found = await self._find(digest_of(secret.strip()))
            if found.token is not None and not _is_past(found.token.expires_ms):
                request.key = Key(found.token.digest)
                return TokenPermit(found.token, self)
            if found.is_known:
                raise S2Error("authn", "authorization: the access token has expired")
        return Permit() if self._admit is None else KeyPermit(self._admit(request))

    async def still_holds(self, token: AccessToken) -> bool:
        """Whether it counts and allows the same. While nobody can say, it does."""
        if _is_past(token.expires_ms):
            return False
        try:
            return (await self._find(token.digest)).token == token
        except StreamsError:
            return True

    async def _find(self, digest: str) -> s2.FindTokenReply:
        now_s = time.monotonic()
        kept = self._kept.get(digest)
        if kept is not None and now_s < kept[1]:
            return kept[0]
        try:
            found = await self._calls.ask(0, s2.FindToken(digest), s2.FindTokenReply)
        except Busy:
            if kept is not None:
                return kept[0]
            raise
        self._kept.pop(digest, None)
        self._kept[digest] = (found, now_s + _KEPT_S)
        if len(self._kept) > _KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        return found


def _is_past(expires_ms: int) -> bool:
    """Whether a token expired, also while its register cannot be reached."""
    return 0 < expires_ms <= time.time() * 1000


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
