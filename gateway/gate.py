"""The way of appends to one shard: open while there is no pressure, a turnstile while there is (v0 §9).

    append ──► room? ──yes──► under way ──► shard
                 └──no──► waits its turn ──► under way, or 429 with a time to come back

How many may be under way is found by measuring (`streams/protocol/pressure.py`). So under a flood the queue
stands here, where waiting costs nothing, and not in the event loop or the shard, where everybody would share
it: reads, and appends that skip the throttle, go on as if there was no flood. What is urgent, such appends
and the questions of those who watch, has a link of its own.

Bounds: at most `WAITING_MAX` wait, none longer than twice the second threshold.
"""

from __future__ import annotations

import re
from collections import deque

import trio

from gateway.http import Buffer
from streams.protocol import pressure
from streams.protocol.errors import Throttled
from streams.protocol.pressure import Gauge, Limit, Thresholds

#: At ten thousand appends a second these are served within a tenth of a second.
WAITING_MAX = 1024

#: Where a body, or the query of a request, says that it skips the throttle. It is not parsed here: one that
#: has this elsewhere, as a field of its data, gets in as well, which it could have had by asking. It begins
#: with letters: such a search is twenty times quicker than one for any of several signs.
_SKIPS = re.compile(rb'disable_backpressure(?:"\s*:\s*|=)true').search
_FIELD = b"disable_backpressure"
_SKIPS_IN_QUERY = "disable_backpressure=true"
#: The fields of an append stand before or behind its records, so as much of both ends is looked at when
#: there is no need to be sure: to search a long body would cost as much as to pass it on.
_END_BYTES = 512


def skips(body: Buffer) -> bool:
    """Whether a body says anywhere that it skips the throttle."""
    return _SKIPS(body) is not None


def skips_by_query(query: str) -> bool:
    return _SKIPS_IN_QUERY in query


def says_urgent(data: Buffer) -> bool:
    """Whether a body, or what has come of a request, says at one of its ends that it skips the throttle."""
    start = bytes(data[:_END_BYTES])
    if _FIELD in start and _SKIPS(start) is not None:
        return True
    if len(data) <= _END_BYTES:
        return False
    end = bytes(data[-_END_BYTES:])
    return _FIELD in end and _SKIPS(end) is not None


class _Waiter:
    __slots__ = ("event", "is_refused", "since_s")

    def __init__(self, since_s: float) -> None:
        self.event = trio.Event()
        self.since_s = since_s
        self.is_refused = False


class Gate:
    __slots__ = (
        "_is_sessions_turn",
        "_limit",
        "_sessions",
        "_throttle_s",
        "_waiting",
        "gauge",
        "paced",
        "throttled",
        "under_way",
        "was_used",
    )

    def __init__(self, thresholds: Thresholds) -> None:
        self.gauge = Gauge(thresholds)
        self._limit = Limit(thresholds)
        self._throttle_s = thresholds.throttle_lag_ms / 1000
        self._waiting: deque[_Waiter] = deque()
        #: Inputs of sessions that wait. They are never refused; both queues take turns.
        self._sessions: deque[_Waiter] = deque()
        self._is_sessions_turn = False
        self.under_way = 0
        #: Whether anybody came since the last sample.
        self.was_used = False
        self.paced = 0
        self.throttled = 0

    def __repr__(self) -> str:
        waiting = len(self._waiting) + len(self._sessions)
        return f"<Gate {self.under_way} of {self._limit.value} under way, {waiting} waiting>"

    @property
    def is_busy(self) -> bool:
        return self.was_used or self.is_pressed

    @property
    def is_pressed(self) -> bool:
        return bool(self._waiting or self._sessions) or self.gauge.level != pressure.NONE

    @property
    def has_room(self) -> bool:
        return self.under_way < self._limit.value and not self._waiting and not self._sessions

    def try_enter(self) -> bool:
        """Whether an append may go at once. Who enters, in this way or the other, leaves."""
        if not self.has_room:
            return False
        self.go_in()
        return True

    def go_in(self) -> None:
        """For who has looked whether there is room, or need not: an append that skips the throttle."""
        self.under_way += 1
        self.was_used = True

    def is_late(self, waited_s: float) -> bool:
        """Whether who has waited that long before is refused."""
        return waited_s >= self._throttle_s

    async def enter(self, waited_s: float = 0.0) -> float:
        """Waits for a turn; how long that took. Raises `Throttled`."""
        self.was_used = True
        if self.is_late(waited_s):
            raise self._refusal(waited_s)
        now_s = trio.current_time()
        # The gate is full. A way that is far behind with nothing of ours on it is refused nothing.
        if self.gauge.level == pressure.THROTTLING or len(self._waiting) >= WAITING_MAX:
            raise self._refusal(self._longest_s(now_s))
        if self._waiting and now_s - self._waiting[0].since_s >= self._throttle_s:
            raise self._refusal(self._longest_s(now_s))
        waiter = _Waiter(now_s)
        self._waiting.append(waiter)
        self.paced += 1
        self._let_in()
        try:
            await waiter.event.wait()
        except BaseException:
            if not waiter.event.is_set():
                self._waiting.remove(waiter)
            elif not waiter.is_refused:
                self.leave()
            raise
        now_s = trio.current_time()
        if waiter.is_refused:
            raise self._refusal(self._longest_s(now_s))
        return now_s - waiter.since_s

    async def enter_from_session(self) -> None:
        """Waits for a turn for as long as that takes. A session that waits here reads nothing, so its client
        is held back by flow control. To refuse an input would end the session, with all that its client has
        sent behind it."""
        if self.try_enter():
            return
        waiter = _Waiter(trio.current_time())
        self._sessions.append(waiter)
        self.was_used = True
        self.paced += 1
        self._let_in()
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.event.is_set():
                self.leave()
            else:
                self._sessions.remove(waiter)
            raise

    def leave(self) -> None:
        self.under_way -= 1
        assert self.under_way >= 0, "who leaves has entered"
        self._let_in()

    def sample(self, lag_ms: float) -> None:
        """Takes a measurement in; turns away who has waited for too long."""
        self.gauge.sample(lag_ms)
        self._limit.sample(lag_ms, self.under_way)
        self.was_used = False
        too_long_s = trio.current_time() - 2 * self._throttle_s
        while self._waiting and self._waiting[0].since_s < too_long_s:
            waiter = self._waiting.popleft()
            waiter.is_refused = True
            waiter.event.set()
        self._let_in()

    def _let_in(self) -> None:
        while (self._waiting or self._sessions) and self.under_way < self._limit.value:
            self.under_way += 1
            is_of_session = bool(self._sessions) and (self._is_sessions_turn or not self._waiting)
            self._is_sessions_turn = not is_of_session
            (self._sessions if is_of_session else self._waiting).popleft().event.set()

    def _longest_s(self, now_s: float) -> float:
        return now_s - self._waiting[0].since_s if self._waiting else 0.0

    def _refusal(self, waited_s: float) -> Throttled:
        self.throttled += 1
        wait_ms = pressure.retry_after_ms(max(waited_s * 1000, self.gauge.lag_ms))
        return Throttled(f"the server is under pressure; try again in {wait_ms} ms", retry_after_ms=wait_ms)
