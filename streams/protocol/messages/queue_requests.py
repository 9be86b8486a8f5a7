"""Decodes requests of queues and groups into commands, and encodes replies (v0 §8, §10).

`requests.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

import msgspec

from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages import queues
from streams.protocol.messages.bodies import (
    WAIT_MS_MAX,
    AckBody,
    ClaimBody,
    CommitBody,
    ExtendBody,
    NackBody,
    PauseBody,
    ReprioritizeBody,
    RequeueBody,
    RescheduleBody,
)
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.messages.query import Query
from streams.protocol.messages.queues import (
    CLAIM_JOBS_MAX,
    DELAY_MS_MAX,
    ERROR_BYTES_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    OUTPUT_BOXES_MAX,
    OUTPUT_RECORDS_MAX,
    REQUEUE_MAX,
    SEQS_MAX,
    AckWithOutputs,
    GroupCommand,
    JobState,
    QueueCommand,
)
from streams.protocol.model.matches import Match, parse_match
from streams.protocol.model.names import check_box_name, check_group_name, check_text, quote
from streams.protocol.model.records import Columns
from streams.protocol.payloads.appends import (
    OutputRecords,
    RecordLimits,
    check_idempotency_key,
    check_seq,
    decode_json,
    parse_output,
)

JOB_STATES = get_args(JobState)
#: Ops that need a queue.
QUEUE_OPS = frozenset(
    (
        wire.OP_CLAIM,
        wire.OP_ACK,
        wire.OP_ACK_WITH_OUTPUTS,
        wire.OP_NACK,
        wire.OP_EXTEND,
        wire.OP_SET_PAUSED,
        wire.OP_RESCHEDULE,
        wire.OP_REPRIORITIZE,
        wire.OP_LIST_JOBS,
        wire.OP_WORK,
        wire.OP_WORK_END,
    )
)

_decode_claim = msgspec.json.Decoder(ClaimBody).decode
_decode_ack = msgspec.json.Decoder(AckBody).decode
_decode_nack = msgspec.json.Decoder(NackBody).decode
_decode_extend = msgspec.json.Decoder(ExtendBody).decode
_decode_reschedule = msgspec.json.Decoder(RescheduleBody).decode
_decode_reprioritize = msgspec.json.Decoder(ReprioritizeBody).decode
_decode_pause = msgspec.json.Decoder(PauseBody).decode
_decode_requeue = msgspec.json.Decoder(RequeueBody).decode
_decode_commit = msgspec.json.Decoder(CommitBody).decode


def _lease_ms(value: int) -> int:
    """Limit the length of a lease to the allowed range, as for a config (v0 §1)."""
    return min(max(value, LEASE_MS_MIN), LEASE_MS_MAX)


def _check_node(node: str, limits: RecordLimits) -> str:
    if not node:
        raise InvalidRequest("node: is empty; a worker needs a name", field="node")
    return check_text(node, "node", bytes_max=limits.node_bytes_max)


def _no_query(head: wire.RequestHead) -> None:
    check_box_name(head.box)
    if head.query:
        Query(head.query).reject_unknown()


def _claim(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    request: ClaimBody = decode_json(_decode_claim, body or b"{}")
    return queues.Claim(
        box=head.box,
        node=_check_node(request.node, limits),
        max=min(request.max, CLAIM_JOBS_MAX),
        lease_ms=None if request.lease_ms is None else _lease_ms(request.lease_ms),
        wait_ms=min(request.wait_ms, WAIT_MS_MAX),
    )


def _work(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> queues.Claim:
    """One claim of a `/work` stream. `stream`, `wait_ms` and `paused` are the gateway's, the rest is the
    client's."""
    check_box_name(head.box)
    query = Query(head.query)
    lease_ms = query.number("lease_ms")
    node = query.text("node")
    if node is None:
        raise InvalidRequest("node: is missing; a worker needs a name", field="node")
    command = queues.Claim(
        box=head.box,
        node=_check_node(node, limits),
        max=min(query.number("max", low=1) or 1, CLAIM_JOBS_MAX),
        lease_ms=None if lease_ms is None else _lease_ms(lease_ms),
        wait_ms=min(query.number("wait_ms") or 0, WAIT_MS_MAX),
        holder=query.number("stream", low=1) or 1,
        knows_paused=bool(query.flag("paused", False)),
    )
    query.reject_unknown()
    return command


