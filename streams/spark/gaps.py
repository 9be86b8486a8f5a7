"""Lost records on the way through Spark: the server's tombstone becomes an error, a row or a warning.

Only a tombstone is loss. A jump in seqs is not: deletes, compaction and filters leave holes that somebody
asked for (v0 §4.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streams.protocol.errors import Refused


@dataclass(frozen=True, slots=True)
class Gap:
    """Records `first` to `last` of a box are lost. `missed` is how many those were, if the server knows. A
    box that was deleted and created again has no `last`: how far the deleted one went is not known any
    more."""

    box: str
    first: int
    last: int | None
    reason: str
    missed: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "box": self.box,
            "gap_from": self.first,
            "gap_to": self.last,
            "reason": self.reason,
            "missed": self.missed,
        }

    def within(self, first: int, last: int) -> Gap | None:
        """The part that a reader of these seqs misses; none if it misses nothing. How many there were in a
        part is not known."""
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
                f"{self.box} was deleted and created again: records from {self.first} on of the deleted "
                f"box are "
                f"lost ({self.reason})"
            )
        about = f", about {self.missed:,} records" if self.missed is not None else ""
        return f"{self.box} has lost records {self.first} to {self.last} ({self.reason}{about})"


class GapError(Refused):
    """Wanted records are lost."""

    code = "records_lost"

    def __init__(self, message: str | None = None, **detail: Any) -> None:
        super().__init__(message, **detail)

    def __reduce__(self) -> tuple[Any, ...]:
        return _gap_error, (self.message, self.detail)

    @classmethod
    def of(cls, gap: Gap) -> GapError:
        return cls(
            f"{gap}. To go on without them, set onGap=emit (a row says what is missing) or "
            f"failOnDataLoss=false; "
            f"or begin anew elsewhere, with startingOffsets and a new checkpoint",
            **gap.as_dict(),
        )


def _gap_error(message: str, detail: Mapping[str, Any]) -> GapError:
    return GapError(message, **detail)


def tombstone_gap(box: str, tombstone: Mapping[str, Any]) -> Gap:
    """A tombstone of the wire or of HTTP."""
    missed = tombstone.get("missed_estimate")
    return Gap(box, tombstone["gap_from"], tombstone["gap_to"], tombstone["reason"], missed)
