"""Decides which connection is served next when more are ready than one turn of the event loop should serve.

Trio runs all ready tasks before it polls its sockets again. With hundreds of clients that send at once, or
that read large answers, one such turn would be tens of milliseconds, and every other request would wait for
all of it. So each turn starts a limited amount of work, and the rest waits here:

    ready ──► work left in this turn? ──yes──► served now
                  └──no──► urgent queue, or queue of all others ──► a later turn, urgent ones first

Both queues are fair to owners (`fair_queue.py`): a key with a thousand connections gets as much as a key with
one. The cost of a request is `REQUEST_COST` plus the bytes of the last body on its connection. A large answer
is sent in pieces, and each piece waits for a turn and costs its bytes. So a key pays for the large pages that
it reads.

Urgent requests go first, but get at most `URGENT_PART` of a turn while others wait: the flag asks for low
latency and must not starve other requests. On a machine without a free core an urgent request changes
processes four times, and a busy process keeps its core for a tick of the kernel's clock, often 4 ms. Offering
the core after each turn (`sched_yield`) did not shorten that.

**Waiting for the next request.** A connection between two requests has no task that waits for its socket. All
these sockets are in one epoll set of the scheduler, and a connection is resumed inline (`inline.py`) when its
turn has come. A socket stays in the set, unless it is readable while its connection is busy: then it is added
again when the connection waits. So most requests cost no system call here. While the gateway is crowded
(`is_crowded`), the scheduler looks at each head for the urgent flag and queues the connection. It reads
nothing of a request before its turn.

Bounds: one entry for each connection, and the front bounds those.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from functools import partial

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from gateway.admission.fair_queue import FairQueue
from gateway.admission.inline import resume_loop, suspend
from gateway.admission.waiter import Waiter

#: The cost of a small request, in bytes: serving it takes as long as copying this many through a gateway.
REQUEST_COST = 16 * 1024
#: Work that one turn of the event loop begins: 64 small requests, about 5 ms.
TURN_COST = 64 * REQUEST_COST
#: Work of a turn while the gateway is crowded, several owners wait, or urgent requests are expected. A
#: request waits for two or three turns on its way in and out, and a turn costs 50 µs by itself: shorter turns
#: are more even and no slower. With half of this, urgent appends are no faster, and all others get somewhat
#: less.
SHORT_TURN_COST = 32 * REQUEST_COST
#: The part of a turn that urgent requests may take while others wait.
URGENT_PART = 0.75
#: How long after an urgent request the next one is expected.
URGENT_S = 0.25
#: How long the gateway counts as crowded: refused clients retry within a second.
CROWDED_S = 1.0
#: Large answers are sent in pieces of this size when others wait.
PIECE_BYTES = 256 * 1024
#: How much of a head is searched for the urgent flag: all of it, but for clients with very long cookies.
_PEEK_BYTES = 2048

_READABLE = select.EPOLLIN | select.EPOLLRDHUP
_peek_buffer = memoryview(bytearray(_PEEK_BYTES))

IsUrgent = Callable[[memoryview], bool]


class _Waiter(Waiter):
    __slots__ = ("is_urgent", "owner", "since_s", "sock")

    def __init__(
        self, owner: str, cost: int, sock: socket.socket | None = None, *, is_urgent: bool = False
    ) -> None:
        super().__init__(cost)
        self.owner = owner
        self.sock = sock
        #: True if it is in the urgent queue; of a sleeping waiter, if its last request was urgent.
        self.is_urgent = is_urgent
        #: When it was queued. 0 if it was not.
        self.since_s = 0.0


class RequestScheduler:
    __slots__ = (
        "_asleep",
        "_crowded_until_s",
        "_epoll",
        "_epoll_fds",
        "_granting_task",
        "_is_urgent",
        "_others",
        "_urgent",
        "_urgent_until_s",
        "_urgent_work_left",
        "_was_crowded",
        "_work_left",
        "is_crowded",
    )

    def __init__(self, is_urgent: IsUrgent | None = None) -> None:
        """`is_urgent` returns True if the request head at the start of a buffer has the urgent flag."""
        self._is_urgent = is_urgent
        #: Work that this turn may still begin.
        self._work_left: float = TURN_COST
        #: Work of urgent requests that this turn may still begin.
        self._urgent_work_left: float = TURN_COST * URGENT_PART
        self._urgent: FairQueue[_Waiter] = FairQueue()
        self._others: FairQueue[_Waiter] = FairQueue()
        #: By descriptor: connections that wait for their sockets.
        self._asleep: dict[int, _Waiter] = {}
        #: Descriptors in the epoll set.
        self._epoll_fds: set[int] = set()
        self._epoll = select.epoll()
        self._granting_task: Task | None = None
        #: True while more connections wait than one turn serves, and for a while after.
        self.is_crowded = False
        self._was_crowded = False
        self._crowded_until_s = self._urgent_until_s = -1.0

    def __repr__(self) -> str:
        return f"<RequestScheduler {len(self)} waiting, {len(self._asleep)} asleep>"

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    @property
    def longest_s(self) -> float:
        """How long the next waiter that is not urgent has waited."""
        return trio.current_time() - self._others.peek().since_s if self._others else 0.0

    def try_take(self, cost: int = REQUEST_COST) -> bool:
        """Return True if work of this cost may begin now."""
        if self._work_left <= 0:
            return False
        self._work_left -= cost
        if self._work_left <= 0:
            self._wake_granting_task()
        return True

    def try_take_urgent(self) -> bool:
        """Return True if an urgent request may begin now."""
        self.note_urgent()
        if self._urgent_work_left <= 0:
            return False
        self._urgent_work_left -= REQUEST_COST
        self._wake_granting_task()
        return True

    async def take(self, owner: str, cost: int = REQUEST_COST, *, is_urgent: bool = False) -> float:
        """Wait for a turn. Returns the seconds waited."""
        waiter = _Waiter(owner, cost)
        self._enqueue(waiter, is_urgent=is_urgent)
        self._wake_granting_task()
        await waiter.wait(partial(self._withdraw, waiter))
        return trio.current_time() - waiter.since_s

    async def wait_readable(
        self, sock: socket.socket, owner: str, cost: int = REQUEST_COST, *, was_urgent: bool = False
    ) -> float:
        """Wait inline until a socket is readable, and then for a turn. Returns the seconds waited for the
        turn. Raises `trio.ClosedResourceError` if it is interrupted before the socket is readable."""
        fd = sock.fileno()
        waiter = _Waiter(owner, cost, sock, is_urgent=was_urgent)
        if fd not in self._epoll_fds:
            self._epoll_fds.add(fd)
            self._epoll.register(fd, _READABLE)
        self._asleep[fd] = waiter
        try:
            await suspend()
        except trio.Cancelled:
            self._withdraw(waiter, fd)
            raise
        return trio.current_time() - waiter.since_s if waiter.since_s else 0.0

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket: its connection ends, or is served by something else."""
        fd = sock.fileno()
        if fd in self._epoll_fds and not self._epoll.closed:
            self._unwatch(fd)

    def _unwatch(self, fd: int) -> None:
        self._epoll_fds.discard(fd)
        self._epoll.unregister(fd)

    def interrupt(self, sock: socket.socket) -> None:
        """End the wait for a socket that is not readable."""
        waiter = self._asleep.pop(sock.fileno(), None)
        if waiter is not None:
            waiter.fail(trio.ClosedResourceError("interrupted"))

    def peek_urgent(self, sock: socket.socket) -> bool:
        """Return True if the unread bytes of this socket begin with an urgent head. Consumes nothing."""
        if self._is_urgent is None:
            return False
        try:
            return self._is_urgent(_peek_buffer[: sock.recv_into(_peek_buffer, _PEEK_BYTES, socket.MSG_PEEK)])
        except OSError:
            return False  # the next read reports the error

    def note_urgent(self) -> None:
        """Note an urgent request: turns are short for `URGENT_S`."""
        self._urgent_until_s = trio.current_time() + URGENT_S

    def sample(self) -> None:
        """Update `is_crowded`. Called forty times a second under load."""
        now_s = trio.current_time()
        if self._was_crowded or self._is_long:
            self._crowded_until_s = now_s + CROWDED_S
        self._was_crowded = self._is_long
        self.is_crowded = now_s < self._crowded_until_s

    @property
    def _is_long(self) -> bool:
        return len(self._others) > TURN_COST // REQUEST_COST

    @property
    def _expects_urgent(self) -> bool:
        return trio.current_time() < self._urgent_until_s

    @property
    def _turn_cost(self) -> int:
        is_short = self._expects_urgent or self.is_crowded or self._others.owners > 1
        return SHORT_TURN_COST if is_short else TURN_COST

    async def run(self) -> None:
        with self._epoll:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_gathering)
                await self._keep_granting()

    async def _keep_granting(self) -> None:
        """Begin one turn's work in each turn of the event loop. Sleeps while no request waits."""
        while True:
            while self._urgent or self._others:
                with resume_loop:
                    self._grant(self._turn_cost)
                await trio.lowlevel.checkpoint()
            self._work_left = self._turn_cost
            self._urgent_work_left = self._work_left * URGENT_PART
            self._granting_task = current_task()
            await wait_task_rescheduled(self._stop)

    def _grant(self, work_left: float) -> None:
        work_left -= self._grant_from(self._urgent, work_left * URGENT_PART if self._others else work_left)
        self._urgent_work_left = max(0.0, work_left - (1 - URGENT_PART) * self._turn_cost)
        self._grant_from(self._others, work_left)

    @staticmethod
    def _grant_from(queue: FairQueue[_Waiter], cost_max: float) -> float:
        """Begin requests of one queue, at least one. Returns their total cost."""
        cost = 0.0
        while queue and cost < cost_max:
            waiter = queue.pop()
            cost += waiter.size
            waiter.grant()
        return cost

    async def _keep_gathering(self) -> None:
        """Resume connections whose sockets are readable, or queue them until their turn."""
        epoll, asleep = self._epoll, self._asleep
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            with resume_loop:
                for fd, _ in epoll.poll(0):
                    waiter = asleep.pop(fd, None)
                    if waiter is not None:
                        self._on_readable(waiter)
                    else:  # its connection is busy
                        self._unwatch(fd)
            if self._urgent or self._others:
                self._wake_granting_task()

    def _on_readable(self, waiter: _Waiter) -> None:
        if (waiter.is_urgent or not self.is_crowded) and self.try_take(waiter.size):
            waiter.grant()
            return
        assert waiter.sock is not None, "a sleeping waiter has a socket"
        is_urgent = self.peek_urgent(waiter.sock)
        if is_urgent and self.try_take_urgent():
            waiter.grant()
        else:
            self._enqueue(waiter, is_urgent=is_urgent)

    def _enqueue(self, waiter: _Waiter, *, is_urgent: bool) -> None:
        waiter.is_urgent = is_urgent
        waiter.since_s = trio.current_time()
        (self._urgent if is_urgent else self._others).push(waiter.owner, waiter, waiter.size)
        if is_urgent:
            self.note_urgent()
        elif self._is_long:
            self._was_crowded = True

    def _withdraw(self, waiter: _Waiter, fd: int = -1) -> None:
        if self._asleep.get(fd) is waiter:
            del self._asleep[fd]
            return
        (self._urgent if waiter.is_urgent else self._others).remove(waiter.owner, waiter)

    def _wake_granting_task(self) -> None:
        if self._granting_task is not None:
            task, self._granting_task = self._granting_task, None
            reschedule(task)

    def _stop(self, _: object) -> Abort:
        self._granting_task = None
        return Abort.SUCCEEDED
