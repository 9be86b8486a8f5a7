"""Runs a coroutine inside the functions that resume it, and in a task of trio only while it needs one.

A task costs 15 to 25 µs for each wait: two system calls, a turn of the event loop, the bookkeeping of trio.
A request that waits for nothing but its shard needs none of that. The code that has its answer resumes it
with a function call:

    socket readable ──► resume() ──► head, key, admission, frame on the link ──► suspended
    answer of shard ──► resume() ──► response, into the socket ──► suspended until the socket is readable

Handlers do not know the difference. A coroutine that is about to wait in any other way calls `need_task`
first: then the task that owns it takes it over at this point, until it calls `leave_task`.

    in its task ◄──── need_task()      for a body that has not come whole, a full socket, a full limiter,
         │                             a stream, a thread, a timer
         └──── leave_task() ────► inline

Rules
- Inline, a coroutine waits only with `suspend`, in a place that withdraws itself if that raises. Any other
  wait is a bug, and raises `NeedsTask` in the coroutine.
- A coroutine that is resumed runs at once, inside its caller. The caller is done with its own state first.
- An exception of the coroutine goes to its task, never to the function that resumed it.

Bounds: one task for each coroutine. It sleeps while the coroutine runs inline.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import coroutine as generator_coroutine
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

Result = TypeVar("Result")

_SUSPENDED: Final = object()
_NEEDS_TASK: Final = object()
_LEAVES_TASK: Final = object()


class NeedsTask(RuntimeError):
    """A coroutine without a task has waited for something that only a task can wait for."""


class InlineCoroutine(Generic[Result]):
    __slots__ = ("_awaits_task", "_coroutine", "_error", "_is_ended", "_result", "_task")

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        #: Its task, while that sleeps.
        self._task: Task | None = None
        #: True if its task must go on: it needs the task, or has ended.
        self._awaits_task = False
        self._is_ended = False
        self._result: Result | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<InlineCoroutine {'ended' if self._is_ended else 'inline' if self._task else 'in its task'}>"

    async def run(self) -> Result:
        """Run it to its end and return its result. The task that calls this is its task."""
        self.resume()
        while True:
            cancellation: BaseException | None = None
            if not self._awaits_task:
                self._task = current_task()
                try:
                    await wait_task_rescheduled(self._stop_sleeping)
                except BaseException as error:
                    cancellation = error
            if not self._is_ended:
                await self._run_in_task(cancellation)
            if self._is_ended:
                break
            self.resume()
        failure, self._error = self._error, None
        if failure is not None:
            raise failure
        return cast(Result, self._result)

    def resume(self, value: object = None) -> None:
        """Go on, with the result of `suspend`."""
        self._step(self._coroutine.send, value)

    def fail(self, error: BaseException) -> None:
        """Go on, with an error that `suspend` raises."""
        self._step(self._coroutine.throw, error)

    def _step(self, send: Callable[[Any], object], value: object) -> None:
        global current_run
        outer, current_run = current_run, self
        try:
            signal = send(value)
            while signal is not _SUSPENDED and signal is not _NEEDS_TASK:
                signal = self._coroutine.throw(NeedsTask(f"it waits for {signal!r} without a task"))
        except StopIteration as end:
            self._is_ended, self._result = True, end.value
        except BaseException as error:  # its task raises it
            self._is_ended, self._error = True, error
        else:
            if signal is _SUSPENDED:
                return
        finally:
            current_run = outer
        self._awaits_task = True
        if self._task is not None:
            task, self._task = self._task, None
            reschedule(task)

    @generator_coroutine
    def _run_in_task(self, error: BaseException | None) -> Generator[Any, Any, None]:
        """Run it in the current task until it ends or leaves the task."""
        self._awaits_task = False
        send, throw = self._coroutine.send, self._coroutine.throw
        try:
            message = send(None) if error is None else throw(error)
            while message is not _LEAVES_TASK:
                try:
                    value = yield message
                except BaseException as failure:
                    message = throw(failure)
                else:
                    message = send(value)
        except StopIteration as end:
            self._is_ended, self._result = True, end.value

    def _stop_sleeping(self, _: object) -> Abort:
        self._task = None
        return Abort.SUCCEEDED


class ResumeLoop:
    """A loop that resumes coroutines, one after the other. Work that is cheaper once for all of them, such as
    a send on a link, is done at its end."""

    __slots__ = ()

    #: Functions to call at the end of the current loop; None outside of loops.
    _at_end: ClassVar[dict[Callable[[], None], None] | None] = None

    def __enter__(self) -> None:
        ResumeLoop._at_end = {}

    def __exit__(self, *_: object) -> None:
        functions, ResumeLoop._at_end = ResumeLoop._at_end, None
        for function in functions or ():
            function()

    @classmethod
    def call_at_end(cls, function: Callable[[], None]) -> bool:
        """Call a function once at the end of the current loop. Returns False if there is no loop."""
        if cls._at_end is None:
            return False
        cls._at_end[function] = None
        return True


resume_loop: Final = ResumeLoop()

#: The coroutine that runs inline now. None in a task.
current_run: InlineCoroutine[Any] | None = None


@generator_coroutine
def suspend() -> Generator[object, Any, Any]:
    """Wait inline, until `resume` or `fail` is called. The caller has passed `current_run` to the code that
    calls one of them, and takes it back if this raises `trio.Cancelled`: its task is cancelled."""
    return (yield _SUSPENDED)


@generator_coroutine
def _yield(signal: object) -> Generator[object, Any, None]:
    yield signal


async def need_task() -> None:
    """Go on in a task. Does nothing in a task. Other code may run before this returns."""
    if current_run is not None:
        await _yield(_NEEDS_TASK)


async def leave_task() -> None:
    """Go on inline. Only for a coroutine that an `InlineCoroutine` runs; does nothing if it runs inline."""
    if current_run is None:
        await _yield(_LEAVES_TASK)
