"""Bounds the memory of answers that are produced and not sent yet.

A page is produced only while its connection has room for one more. A request for a page that finds no room
waits, as the few bytes that it is, until the connection has sent enough; all other requests of the connection
are served meanwhile.

Two pools share the memory of a shard: one for the links of gateways and other clients on the Unix socket, one
for peers over TCP. So slow peers on other machines never take the room of the gateways.

Bounds: a connection and a pool may each exceed their limit by the one answer that is produced last, at most
one pass of claims (`PASS_BYTES_MAX` in `core/queues/jobs.py`).
"""

from __future__ import annotations

from typing import NamedTuple

_MIB = 1 << 20


class AnswerLimits(NamedTuple):
    """Limits of one kind of connection."""

    #: Unsent bytes of one connection, from which on no further page is produced for it.
    connection_bytes: int
    #: Unsent bytes of all connections of this kind.
    pool_bytes: int
    #: A connection that takes nothing of its answers for this long is closed.
    stall_s: float
    #: The same while the pool is full, because others wait for the room.
    stall_full_s: float


#: A gateway takes answers as they come, so a link is behind by a few pages of 8 MiB at most. A gateway has
#: three links; the pool has room for those of two.
LINK_LIMITS = AnswerLimits(16 * _MIB, 128 * _MIB, stall_s=60, stall_full_s=30)

#: A peer asks for one page of at most 16 MiB at a time, or for one ahead.
PEER_LIMITS = AnswerLimits(8 * _MIB, 64 * _MIB, stall_s=60, stall_full_s=5)


class AnswerPool:
    """Counts the unsent bytes of all connections of one kind."""

    __slots__ = ("limits", "used_bytes")

    def __init__(self, limits: AnswerLimits) -> None:
        self.limits = limits
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<AnswerPool {self.used_bytes} of {self.limits.pool_bytes} B>"

    @property
    def is_full(self) -> bool:
        return self.used_bytes >= self.limits.pool_bytes

    @property
    def stall_s(self) -> float:
        """How long a connection may take nothing of its answers, at the moment."""
        return self.limits.stall_full_s if self.is_full else self.limits.stall_s
