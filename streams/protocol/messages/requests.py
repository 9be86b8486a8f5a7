"""Decodes requests into commands and encodes replies (v0 §2-§5).

A gateway forwards query and body unchanged; the shard decodes them here, once, for HTTP and for the shard
wire. Every error names the field. Unknown fields and parameters are errors too (§0.9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from streams.protocol import wire
from streams.protocol.access.grants import check_append, check_patch
from streams.protocol.access.key_limits import AccountsUse, ExchangeUse
from streams.protocol.access.keys import Key
from streams.protocol.errors import InvalidRequest, StreamsError
from streams.protocol.messages import (
    bulk_requests,
    commands,
    forwards,
    list_requests,
    queue_requests,
    s2_requests,
    schedule_requests,
    session_requests,
)
from streams.protocol.messages.bodies import WAIT_MS_MAX as WAIT_MS_MAX
from streams.protocol.messages.bodies import DeleteBody, DiffBody, FenceBody, RouterBody
from streams.protocol.messages.commands import Command, Reply
from streams.protocol.messages.query import Query
from streams.protocol.messages.queues import CommitGroupReply, RequireQueue
from streams.protocol.messages.routers import Route
from streams.protocol.messages.schedules import PutScheduleReply
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.matches import parse_match as parse_match
from streams.protocol.model.names import (
    FENCING_TOKEN_BYTES_MAX,
    check_box_name,
    check_group_name,
    check_readable_name,
    check_text,
)
from streams.protocol.model.records import Columns
from streams.protocol.payloads.appends import (
    AppendOptions,
    RecordLimits,
    check_idempotency_key,
    check_seq,
    decode_json,
    parse_append,
    parse_append_lines,
)

DIFF_LIMIT_DEFAULT, DIFF_LIMIT_MAX = 256, 1000
DIFF_BYTES_DEFAULT, DIFF_BYTES_MAX = 1024 * 1024, 8 * 1024 * 1024
NODES_MAX = 256


_decode_router = msgspec.json.Decoder(RouterBody).decode
_decode_diff = msgspec.json.Decoder(DiffBody).decode
_decode_delete = msgspec.json.Decoder(DeleteBody).decode
_decode_fence = msgspec.json.Decoder(FenceBody).decode
_decode_patch = msgspec.json.Decoder(BoxPatch).decode
_decode_exchange = msgspec.msgpack.Decoder(ExchangeUse).decode


def parse_router(body: bytes) -> tuple[Route, int | None]:
    """Decode the body of a router's PUT: the route, and the first seq; None starts at the head."""
    request: RouterBody = decode_json(_decode_router, body or b"{}")
    for field in ("source", "dest"):
        check_box_name(getattr(request, field), field)
    if request.source == request.dest:
        raise InvalidRequest(f"dest: {request.dest} is the source too; they must differ", field="dest")
    route = Route(
        source=request.source,
        dest=request.dest,
        preserve_node=request.preserve_node,
        preserve_tag=request.preserve_tag,
        create_dest=request.create_dest,
        filter=parse_match(request.filter, "filter") if request.filter is not None else None,
        allow_cycle=request.allow_cycle,
    )
    return route, check_seq(request.from_seq, "from_seq") if request.from_seq is not None else None


def _check_box(head: wire.RequestHead) -> Query:
    check_box_name(head.box)
    return Query(head.query)


def _check_readable_box(head: wire.RequestHead) -> Query:
    check_readable_name(head.box)
    return Query(head.query)


