"""The origins of a box's copies: one position for each origin, and the effect of a copy batch.

The destination's half of forwarding (`streams/protocol/messages/forwards.py` has the whole picture).

      position          batch (after, upto]             effect
    ──────────────      ─────────────────────────       ─────────────────────────────────────────────
         p                after = p                     appended; the position becomes `upto`
         p                upto <= p                     none: it is a repeat. The reply contains p
         p                anything else                 none: the source plans again from p
      NOT_KNOWN           any                           the position starts at `after`

Rules of the file
- Functions that decide change nothing; `apply_…` functions change state, as in `boxes/box.py`.
- A position belongs to one generation of its source. A newer generation starts again; batches of an older
  generation are ignored.

Invariants
- ONCE: the records between two positions of an origin are appended by exactly one change.
- ORIGINS: a box has at most `ORIGINS_MAX` origins.
"""

from __future__ import annotations

from typing import NamedTuple

from shard.core import changes
from streams.protocol.errors import Throttled
from streams.protocol.messages.forwards import ForwardHead

#: Maximum number of origins per box, about 300 bytes each. `STREAMS_MAX_ROUTERS` bounds routers; dead letters
#: are bounded by the queues that name this box. Beyond it the box drops the origin that was idle longest,
#: never a router's: 10,000 others have moved since, so none of its batches is in flight any more.
ORIGINS_MAX = 10_000

NOT_KNOWN = -1


class Origin(NamedTuple):
    """The progress of one origin. A snapshot stores the fields in this order."""

    #: The generation of the source that `position` counts in.
    generation: int
    position: int
    #: Records appended from this origin.
    total: int = 0
    #: Records the source has lost since the last copy. The next copy reports them as a hole.
    lost_count: int = 0
    #: True for the endpoint of a router: it is never dropped to make room.
    is_pinned: bool = False

    def restart(self, *, is_memory: bool) -> Origin:
        """Return the origin as it is after a restart. A memory box forgets the position."""
        return Origin(0, NOT_KNOWN, is_pinned=self.is_pinned) if is_memory else self


def enter_generation(origin: Origin, head: ForwardHead) -> Origin:
    """Return the origin in the generation of the batch."""
    if origin.position == NOT_KNOWN:
        return origin._replace(generation=head.life, position=head.after)
    if origin.generation < head.life:
        # The source has a new generation (a memory box after a restart, a queue that was created again). It
        # is unknown whether all records of the last one arrived, so count one lost record: an estimate, not
        # silence.
        lost_count = origin.lost_count + (1 if origin.position else 0)
        return origin._replace(generation=head.life, position=head.after, lost_count=lost_count)
    return origin


def fits(origin: Origin, head: ForwardHead) -> bool:
    """Return True if a batch starts at the origin's position and extends it."""
    return origin.generation == head.life and origin.position == head.after and head.upto > head.after


def check_room(origins: dict[str, Origin], name: str) -> None:
    """Raise `Throttled` if the box cannot store one more origin."""
    if name in origins or len(origins) < ORIGINS_MAX:
        return
    if all(origin.is_pinned for origin in origins.values()):
        raise Throttled(
            f"{len(origins)} routers and queues copy into this box, which is the limit; delete some",
            limit="origins",
        )


# -- applying


def apply_move(origins: dict[str, Origin], change: changes.OriginMoved) -> None:
    before = origins.pop(change.origin, None) or Origin(0, NOT_KNOWN)
    origins[change.origin] = Origin(
        change.life,
        change.position,
        before.total,
        change.lost,
        before.is_pinned or change.pinned,
    )
    _forget(origins)


def apply_forward(origins: dict[str, Origin], change: changes.BatchForwarded) -> None:
    before = origins.pop(change.origin, None) or Origin(0, NOT_KNOWN)
    total = before.total + change.batch.count
    origins[change.origin] = Origin(change.life, change.position, total, 0, before.is_pinned)
    _forget(origins)


def _forget(origins: dict[str, Origin]) -> None:
    if len(origins) > ORIGINS_MAX:
        del origins[next(name for name, origin in origins.items() if not origin.is_pinned)]
