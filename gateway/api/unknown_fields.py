"""Ignores unknown fields of reads and reports them as warnings (v0 §20).

A newer client may send fields that this server does not know. Reads ignore them and list them in `warnings`.
Requests that write, acknowledge, move a cursor, delete or configure stay strict: there a mistyped field would
silently drop a condition. `Prefer: handling=strict` (RFC 7240) makes reads strict too.

Shards always parse strictly. The gateway parses the body only after a shard has rejected it, so a request
without unknown fields has no extra cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gateway.api import long_polls
from gateway.api.responses import from_shard
from gateway.requests.content import check_content_type, decompress_body
from gateway.requests.request import Buffer, Request, Response
from gateway.shards.dispatch import Dispatch
from gateway.watch.plan import WATCH_FIELDS, WatchPlan, plan_of_body
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.bodies import ClaimBody, DiffBody

_FIELDS = {
    wire.OP_DIFF: frozenset(DiffBody.__struct_encode_fields__),
    wire.OP_CLAIM: frozenset(ClaimBody.__struct_encode_fields__),
}
WARNINGS_MAX = 8
_NAME_CHARS_MAX = 64
#: Larger bodies are not searched for unknown fields: a read with 256 nodes has 32 KiB.
_BODY_BYTES_MAX = 1024 * 1024

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def wants_strict(headers: Mapping[str, str]) -> bool:
    preferences = headers.get("prefer")
    if preferences is None:
        return False
    for preference in preferences.lower().split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip() == "handling" and value.strip().strip('"') == "strict":
            return True
    return False


def strip_unknown_fields(body: bytes, field_names: Iterable[str]) -> tuple[bytes, list[str]]:
    """Return the body without unknown top-level fields, and warnings for the first `WARNINGS_MAX` of them."""
    try:
        if len(body) > _BODY_BYTES_MAX:
            return body, []
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, []
    unknown = sorted(fields.keys() - set(field_names))
    if not unknown:
        return body, []
    warnings = [f"unknown field {name[:_NAME_CHARS_MAX]!r} was ignored" for name in unknown[:WARNINGS_MAX]]
    return msgspec.json.encode({name: fields[name] for name in fields if name not in unknown}), warnings


async def call_tolerantly(
    dispatch: Dispatch, op: int, request: Request, head: wire.RequestHead, body: Buffer
) -> tuple[wire.Message, list[str]]:
    """Send a request to the owner of its box. Return the reply and a warning for each ignored field."""
    try:
        return await long_polls.call_owner(dispatch, op, request, head, body), []
    except InvalidRequest:
        field_names = _FIELDS.get(op)
        if field_names is None or wants_strict(request.headers):
            raise
        stripped_body, warnings = strip_unknown_fields(bytes(body), field_names)
        if not warnings:
            raise
    return await long_polls.call_owner(dispatch, op, request, head, stripped_body), warnings


async def forward_json(
    dispatch: Dispatch, op: int, request: Request, box: str, body_bytes_max: int
) -> Response:
    """Forward a JSON body to the owner of a box, and return its reply, with warnings, as a response."""
    check_content_type(request, allow_ndjson=False)
    body = request.body
    if "content-encoding" in request.headers:
        body = await decompress_body(request, body_bytes_max)
    head = wire.RequestHead(box, request.query)
    answer, warnings = await call_tolerantly(dispatch, op, request, head, body)
    response = from_shard(request, answer, warnings=warnings)
    response.charge = request.page_charge
    return response


def plan_watch(body: bytes, node_bytes_max: int, *, strict: bool) -> tuple[WatchPlan, list[str]]:
    """Parse the body of a watch or subscription. Return its plan and a warning for each ignored field."""
    try:
        return plan_of_body(body, node_bytes_max), []
    except InvalidRequest:
        stripped_body, warnings = strip_unknown_fields(body, WATCH_FIELDS)
        if strict or not warnings:
            raise
    return plan_of_body(stripped_body, node_bytes_max), warnings
