"""The JSON bodies of `/v0` requests, one struct each: a process decodes it, OpenAPI describes it.

Bounds that are described only (`extra_json_schema`) are checked by the code that reads the body, with a
better message.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from streams.protocol.messages.queues import OUTPUT_BOXES_MAX, SEQS_MAX
from streams.protocol.model.boxes import NON_NEGATIVE_MAX, CatchUp
from streams.protocol.model.names import BoxName
from streams.protocol.payloads.appends import JOB_PRIORITY_MAX, AppendOptions
from streams.protocol.payloads.appends import NewRecord as NewRecord

WAIT_MS_MAX = 30_000
WATCHED_BOXES_MAX = 256
WATCH_LIMIT_DEFAULT, WATCH_BYTES_DEFAULT, HEARTBEAT_MS_DEFAULT = 256, 256 * 1024, 15_000

#: Bodies whose unknown fields are ignored, unless the request prefers strict handling.
TOLERANT = frozenset(("DiffBody", "ClaimBody", "WatchBody"))

_Count = Annotated[int, Meta(ge=0)]
_Millis = Annotated[int, Meta(ge=0, le=NON_NEGATIVE_MAX)]
_Node = Annotated[str, Meta(extra_json_schema={"minLength": 1})]


# -- records


class AppendBody(AppendOptions, forbid_unknown_fields=True, kw_only=True):
    records: Annotated[list[NewRecord], Meta(min_length=1)]


class DiffBody(msgspec.Struct, forbid_unknown_fields=True):
    from_seq: _Count | None = None
    limit: _Count = 0
    max_bytes: _Count = 0
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    wait_ms: _Count = 0
    from_ts: _Millis | None = None
    match: str | list[str] | None = None
    generation: _Count | None = None
    group: str | None = None
    touch: bool | None = None


class DeleteBody(msgspec.Struct, forbid_unknown_fields=True):
    before_seq: _Count | None = None
    match: str | list[str] | None = None
    dry_run: bool = False


class FenceBody(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    if_token: str | None = None


# -- queues and groups


class ClaimBody(msgspec.Struct, forbid_unknown_fields=True):
    node: _Node
    max: Annotated[int, Meta(ge=1)] = 1
    lease_ms: _Count | None = None
    wait_ms: _Count = 0


class _SettleBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: _Node
    seqs: Annotated[list[_Count], Meta(extra_json_schema={"minItems": 1, "maxItems": SEQS_MAX})]
    lease_ids: list[str] | None = None


class OutputBody(msgspec.Struct, forbid_unknown_fields=True):
    records: Annotated[list[NewRecord], Meta(extra_json_schema={"minItems": 1})]


class AckBody(_SettleBody, forbid_unknown_fields=True, kw_only=True):
    """With `outputs`, all jobs are acked or none, and the records of each box appear there exactly once
    (§24). `idempotency_key`, or the header, is required then."""

    outputs: (
        Annotated[
            dict[BoxName, OutputBody],
            Meta(extra_json_schema={"minProperties": 1, "maxProperties": OUTPUT_BOXES_MAX}),
        ]
        | None
    ) = None
    idempotency_key: str | None = None


class NackBody(_SettleBody, forbid_unknown_fields=True, kw_only=True):
    delay_ms: _Count | None = None
    #: Longer than 4 KiB is cut.
    error: str | None = None


class ExtendBody(_SettleBody, forbid_unknown_fields=True, kw_only=True):
    lease_ms: _Count


class RequeueBody(msgspec.Struct, forbid_unknown_fields=True, rename={"from_box": "from"}):
    """Dead letters by seq (of their box) or by tag; without either the oldest."""

    from_box: BoxName
    max: Annotated[int, Meta(ge=1)] = 100
    seqs: Annotated[list[_Count], Meta(extra_json_schema={"minItems": 1, "maxItems": SEQS_MAX})] | None = None
    match: str | list[str] | None = None
    dry_run: bool = False


class RescheduleBody(msgspec.Struct, forbid_unknown_fields=True):
    """Waiting and delayed jobs by seq or by tag, and their new time."""

    seqs: Annotated[list[_Count], Meta(extra_json_schema={"minItems": 1, "maxItems": SEQS_MAX})] | None = None
    match: str | list[str] | None = None
    delay_ms: _Millis | None = None
    deliver_at: _Millis | None = None


class ReprioritizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Waiting and delayed jobs by seq or by tag, and their new priority."""

    seqs: Annotated[list[_Count], Meta(extra_json_schema={"minItems": 1, "maxItems": SEQS_MAX})] | None = None
    match: str | list[str] | None = None
    job_priority: Annotated[int, Meta(ge=0, le=JOB_PRIORITY_MAX)]


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Pause and resume have no fields."""


class CommitBody(msgspec.Struct, forbid_unknown_fields=True):
    cursor: _Count
    if_cursor: _Count | None = None


# -- routers and watch sessions


class RouterBody(msgspec.Struct, forbid_unknown_fields=True):
    source: BoxName
    dest: BoxName
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: str | list[str] | None = None
    allow_cycle: bool = False
    from_seq: _Count | None = None


class ScheduleBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A schedule (§22). Exactly one of `cron` and `every_ms` is given."""

    box: BoxName
    record: NewRecord
    cron: str | None = None
    every_ms: Annotated[int, Meta(ge=0, le=NON_NEGATIVE_MAX)] | None = None
    time_zone: str = "UTC"
    paused: bool = False
    end_ts: _Millis | None = None
    catch_up: CatchUp = "one"


class WatchStart(msgspec.Struct, forbid_unknown_fields=True):
    from_seq: _Count | None = None
    tail: bool = False


class WatchOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    node: str | list[str] | None = None
    limit: _Count = WATCH_LIMIT_DEFAULT
    max_batch_bytes: _Count = WATCH_BYTES_DEFAULT
    heartbeat_ms: _Count = HEARTBEAT_MS_DEFAULT
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Literal["eventual", "strong"] = "eventual"
    touch: bool = True


class WatchBody(WatchOptions, forbid_unknown_fields=True, kw_only=True):
    """The boxes to watch, and where to start in each (§7.1)."""

    boxes: Annotated[
        dict[BoxName, WatchStart],
        Meta(extra_json_schema={"minProperties": 1, "maxProperties": WATCHED_BOXES_MAX}),
    ]
    cursor: str | dict[str, int] | None = None
