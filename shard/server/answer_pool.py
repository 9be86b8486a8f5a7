"""Bounds the memory of answers that are produced and not sent yet.

A page is produced only while its connection has room for one more. Otherwise the request for it, a few bytes,
waits until the connection has sent enough. The connection's other requests are served meanwhile.

Two pools share the memory of a shard: one for gateways and other clients on the Unix socket, one for peers
over TCP. So slow peers on other machines never use up the memory of the gateways.

Bounds: a connection and a pool may each exceed their limit by one answer, at most one pass of claims
(`PASS_BYTES_MAX` in `core/queues/jobs.py`).
"""

from __future__ import annotations

from typing import NamedTuple

_MIB = 1 << 20


class AnswerLimits(NamedTuple):
    """Limits of one kind of connection."""

    #: Unsent bytes of one connection at which no further page is produced for it.
    connection_bytes: int
    #: Unsent bytes of all connections of this kind.
    pool_bytes: int
    #: A connection that accepts no data for this long is closed.
    stall_s: float
    #: This applies instead while the pool is full, because other connections wait for memory.
    stall_full_s: float


#: A gateway reads answers as they come, so a link has a few unsent pages of 8 MiB at most. A gateway has
#: three links; the pool has room for the links of two gateways.
LINK_LIMITS = AnswerLimits(16 * _MIB, 128 * _MIB, stall_s=60, stall_full_s=30)

#: A peer requests one page of at most 16 MiB at a time, or prefetches one more.
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
        """How long a connection may accept no data before it is closed, with the pool as it is now."""
        return self.limits.stall_full_s if self.is_full else self.limits.stall_s
