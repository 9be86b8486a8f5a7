"""Every command a shard answers, and what it answers. Frozen, without behaviour.

A command names its box and holds what the request said, already checked for form (`requests.py` does that).
A reply holds facts; `requests.py` words it as JSON. Bytes of records travel as `bytes`, never as objects.
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


class Diff(msgspec.Struct, frozen=True, kw_only=True):
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


class Follow(Diff, frozen=True, kw_only=True):
    """The read of somebody who stays (v0 §7): answered like `Diff`, and as soon as there is something.

    `strong` shows only what is on the disk. `awaits_box` waits for a box that is not there to be made again,
    where other reads are told at once that it is not there.
    """

    strong: bool = False
    awaits_box: bool = False


class Scan(Diff, frozen=True, kw_only=True):
    """A read of stored records as buffers (`payloads/scans.py`), by bytes alone. `to_seq` 0 is the head."""

    to_seq: int = 0
    columns: int = scans.ALL


class ReadStream(Diff, frozen=True, kw_only=True):
    """Records from a number on (`from_seq`: see `model/sequenced.py`), or from a time, or so many before the
    end.

    `begins` says that this is the first read of somebody, whose start is to be found and judged. `limit` and
    `max_bytes`, in metered bytes, are exact: 0 is none at all.
    """

    tail_offset: int | None = None
    clamp: bool = False
    until: int | None = None
    begins: bool = True
    #: Whether a start at the very end is fine, because the reader would wait there or be content.
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


class SetFence(msgspec.Struct, frozen=True):
    box: str
    token: str
    if_token: str | None = None


class PutSession(msgspec.Struct, frozen=True):
    """Keeps what a gateway wants to find again, whichever gateway asks: the state of a watch session."""

    wid: str
    state: bytes
    ttl_ms: int
    epoch: int = 0
    #: Whose it is: the id of a key, or nothing where no keys are asked for.
    owner: str = ""


class TakeSession(msgspec.Struct, frozen=True):
    """The session goes to whoever asks last, of those whose it is; its epoch tells the one before that it is
    no longer theirs."""

    wid: str
    ttl_ms: int
    owner: str = ""
    #: True if the client says what it has had, so that an old state does no harm.
    has_cursor: bool = False


class KeepSession(msgspec.Struct, frozen=True):
    """The holder of `epoch` says where the session is now, and that it lives."""

    wid: str
    epoch: int
    state: bytes
    ttl_ms: int


SessionCommand = PutSession | TakeSession | KeepSession

Command = (
    PutBox
    | GetState
    | ListBoxes
    | DeleteBox
    | Append
    | Diff
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
)


# ---------------------------------------------------------------------------------------------------


class BoxPage(msgspec.Struct, frozen=True):
    boxes: list[ListedBox]
    more: bool


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    box: str
    first_seq: int
    last_seq: int
    head_seq: int
    created: bool
    deduped: bool
    return_seqs: bool


class Records(msgspec.Struct, frozen=True, kw_only=True):
    box: str
    records: bytes
    next_from_seq: int
    generation: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    records_scanned: int


class Page(Records, frozen=True, kw_only=True):
    """The answer to `Follow`. It travels as numbers and bare records, because a gateway words it."""

    #: When the box was last appended to.
    appended_ms: int = 0


class OneRecord(msgspec.Struct, frozen=True):
    box: str
    record: bytes


class SessionReply(msgspec.Struct, frozen=True):
    """`state` is None unless the session was taken."""

    epoch: int
    state: bytes | None = None


Reply = (
    PutBoxReply
    | BoxState
    | BoxPage
    | DeleteBoxReply
    | AppendResult
    | Records
    | OneRecord
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
)
