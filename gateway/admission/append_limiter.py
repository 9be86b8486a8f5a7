"""Bounds the appends and pages in flight between a gateway and one shard, and queues the rest fairly by owner
(v0 §9).

    append ──► room? ──yes──► in flight ──► shard
                 └──no──► waits, the owner that was served least goes first ──► in flight

The gateway only delays. Under a flood the queue is here, where waiting is cheap and the owner of each request
is known. On the link or in the shard's event loop, a request of one key would wait behind all requests of
another. The shard, which parses the requests, rejects those that exceed its own limits.

**Appends** (`AppendLimiter`). How many may be in flight is found by measuring: while a probe that travels
behind them needs longer than the pacing threshold, the number shrinks (`telemetry/pressure.py`). Their bodies
are bounded by `BODY_WINDOW_BYTES`, so that a small request is never behind more than these. An urgent append
does not wait, as long as fewer than `URGENT_MAX` are in flight.

**Pages** (`PageWindow`). The size of an owner's next page is estimated from its last ones. Large pages have a
link of their own, so that no other answer waits behind them, and at most `PAGE_WINDOW_BYTES` of them are in
flight. Small pages use the same link as other requests and do not wait here.

**Waiting inline.** An append that runs inline (`inline.py`) waits without a task: a task would double its
cost in a gateway. `leave` resumes it, so it sends its frame inside that call. It has no timer of its own:
`sample`, which is called at least four times a second, ends waits that are over.

Bounds: `WAITING_MAX` requests wait in each queue, none for longer than `WAIT_S_MAX`. After that a request is
refused with a `Retry-After`, and nothing of it was done. Inputs of S2 sessions are the exception: each
session has at most one here, and it waits without a time limit."""

from __future__ import annotations

from collections import deque
from functools import partial
from math import inf

import trio

from gateway.admission import inline
from gateway.admission.fair_queue import FairQueue
from gateway.admission.inline import need_task
from gateway.admission.request_scheduler import REQUEST_COST
from gateway.admission.waiter import Waiter
from streams.protocol.errors import Throttled
from streams.protocol.telemetry import pressure
from streams.protocol.telemetry.pressure import Gauge, Limit, Thresholds

#: As many as a gateway has connections. HTTP/2 and S2 sessions may have more requests.
WAITING_MAX = 10_000
#: Longer than any queue that a shard works off. A client gives up after about as long.
WAIT_S_MAX = 5.0
#: Bodies of appends in flight: 35 batches of 1,000 records, a few milliseconds of a shard's time.
BODY_WINDOW_BYTES = 4 << 20
#: Large pages in flight: two of the default size. A link carries these in two or three milliseconds, so
#: another one is always in flight while a gateway passes one on.
PAGE_WINDOW_BYTES = 2 << 20
#: A page is large from this size on: the size of the socket buffer of a link.
LARGE_PAGE_BYTES = 128 * 1024
#: Urgent appends in flight. The flag is meant for few requests: more than these wait like others.
URGENT_MAX = 256
#: Owners whose page sizes are remembered. Beyond it, all sizes are forgotten and learned again.
_SIZES_MAX = 4096


class _Window:
    """Bounds the number and the bytes of requests in flight, and queues the requests that wait."""

    __slots__ = (
        "_bytes_max",
        "_inline",
        "_is_letting_in",
        "_queue",
        "bytes_used",
        "in_flight",
        "paced_count",
        "throttled_count",
    )

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._queue: FairQueue[Waiter] = FairQueue()
        #: Waiters without a task, in order of arrival: (end of the wait, owner, waiter).
        self._inline: deque[tuple[float, str, Waiter]] = deque()
        self._is_letting_in = False
        self.bytes_used = 0
        self.in_flight = 0
        #: Counters since start. Metrics only: no decision depends on them.
        self.paced_count = 0
        self.throttled_count = 0

    @property
    def count_max(self) -> int:
        return pressure.LIMIT_MAX

    @property
    def has_room(self) -> bool:
        return self._has_room() and not self._queue

    def _has_room(self) -> bool:
        """Return True if one more request of any size may be in flight. It always is if none is in flight."""
        return self.bytes_used < self._bytes_max and self.in_flight < self.count_max

    def go_in(self, size: int) -> None:
        """Count a request as in flight. Its task calls `leave` later."""
        self.in_flight += 1
        self.bytes_used += size

    async def wait(self, owner: str, size: int, wait_s_max: float = WAIT_S_MAX) -> float:
        """Wait for room and go in. Returns the seconds waited. Raises `Throttled`."""
        if len(self._queue) >= WAITING_MAX and wait_s_max != inf:
            raise self._refusal(1.0)
        since_s = trio.current_time()
        waiter = Waiter(size)
        self._queue.push(owner, waiter, REQUEST_COST + size)
        self.paced_count += 1
        if inline.current_run is not None:
            self._inline.append((since_s + wait_s_max, owner, waiter))
        if not await waiter.wait(partial(self._queue.remove, owner, waiter), wait_s_max):
            raise self._refusal(WAIT_S_MAX)
        return trio.current_time() - since_s

    def leave(self, size: int) -> None:
        self.in_flight -= 1
        self.bytes_used -= size
        assert self.in_flight >= 0 and self.bytes_used >= 0, "a request leaves once, with its own size"
        if self._queue:
            self.let_in()

    def let_in(self) -> None:
        if self._is_letting_in:  # a waiter that runs inline has left again: the loop that resumed it goes on
            return
        self._is_letting_in = True
        try:
            while self._queue and self._has_room():
                waiter = self._queue.pop()
                self.go_in(waiter.size)
                waiter.grant()
        finally:
            self._is_letting_in = False

    def end_waits(self, now_s: float) -> None:
        """Refuse the inline waiters whose time is over."""
        waiters = self._inline
        while waiters and (waiters[0][0] <= now_s or not self._queue.has(*waiters[0][1:])):
            _, owner, waiter = waiters.popleft()
            if self._queue.has(owner, waiter):
                self._queue.remove(owner, waiter)
                waiter.fail(self._refusal(WAIT_S_MAX))

    def _refusal(self, waited_s: float) -> Throttled:
        self.throttled_count += 1
        wait_ms = pressure.retry_after_ms(waited_s * 1000)
        return Throttled(
            f"the shard is overloaded and did not take the request within {WAIT_S_MAX:g} s; "
            f"retry in {wait_ms} ms",
            retry_after_ms=wait_ms,
        )


