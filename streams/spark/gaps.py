"""Lost records on the way through Spark: the server's tombstone becomes an error, a row or a warning.

Only a tombstone means loss. A jump in seqs does not: deletes, compaction and filters leave holes on purpose
(v0 §4.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streams.protocol.errors import Refused


@dataclass(frozen=True, slots=True)
class Gap:
    """Lost records of a box: `first` to `last`.

    `missed_count` is how many records were lost, if the server knows. A box that was deleted and created
    again has no `last`: the end of the deleted box is unknown.
    """

    box: str
    first: int
    last: int | None
    reason: str
    missed_count: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "box": self.box,
            "gap_from": self.first,
            "gap_to": self.last,
            "reason": self.reason,
            "missed": self.missed_count,
        }

    def within(self, first: int, last: int) -> Gap | None:
        """Return the part of the gap in these seqs, or None. A part has no `missed_count`."""
        if self.last is None:
            return self
        if self.last < first or last < self.first:
            return None
        if first <= self.first and self.last <= last:
            return self
        return Gap(self.box, max(first, self.first), min(last, self.last), self.reason, None)

    def __str__(self) -> str:
        if self.last is None:
            return (
                f"{self.box} was deleted and created again: records of the deleted box from {self.first} on "
                f"are lost ({self.reason})"
            )
        about = f", about {self.missed_count:,} records" if self.missed_count is not None else ""
        return f"{self.box} has lost records {self.first} to {self.last} ({self.reason}{about})"


class GapError(Refused):
    """Records in the requested range are lost."""

    code = "records_lost"

    def __init__(self, message: str | None = None, **detail: Any) -> None:
        super().__init__(message, **detail)

    def __reduce__(self) -> tuple[Any, ...]:
        return _gap_error, (self.message, self.detail)

    @classmethod
    def of(cls, gap: Gap) -> GapError:
        return cls(
            f"{gap}. To continue without them, set onGap=emit (a row reports each gap) or "
            f"failOnDataLoss=false; or start elsewhere, with startingOffsets and a new checkpoint",
            **gap.as_dict(),
        )


def _gap_error(message: str, detail: Mapping[str, Any]) -> GapError:
    return GapError(message, **detail)


def tombstone_gap(box: str, tombstone: Mapping[str, Any]) -> Gap:
    """Convert a tombstone, from the wire or from HTTP, to a gap."""
    missed_estimate = tombstone.get("missed_estimate")
    return Gap(box, tombstone["gap_from"], tombstone["gap_to"], tombstone["reason"], missed_estimate)
