"""Tolerant reads: unknown fields of a read are ignored and reported (v0 §20).

A client of a newer version sends fields that this server does not know. Reads go on without them and list
them in `warnings`. Everything that writes, acknowledges, moves a cursor, deletes or configures stays strict:
there a mistyped field would turn a condition into none. `Prefer: handling=strict` (RFC 7240) makes reads
strict too.

A shard reads strictly, whoever asks. Its refusal is what makes the gateway look at the body, so that a
request without unknown fields costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gateway.api import long_polls
from gateway.api.responses import from_shard
from gateway.requests.content import is_ndjson, uncompressed
from gateway.requests.request import Buffer, Request, Response
from gateway.shards.dispatch import Dispatch
from gateway.watch.plan import WATCH_FIELDS, Plan, plan_of_body
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.bodies import ClaimBody, DiffBody

_FIELDS = {
    wire.OP_DIFF: frozenset(DiffBody.__struct_encode_fields__),
    wire.OP_CLAIM: frozenset(ClaimBody.__struct_encode_fields__),
}
WARNINGS_MAX = 8
_NAME_CHARS_MAX = 64
#: A larger body is never one of a read with a field too many: 256 nodes have 32 KiB.
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


def without_unknown(body: bytes, known: Iterable[str]) -> tuple[bytes, list[str]]:
    """The body without its unknown top-level fields, and a warning for each of the first of them."""
    try:
        if len(body) > _BODY_BYTES_MAX:
            return body, []
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, []
    unknown = sorted(fields.keys() - set(known))
    if not unknown:
        return body, []
    warnings = [f"unknown field {name[:_NAME_CHARS_MAX]!r} was ignored" for name in unknown[:WARNINGS_MAX]]
    return msgspec.json.encode({name: fields[name] for name in fields if name not in unknown}), warnings


async def ask(
    dispatch: Dispatch, op: int, request: Request, head: wire.RequestHead, body: Buffer
) -> tuple[wire.Message, list[str]]:
    """The owner's answer to a read, and warnings about what was ignored."""
    try:
        return await long_polls.ask(dispatch, op, request, head, body), []
    except InvalidRequest:
        known = _FIELDS.get(op)
        if known is None or wants_strict(request.headers):
            raise
        trimmed, warnings = without_unknown(bytes(body), known)
        if not warnings:
            raise
    return await long_polls.ask(dispatch, op, request, head, trimmed), warnings


async def forward_json(
    dispatch: Dispatch, op: int, request: Request, box: str, body_bytes_max: int
) -> Response:
    """Pass a JSON body on to the owner of a box, and its answer, with its warnings, back."""
    is_ndjson(request, allowed=False)
    body = request.body
    if "content-encoding" in request.headers:
        body = await uncompressed(request, body_bytes_max)
    head = wire.RequestHead(box, request.query)
    answer, warnings = await ask(dispatch, op, request, head, body)
    response = from_shard(request, answer, warnings=warnings)
    response.charge = request.page_charge
    return response


def plan_watch(body: bytes, node_bytes_max: int, *, strict: bool) -> tuple[Plan, list[str]]:
    """What a watch or a subscription asks for, and warnings about what was ignored."""
    try:
        return plan_of_body(body, node_bytes_max), []
    except InvalidRequest:
        trimmed, warnings = without_unknown(body, WATCH_FIELDS)
        if strict or not warnings:
            raise
    return plan_of_body(trimmed, node_bytes_max), warnings
