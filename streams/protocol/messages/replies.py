"""The JSON replies of `/v0`, one struct each: processes encode it, OpenAPI describes it, clients decode it.

`server_replies.py` has those about the server itself.

Rules of both files
- A field without a default is always there. A field with a default may be absent, and then it has the
  default: the OpenAPI document says so, and `omit_defaults` makes encoders leave it out.
- Bounds and patterns describe (`extra_json_schema`); nothing here validates, so that a client can read what a
  newer server says. Fields that it does not know are passed over.
- `performance` is in every reply and in no struct: a gateway adds it when it answers.
- Replies to an append, a read and a claim are written by hand (`requests.py`), because most of them is stored
  bytes; their structs describe and decode.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, field

from streams.protocol.model import boxes
from streams.protocol.model.boxes import BoxConfig
from streams.protocol.model.names import ROUTER_NAME_PATTERN, BoxName


def one_of(*words: str) -> Meta:
    """Describe a text that is one of these words."""
    return Meta(extra_json_schema={"enum": list(words)})


Seq = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Count = Seq
Millis = Seq
RouterName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{ROUTER_NAME_PATTERN}$"})]
ScheduleName = BoxName
Kind = Annotated[str, one_of(*get_args(boxes.Kind))]
Durability = Annotated[str, one_of(*get_args(boxes.Durability))]
Warnings = Annotated[
    list[str], Meta(description="What the server ignored.", extra_json_schema={"maxItems": 8})
]


# -- boxes


class PutBoxReply(msgspec.Struct, frozen=True):
    box: BoxName
    created: bool
    config: BoxConfig


class QueueTotals(msgspec.Struct, frozen=True):
    """Jobs of a queue, and the outputs of acked ones that are not in their boxes yet. `outputs_error` says
    why they are held back."""

    ready: Count
    in_flight: Count
    delayed: Count
    dead_lettered: Count
    outputs_pending: Count = 0
    outputs_error: str | msgspec.UnsetType = msgspec.UNSET


class BoxState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    box: BoxName
    type: Kind
    head_seq: Seq
    earliest_seq: Seq
    next_seq: Seq
    generation: Seq
    count: Count
    bytes: Count
    config: BoxConfig
    effective_priority: float
    last_write_ts: Millis | None
    last_read_ts: Millis | None
    fencing_token: str | None = None
    #: None for a log.
    queue: QueueTotals | None = None


class ListedBox(msgspec.Struct, frozen=True, omit_defaults=True):
    """A box as a list shows it. `lag` is the largest of its groups and outgoing routers."""

    box: BoxName
    type: Kind
    head_seq: Seq
    earliest_seq: Seq
    count: Count
    bytes: Count
    durable: bool
    durability: Durability
    effective_priority: float
    last_write_ts: Millis | None
    lag: Count
    #: Records appended a second, over the last ten seconds or more.
    rate: float
    #: None unless it is a queue.
    queue: QueueTotals | None = None


class BoxPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """`restarted` is true if the ordering of a sorted listing was dropped: this is a first page again."""

    boxes: list[ListedBox]
    total: Count
    next_cursor: str | None = None
    is_restart: bool = msgspec.field(default=False, name="restarted")


class DeleteBoxReply(msgspec.Struct, frozen=True):
    """The box, and the routers and schedules that were deleted with it."""

    box: BoxName
    deleted: bool
    schedules_removed: list[ScheduleName]
    #: A shard puts origins of routers into this list, and a gateway replaces them with names.
    routers_removed: list[RouterName]


class SetFenceReply(msgspec.Struct, frozen=True):
    box: BoxName
    token: str


# -- records


class AppendReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an append: its records have the seqs from `first_seq` to `last_seq`. `deduped` is true if
    an earlier attempt with the same key had written them."""

    box: BoxName
    first_seq: Seq
    last_seq: Seq
    head_seq: Seq
    count: Count
    created: bool
    deduped: bool
    seqs: list[Seq] | None = None


class Record(msgspec.Struct, frozen=True):
    """A record as it is read back (§0.5). `data` is left out only where the request asked for that."""

    seq: Seq = field(name="$seq")
    ts: Millis = field(name="$ts")
    data: Any = None
    tag: str | None = field(name="$tag", default=None)
    node: str | None = field(name="$node", default=None)
    meta: dict[str, Any] = {}