def _append(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    check_box_name(head.box)
    if head.form == wire.FORM_NDJSON:
        return _append_lines(head, body, limits)
    columns, options = parse_append(body, limits)
    if head.grant is not None:
        check_append(head.grant, options.config, options.trim_before_seq)
    return_seqs = options.return_seqs is not False
    is_urgent = False
    if head.query:
        query = Query(head.query)
        query_return_seqs = query.flag("return_seqs", True) is not False
        return_seqs = query_return_seqs if options.return_seqs is None else return_seqs
        is_urgent = bool(query.flag("urgent", False))
        query.reject_unknown()
    key = options.idempotency_key
    if key is None and head.idempotency_key:
        key = check_idempotency_key(head.idempotency_key)
    return _append_of(head, columns, options, key, return_seqs=return_seqs, is_urgent=is_urgent)


def _append_of(
    head: wire.RequestHead,
    columns: Columns,
    options: AppendOptions,
    key: str | None,
    *,
    return_seqs: bool,
    is_urgent: bool,
) -> commands.Append:
    return commands.Append(
        box=head.box,
        columns=columns,
        idempotency_key=key,
        create=options.create,
        config=options.config,
        disable_backpressure=options.disable_backpressure or is_urgent,
        match_seq=options.match_seq,
        fencing_token=options.fencing_token,
        trim_before_seq=options.trim_before_seq,
        return_seqs=return_seqs,
        account=head.account,
    )


def _append_lines(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = Query(head.query)
    return_seqs = query.flag("return_seqs", True) is not False
    is_urgent = bool(query.flag("urgent", False))
    config_text = query.text("config")
    options = AppendOptions(
        node=query.text("node"),
        idempotency_key=query.text("idempotency_key") or head.idempotency_key or None,
        create=query.flag("create", None),
        disable_backpressure=bool(query.flag("disable_backpressure", False)),
        match_seq=query.number("match_seq"),
        fencing_token=query.text("fencing_token"),
        trim_before_seq=query.number("trim_before_seq"),
    )
    query.reject_unknown()
    if config_text:
        options.config = decode_json(_decode_patch, config_text.encode())
    if head.grant is not None:
        check_append(head.grant, options.config, options.trim_before_seq)
    columns = parse_append_lines(body, options.node, limits)
    key = options.idempotency_key
    if key is not None:
        check_idempotency_key(key)
    return _append_of(head, columns, options, key, return_seqs=return_seqs, is_urgent=is_urgent)


def _diff(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = _check_readable_box(head)
    touch = query.flag("touch", True) is not False
    query.reject_unknown()
    request: DiffBody = decode_json(_decode_diff, body or b"{}")
    if request.from_ts is not None and request.from_seq is not None:
        raise InvalidRequest("from_ts: cannot be given together with from_seq", field="from_ts")
    if request.group is not None:
        check_group_name(request.group)
        if request.from_seq is not None or request.from_ts is not None:
            raise InvalidRequest("group: cannot be given together with from_seq or from_ts", field="group")
    nodes = [request.node] if isinstance(request.node, str) else request.node or []
    if len(nodes) > NODES_MAX:
        raise InvalidRequest(f"node: has {len(nodes)} names, at most {NODES_MAX} are allowed", field="node")
    for node in nodes:
        check_text(node, "node", bytes_max=limits.node_bytes_max)
    return commands.ReadBox(
        box=head.box,
        from_seq=check_seq(request.from_seq or 0, "from_seq"),
        from_ts=request.from_ts,
        limit=min(request.limit or DIFF_LIMIT_DEFAULT, DIFF_LIMIT_MAX),
        max_bytes=min(request.max_bytes or DIFF_BYTES_DEFAULT, DIFF_BYTES_MAX),
        nodes=frozenset(node for node in nodes if node),
        include_tags=request.include_tags,
        include_meta=request.include_meta,
        include_data=request.include_data,
        wait_ms=min(request.wait_ms, WAIT_MS_MAX),
        match=parse_match(request.match) if request.match is not None else None,
        generation=request.generation,
        group=request.group,
        touch=touch if request.touch is None else request.touch,
    )


def _put_box(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    _check_box(head).reject_unknown()
    patch: BoxPatch = decode_json(_decode_patch, body or b"{}")
    if head.grant is not None:
        check_patch(head.grant, patch)
    return commands.PutBox(head.box, patch, head.account)


def _get_state(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = _check_readable_box(head)
    touch = query.flag("touch", True) is not False
    query.reject_unknown()
    return commands.GetState(head.box, touch)


def _delete_box(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = _check_box(head)
    if_empty = bool(query.flag("if_empty", False))
    query.reject_unknown()
    return commands.DeleteBox(head.box, if_empty)


def _get_record(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    query = _check_readable_box(head)
    seq = query.number("seq")
    query.reject_unknown()
    if seq is None:
        raise InvalidRequest("seq: is missing", field="seq")
    return commands.GetRecord(head.box, seq)


def _get_tail(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    _check_readable_box(head).reject_unknown()
    return commands.GetTail(head.box)


def _delete_records(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    _check_box(head).reject_unknown()
    request: DeleteBody = decode_json(_decode_delete, body or b"{}")
    if request.before_seq is None and request.match is None:
        raise InvalidRequest("before_seq, match: give at least one of them", field="before_seq")
    return commands.DeleteRecords(
        head.box,
        check_seq(request.before_seq, "before_seq") if request.before_seq is not None else None,
        parse_match(request.match) if request.match is not None else None,
        request.dry_run,
    )


def _set_fence(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> Command:
    _check_box(head).reject_unknown()
    request: FenceBody = decode_json(_decode_fence, body or b"{}")
    for field, token in (("token", request.token), ("if_token", request.if_token or "")):
        check_text(token, field, bytes_max=FENCING_TOKEN_BYTES_MAX)
    return commands.SetFence(head.box, request.token, request.if_token)


def _follow(head: wire.FollowHead) -> Command:
    """From a gateway, which has checked it; a name is checked again because it costs nothing."""
    check_readable_name(head.box)
    return commands.Follow(
        box=head.box,
        from_seq=head.from_seq,
        generation=head.generation,
        limit=min(head.limit, DIFF_LIMIT_MAX),
        max_bytes=min(head.max_bytes, DIFF_BYTES_MAX),
        nodes=frozenset(head.nodes),
        include_tags=head.include_tags,
        include_meta=head.include_meta,
        include_data=head.include_data,
        wait_ms=min(head.wait_ms, WAIT_MS_MAX),
        strong=head.strong,
        awaits_box=head.awaits_box,
        touch=head.touch,
    )


def _exchange_use(head: bytes) -> Command:
    try:
        return _decode_exchange(head)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"head: {error}") from None


_DECODERS: dict[int, Callable[[wire.RequestHead, bytes, RecordLimits], Command]] = {
    wire.OP_APPEND: _append,
    wire.OP_DIFF: _diff,
    wire.OP_PUT_BOX: _put_box,
    wire.OP_GET_STATE: _get_state,
    wire.OP_LIST_BOXES: list_requests.decode,
    wire.OP_DELETE_BOX: _delete_box,
    wire.OP_GET_RECORD: _get_record,
    wire.OP_GET_TAIL: _get_tail,
    wire.OP_DELETE_RECORDS: _delete_records,
    wire.OP_SET_FENCE: _set_fence,
    **queue_requests.DECODERS,
    **schedule_requests.DECODERS,
    **session_requests.DECODERS,
}


def decode_command(
    op: int, head: bytes, body: bytes, limits: RecordLimits, key: Key | None = None
) -> Command:
    """Decode a message into its command. Raises only errors of the family `Refused`. `key` is the peer's
    own and replaces grant and account in the message."""
    if op == wire.OP_FOLLOW:
        try:
            return _follow(wire.follow_head_decoder.decode(head))
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"head: {error}") from None
    decode = _DECODERS.get(op)
    if decode is None:
        if op in forwards.DECODERS:
            return forwards.DECODERS[op](head, body)
        if op in bulk_requests.DECODERS:
            return bulk_requests.decode(op, head, body, limits)
        if op in s2_requests.DECODERS:
            return s2_requests.DECODERS[op](head, body)
        if op == wire.OP_EXCHANGE_USE:
            return _exchange_use(head)
        raise InvalidRequest(f"op {op} is not known; compare the versions of client and server")
    try:
        request_head = wire.request_head_decoder.decode(head)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"head: {error}") from None
    if key is not None:
        request_head.grant, request_head.account = key.grant, key.account
    return decode(request_head, body, limits)


_BOX_OPS = frozenset(
    (
        wire.OP_DIFF,
        wire.OP_GET_STATE,
        wire.OP_GET_TAIL,
        wire.OP_DELETE_RECORDS,
        wire.OP_SET_FENCE,
        wire.OP_COMMIT_GROUP,
    )
)


def existence_check(op: int, head: bytes) -> Command | None:
    """Return the command that checks existence and type of the box; its error comes before that of an invalid
    request (v0 §20). None where names are invalid, or where the op may create its box."""
    if op not in queue_requests.QUEUE_OPS and op not in _BOX_OPS:
        return None
    try:
        request_head = wire.request_head_decoder.decode(head)
        check_readable_name(request_head.box)
        if op == wire.OP_COMMIT_GROUP:
            queue_requests.group_of(request_head)
    except (msgspec.DecodeError, InvalidRequest):
        return None
    if op in queue_requests.QUEUE_OPS:
        return RequireQueue(request_head.box)
    return commands.GetState(request_head.box, touch=False)


# ---------------------------------------------------------------------------------------------------
# Replies

encode_json = msgspec.json.Encoder().encode

_FLAGS = {False: b"false", True: b"true"}


def _encode_append(reply: commands.AppendResult) -> bytes:
    first_seq, last_seq = reply.first_seq, reply.last_seq
    seqs = b""
    if reply.return_seqs:
        if first_seq == last_seq:
            seqs = b',"seqs":[%d]' % first_seq
        else:
            seqs = b',"seqs":%b' % orjson.dumps(list(range(first_seq, last_seq + 1)))
    return b'{"box":"%b","first_seq":%d,"last_seq":%d%b,"head_seq":%d,"count":%d%b' % (
        reply.box.encode(),
        first_seq,
        last_seq,
        seqs,
        reply.head_seq,
        last_seq - first_seq + 1,
        _APPEND_ENDINGS[reply.created, reply.deduped],
    )


_APPEND_ENDINGS = {
    (created, deduped): b',"created":%b,"deduped":%b}' % (_FLAGS[created], _FLAGS[deduped])
    for created in (False, True)
    for deduped in (False, True)
}


def _encode_records(reply: commands.DiffResult) -> bytes:
    tombstone = encode_json(reply.tombstone) if reply.tombstone else b"null"
    return b"".join(
        (
            b'{"box":"%b","records":[' % reply.box.encode(),
            reply.records,
            b'],"next_from_seq":%d,"generation":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b'
            % (
                reply.next_from_seq,
                reply.generation,
                reply.head_seq,
                reply.earliest_seq,
                b"true" if reply.next_from_seq == reply.head_seq else b"false",
                tombstone,
            ),
            b',"lag":%d}' % (reply.head_seq - reply.next_from_seq),
        )
    )


def _encode_state(reply: commands.BoxState) -> bytes:
    state = msgspec.structs.replace(
        reply, config=reply.config.to_fields(), fencing_token=reply.fencing_token or None
    )
    return encode_json(state)


def _encode_put_box(reply: commands.PutBoxReply) -> bytes:
    return encode_json(msgspec.structs.replace(reply, config=reply.config.to_fields()))


def _encode_one_record(reply: commands.GetRecordResult) -> bytes:
    return b'{"box":"%b","record":%b}' % (reply.box.encode(), reply.record)


def page_head(page: commands.FollowResult) -> wire.PageHead:
    gap = page.tombstone
    return wire.PageHead(
        page.next_from_seq,
        page.generation,
        page.head_seq,
        page.earliest_seq,
        None if gap is None else (gap.gap_from, gap.gap_to, gap.reason),
        page.appended_ms,
    )


def _encode_session(reply: commands.SessionReply) -> bytes:
    return b'{"epoch":%d,"state":%b}' % (reply.epoch, reply.state or b"null")


_ENCODERS: dict[type[Any], Callable[[Any], bytes]] = {
    commands.AppendResult: _encode_append,
    commands.DiffResult: _encode_records,
    commands.BoxState: _encode_state,
    commands.PutBoxReply: _encode_put_box,
    commands.GetRecordResult: _encode_one_record,
    commands.ListBoxesResult: encode_json,
    commands.DeleteBoxReply: encode_json,
    commands.Tail: encode_json,
    commands.DeleteRecordsReply: encode_json,
    commands.SetFenceReply: encode_json,
    **queue_requests.ENCODERS,
    **dict.fromkeys(schedule_requests.REPLIES, encode_json),
    **dict.fromkeys(forwards.REPLIES, forwards.encode),
    **dict.fromkeys(bulk_requests.REPLIES, bulk_requests.encode),
    commands.SessionReply: _encode_session,
    AccountsUse: msgspec.msgpack.encode,
    **s2_requests.ENCODERS,
}


#: Replies with `created`.
_CREATING = (commands.PutBoxReply, CommitGroupReply, PutScheduleReply)


def status_of(reply: Reply) -> int:
    if type(reply) is commands.AppendResult:
        return 201 if reply.created else 200
    return 201 if isinstance(reply, _CREATING) and reply.created else 200


def encode_reply(reply: Reply) -> bytes:
    """Encode a reply as a JSON object, without the `performance` that the gateway adds."""
    return _ENCODERS[type(reply)](reply)


class WireFailure(msgspec.Struct, array_like=True):
    """An error on the wire. The receiver finds its class by its code."""

    code: str
    message: str
    detail: dict[str, Any]


failure_decoder = msgspec.json.Decoder(WireFailure)


def encode_failure(error: StreamsError) -> bytes:
    return msgspec.json.encode(WireFailure(error.code, error.message, error.detail))
