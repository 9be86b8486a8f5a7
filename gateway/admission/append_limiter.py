"""Bounds what is in flight between a gateway and one shard, and queues the rest fairly by owner (v0 §9).

    append ──► room? ──yes──► in flight ──► shard
                 └──no──► waits, the owner that was served least goes first ──► in flight

The gateway only delays. So under a flood the queue stands here, where waiting costs nothing and where it is
known whose requests they are, and not on the link or in the shard's event loop, where a request of one key
would wait behind all requests of another. The shard, which parses, refuses what is too much for it.

**Appends** (`AppendLimiter`). How many may be in flight is found by measuring: while a probe that travels
behind them needs longer than the pacing threshold, the number shrinks (`telemetry/pressure.py`). Their bodies
are bounded by `BODY_WINDOW_BYTES`, so that a small request is never behind more than these. An urgent append
does not wait, as long as fewer than `URGENT_MAX` are in flight.

**Pages** (`PageWindow`). How large the next page of an owner will be is guessed from its last ones. Large
pages have a link of their own, so that no other answer is behind them, and at most `PAGE_WINDOW_BYTES` of
them are asked for at a time. Small pages go the way of all other requests and wait for nothing.

Bounds: `WAITING_MAX` requests wait in each queue, none for longer than `WAIT_S_MAX`: then it is refused with
a time to come back, and nothing of it was done. Inputs of S2 sessions are the exception: there is one of each
session, and it waits.
"""

from __future__ import annotations

from functools import partial
from math import inf

import trio

from gateway.admission.fair_queue import FairQueue
from gateway.admission.request_scheduler import REQUEST_COST
from gateway.admission.waiter import Waiter
from streams.protocol.errors import Throttled
from streams.protocol.telemetry import pressure
from streams.protocol.telemetry.pressure import Gauge, Limit, Thresholds

#: As many as a gateway has connections. Requests of HTTP/2 and of S2 sessions may be more.
WAITING_MAX = 10_000
#: Longer than any queue that a shard works off. A client gives up after about as long.
WAIT_S_MAX = 5.0
#: Bodies of appends in flight: 35 batches of 1,000 records, a few milliseconds of a shard's time.
BODY_WINDOW_BYTES = 4 << 20
#: Large pages in flight: two of the default size. A link carries these in two or three milliseconds, so there
#: is always another one under way while a gateway passes one on.
PAGE_WINDOW_BYTES = 2 << 20
#: A page is large from this size on: as much as the buffer of a link's socket takes at once.
LARGE_PAGE_BYTES = 128 * 1024
#: Urgent appends in flight: with more, they are not the few for which the flag is meant.
URGENT_MAX = 256
#: Owners whose page sizes are remembered. Past it, all are guessed anew.
_SIZES_MAX = 4096


class _Window:
    """Requests in flight, the queue of those that wait, and what they take of some bytes."""

    __slots__ = ("_bytes_max", "_queue", "bytes_used", "in_flight", "paced", "throttled")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._queue: FairQueue[Waiter] = FairQueue()
        self.bytes_used = 0
        self.in_flight = 0
        #: Counters since start. Metrics only: no decision depends on them.
        self.paced = 0
        self.throttled = 0

    @property
    def count_max(self) -> int:
        return pressure.LIMIT_MAX

    @property
    def has_room(self) -> bool:
        return self._has_room() and not self._queue

    def _has_room(self) -> bool:
        """True if one more, of any size, may be in flight. If none is in flight, it never waits."""
        return self.bytes_used < self._bytes_max and self.in_flight < self.count_max

    def go_in(self, size: int) -> None:
        """Count a request that has found room, or need not wait for it. Its task calls `leave`."""
        self.in_flight += 1
        self.bytes_used += size

    async def wait(self, owner: str, size: int, wait_s_max: float = WAIT_S_MAX) -> float:
        """Wait for room and go in. Returns how long that took. Raises `Throttled`."""
        if len(self._queue) >= WAITING_MAX and wait_s_max != inf:
            raise self._refusal(1.0)
        since_s = trio.current_time()
        waiter = Waiter(size)
        self._queue.push(owner, waiter, REQUEST_COST + size)
        self.paced += 1
        if not await waiter.wait(partial(self._queue.remove, owner, waiter), wait_s_max):
            raise self._refusal(WAIT_S_MAX)
        return trio.current_time() - since_s

    def leave(self, size: int) -> None:
        self.in_flight -= 1
        self.bytes_used -= size
        assert self.in_flight >= 0 and self.bytes_used >= 0, "a request leaves once, with what it brought"
        if self._queue:
            self.let_in()

    def let_in(self) -> None:
        while self._queue and self._has_room():
            waiter = self._queue.pop()
            self.go_in(waiter.size)
            waiter.grant()

    def _refusal(self, waited_s: float) -> Throttled:
        self.throttled += 1
        wait_ms = pressure.retry_after_ms(waited_s * 1000)
        return Throttled(
            f"the shard has more to do than it can within {WAIT_S_MAX:g} s; try again in {wait_ms} ms",
            retry_after_ms=wait_ms,
        )


