"""Handlers for access tokens: issue, list, revoke (s2 §17).

The secret is returned once, when the token is issued. Only its digest is stored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import orjson
from msgspec import UNSET, UnsetType

from gateway.requests.request import Request, Response
from gateway.requests.s2_errors import S2Error
from gateway.s2 import configs, fields
from gateway.s2.control import json_body, json_response
from gateway.s2.permits import OPERATIONS, READ, WRITE, Permit, digest_of
from gateway.s2.shard_calls import ShardCalls
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import AccessToken, NameSet
from streams.protocol.model.names import quote

_ID_BYTES_MAX = 96
_SECRET_BYTES = 32

_Operation = Literal[
    "list-basins",
    "create-basin",
    "delete-basin",
    "reconfigure-basin",
    "get-basin-config",
    "issue-access-token",
    "revoke-access-token",
    "list-access-tokens",
    "account-metrics",
    "list-locations",
    "get-default-location",
    "set-default-location",
    "list-streams",
    "create-stream",
    "delete-stream",
    "get-stream-config",
    "reconfigure-stream",
    "basin-metrics",
    "check-tail",
    "read",
    "append",
    "trim",
    "fence",
    "stream-metrics",
]


class _NameRule(msgspec.Struct, frozen=True):
    exact: str | UnsetType = UNSET
    prefix: str | UnsetType = UNSET

    def names(self, where: str) -> NameSet:
        exact, prefix = self.exact, self.prefix
        if exact is not UNSET and prefix is UNSET:
            if exact:
                _CHECK_NAME[where](exact, "bad_json")
            return NameSet(exact, None)
        if prefix is not UNSET and exact is UNSET:
            if not _IS_PREFIX[where](prefix):
                raise S2Error("bad_json", f"scope.{where}.prefix: is not a valid prefix of such a name")
            return NameSet(None, prefix)
        raise S2Error("bad_json", f"scope.{where}: must be either exact or prefix")


class _Group(msgspec.Struct, frozen=True):
    read: bool | None = None
    write: bool | None = None


class _Groups(msgspec.Struct, frozen=True):
    account: _Group | None = None
    basin: _Group | None = None
    stream: _Group | None = None

    def ops(self) -> set[str]:
        groups = {"account": self.account, "basin": self.basin, "stream": self.stream}
        group_kinds = {
            (name, kind)
            for name, group in groups.items()
            if group is not None
            for kind, is_allowed in ((READ, group.read), (WRITE, group.write))
            if is_allowed
        }
        return {
            operation for operation, (group, kind, _) in OPERATIONS.items() if (group, kind) in group_kinds
        }


class _Scope(msgspec.Struct, frozen=True):
    basins: _NameRule | None = None
    streams: _NameRule | None = None
    access_tokens: _NameRule | None = None
    op_groups: _Groups | None = None
    ops: list[_Operation] | None = None


class _Issue(msgspec.Struct, frozen=True):
    id: str
    scope: _Scope
    auto_prefix_streams: bool | None = None
    expires_at: str | None = None


_fraction = re.compile(r"\.([0-9]{1,9})(?=[Zz+-])")


def _parse_time(text: str) -> tuple[int, str]:
    """Parse an RFC 3339 time. Return milliseconds, and the time in UTC with the client's precision."""
    fraction = _fraction.search(text)
    digits = fraction[1] if fraction else ""
    try:
        moment = msgspec.convert(_fraction.sub("", text, count=1), datetime)
        seconds = int(moment.timestamp())
    except (msgspec.ValidationError, OverflowError, ValueError):
        raise S2Error("bad_json", f"expires_at: {quote(text)} is not an RFC 3339 time") from None
    if moment.tzinfo is None:
        raise S2Error("bad_json", f"expires_at: {quote(text)} has no offset from UTC")
    utc = moment.astimezone(UTC)
    return seconds * 1000 + int(digits.ljust(3, "0")[:3]), f"{utc:%Y-%m-%dT%H:%M:%S}.{digits.ljust(6, '0')}Z"


