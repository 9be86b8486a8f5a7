"""Limits of a key: boxes, routers, groups, sessions, bytes, requests (v0 §12). Pure.

Stored things count by the names that the key may use: everything under its prefixes, whichever key made it,
and everything on the server when the key has no prefixes. Sessions and transactions are counted by the key
that made them. A limit of 0 is no limit.
"""

from __future__ import annotations

from typing import Final

import msgspec

from streams.protocol.errors import Throttled


class _StoredAmounts(msgspec.Struct, frozen=True, gc=False):
    """A number for each limit that shards enforce."""

    boxes: int = 0
    routers: int = 0
    groups: int = 0
    sessions: int = 0
    idempotency_keys: int = 0
    txn_bytes: int = 0
    stored_bytes: int = 0


class Limits(_StoredAmounts, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    requests_per_s: int = 0

    def to_fields(self) -> dict[str, int]:
        """Return the limits that are set, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


class Use(_StoredAmounts, frozen=True, array_like=True, gc=False):
    """The usage of a key, in a shard or on the whole server."""

    def plus(self, other: Use) -> Use:
        return Use(*(getattr(self, name) + getattr(other, name) for name in STORED))

    def minus(self, other: Use) -> Use:
        return Use(*(getattr(self, name) - getattr(other, name) for name in STORED))


class ExchangeUse(msgspec.Struct, array_like=True, frozen=True):
    """A gateway reports the usage of keys in other shards, and asks for their usage in this one."""

    accounts: list[str]
    elsewhere: dict[str, Use] = {}


class AccountsUse(msgspec.Struct, array_like=True, frozen=True):
    """Usage of keys in a shard, by id. Keys that the shard does not know are left out."""

    use: dict[str, Use]


decode_use = msgspec.msgpack.Decoder(AccountsUse).decode

#: All limits, and those that shards enforce.
NAMES: Final = Limits.__struct_fields__
STORED: Final = Use.__struct_fields__

#: The next step for a client that has reached a limit, by the name of the limit.
_NEXT_STEP: Final = {
    "boxes": "delete some boxes",
    "routers": "delete some routers",
    "groups": "delete some groups",
    "sessions": "close some sessions or let them lapse",
    "idempotency_keys": "try again when older ones have lapsed",
    "txn_bytes": "commit or abort some transactions",
    "stored_bytes": "delete some records or boxes",
    "requests_per_s": "send fewer requests",
}


def limit_exceeded_error(name: str, *, in_use: int, limit: int) -> Throttled:
    """Return the error for a request that would exceed a limit of its key."""
    what = name.replace("_", " ").replace(" per s", " a second")
    message = f"this key has {in_use} of {limit} {what}; {_NEXT_STEP[name]}, or have its limit raised"
    if name == "requests_per_s":
        message = f"this key may send {limit} {what}; {_NEXT_STEP[name]}, or have its limit raised"
    return Throttled(message, limit=f"{name}_per_key", max=limit, used=in_use)
