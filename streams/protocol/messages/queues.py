"""The commands of queues and groups, and their answers (v0 §8, §10). Frozen, without behaviour."""

from __future__ import annotations

import msgspec

from streams.protocol.messages.replies import AckReply as AckReply
from streams.protocol.messages.replies import CommitGroupReply as CommitGroupReply
from streams.protocol.messages.replies import DeleteGroupReply as DeleteGroupReply
from streams.protocol.messages.replies import ExtendReply as ExtendReply
from streams.protocol.messages.replies import GroupState as GroupState
from streams.protocol.messages.replies import JobPage as JobPage
from streams.protocol.messages.replies import JobState as JobState
from streams.protocol.messages.replies import ListedJob as ListedJob
from streams.protocol.messages.replies import NackReply as NackReply
from streams.protocol.messages.replies import PauseReply as PauseReply
from streams.protocol.messages.replies import ReprioritizeReply as ReprioritizeReply
from streams.protocol.messages.replies import RescheduleReply as RescheduleReply
from streams.protocol.model.boxes import DELAY_MS_MAX as DELAY_MS_MAX
from streams.protocol.model.matches import Match
from streams.protocol.model.records import Columns

CLAIM_JOBS_MAX = 1000
SEQS_MAX = 1000
LEASE_MS_MIN, LEASE_MS_MAX = 100, 86_400_000
#: A longer error is cut.
ERROR_BYTES_MAX = 4096
REQUEUE_MAX = 1000
#: Of an ack with outputs: boxes, records, and bytes of its body.
OUTPUT_BOXES_MAX, OUTPUT_RECORDS_MAX, OUTPUT_BYTES_MAX = 8, 1000, 8 << 20


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    box: str
    node: str
    #: Jobs wanted; for a connection that holds what it gets, jobs that it wants to hold at once.
    max: int = 1
    lease_ms: int | None = None
    wait_ms: int = 0
    #: The connection that the leases end with; 0 = none, they end at their deadline only.
    holder: int = 0
    #: True if the connection knows that the queue is paused.
    knows_paused: bool = False


class BatchClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Claims that have waited, served in one pass. Some may go on waiting, unless their time `is_over`."""

    box: str
    claims: tuple[Claim, ...]
    is_over: bool = False


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    box: str
    node: str
    seqs: list[int]
    #: One for each of `seqs`.
    lease_ids: list[str] | None = None


class AckWithOutputs(Ack, frozen=True, kw_only=True):
    """Acks all of the jobs or none, together with records for other boxes."""

    idempotency_key: str
    outputs: tuple[tuple[str, Columns], ...]
    #: Those of the boxes that are logs: their records cannot wait for a time.
    log_boxes: frozenset[str] = frozenset()
    #: True if only a repeat of an earlier ack is to be answered.
    only_repeats: bool = False
    #: The key whose limits count, if it has some.
    account: str = ""


class CheckOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Fails if the box would refuse such outputs for good. It need not exist."""

    box: str
    #: Of all records, and of the largest one.
    bytes: int
    record_bytes: int
    account: str = ""


class Nack(Ack, frozen=True, kw_only=True):
    #: None = the backoff of the queue.
    delay_ms: int | None = None
    error: str = ""


class Extend(Ack, frozen=True, kw_only=True):
    lease_ms: int


class SetPaused(msgspec.Struct, frozen=True):
    """Pauses or resumes a queue."""

    box: str
    paused: bool


class Reschedule(msgspec.Struct, frozen=True, kw_only=True):
    """Gives waiting and delayed jobs another time: after `delay_ms`, or at `deliver_at`."""

    box: str
    seqs: tuple[int, ...] = ()
    match: Match | None = None
    delay_ms: int | None = None
    deliver_at: int = 0


class Reprioritize(msgspec.Struct, frozen=True, kw_only=True):
    """Gives waiting and delayed jobs another priority."""

    box: str
    seqs: tuple[int, ...] = ()
    match: Match | None = None
    job_priority: int


class ListJobs(msgspec.Struct, frozen=True):
    """Lists the jobs of one state with seqs above `after`."""

    box: str
    state: JobState
    after: int = 0
    limit: int = 100


class ReleaseHolder(msgspec.Struct, frozen=True):
    """A connection that held jobs of this box is gone."""

    box: str
    holder: int


class RequireQueue(msgspec.Struct, frozen=True):
    """Fails if the box is not a queue."""

    box: str


class PlanRequeue(msgspec.Struct, frozen=True):
    """Plans to move dead letters of the queue `to` from `box` back there: the oldest, or those with these
    seqs, or with this tag."""

    box: str
    to: str
    max: int = 100
    seqs: tuple[int, ...] = ()
    match: Match | None = None
    #: True to count them only.
    dry_run: bool = False


class AwaitMoves(msgspec.Struct, frozen=True):
    """Waits until the records planned up to `position` have moved."""

    box: str
    to: str
    position: int
    wait_ms: int = 0


class CheckOutputReply(msgspec.Struct, frozen=True):
    box: str
    is_queue: bool


class RequireQueueReply(msgspec.Struct, frozen=True):
    box: str


class PlanRequeueReply(msgspec.Struct, frozen=True):
    box: str
    planned: int
    position: int


class AwaitMovesReply(msgspec.Struct, frozen=True):
    """The number of records that have not moved yet."""

    pending: int


class ClaimResult(msgspec.Struct, frozen=True):
    box: str
    #: (seq, the job as JSON), in the order of their seqs.
    jobs: list[tuple[int, bytes]]
    ready: int
    #: True if the jobs go out as events of a `/work` stream.
    is_pushed: bool = False
    paused: bool = False
    #: True if the reply tells a `/work` stream that the queue was paused or resumed.
    is_pause_event: bool = False


class BatchClaimResult(msgspec.Struct, frozen=True):
    """A result for each claim; None for a claim that goes on waiting."""

    answers: list[ClaimResult | None]


class ReleaseHolderReply(msgspec.Struct, frozen=True):
    box: str
    released: int


# ---------------------------------------------------------------------------------------------------


class CommitGroup(msgspec.Struct, frozen=True):
    box: str
    group: str
    cursor: int
    if_cursor: int | None = None
    #: The key whose limits count, if it has some.
    account: str = ""


class GetGroup(msgspec.Struct, frozen=True):
    box: str
    group: str


class ListGroups(msgspec.Struct, frozen=True):
    box: str
    prefix: str = ""
    after: str = ""
    limit: int = 100


class DeleteGroup(msgspec.Struct, frozen=True):
    box: str
    group: str


class ListGroupsResult(msgspec.Struct, frozen=True):
    groups: list[GroupState]
    more: bool


QueueCommand = (
    Claim
    | BatchClaim
    | Ack
    | AckWithOutputs
    | CheckOutput
    | Nack
    | Extend
    | SetPaused
    | Reschedule
    | Reprioritize
    | ReleaseHolder
    | ListJobs
    | RequireQueue
    | PlanRequeue
    | AwaitMoves
)
QueueReply = (
    ClaimResult
    | BatchClaimResult
    | AckReply
    | NackReply
    | ExtendReply
    | PauseReply
    | RescheduleReply
    | ReprioritizeReply
    | ReleaseHolderReply
    | JobPage
    | CheckOutputReply
    | RequireQueueReply
    | PlanRequeueReply
    | AwaitMovesReply
)
GroupCommand = CommitGroup | GetGroup | ListGroups | DeleteGroup
GroupReply = GroupState | CommitGroupReply | ListGroupsResult | DeleteGroupReply