def token_of(body: _Issue, digest: str) -> AccessToken:
    """Validate the request and build its token."""
    token_id(body.id, "bad_json")
    scope = body.scope
    ops = set(scope.ops or ()) | (scope.op_groups.ops() if scope.op_groups else set())
    if not ops:
        raise S2Error("invalid", "Access token permissions cannot be empty")
    names = {
        where: name_rule.names(where) if name_rule is not None else NameSet()
        for where, name_rule in (
            ("basins", scope.basins),
            ("streams", scope.streams),
            ("access_tokens", scope.access_tokens),
        )
    }
    if body.auto_prefix_streams and names["streams"].prefix is None:
        raise S2Error("invalid", "Auto prefixing is only allowed for streams with prefix matching")
    expires_ms = 0
    scope_json = msgspec.to_builtins(scope)
    if body.expires_at is not None:
        expires_ms, scope_json["expires_at"] = _parse_time(body.expires_at)
        expires_ms = max(1, expires_ms)
    return AccessToken(
        id=body.id,
        digest=digest,
        basins=names["basins"],
        streams=names["streams"],
        tokens=names["access_tokens"],
        ops=tuple(sorted(ops)),
        scope=orjson.dumps(scope_json).decode(),
        auto_prefix=bool(body.auto_prefix_streams),
        expires_ms=expires_ms,
    )


def token_id(id: str, where: str) -> str:
    if not 1 <= len(id.encode(errors="replace")) <= _ID_BYTES_MAX or id in (".", "..") or "\0" in id:
        raise S2Error(where, f"id: must have 1 to {_ID_BYTES_MAX} bytes")
    return id


_CHECK_NAME: dict[str, Callable[[str, str], str]] = {
    "basins": fields.basin_name,
    "streams": fields.stream_name,
    "access_tokens": token_id,
}
_IS_PREFIX: dict[str, Callable[[str], bool]] = {
    "basins": fields.is_basin_part,
    "streams": fields.is_stream_part,
    "access_tokens": lambda text: len(text.encode()) <= _ID_BYTES_MAX and "\0" not in text,
}


def describe_token(token: AccessToken) -> dict[str, Any]:
    scope_json = orjson.loads(token.scope)
    groups = scope_json.get("op_groups") or {}
    scope: dict[str, Any] = {where: _describe_names(scope_json.get(where)) for where in _IS_PREFIX}
    scope["op_groups"] = {name: _describe_group(groups.get(name)) for name in ("account", "basin", "stream")}
    scope["ops"] = scope_json.get("ops") or []
    return {
        "id": token.id,
        "scope": scope,
        "auto_prefix_streams": token.auto_prefix,
        "expires_at": scope_json.get("expires_at")
        or (configs.format_time(token.expires_ms) if token.expires_ms else None),
    }


def _describe_names(name_rule: dict[str, str | None] | None) -> dict[str, str] | None:
    """Return an object with exactly one field, or None for no names."""
    set_fields = {kind: text for kind, text in (name_rule or {}).items() if text is not None}
    return None if set_fields in ({}, {"exact": ""}) else set_fields


def _describe_group(group: dict[str, bool | None] | None) -> dict[str, bool]:
    flags = group or {}
    return {"read": bool(flags.get("read")), "write": bool(flags.get("write"))}


class TokenApi:
    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    async def issue(self, request: Request, permit: Permit) -> Response:
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        token = token_of(configs.decode_body(await json_body(request), _Issue), digest_of(secret))
        permit.check("issue-access-token")
        token = permit.restrict(token)
        await self._calls.call_shard(0, s2.IssueToken(token), s2.FindTokenReply)
        return json_response({"access_token": secret}, 201)

    async def list(self, request: Request, permit: Permit) -> Response:
        query = fields.QueryParameters(request.query)
        permit.check("list-access-tokens")
        limit = query.limit()
        names = permit.tokens.narrow(query.text("prefix") or "")
        if names.is_empty:
            return json_response({"access_tokens": [], "has_more": False})
        command = s2.ListTokens(names.common_prefix, query.text("start_after") or "", limit)
        page = await self._calls.call_shard(0, command, s2.TokenPage)
        descriptions = [describe_token(token) for token in page.tokens if names.holds(token.id)]
        return json_response({"access_tokens": descriptions, "has_more": page.more and not names.exact})

    async def revoke(self, request: Request, permit: Permit, id: str) -> Response:
        token_id(id, "bad_path")
        permit.check("revoke-access-token")
        permit.check_token_id(id)
        await self._calls.call_shard(0, s2.RevokeToken(id), s2.FindTokenReply)
        return Response(204)