class AppendLimiter(_Window):
    """Bounds the appends in flight to one shard."""

    __slots__ = ("_limit", "gauge", "urgent", "was_used")

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__(BODY_WINDOW_BYTES)
        self.gauge = Gauge(thresholds)
        self._limit = Limit(thresholds)
        #: Urgent appends in flight. `in_flight` includes them.
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
        """Go in, now or when it is this owner's turn. Returns the seconds waited. The caller calls `leave`
        or, for an urgent append, `leave_urgent`. Raises `Throttled`."""
        self.was_used = True
        waited_s = 0.0
        if not self._try_enter(size, is_urgent):
            waited_s = await self.wait(owner, size)
        if is_urgent:
            self.urgent += 1
        return waited_s

    def _try_enter(self, size: int, is_urgent: bool) -> bool:
        """Go in if that needs no wait. This is `has_room` and `go_in` in one: each append passes here."""
        in_flight = self.in_flight
        if (not self._queue and self.bytes_used < self._bytes_max and in_flight < self._limit.value) or (
            is_urgent and self.urgent < URGENT_MAX
        ):
            self.in_flight = in_flight + 1
            self.bytes_used += size
            return True
        return False

    async def enter_from_session(self, owner: str, size: int) -> None:
        """Go in, however long that takes. A session that waits here reads nothing, so flow control slows its
        client down. A refused input would end the session and lose the inputs behind it."""
        self.was_used = True
        if self.has_room:
            self.go_in(size)
        else:
            await self.wait(owner, size, inf)

    def leave_urgent(self, size: int) -> None:
        self.urgent -= 1
        self.leave(size)

    def sample(self, lag_ms: float) -> None:
        """Adjust the limit to a new measurement of the shard's lag."""
        self.gauge.sample(lag_ms)
        self._limit.sample(lag_ms, self.in_flight)
        self.was_used = False
        self.let_in()
        self.end_waits(trio.current_time())


class PageWindow(_Window):
    """Bounds the large pages in flight from one shard."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        super().__init__(PAGE_WINDOW_BYTES)
        #: By owner: a moving estimate of its page size.
        self._sizes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<PageWindow {self.bytes_used} B in flight, {len(self._queue)} waiting>"

    def guess(self, owner: str, size_max: int) -> int:
        """Estimate the size of an owner's next page, at most `size_max` bytes; 0 for a small page."""
        size = min(size_max, self._sizes.get(owner, 0))
        return size if size > LARGE_PAGE_BYTES else 0

    async def enter(self, owner: str, size: int) -> None:
        """Go in, now or when it is this owner's turn. The caller calls `leave`. Raises `Throttled`."""
        if not self.has_room:
            await need_task()
        if self.has_room:
            self.go_in(size)
        else:
            await self.wait(owner, size)

    def note_size(self, owner: str, size: int) -> None:
        """Learn from the size of a page. The estimate grows at once and shrinks by an eighth at a time."""
        last = self._sizes.get(owner)
        if last is None and len(self._sizes) >= _SIZES_MAX:
            self._sizes.clear()
        self._sizes[owner] = size if last is None or size > last else last - (last - size) // 8
