"""An outbox whose records are planned: each gets its position in a logged change before a copy is sent.

`move_queue.py` moves records of the box, `output_queue.py` sends the outputs of acked jobs. Both drop what
has arrived, so the position of the destination is logged each time.

    log_position               sendable_position            last_position
         ▼                            ▼                           ▼
   · · · |■■■■ durable: may be sent ■■|░░ planned, not durable yet ░░|
"""

from __future__ import annotations

from shard.core.routers.copy_sources import Origin
from shard.core.routers.outbox import Load, Outbox
from streams.protocol.messages.forwards import ForwardHead


class PlannedOutbox(Outbox):
    """`last_position` is logged, as `log_position` is; `sendable_position` is volatile."""

    __slots__ = ("last_position", "sendable_position")

    is_planned = True

    def __init__(self, *, source: str, origin: str, dest: str, generation: int, position: int) -> None:
        super().__init__(source=source, origin=origin, dest=dest, generation=generation, position=position)
        #: The last position assigned, and the last whose plan is durable, so that it may be sent.
        self.last_position = self.sendable_position = position

    @property
    def may_send(self) -> bool:
        """Return True if no batch is in flight and the outbox may send.

        A destination without this origin starts at the first batch that arrives. An earlier batch that
        arrives after it would count as a repeat."""
        return not self.in_flight and super().may_send

    def unseen_count(self, upto: int = 0) -> int:
        return max(0, self.sendable_position - self.seen_from)

    def lost_count(self, origin: Origin, dest_generation: int) -> int:
        """Return the number of records that were dropped here, and that a restored destination does not have.
        `origin` is what it knows of this outbox."""
        return max(0, self.log_position.position - origin.position)

    def head_of(self, load: Load, after: int, *, hops: int, create: bool | None) -> ForwardHead:
        """Return the head of a copy batch. The first one creates the origin at the destination."""
        return ForwardHead(
            box=self.dest,
            origin=self.origin,
            life=self.generation,
            after=after,
            upto=load.upto,
            count=load.count,
            lost=load.lost_count,
            hops=hops,
            create=create,
            bind=after <= self.log_position.position,
            tags=load.tags,
            job_fields=load.job_fields,
        )
