"""All errors, in three families by the next step of the client.

`Refused`    change the request; nothing happened.
`Busy`       try again later; nothing happened.
`Uncertain`  it may have happened; repeat with the same idempotency key.

Clients match on `code`, which never changes. The docstring of a class is its default message. HTTP statuses
are in `gateway/requests/errors.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class StreamsError(Exception):
    """Something went wrong inside the server."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str | None = None, **detail: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.detail = detail
        super().__init__(self.message)


class Refused(StreamsError):
    """The request cannot be served as it is."""

    code = "invalid_request"


class Busy(StreamsError):
    """The server cannot take this now; try again later."""

    code = "throttled"


class Uncertain(StreamsError):
    """The outcome is unknown; repeat with the same idempotency key."""

    code = "shard_unavailable"


class InvalidRequest(Refused):
    """The request is not valid."""

    code = "invalid_request"


class BatchTooLarge(Refused):
    """The write has more records than one write may have."""

    code = "batch_too_large"


class RecordTooLarge(Refused):
    """A record is larger than allowed."""

    code = "record_too_large"


class Unauthorized(Refused):
    """A valid key is needed."""

    code = "unauthorized"


class Forbidden(Refused):
    """The key does not allow this."""

    code = "forbidden"


class BoxNotFound(Refused):
    """There is no such box."""

    code = "box_not_found"


class RouterNotFound(Refused):
    """There is no such router."""

    code = "router_not_found"


class ScheduleNotFound(Refused):
    """There is no such schedule."""

    code = "schedule_not_found"


class GroupNotFound(Refused):
    """There is no such group."""

    code = "group_not_found"


class NotFound(Refused):
    """There is nothing here."""

    code = "not_found"


class MethodNotAllowed(Refused):
    """This address does not take that method."""

    code = "method_not_allowed"


class NotAcceptable(Refused):
    """The answer cannot be given in a form the request accepts."""

    code = "not_acceptable"


class RouterCycle(Refused):
    """The router would close a cycle."""

    code = "router_cycle"


class BoxExistsIncompatible(Refused):
    """The box exists with a setting that cannot change."""

    code = "box_exists_incompatible"


class BoxNotEmpty(Refused):
    """The box still holds records."""

    code = "box_not_empty"


class NotAQueue(Refused):
    """The box is not a queue."""

    code = "not_a_queue"


class WriterConflict(Refused):
    """The writer of a transaction was last used by another query."""

    code = "writer_conflict"


class SeqMismatch(Refused):
    """The box is not at the position the request expects."""

    code = "seq_mismatch"


class FencingTokenMismatch(Refused):
    """The fencing token is not the box's token."""

    code = "fencing_token_mismatch"


class StreamNotFound(Refused):
    """There is no such stream."""

    code = "stream_not_found"


class StreamDeletionPending(Refused):
    """The stream is being deleted."""

    code = "stream_deletion_pending"


class BasinNotFound(Refused):
    """There is no such basin."""

    code = "basin_not_found"


class BasinDeletionPending(Refused):
    """The basin is being deleted."""

    code = "basin_deletion_pending"


class AccessTokenNotFound(Refused):
    """There is no such access token."""

    code = "access_token_not_found"


class ResourceAlreadyExists(Refused):
    """It exists already, and was not made by this request."""

    code = "resource_already_exists"


class PositionUnwritten(Refused):
    """Nothing has been written at this position of the stream yet."""

    code = "position_unwritten"


class CipherMismatch(Refused):
    """The records are not closed as this stream keeps them."""

    code = "cipher_mismatch"


class PayloadTooLarge(Refused):
    """The body is larger than allowed."""

    code = "payload_too_large"


class UnsupportedMediaType(Refused):
    """The body's type is not one the server reads."""

    code = "unsupported_media_type"


class LeaseLost(Refused):
    """Jobs that were to be acked with outputs are not leased to the worker any more."""

    code = "lease_lost"


class BoxFull(Refused):
    """The box is full and set to refuse what does not fit."""

    code = "box_full"


class Throttled(Busy):
    """A limit is reached; try again later."""

    code = "throttled"


class DiskFull(Busy):
    """The server's disk is full; nothing was written. Delete records or free space, then try again."""

    code = "disk_full"


class NotReady(Busy):
    """The server is still replaying its log."""

    code = "not_ready"


class ShuttingDown(Busy):
    """The server is stopping."""

    code = "shutting_down"


class ShardUnavailable(Busy):
    """The shard that owns this box cannot be reached right now; nothing was done."""

    code = "shard_unavailable"


class ColdStoreUnavailable(Busy):
    """A record that is asked for is in the cold store, which cannot be read right now; nothing is lost."""

    code = "cold_store_unavailable"


class DataDamaged(Busy):
    """Stored bytes that this needs are damaged; see the server's log for the file and the next step."""

    code = "data_damaged"


class OutcomeUnknown(Uncertain):
    """The shard went away before it answered; the request may or may not have taken effect."""

    code = "shard_unavailable"


def _leaves(family: type[StreamsError]) -> list[type[StreamsError]]:
    classes: list[type[StreamsError]] = []
    for child in family.__subclasses__():
        classes.append(child)
        classes.extend(_leaves(child))
    return classes


#: code -> the class raised for it, so that an error keeps its family across the wire. A code shared by
#: two families (`shard_unavailable`) keeps the first one here; the wire says which by its own flag.
BY_CODE: dict[str, type[StreamsError]] = {"internal": StreamsError}
for _leaf in _leaves(StreamsError):
    if _leaf not in (Refused, Busy, Uncertain):
        BY_CODE.setdefault(_leaf.code, _leaf)
