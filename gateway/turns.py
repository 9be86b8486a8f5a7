"""How many requests begin in one round of the event loop, so that no round is long.

Trio runs all that is ready before it looks again for what has come. With some hundred clients that all send
at once, a round is tens of milliseconds, and whatever comes meanwhile waits for all of it: an event on its
way to a watcher as much as an urgent append. So a round begins only so many requests, and the rest of them
wait in the kernel, first come, first served.

    ready ──► a turn left? ──yes──► read and served
                 └──no──► urgent? ──yes──► read and served
                              └──no──► waits for a later round

Under pressure, while there is something urgent, rounds are much shorter and there is a rest between them,
and while something urgent is under way there is none.
Then a connection whose last request was not urgent is not even woken before its turn: its socket is watched
in a second set, and what becomes ready there costs a microsecond until its turn, instead of fifty.

Bounds: who waits is a connection, and the front bounds those. Nothing of a request is read before its turn.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from math import inf

import outcome
import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

#: A request is about a tenth of a millisecond of work at most, so a round is a few milliseconds.
PER_ROUND = 64
#: Under pressure while there is something urgent: the requests of a round, and the rest until the next one.
#: With every core busy, what is urgent would wait for one at each step of its way: here, in the shard, and
#: here again. So an append is with its watcher nearly as soon as in an idle server, and the flood gets a
#: fifteenth of what it could. With a rest of a millisecond it is a ninth, and the slowest hundredth of what
#: is urgent takes a fifth longer.
PER_ROUND_URGENT, REST_S = 2, 0.0013
#: How long after an urgent request is answered the next round is: until its client, and whoever watches, has
#: what it waits for. And how many rounds are missed at most, one after the other, for there may be something
#: urgent under way all the time. Then as many more are told that they come too late, for a line in which all
#: have waited for too long would serve nobody.
BEHIND_URGENT_S, MISSED_MAX = 0.001, 3
#: For how long pressure is expected to come back: whoever was refused is left alone for up to a second, and
#: then they all come again.
PRESSED_S = 2.0

_READABLE_ONCE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Urgency:
    """What is urgent, of all fronts of a gateway: whether there is any, and whether it is under way."""

    __slots__ = ("last_s", "under_way")

    def __init__(self) -> None:
        #: When an urgent request last began or ended.
        self.last_s = -inf
        self.under_way = 0

    def __repr__(self) -> str:
        return f"<Urgency {self.under_way} under way>"

    def begin(self) -> None:
        self.under_way += 1
        self.last_s = trio.current_time()

    def end(self) -> None:
        self.under_way -= 1
        self.last_s = trio.current_time()

    @property
    def is_under_way(self) -> bool:
        return self.under_way > 0 or trio.current_time() < self.last_s + BEHIND_URGENT_S


class Turns:
    __slots__ = (
        "_asleep",
        "_epoll",
        "_giver",
        "_left",
        "_pressed_until_s",
        "_waiting",
        "_were_many",
        "late_s",
        "per_round",
        "urgency",
    )

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self.per_round = per_round
        #: Who has waited this long is refused by whoever serves it.
        self.late_s = inf
        self.urgency = Urgency()
        self._left = per_round
        #: Whose turn is next, and since when it has something to do.
        self._waiting: deque[tuple[Task, float]] = deque()
        #: By descriptor: who waits for its peer and then for its turn.
        self._asleep: dict[int, Task] = {}
        self._epoll = select.epoll()
        #: Whether more than a whole round has waited since that was last asked.
        self._were_many = False
        self._giver: Task | None = None
        self._pressed_until_s = -inf

    def __repr__(self) -> str:
        return f"<Turns {self._left} left, {len(self._waiting)} waiting, {len(self._asleep)} asleep>"

    @property
    def rests(self) -> bool:
        """Whether there is a rest between rounds, so that most of the time is left to what is urgent."""
        return self.per_round == PER_ROUND_URGENT

    @property
    def longest_s(self) -> float:
        """How long the next one has waited for its turn."""
        return trio.current_time() - self._waiting[0][1] if self._waiting else 0.0

    @property
    def _is_held(self) -> bool:
        return self.rests and self.urgency.is_under_way

    def try_take(self) -> bool:
        """Whether a request may begin at once."""
        if self._left and not self._is_held:
            self._left -= 1
            if not self._left:
                self._wake_giver()
            return True
        return False

    async def take(self) -> float:
        """Waits for a turn; how long that took, in seconds."""
        task = current_task()
        self._put_last(task, trio.current_time())
        self._wake_giver()

        def abort(_: object) -> Abort:
            self._leave(task)
            return Abort.SUCCEEDED

        since_s: float = await wait_task_rescheduled(abort)
        return trio.current_time() - since_s

    async def wait_readable(self, sock: socket.socket) -> float:
        """Waits until a socket has something, and then for a turn; how long the latter took, in seconds.
        Raises `trio.ClosedResourceError` when it is interrupted before it has anything."""
        task, fd = current_task(), sock.fileno()
        try:
            self._epoll.modify(fd, _READABLE_ONCE)
        except FileNotFoundError:
            self._epoll.register(fd, _READABLE_ONCE)
        self._asleep[fd] = task

        def abort(_: object) -> Abort:
            if self._asleep.get(fd) is task:
                del self._asleep[fd]
            else:
                self._leave(task)
            return Abort.SUCCEEDED

        since_s: float = await wait_task_rescheduled(abort)
        return trio.current_time() - since_s

    def interrupt(self, sock: socket.socket) -> None:
        """Ends the wait for a socket that has nothing."""
        task = self._asleep.pop(sock.fileno(), None)
        if task is not None:
            reschedule(task, outcome.Error(trio.ClosedResourceError("interrupted")))

    def sample(self, *, is_pressed: bool, is_urgent: bool) -> None:
        """Takes in whether there is pressure, and anything urgent. Pressure is also when more wait for a turn
        than a round would serve: short rounds with a rest keep it from being felt elsewhere."""
        now_s = trio.current_time()
        if is_pressed or self._were_many:
            self._pressed_until_s = now_s + PRESSED_S
        self._were_many = len(self._waiting) > PER_ROUND
        rests = is_urgent and now_s < self._pressed_until_s
        self.per_round = PER_ROUND_URGENT if rests else PER_ROUND

    async def run(self) -> None:
        with self._epoll:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_gathering)
                await self._keep_giving()

    async def _keep_giving(self) -> None:
        """Gives turns, once a round while they are wanted; it sleeps while they are not."""
        waiting = self._waiting
        while True:
            while waiting:
                missed = await self._let_urgent_pass()
                late = self.per_round * (1 + missed if missed == MISSED_MAX else 1)
                self._give(self.per_round, late, trio.current_time() - self.late_s)
                if self.rests:
                    await trio.sleep(REST_S)
                else:
                    await trio.lowlevel.checkpoint()
            self._left = self.per_round
            self._giver = current_task()
            await wait_task_rescheduled(self._stop)

    async def _let_urgent_pass(self) -> int:
        """How many rounds were missed for it."""
        missed = 0
        while missed < MISSED_MAX and self._is_held:
            await trio.sleep(REST_S)
            missed += 1
        return missed

    def _give(self, left: int, late_left: int, too_early_s: float) -> None:
        """A round's turns; and some more to those who come too late, for they are only to be told so."""
        waiting = self._waiting
        while waiting and left and late_left:
            task, since_s = waiting.popleft()
            if since_s > too_early_s:
                left -= 1
            else:
                late_left -= 1
            reschedule(task, outcome.Value(since_s))

    async def _keep_gathering(self) -> None:
        """Notes which sockets have something, without waking anybody."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            now_s = trio.current_time()
            for fd, _ in self._epoll.poll(0):
                task = self._asleep.pop(fd, None)
                if task is not None:  # else it has given up
                    self._put_last(task, now_s)
            self._wake_giver()

    def _put_last(self, task: Task, since_s: float) -> None:
        self._waiting.append((task, since_s))
        if len(self._waiting) > PER_ROUND:
            self._were_many = True

    def _leave(self, task: Task) -> None:
        for at, (other, _) in enumerate(self._waiting):
            if other is task:
                del self._waiting[at]
                return

    def _wake_giver(self) -> None:
        if self._giver is not None:
            giver, self._giver = self._giver, None
            reschedule(giver)

    def _stop(self, _: object) -> Abort:
        self._giver = None
        return Abort.SUCCEEDED
