"""Errors between a client and a server, and the server's errors decoded from its answers.

Every error is in one of the three families of `streams.protocol.errors`, so `except streams.Busy` is
complete: `Refused` change the request, `Busy` try later, `Uncertain` it may have happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streams.protocol.errors import (
    BY_CODE,
    Busy,
    OutcomeUnknown,
    RecordTooLarge,
    Refused,
    StreamsError,
    Uncertain,
)


class Unreachable(Busy):
    """No server can be reached at this address; nothing was sent."""

    code = "unreachable"


class AnswerLost(Uncertain):
    """The connection ended before the answer came; the request may or may not have taken effect."""

    code = "answer_lost"


class NotAnAnswer(StreamsError):
    """The server at this address is not a streams server."""

    code = "not_an_answer"


class Closed(StreamsError):
    """This object was closed; make a new one."""

    code = "closed"


class NotJson(Refused, ValueError):
    """A value cannot be written as JSON; nothing was sent. `detail["place"]` says where it is."""

    code = "not_json"

    def inside(self, outer: str) -> NotJson:
        """Return this error with its place inside an outer value."""
        return NotJson(f"{outer}.{self.message}", place=f"{outer}.{self.detail['place']}")


class WriteOverCap(RecordTooLarge):
    """The write is larger than the whole cap of its box; split it, or raise the cap."""


class _Fault(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, Any] = {}


class _Failure(msgspec.Struct):
    error: _Fault


_decode_failure = msgspec.json.Decoder(_Failure).decode


def error_of(status: int, body: bytes, *, retry_after: str = "", url: str = "") -> StreamsError:
    """Return the error for an answer with this status, in its family."""
    try:
        fault = _decode_failure(body).error
    except msgspec.DecodeError:
        return _error_of_a_stranger(status, body, url)
    detail = fault.detail
    # The header is in whole seconds. Where the server says it in milliseconds too, that counts.
    if retry_after.isdigit() and fault.code not in _HEADER_IS_COARSE:
        detail = {"retry_after_ms": int(retry_after) * 1000, **detail}
    if fault.code == OutcomeUnknown.code and detail.get("outcome") == "unknown":
        return OutcomeUnknown(fault.message, **detail)
    return class_of(fault.code, detail)(fault.message, **detail)


def class_of(code: str, detail: Mapping[str, Any]) -> type[StreamsError]:
    """The class of a server's error. One code covers a record and a write that are too large."""
    if code == RecordTooLarge.code and "cap_records" in detail:
        return WriteOverCap
    return BY_CODE.get(code, StreamsError)


#: Errors that end with a restart, which takes less than a second, the least that the header can express.
_HEADER_IS_COARSE = frozenset({"shard_unavailable", "not_ready", "shutting_down"})


def _error_of_a_stranger(status: int, body: bytes, url: str) -> StreamsError:
    """A proxy on the way answered, or it is no server of ours at all."""
    text = f"{url} answered {status} with {body[:80]!r}, which is not JSON of a streams server"
    if status in (502, 504):
        return AnswerLost(
            f"{text}; a proxy between this client and the server may have timed out", status=status
        )
    if status in (429, 503):
        return Busy(text, status=status)
    return NotAnAnswer(f"{text}; is this the right address?", status=status)
