"""Queues and serves claims that wait for a job or for the end of a window (v0 §8).

    a claim that gets no job ──► waits ──► a job arrives or returns: waiting claims are served in order
                                   │
    a claim in a window ───────────┘       the window closes: all waiting claims are served in one pass

A window opens with the first claim, or with the first job that arrives while claims wait, and collects claims
and jobs until it closes. `WaitingClaims` is the queue; `ClaimDelivery` serves it.

A claim may have to log a change (a durable lease, a count of deliveries, a dead letter). So on a full disk
claims keep waiting, and are refused at their deadline.

Bounds: claims are requests in flight, which links and fronts bound. Stale deadlines are dropped when they are
more than half. One pass serves at most `COHORT_MAX` claims, and a window with as many closes early. A wake-up
hands out at most `PASS_JOBS_MAX` jobs of a box before other tasks run.

Invariants
- PASS_ANSWERED: a pass over claims is answered, or needs something from disk.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import trio

from shard.core.queues.jobs import PASS_JOBS_MAX
from shard.engine.disk_space import DiskSpace, Level
from shard.engine.execution import Execution
from shard.engine.fetcher import FetchedPayloads
from shard.engine.replies import DeferredAnswers, Ticket
from streams.protocol.errors import StreamsError, Throttled
from streams.protocol.messages.queues import BatchClaim, BatchClaimResult, Claim, ClaimResult

COHORT_MAX = 1024
#: Stale deadlines, beyond as many as wait, before the heap is rebuilt.
_STALE_MIN = 64
#: Claims served in one pass without a window. Most wake-ups bring one job, and a thousand claims may wait for
#: it.
IN_ORDER_MAX = 32

#: Error for a claim at its deadline whose connection has no room.
_NO_ROOM = "the client has not read earlier answers of this connection; read them, then claim again"

T = TypeVar("T")


def _always(ticket: object) -> bool:
    return True


class WaitingClaim(Generic[T]):
    """A waiting claim with its ticket and deadline."""

    __slots__ = ("claim", "is_done", "number", "ticket", "until_ms")

    def __init__(self, number: int, claim: Claim, ticket: T, until_ms: int) -> None:
        self.number = number
        self.claim = claim
        self.ticket = ticket
        self.until_ms = until_ms
        self.is_done = False

    def __repr__(self) -> str:
        return f"<WaitingClaim {self.number} of {self.claim.node} until {self.until_ms}>"


class _Box(Generic[T]):
    __slots__ = ("closes_ms", "waiting", "window_ms")

    def __init__(self) -> None:
        #: By number, in the order of arrival.
        self.waiting: dict[int, WaitingClaim[T]] = {}
        #: Length of a window of this queue, as of the last claim; 0 = it has no windows.
        self.window_ms = 0
        #: When the open window closes; 0 = none is open.
        self.closes_ms = 0

    def first(self, count: int, is_ready: Callable[[T], bool]) -> list[WaitingClaim[T]]:
        ready = (each for each in self.waiting.values() if is_ready(each.ticket))
        return list(itertools.islice(ready, count))


class WaitingClaims(Generic[T]):
    def __init__(self) -> None:
        self._boxes: dict[str, _Box[T]] = {}
        #: All waiting claims, by ticket.
        self._by_ticket: dict[T, WaitingClaim[T]] = {}
        self._numbers = itertools.count(1)
        #: (when, number, box, claim): the deadline of a claim or, with None, the end of a window. Entries may
        #: be stale.
        self._times: list[tuple[int, int, str, WaitingClaim[T] | None]] = []
        #: True if the last `ready_claims` or `due` has skipped claims because they were not ready.
        self.were_passed_over = False

    def __repr__(self) -> str:
        return f"<WaitingClaims {len(self._by_ticket)}>"

    def __len__(self) -> int:
        return len(self._by_ticket)

    def add(self, claim: Claim, ticket: T, *, now_ms: int, window_ms: int) -> None:
        """Add a claim. `now_ms` is of a monotonic clock, here and below. With `window_ms` its queue has
        windows."""
        box = self._boxes.get(claim.box)
        if box is None:
            box = self._boxes[claim.box] = _Box()
        waiting = WaitingClaim(next(self._numbers), claim, ticket, now_ms + max(claim.wait_ms, window_ms))
        box.waiting[waiting.number] = self._by_ticket[ticket] = waiting
        if len(self._times) > 2 * len(self._by_ticket) + len(self._boxes) + _STALE_MIN:
            self._drop_stale()
        heapq.heappush(self._times, (waiting.until_ms, waiting.number, claim.box, waiting))
        box.window_ms = window_ms
        if box.window_ms:
            self._open(box, claim.box, now_ms + box.window_ms)
            if len(box.waiting) >= COHORT_MAX:
                box.closes_ms = 0
                self._open(box, claim.box, now_ms)

    def boxes(self) -> list[str]:
        """Return the boxes with waiting claims."""
        return list(self._boxes)

    def next_ms(self) -> int | None:
        """Return when the next claim or window is due."""
        times = self._times
        while times:
            when, _, name, waiting = times[0]
            if waiting is not None:
                if not waiting.is_done:
                    return when
            else:
                if self._closes_at(name) == when:
                    return when
            heapq.heappop(times)
        return None

    def ready_claims(
        self, name: str, now_ms: int, is_ready: Callable[[T], bool] = _always
    ) -> list[WaitingClaim[T]]:
        """Return the claims to serve now, because a box may have a job. None of them if a window collects
        them."""
        self.were_passed_over = False
        box = self._boxes.get(name)
        if box is None:
            return []
        if box.window_ms:
            self._open(box, name, now_ms + box.window_ms)
            return []
        return self._first(box, IN_ORDER_MAX, is_ready)

    def _first(self, box: _Box[T], count: int, is_ready: Callable[[T], bool]) -> list[WaitingClaim[T]]:
        claims = box.first(count, is_ready)
        self.were_passed_over = len(claims) < min(count, len(box.waiting))
        return claims

    def due(
        self, now_ms: int, is_ready: Callable[[T], bool] = _always
    ) -> tuple[str, list[WaitingClaim[T]], bool] | None:
        """Return a box, its claims to serve, and whether they are at their deadline: all claims if a window
        closes, or one at its deadline. None if nothing is due. When a window closes, claims that are not
        ready are skipped, so the list may be empty; then `were_passed_over` is True."""
        self.were_passed_over = False
        when = self.next_ms()
        if when is None or when > now_ms:
            return None
        _, _, name, waiting = heapq.heappop(self._times)
        box = self._boxes[name]
        if waiting is None or (box.closes_ms and box.closes_ms <= now_ms):
            if waiting is not None:  # its deadline still counts if it gets no job
                heapq.heappush(self._times, (waiting.until_ms, waiting.number, name, waiting))
            box.closes_ms = 0
            return name, self._first(box, COHORT_MAX, is_ready), False
        return name, [waiting], True

    def remove(self, name: str, claims: list[WaitingClaim[T]]) -> None:
        """Remove claims that are answered or cancelled."""
        box = self._boxes[name]
        for each in claims:
            each.is_done = True
            del box.waiting[each.number], self._by_ticket[each.ticket]
        if not box.waiting:
            del self._boxes[name]

    def drop(self, name: str, holder: int) -> None:
        """Remove the claims of a holder whose connection is lost."""
        box = self._boxes.get(name)
        if box is not None:
            self.remove(name, [each for each in box.waiting.values() if each.claim.holder == holder])

    def waits(self, ticket: T) -> bool:
        """Return True while this claim waits."""
        return ticket in self._by_ticket

    def forget(self, ticket: T) -> bool:
        """Remove a claim that its client has cancelled. Return False if it does not wait."""
        waiting = self._by_ticket.get(ticket)
        if waiting is None:
            return False
        self.remove(waiting.claim.box, [waiting])
        return True

    def _drop_stale(self) -> None:
        """Drop stale deadlines: most claims are answered long before their deadline, and would fill the
        heap."""
        self._times = [
            (when, number, name, waiting)
            for when, number, name, waiting in self._times
            if (not waiting.is_done if waiting is not None else self._closes_at(name) == when)
        ]
        heapq.heapify(self._times)

    def _closes_at(self, name: str) -> int:
        box = self._boxes.get(name)
        return 0 if box is None else box.closes_ms

    def _open(self, box: _Box[T], name: str, closes_ms: int) -> None:
        if not box.closes_ms:
            box.closes_ms = closes_ms
            heapq.heappush(self._times, (closes_ms, next(self._numbers), name, None))


class _PassResult(NamedTuple):
    """The result of a pass over waiting claims."""

    #: True if each claim has an answer.
    is_for_all: bool
    jobs: int


class ClaimDelivery:
    def __init__(
        self,
        execution: Execution,
        deferred_answers: DeferredAnswers,
        disk_space: DiskSpace,
        *,
        post: Callable[..., object],
        wake: Callable[[tuple[str, ...]], None],
        end_turn: Callable[[], None],
    ) -> None:
        """`post` runs a callback after the other tasks of the event loop, `wake` serves all waiting reads and
        claims of boxes, and `end_turn` flushes the log and sends answers."""
        self._execution = execution
        self._deferred_answers = deferred_answers
        self._disk_space = disk_space
        self._post = post
        self._wake = wake
        self._end_turn = end_turn
        self.waiting: WaitingClaims[Ticket] = WaitingClaims()
        self._holders = itertools.count(1)

    def __repr__(self) -> str:
        return f"<ClaimDelivery {self.waiting!r}>"

    def new_holder(self) -> int:
        """Return a holder number for a connection, with which its leases end. Unique in this run of the
        shard."""
        return next(self._holders)

    def park(self, claim: Claim, ticket: Ticket, window_ms: int) -> None:
        """Park a claim that got no job."""
        self.waiting.add(claim, ticket, now_ms=_wait_ms(), window_ms=window_ms)

    def wake(self, box: str) -> None:
        """Serve those that wait for jobs of this box, in their order, until one of them gets none. When they
        have got as many jobs as one pass gives out, others come first."""
        jobs = 0
        while self._disk_space.level != Level.FULL:  # else they wait on: a claim may log
            waiting = self.waiting.ready_claims(box, _wait_ms(), self._deferred_answers.has_room)
            if self.waiting.were_passed_over:
                self._deferred_answers.add_box(box)
            if not waiting:
                return
            result = self._serve(box, waiting, is_over=False)
            jobs += result.jobs
            if jobs >= PASS_JOBS_MAX:
                self._post(self._serve_more, box)
                return
            if not result.is_for_all:
                return

    def serve_due(self, now_s: float) -> None:
        """Serve the claims whose window closes, and answer those at their deadline."""
        has_room = self._deferred_answers.has_room
        while (due := self.waiting.due(int(now_s * 1000), has_room)) is not None:
            box, waiting, is_over = due
            if self.waiting.were_passed_over:
                self._deferred_answers.add_box(box)
            if is_over and not has_room(waiting[0].ticket):
                self._refuse(box, waiting, Throttled(_NO_ROOM))
            elif self._disk_space.level == Level.FULL:  # a claim may log a change; the others keep waiting
                if is_over:
                    self._refuse(box, waiting, self._disk_space.full_refusal())
            elif waiting:
                self._serve(box, waiting, is_over=is_over)

    def _serve_more(self, box: str) -> None:
        self.wake(box)
        self._end_turn()

    def _refuse(self, box: str, waiting: list[WaitingClaim[Ticket]], error: StreamsError) -> None:
        self.waiting.remove(box, waiting)
        for each in waiting:
            each.ticket.answer(error, 0.0, 0.0)

    def _serve(
        self,
        box: str,
        waiting: list[WaitingClaim[Ticket]],
        *,
        is_over: bool,
        payloads: FetchedPayloads | None = None,
    ) -> _PassResult:
        """Handle these claims in one pass. Those that get no answer keep waiting."""
        payloads = payloads or []
        together = BatchClaim(box=box, claims=tuple(each.claim for each in waiting), is_over=is_over)
        outcome = self._execution.handle(together, payloads, self._execution.now_ms())
        if outcome.needs:
            on_fetched = partial(self._serve_again, box, waiting, is_over, payloads)
            self._execution.fetch(outcome.needs[0], None, on_fetched)
            return _PassResult(False, 0)
        reply = outcome.reply
        assert reply is not None, "PASS_ANSWERED"
        answers = reply.answers if isinstance(reply, BatchClaimResult) else [reply] * len(waiting)
        claims_with_answers = [
            (each, answer) for each, answer in zip(waiting, answers, strict=True) if answer is not None
        ]
        self.waiting.remove(box, [each for each, _ in claims_with_answers])
        for each, answer in claims_with_answers:
            self._execution.send_when_ready(outcome, answer, each.ticket)
        if outcome.wakes:
            self._wake(outcome.wakes)
        jobs = sum(len(answer.jobs) for _, answer in claims_with_answers if isinstance(answer, ClaimResult))
        return _PassResult(len(claims_with_answers) == len(waiting), jobs)

    def _serve_again(
        self,
        box: str,
        waiting: list[WaitingClaim[Ticket]],
        is_over: bool,
        payloads: FetchedPayloads,
        error: StreamsError | None,
        more: FetchedPayloads,
    ) -> None:
        """Repeat a pass after its data was fetched, or refuse its claims if the fetch failed."""
        waiting = [each for each in waiting if not each.is_done]
        if waiting and error is not None:
            self._refuse(box, waiting, error)
        elif waiting:
            result = self._serve(box, waiting, is_over=is_over, payloads=payloads + more)
            if not is_over and (result.is_for_all or result.jobs >= PASS_JOBS_MAX):
                self.wake(box)
        self._end_turn()


def _wait_ms() -> int:
    """Return trio's clock in milliseconds, rounded up: the clock of waiting claims."""
    return int(trio.current_time() * 1000) + 1
