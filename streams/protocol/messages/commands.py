"""All commands of a shard, and their replies. Frozen structs without behaviour.

A command names its box and holds the fields of the request, whose form `requests.py` has checked. A reply
holds facts; `requests.py` encodes it as JSON. Bytes of records travel as `bytes`, never as objects.
"""

from __future__ import annotations

import msgspec

from streams.protocol.access.key_limits import AccountsUse, ExchangeUse
from streams.protocol.messages import forwards, s2
from streams.protocol.messages.bulk import BulkCommand, BulkReply
from streams.protocol.messages.queues import GroupCommand, GroupReply, QueueCommand, QueueReply
from streams.protocol.messages.replies import BoxState as BoxState
from streams.protocol.messages.replies import DeleteBoxReply as DeleteBoxReply
from streams.protocol.messages.replies import DeleteRecordsReply as DeleteRecordsReply
from streams.protocol.messages.replies import ListedBox as ListedBox
from streams.protocol.messages.replies import PutBoxReply as PutBoxReply
from streams.protocol.messages.replies import SetFenceReply as SetFenceReply
from streams.protocol.messages.replies import Tail as Tail
from streams.protocol.messages.replies import Tombstone as Tombstone
from streams.protocol.messages.schedules import ScheduleCommand, ScheduleReply
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.matches import Match as Match
from streams.protocol.model.records import Columns
from streams.protocol.payloads import scans


class PutBox(msgspec.Struct, frozen=True):
    box: str
    patch: BoxPatch
    #: The key whose limits count (`access/key_limits.py`), if it has some.
    account: str = ""


class GetState(msgspec.Struct, frozen=True):
    box: str
    touch: bool = True


class ListBoxes(msgspec.Struct, frozen=True):
    prefix: str = ""
    after: str = ""
    limit: int = 100


