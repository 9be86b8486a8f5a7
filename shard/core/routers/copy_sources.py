"""Where a box's copies come from: one position for each origin, and what a parcel from there becomes.

The destination's half of forwarding (`streams/protocol/messages/forwards.py` has the whole picture).

    known position      a parcel (after, upto]          what it becomes
    ──────────────      ─────────────────────────       ─────────────────────────────────────────────
         p                after = p                     appended; the position is `upto` from now on
         p                upto <= p                     nothing: it is a repeat. The answer says p
         p                anything else                 nothing: the source plans again from p
     not known            any                           begins where the parcel begins

Rules of the file
- Deciding and applying are apart, as in `boxes/box.py`.
- A position belongs to a life of its source. A newer life begins anew, an older one has nothing to say.

Invariants
- ONCE: the records between two positions of an origin are appended by exactly one change.
- ORIGINS: a box has at most `ORIGINS_MAX` origins.
"""

from __future__ import annotations

from typing import NamedTuple

from shard.core import changes
from streams.protocol.errors import Throttled
from streams.protocol.messages.forwards import ForwardHead

#: Origins one box keeps, about 300 bytes each. Routers are bounded by `STREAMS_MAX_ROUTERS`, dead letters by
#: the queues that name this box. Beyond it the origin that has not moved for longest is forgotten, unless it
#: is a router's: 10,000 others have moved since, so nothing of it is on the way any more.
ORIGINS_MAX = 10_000

NOT_KNOWN = -1


class Origin(NamedTuple):
    life: int
    position: int
    #: Records appended from here.
    total: int = 0
    #: Records the source has lost since the last one it could send: told with the next one that comes.
    lost: int = 0
    pinned: bool = False

    def kept(self, *, is_memory: bool) -> Origin:
        """What outlives a restart: of a memory box, that there is such an origin."""
        return Origin(0, NOT_KNOWN, pinned=self.pinned) if is_memory else self


def standing(known: Origin, head: ForwardHead) -> Origin:
    """Where the origin stands in the parcel's life."""
    if known.position == NOT_KNOWN:
        return known._replace(life=head.life, position=head.after)
    if known.life < head.life:
        # The source began anew (a memory box after a restart, a queue made again). Whether everything of its
        # earlier life had come is not known, so it counts as one lost record: an estimate, but not silence.
        lost = known.lost + (1 if known.position else 0)
        return known._replace(life=head.life, position=head.after, lost=lost)
    return known


def fits(known: Origin, head: ForwardHead) -> bool:
    """Whether a parcel begins where its origin stands, and goes on from there."""
    return known.life == head.life and known.position == head.after and head.upto > head.after


def check_room(origins: dict[str, Origin], origin: str) -> None:
    if origin in origins or len(origins) < ORIGINS_MAX:
        return
    if all(known.pinned for known in origins.values()):
        raise Throttled(f"{len(origins)} origins already copy into this box", limit="origins")


# -- applying


def moved(origins: dict[str, Origin], change: changes.OriginMoved) -> None:
    known = origins.pop(change.origin, None) or Origin(0, NOT_KNOWN)
    origins[change.origin] = Origin(
        change.life,
        change.position,
        known.total,
        change.lost,
        known.pinned or change.pinned,
    )
    _forget(origins)


def forwarded(origins: dict[str, Origin], change: changes.BatchForwarded) -> None:
    known = origins.pop(change.origin, None) or Origin(0, NOT_KNOWN)
    total = known.total + change.batch.count
    origins[change.origin] = Origin(change.life, change.position, total, 0, known.pinned)
    _forget(origins)


def _forget(origins: dict[str, Origin]) -> None:
    if len(origins) > ORIGINS_MAX:
        del origins[next(name for name, known in origins.items() if not known.pinned)]