class AppendLimiter(_Window):
    """Appends to one shard."""

    __slots__ = ("_limit", "gauge", "urgent", "was_used")

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__(BODY_WINDOW_BYTES)
        self.gauge = Gauge(thresholds)
        self._limit = Limit(thresholds)
        #: Urgent appends in flight. They count above, too.
        self.urgent = 0
        #: True if an append came since the last sample.
        self.was_used = False

    def __repr__(self) -> str:
        return (
            f"<AppendLimiter {self.in_flight} of {self._limit.value} in flight, {len(self._queue)} waiting>"
        )

    @property
    def count_max(self) -> int:
        return self._limit.value

    @property
    def is_busy(self) -> bool:
        return self.was_used or bool(self._queue) or self.gauge.level != pressure.NONE

    async def enter(self, owner: str, size: int, *, is_urgent: bool = False) -> float:
        """Go in, now or when it is this owner's turn. Returns how long that took, in seconds. The caller
        calls `leave` or, for an urgent append, `leave_urgent`. Raises `Throttled`."""
        self.was_used = True
        waited_s = 0.0
        if self.has_room or (is_urgent and self.urgent < URGENT_MAX):
            self.go_in(size)
        else:
            waited_s = await self.wait(owner, size)
        if is_urgent:
            self.urgent += 1
        return waited_s

    async def enter_from_session(self, owner: str, size: int) -> None:
        """Go in, however long that takes. A session that waits here reads nothing, so its client is held back
        by flow control. To refuse an input would end the session, with all that its client has sent behind
        it."""
        self.was_used = True
        if self.has_room:
            self.go_in(size)
        else:
            await self.wait(owner, size, inf)

    def leave_urgent(self, size: int) -> None:
        self.urgent -= 1
        self.leave(size)

    def sample(self, lag_ms: float) -> None:
        """Take a measurement of how far the shard is behind."""
        self.gauge.sample(lag_ms)
        self._limit.sample(lag_ms, self.in_flight)
        self.was_used = False
        self.let_in()


class PageWindow(_Window):
    """Large pages that one shard was asked for and that have not come yet."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        super().__init__(PAGE_WINDOW_BYTES)
        #: By owner: how large its pages were of late.
        self._sizes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<PageWindow {self.bytes_used} B in flight, {len(self._queue)} waiting>"

    def guess(self, owner: str, size_max: int) -> int:
        """How large the next page of an owner will be, if it can be `size_max` bytes; 0 for a small one."""
        size = min(size_max, self._sizes.get(owner, 0))
        return size if size > LARGE_PAGE_BYTES else 0

    async def enter(self, owner: str, size: int) -> None:
        """Go in, now or when it is this owner's turn. The caller calls `leave`. Raises `Throttled`."""
        if self.has_room:
            self.go_in(size)
        else:
            await self.wait(owner, size)

    def note_size(self, owner: str, size: int) -> None:
        """Learn from a page that has come. A large page counts at once, small ones bit by bit."""
        last = self._sizes.get(owner)
        if last is None and len(self._sizes) >= _SIZES_MAX:
            self._sizes.clear()
        self._sizes[owner] = size if last is None or size > last else last - (last - size) // 8