class Tombstone(msgspec.Struct, frozen=True):
    """Records that a reader would have been shown and that are lost: to a cap (`cap`), an age (`ttl`), both
    (`mixed`), a box made anew (`recreated`), a crash (`crash`), or before a router copied them
    (`source_trim`)."""

    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of records. `next_from_seq` is where to go on; `caught_up` says that there is no more now."""

    box: BoxName
    records: list[Record]
    next_from_seq: Seq
    generation: Seq
    head_seq: Seq
    earliest_seq: Seq
    caught_up: bool
    lag: Count
    warnings: Warnings = []


class Diff(RecordPage, frozen=True, kw_only=True):
    tombstone: Tombstone | None


class OneRecord(msgspec.Struct, frozen=True):
    box: BoxName
    record: Record


class Tail(msgspec.Struct, frozen=True):
    """Where a box ends: `last_ts` is the time of its last record."""

    box: BoxName
    head_seq: Seq
    next_seq: Seq
    last_ts: Millis | None


class DeleteRecordsReply(msgspec.Struct, frozen=True, omit_defaults=True):
    box: BoxName
    deleted: Count
    earliest_seq: Seq
    head_seq: Seq
    count: Count
    bytes: Count
    #: Present and true if nothing was deleted, and `deleted` is what would be.
    dry_run: bool = False


# -- queues


class Job(msgspec.Struct, frozen=True):
    """A job under a lease: its worker's until `deadline`, unless it is extended. `lease_id` proves it."""

    seq: Seq = field(name="$seq")
    ts: Millis = field(name="$ts")
    lease_id: str
    deadline: Millis
    deliveries: Annotated[int, Meta(extra_json_schema={"minimum": 1})]
    data: Any = None
    tag: str | None = field(name="$tag", default=None)
    node: str | None = field(name="$node", default=None)
    meta: dict[str, Any] = {}
    ordering_key: str | None = field(name="$ordering_key", default=None)
    job_priority: Count = field(name="$job_priority", default=0)
    deliver_at: Millis | None = field(name="$deliver_at", default=None)
    #: Of the deliveries before this one: when the first was, and the node and the error of the last.
    first_ts: Millis | None = None
    last_node: str | None = None
    last_error: str | None = None


JobState = Literal["leased", "delayed", "ready"]


class ListedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job as operators see it. A leased job has `node`, `lease_id` and `deadline`; a delayed one `due_ts`,
    unless it is on its way to the dead letter box (`moving`)."""

    seq: Seq
    deliveries: Count
    node: str = ""
    lease_id: str = ""
    deadline: Millis | None = None
    due_ts: Millis | None = None
    moving: bool = False
    first_ts: Millis | None = None
    last_node: str = ""
    last_error: str = ""
    ordering_key: str = ""
    job_priority: Count = 0


class JobPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Jobs of one state, by seq. A page may have few jobs, or none, and a `next_cursor` all the same."""

    box: BoxName
    state: JobState
    jobs: list[ListedJob]
    next_cursor: str | None = None


class ClaimReply(msgspec.Struct, frozen=True):
    box: BoxName
    claimed: list[Job]
    count: Count
    ready: Count
    #: True while the queue is paused; absent otherwise.
    paused: bool = False
    warnings: Warnings = []


class AckReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`skipped` are seqs that are not the worker's any more. `deduped`, of an ack with outputs, is true if an
    earlier attempt with the same key had acked them."""

    box: BoxName
    acked: Count
    skipped: list[Seq]
    ready: Count
    in_flight: Count
    deduped: bool | None = None


class NackReply(msgspec.Struct, frozen=True):
    """`skipped` are seqs that are not the worker's any more."""

    box: BoxName
    nacked: Count
    skipped: list[Seq]
    ready: Count
    in_flight: Count


class ExtendReply(msgspec.Struct, frozen=True):
    """`skipped` are seqs that are not the worker's any more; `deadlines` are by seq."""

    box: BoxName
    extended: Count
    skipped: list[Seq]
    deadlines: dict[str, Millis]