class ListSortedBoxes(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a listing that is sorted or filtered (v0 §26).

    `listing` names the ordering of the first page, which the gateway chose; `offset` is a position in it.
    """

    listing: str
    offset: int = 0
    limit: int = 100
    prefixes: tuple[str, ...] = ("",)
    kind: str = ""
    durability: str = ""
    #: Part of the name.
    text: str = ""
    sort: str = "name"
    is_descending: bool = False


class DeleteBox(msgspec.Struct, frozen=True):
    box: str
    if_empty: bool = False


class Append(msgspec.Struct, frozen=True, kw_only=True):
    box: str
    columns: Columns
    idempotency_key: str | None = None
    create: bool | None = None
    config: BoxPatch | None = None
    disable_backpressure: bool = False
    match_seq: int | None = None
    fencing_token: str | None = None
    trim_before_seq: int | None = None
    return_seqs: bool = True
    #: As in `PutBox`.
    account: str = ""


class ReadBox(msgspec.Struct, frozen=True, kw_only=True):
    """Reads a page of records (`diff` in the API)."""

    box: str
    from_seq: int = 0
    from_ts: int | None = None
    limit: int = 256
    max_bytes: int = 1024 * 1024
    nodes: frozenset[str] = frozenset()
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    wait_ms: int = 0
    match: Match | None = None
    generation: int | None = None
    #: Read from this group's cursor; `from_seq` is not used then.
    group: str | None = None
    #: False if the read does not count for the priority of the box.
    touch: bool = True


class Follow(ReadBox, frozen=True, kw_only=True):
    """A live read (v0 §7): answered like `ReadBox`, as soon as there are records.

    `strong` shows only records that are on disk. `awaits_box` waits until a missing box is created, where
    other reads fail at once.
    """

    strong: bool = False
    awaits_box: bool = False


class Scan(ReadBox, frozen=True, kw_only=True):
    """A read of stored records as buffers (`payloads/scans.py`), by bytes alone. `to_seq` 0 is the head."""

    to_seq: int = 0
    columns: int = scans.ALL


class ReadStream(ReadBox, frozen=True, kw_only=True):
    """Reads a stream from a number (`from_seq`: see `model/binary_records.py`), a time or an offset from the
    end.

    `begins` marks the first read of a client: the shard resolves and checks its start. `limit` and
    `max_bytes`, in metered bytes, are exact: 0 is none at all.
    """

    tail_offset: int | None = None
    clamp: bool = False
    until: int | None = None
    begins: bool = True
    #: True if a start at the tail is allowed, because the reader waits there or accepts an empty page.
    may_follow: bool = False


class GetRecord(msgspec.Struct, frozen=True):
    box: str
    seq: int


class GetTail(msgspec.Struct, frozen=True):
    box: str


class DeleteRecords(msgspec.Struct, frozen=True):
    box: str
    before_seq: int | None = None
    match: Match | None = None
    #: True to count the records only.
    dry_run: bool = False


class SetFence(msgspec.Struct, frozen=True):
    box: str
    token: str
    if_token: str | None = None


class PutSession(msgspec.Struct, frozen=True):
    """Stores the state of a watch session, so that any gateway can resume it."""

    wid: str
    state: bytes
    ttl_ms: int
    epoch: int = 0
    #: The id of the key that owns the session; empty when the server has no keys.
    owner: str = ""


class TakeSession(msgspec.Struct, frozen=True):
    """Takes over a session. The last caller with the right owner gets it; the new epoch fences off the former
    holder."""

    wid: str
    ttl_ms: int
    owner: str = ""
    #: True if the client sent a cursor of its own, so that an old state does no harm.
    has_cursor: bool = False


class KeepSession(msgspec.Struct, frozen=True):
    """Saves the position of a session and extends its life, for the holder of `epoch`."""

    wid: str
    epoch: int
    state: bytes
    ttl_ms: int


SessionCommand = PutSession | TakeSession | KeepSession

Command = (
    PutBox
    | GetState
    | ListBoxes
    | ListSortedBoxes
    | DeleteBox
    | Append
    | ReadBox
    | GetRecord
    | GetTail
    | DeleteRecords
    | SetFence
    | QueueCommand
    | GroupCommand
    | BulkCommand
    | forwards.Command
    | SessionCommand
    | s2.Command
    | ExchangeUse
    | ScheduleCommand
)


# ---------------------------------------------------------------------------------------------------


class ListBoxesResult(msgspec.Struct, frozen=True):
    """A page of one shard. `keys` and `offsets` belong to the boxes of a sorted listing: the number that each
    is sorted by, and the position after it. `is_unknown`: the shard has no such ordering any more."""

    boxes: list[ListedBox]
    more: bool
    total: int = 0
    keys: list[float] = []
    offsets: list[int] = []
    is_unknown: bool = False


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    box: str
    first_seq: int
    last_seq: int
    head_seq: int
    created: bool
    deduped: bool
    return_seqs: bool


class DiffResult(msgspec.Struct, frozen=True, kw_only=True):
    box: str
    records: bytes
    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    records_scanned: int


class FollowResult(DiffResult, frozen=True, kw_only=True):
    """The reply to `Follow`. It travels as numbers and bare records; a gateway renders it."""

    #: Time of the last append to the box.
    appended_ms: int = 0


class GetRecordResult(msgspec.Struct, frozen=True):
    box: str
    record: bytes


class SessionReply(msgspec.Struct, frozen=True):
    """`state` is None unless the session was taken."""

    epoch: int
    state: bytes | None = None


Reply = (
    PutBoxReply
    | BoxState
    | ListBoxesResult
    | DeleteBoxReply
    | AppendResult
    | DiffResult
    | GetRecordResult
    | Tail
    | DeleteRecordsReply
    | SetFenceReply
    | QueueReply
    | GroupReply
    | BulkReply
    | scans.ScanReply
    | forwards.Reply
    | SessionReply
    | s2.Reply
    | AccountsUse
    | ScheduleReply
)