def _work_end(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    """Decode the end of a `/work` stream. It has the same query as the claims. The gateway also sends it
    before the first claim."""
    claim = _work(head, body, limits)
    return queues.ReleaseHolder(head.box, claim.holder)


def _check_settled(request: AckBody | NackBody | ExtendBody, limits: RecordLimits) -> None:
    _check_node(request.node, limits)
    if not 1 <= len(request.seqs) <= SEQS_MAX:
        raise InvalidRequest(
            f"seqs: has {len(request.seqs)} entries, must have from 1 to {SEQS_MAX}", field="seqs"
        )
    for at, seq in enumerate(request.seqs):
        check_seq(seq, f"seqs[{at}]")
    if request.lease_ids is not None and len(request.lease_ids) != len(request.seqs):
        raise InvalidRequest(
            f"lease_ids: has {len(request.lease_ids)} entries for {len(request.seqs)} seqs; "
            "give one for each, in the same order",
            field="lease_ids",
        )


def _ack(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    request: AckBody = decode_json(_decode_ack, body or b"{}")
    _check_settled(request, limits)
    if request.outputs is not None:
        raise InvalidRequest(
            "outputs: only HTTP takes them, and the field name must be written without escapes",
            field="outputs",
        )
    if request.idempotency_key is not None:
        raise InvalidRequest(
            "idempotency_key: is for an ack with outputs; any other ack can be repeated without one",
            field="idempotency_key",
        )
    return queues.Ack(box=head.box, node=request.node, seqs=request.seqs, lease_ids=request.lease_ids)


class _OutputsBody(AckBody, forbid_unknown_fields=True, kw_only=True):
    """An `AckBody` whose records are kept byte for byte."""

    outputs: dict[str, OutputRecords] | None = None  # type: ignore[assignment]


_decode_outputs = msgspec.json.Decoder(_OutputsBody).decode


def decode_ack_with_outputs(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> AckWithOutputs:
    """Read by the gateway too, which asks the owners of the boxes. It puts what it learns into the query."""
    check_box_name(head.box)
    query = Query(head.query)
    log_boxes = query.text("logs")
    only_repeats = bool(query.flag("only_repeats", False))
    query.reject_unknown()
    request: _OutputsBody = decode_json(_decode_outputs, body or b"{}")
    _check_settled(request, limits)
    if len(set(request.seqs)) < len(request.seqs):
        raise InvalidRequest("seqs: an ack with outputs names each job once", field="seqs")
    outputs = request.outputs or {}
    if not 1 <= len(outputs) <= OUTPUT_BOXES_MAX:
        raise InvalidRequest(
            f"outputs: has {len(outputs)} boxes, must have from 1 to {OUTPUT_BOXES_MAX}", field="outputs"
        )
    count = sum(len(output.records) for output in outputs.values())
    if count > OUTPUT_RECORDS_MAX:
        raise InvalidRequest(
            f"outputs: has {count} records, at most {OUTPUT_RECORDS_MAX} are allowed", field="outputs"
        )
    key = request.idempotency_key or head.idempotency_key
    if not key:
        raise InvalidRequest(
            "idempotency_key: is missing; an ack with outputs needs one, so that it can be repeated",
            field="idempotency_key",
        )
    return AckWithOutputs(
        box=head.box,
        node=request.node,
        seqs=request.seqs,
        lease_ids=request.lease_ids,
        idempotency_key=check_idempotency_key(key),
        outputs=tuple((box, _parse_output(box, output, limits)) for box, output in outputs.items()),
        log_boxes=frozenset(log_boxes.split(",") if log_boxes else ()),
        only_repeats=only_repeats,
        account=head.account,
    )


def _parse_output(box: str, output: OutputRecords, limits: RecordLimits) -> Columns:
    check_box_name(box, "outputs")
    size = sum(len(record.data) + len(record.meta) for record in output.records)
    try:
        return parse_output(output, size, limits)
    except InvalidRequest as error:
        message = error.message.replace("records", f"outputs.{box}.records", 1)
        raise InvalidRequest(message, field=error.detail.get("field", "outputs")) from None


def _check_output(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    query = Query(head.query)
    size, record_bytes = query.number("bytes") or 0, query.number("record_bytes") or 0
    query.reject_unknown()
    return queues.CheckOutput(
        box=check_box_name(head.box), bytes=size, record_bytes=record_bytes, account=head.account
    )


def _cut_error(error: str) -> str:
    """Cut an error text to `ERROR_BYTES_MAX` bytes."""
    content = error.encode("utf-8", "replace")
    return error if len(content) <= ERROR_BYTES_MAX else str(content[:ERROR_BYTES_MAX], "utf-8", "ignore")


def _nack(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    request: NackBody = decode_json(_decode_nack, body or b"{}")
    _check_settled(request, limits)
    return queues.Nack(
        box=head.box,
        node=request.node,
        seqs=request.seqs,
        lease_ids=request.lease_ids,
        delay_ms=None if request.delay_ms is None else min(request.delay_ms, DELAY_MS_MAX),
        error=_cut_error(request.error or ""),
    )


def _extend(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    request: ExtendBody = decode_json(_decode_extend, body or b"{}")
    _check_settled(request, limits)
    return queues.Extend(
        box=head.box,
        node=request.node,
        seqs=request.seqs,
        lease_ids=request.lease_ids,
        lease_ms=_lease_ms(request.lease_ms),
    )


def _selection(
    request: RescheduleBody | ReprioritizeBody | RequeueBody,
) -> tuple[tuple[int, ...], Match | None]:
    """Return the jobs that a request selects with exactly one of `seqs` and `match`."""
    if (request.seqs is None) == (request.match is None):
        raise InvalidRequest("seqs, match: give exactly one of them", field="seqs")
    if request.match is not None:
        return (), parse_match(request.match)
    seqs = request.seqs or []
    if not 1 <= len(seqs) <= SEQS_MAX:
        raise InvalidRequest(f"seqs: has {len(seqs)} entries, must have from 1 to {SEQS_MAX}", field="seqs")
    return tuple(check_seq(seq, f"seqs[{at}]") for at, seq in enumerate(seqs)), None


def _reschedule(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    request: RescheduleBody = decode_json(_decode_reschedule, body or b"{}")
    seqs, match = _selection(request)
    if (request.delay_ms is None) == (request.deliver_at is None):
        raise InvalidRequest("delay_ms, deliver_at: give exactly one of them", field="deliver_at")
    return queues.Reschedule(
        box=head.box,
        seqs=seqs,
        match=match,
        delay_ms=request.delay_ms,
        deliver_at=request.deliver_at or 0,
    )


def _reprioritize(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    request: ReprioritizeBody = decode_json(_decode_reprioritize, body or b"{}")
    seqs, match = _selection(request)
    return queues.Reprioritize(box=head.box, seqs=seqs, match=match, job_priority=request.job_priority)


def _set_paused(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    """Pause or resume. The gateway puts `paused` into the query."""
    check_box_name(head.box)
    query = Query(head.query)
    is_paused = bool(query.flag("paused", None))
    query.reject_unknown()
    decode_json(_decode_pause, body or b"{}")
    return queues.SetPaused(head.box, is_paused)


def decode_requeue(body: bytes, box: str) -> RequeueBody:
    """Read by the gateway, because it names the box to ask."""
    request: RequeueBody = decode_json(_decode_requeue, body or b"{}")
    check_box_name(request.from_box, "from")
    if request.from_box == box:
        raise InvalidRequest(f"from: {box} cannot be requeued into itself", field="from")
    if request.seqs is not None or request.match is not None:
        _selection(request)
    return request


def _require_queue(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    _no_query(head)
    return queues.RequireQueue(head.box)


def _plan_requeue(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    """From a gateway: the body of the client, whose `from` is the box of this command."""
    query = Query(head.query)
    to = check_box_name(query.text("to") or "", "to")
    query.reject_unknown()
    request = decode_requeue(body, to)
    seqs: tuple[int, ...] = ()
    match: Match | None = None
    if request.seqs is not None or request.match is not None:
        seqs, match = _selection(request)
    count = REQUEUE_MAX if seqs else min(request.max, REQUEUE_MAX)
    return queues.PlanRequeue(check_box_name(head.box), to, count, seqs, match, request.dry_run)


def _list_jobs(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    check_box_name(head.box)
    query = Query(head.query)
    state = query.text("state") or "leased"
    if state not in JOB_STATES:
        raise InvalidRequest(
            f"state: must be one of {', '.join(JOB_STATES)}, not {quote(state)}", field="state"
        )
    cursor = query.text("cursor") or "0"
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 20):
        raise InvalidRequest(f"cursor: {quote(cursor)} is not a cursor of this list", field="cursor")
    size = query.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT
    query.reject_unknown()
    return queues.ListJobs(head.box, cast(JobState, state), check_seq(int(cursor), "cursor"), size)


def _await_moves(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> QueueCommand:
    query = Query(head.query)
    to = check_box_name(query.text("to") or "", "to")
    position, wait_ms = query.number("position") or 0, query.number("wait_ms") or 0
    query.reject_unknown()
    return queues.AwaitMoves(check_box_name(head.box), to, position, min(wait_ms, WAIT_MS_MAX))


def group_of(head: wire.RequestHead) -> str:
    """A gateway puts the name of the group into the query."""
    check_box_name(head.box)
    query = Query(head.query)
    name = check_group_name(query.text("group") or "")
    query.reject_unknown()
    return name


def _commit_group(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> GroupCommand:
    group = group_of(head)
    request: CommitBody = decode_json(_decode_commit, body or b"{}")
    if request.if_cursor is not None:
        check_seq(request.if_cursor, "if_cursor")
    return queues.CommitGroup(
        head.box, group, check_seq(request.cursor, "cursor"), request.if_cursor, head.account
    )


def _get_group(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> GroupCommand:
    return queues.GetGroup(head.box, group_of(head))


def _delete_group(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> GroupCommand:
    return queues.DeleteGroup(head.box, group_of(head))


def _list_groups(head: wire.RequestHead, body: bytes, limits: RecordLimits) -> GroupCommand:
    check_box_name(head.box)
    query = Query(head.query)
    command = queues.ListGroups(
        head.box,
        query.text("prefix") or "",
        query.text("after") or "",
        query.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT,
    )
    query.reject_unknown()
    return command


DECODERS: dict[int, Callable[[wire.RequestHead, bytes, RecordLimits], QueueCommand | GroupCommand]] = {
    wire.OP_CLAIM: _claim,
    wire.OP_ACK: _ack,
    wire.OP_ACK_WITH_OUTPUTS: decode_ack_with_outputs,
    wire.OP_CHECK_OUTPUT: _check_output,
    wire.OP_NACK: _nack,
    wire.OP_EXTEND: _extend,
    wire.OP_SET_PAUSED: _set_paused,
    wire.OP_RESCHEDULE: _reschedule,
    wire.OP_REPRIORITIZE: _reprioritize,
    wire.OP_WORK: _work,
    wire.OP_WORK_END: _work_end,
    wire.OP_LIST_JOBS: _list_jobs,
    wire.OP_REQUIRE_QUEUE: _require_queue,
    wire.OP_PLAN_REQUEUE: _plan_requeue,
    wire.OP_AWAIT_MOVES: _await_moves,
    wire.OP_COMMIT_GROUP: _commit_group,
    wire.OP_GET_GROUP: _get_group,
    wire.OP_LIST_GROUPS: _list_groups,
    wire.OP_DELETE_GROUP: _delete_group,
}


# ---------------------------------------------------------------------------------------------------


def _encode_claim(reply: queues.ClaimResult) -> bytes:
    if reply.is_pause_event:
        name = b"paused" if reply.paused else b"resumed"
        return b'event: %b\ndata: {"box":"%b"}\n\n' % (name, reply.box.encode())
    if reply.is_pushed:
        return b"".join([_event(reply.box, seq, job) for seq, job in reply.jobs])
    return b'{"box":"%b","claimed":[%b],"count":%d,"ready":%d%b}' % (
        reply.box.encode(),
        b",".join([job for _, job in reply.jobs]),
        len(reply.jobs),
        reply.ready,
        b',"paused":true' if reply.paused else b"",
    )


def _event(box: str, seq: int, job: bytes) -> bytes:
    """Encode a job as an event of a `/work` stream. Line breaks in the JSON are white space, and would end
    the line in SSE."""
    if b"\n" in job or b"\r" in job:
        job = job.replace(b"\n", b" ").replace(b"\r", b" ")
    return b'event: job\nid: %d\ndata: {"box":"%b",%b\n\n' % (seq, box.encode(), job[1:])


_encode = msgspec.json.Encoder().encode


ENCODERS: dict[type[Any], Callable[[Any], bytes]] = {
    queues.ClaimResult: _encode_claim,
    queues.AckReply: _encode,
    queues.NackReply: _encode,
    queues.ExtendReply: _encode,
    queues.PauseReply: _encode,
    queues.RescheduleReply: _encode,
    queues.ReprioritizeReply: _encode,
    queues.ReleaseHolderReply: _encode,
    queues.JobPage: _encode,
    queues.CheckOutputReply: _encode,
    queues.RequireQueueReply: _encode,
    queues.PlanRequeueReply: _encode,
    queues.AwaitMovesReply: _encode,
    queues.GroupState: _encode,
    queues.CommitGroupReply: _encode,
    queues.ListGroupsResult: _encode,
    queues.DeleteGroupReply: _encode,
}