class PauseReply(msgspec.Struct, frozen=True):
    """Whether the queue is paused now."""

    box: BoxName
    paused: bool


class RescheduleReply(msgspec.Struct, frozen=True):
    """`skipped` are seqs that are no waiting or delayed jobs. With `more`, further jobs match: repeat."""

    box: BoxName
    rescheduled: Count
    skipped: list[Seq]
    deliver_at: Millis
    more: bool = False


class ReprioritizeReply(msgspec.Struct, frozen=True):
    """`skipped` are seqs that are no waiting or delayed jobs. With `more`, further jobs match: repeat."""

    box: BoxName
    reprioritized: Count
    skipped: list[Seq]
    job_priority: Count
    more: bool = False


class RequeueReply(msgspec.Struct, frozen=True, omit_defaults=True, rename={"from_box": "from"}):
    box: BoxName
    from_box: BoxName
    requeued: Count
    pending: Count
    #: Present and true if nothing was requeued, and `requeued` is what would be.
    dry_run: bool = False


# -- groups


class GroupState(msgspec.Struct, frozen=True):
    box: BoxName
    group: BoxName
    cursor: Seq
    lag: Count
    updated_ts: Millis


class GetGroupReply(GroupState, frozen=True):
    """The reply to a request for one group."""


class CommitGroupReply(GroupState, frozen=True):
    created: bool


class GroupPage(msgspec.Struct, frozen=True, omit_defaults=True):
    box: BoxName
    groups: list[GroupState]
    next_cursor: str | None = None


class DeleteGroupReply(msgspec.Struct, frozen=True):
    box: BoxName
    group: BoxName
    deleted: bool


# -- routers


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """A router's definition."""

    router: RouterName
    source: BoxName
    dest: BoxName
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: list[str] | None
    allow_cycle: bool


class PutRouterReply(Router, frozen=True, kw_only=True):
    created: bool


class RouterState(Router, frozen=True, kw_only=True):
    """A router's definition and progress."""

    forwarded_total: Count
    position: Seq
    lag: Count
    state: Annotated[str, one_of("ok", "blocked")]
    last_error: str | None


class RouterPage(msgspec.Struct, frozen=True, omit_defaults=True):
    routers: list[Router]
    next_cursor: str | None = None


class DeleteRouterReply(msgspec.Struct, frozen=True):
    router: RouterName
    deleted: bool


# -- schedules


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule's definition and progress. `next_due` is null if nothing more is due: the schedule is paused
    or has ended. `last_due` is the last due time whose record is in the box."""

    schedule: ScheduleName
    box: BoxName
    #: As in an append.
    record: Any
    cron: str | None
    every_ms: Millis | None
    time_zone: str
    paused: bool
    end_ts: Millis | None
    catch_up: Annotated[str, one_of(*get_args(boxes.CatchUp))]
    created_ts: Millis
    next_due: Millis | None
    last_due: Millis | None
    fired_total: Count
    state: Annotated[str, one_of("active", "paused", "blocked", "ended")]
    last_error: str | None


class GetScheduleReply(ScheduleState, frozen=True, kw_only=True):
    """The reply to a request for one schedule."""


class PutScheduleReply(ScheduleState, frozen=True, kw_only=True):
    created: bool


class SchedulePage(msgspec.Struct, frozen=True, omit_defaults=True):
    schedules: list[ScheduleState]
    next_cursor: str | None = None


class DeleteScheduleReply(msgspec.Struct, frozen=True):
    schedule: ScheduleName
    deleted: bool


class RunScheduleReply(msgspec.Struct, frozen=True):
    """The record of a run. `deduped` is true if an earlier attempt with the same key had written it."""

    schedule: ScheduleName
    box: BoxName
    seq: Seq
    deduped: bool


# -- watch sessions


class WatchedBox(msgspec.Struct, frozen=True):
    from_seq: Seq
    head_seq: Seq
    earliest_seq: Seq


class WatchReply(msgspec.Struct, frozen=True, omit_defaults=True):
    wid: str
    stream_url: str
    session_ttl_ms: Millis
    boxes: dict[str, WatchedBox]
    warnings: Warnings = []
