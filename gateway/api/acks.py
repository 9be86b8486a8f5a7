"""Acks with outputs (v0 §24): the boxes that are to take the outputs may be on other shards.

The owner of each box says first whether it would refuse its outputs for good. Nothing is written by that.
Then the owner of the queue acks the jobs and plans the outputs, in one change. If a box refuses, the request
may still be a repeat of an ack that has succeeded, so the owner of the queue is asked for that.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import urlencode

import msgspec

from gateway.admission.inline import need_task
from gateway.api.responses import from_shard
from gateway.requests.content import check_content_type, decompress_body
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest, LeaseLost, PayloadTooLarge, StreamsError
from streams.protocol.messages.query import Query
from streams.protocol.messages.queue_requests import decode_ack_with_outputs
from streams.protocol.messages.queues import OUTPUT_BYTES_MAX, CheckOutputReply
from streams.protocol.model.records import Columns
from streams.protocol.payloads.appends import RecordLimits

_FIELD = b"outputs"

#: The shard that plans the outputs checks the limits of records.
_NO_LIMITS = RecordLimits(*[1 << 40] * len(RecordLimits.__struct_fields__))

_decode_check = msgspec.json.Decoder(CheckOutputReply).decode


def may_have_outputs(request: Request) -> bool:
    """Return True if the body has the field, or is compressed."""
    return bytes(request.body).find(_FIELD) >= 0 or "content-encoding" in request.headers


async def ack_with_outputs(dispatch: Dispatch, request: Request, box: str, body_bytes_max: int) -> Response:
    """Ack jobs, with outputs if the body has some."""
    await need_task()
    check_content_type(request, allow_ndjson=False)
    bytes_max = min(body_bytes_max, OUTPUT_BYTES_MAX)
    body = bytes(await decompress_body(request, bytes_max))
    if len(body) > bytes_max:
        raise PayloadTooLarge(f"body: has more than {bytes_max} bytes, the limit of an ack", limit=bytes_max)
    if body.find(_FIELD) < 0:
        plain_head = wire.RequestHead(box, request.query)
        return from_shard(request, await dispatch.to_owner(wire.OP_ACK, plain_head, body))
    head = partial(
        wire.RequestHead,
        idempotency_key=request.headers.get("idempotency-key", ""),
        account=request.account,
    )
    try:
        Query(request.query).reject_unknown()
        ack = decode_ack_with_outputs(head(box, ""), body, _NO_LIMITS)
    except InvalidRequest:
        # If the box is no queue, that is reported first.
        await dispatch.to_owner(wire.OP_REQUIRE_QUEUE, wire.RequestHead(box), b"")
        raise
    for dest, _ in ack.outputs:
        request.require_name(dest, "outputs")
    await dispatch.to_owner(wire.OP_REQUIRE_QUEUE, wire.RequestHead(box), b"")
    try:
        log_boxes = await _check_outputs(dispatch, ack.outputs, request.account)
    except StreamsError as error:
        repeat = head(box, urlencode({"only_repeats": "true"}))
        try:
            return from_shard(request, await dispatch.to_owner(wire.OP_ACK_WITH_OUTPUTS, repeat, body))
        except LeaseLost:
            raise error from None
    query = urlencode({"logs": ",".join(log_boxes)}) if log_boxes else ""
    answer = await dispatch.to_owner(wire.OP_ACK_WITH_OUTPUTS, head(box, query), body)
    return from_shard(request, answer)


async def _check_outputs(
    dispatch: Dispatch, outputs: tuple[tuple[str, Columns], ...], account: str
) -> list[str]:
    """Ask the owner of each box. Return the boxes that are logs, or will be."""
    log_boxes: list[str] = []
    for dest, columns in outputs:
        metas = columns.metas or [None] * columns.count
        sizes = [len(data) + len(meta or b"") for data, meta in zip(columns.datas, metas, strict=True)]
        query = urlencode({"bytes": sum(sizes), "record_bytes": max(sizes)})
        head = wire.RequestHead(dest, query, account=account)
        reply = _decode_check((await dispatch.to_owner(wire.OP_CHECK_OUTPUT, head, b"")).body)
        if not reply.is_queue:
            log_boxes.append(dest)
    return log_boxes
