"""The windows before a shard (v0 §9): fair by owner, bounded waits; nothing leaks however a wait ends.

Method: real tasks on a clock that jumps; samples are given by hand.
"""

from __future__ import annotations

from itertools import count

import pytest
import trio
import trio.testing

from gateway.admission import inline
from gateway.admission.append_limiter import (
    BODY_WINDOW_BYTES,
    PAGE_WINDOW_BYTES,
    URGENT_MAX,
    WAIT_S_MAX,
    WAITING_MAX,
    AppendLimiter,
    PageWindow,
)
from gateway.admission.inline import InlineCoroutine
from gateway.admission.request_scheduler import RequestScheduler
from gateway.s2.record_formats import Input, InputRecord
from gateway.s2.shard_calls import PostedAppend, ShardCalls
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link, OnAnswer
from gateway.shards.placement import even
from gateway.shards.pressure import GatewayPressure
from streams.protocol import wire
from streams.protocol.errors import ShardUnavailable, Throttled
from streams.protocol.telemetry import pressure
from streams.protocol.telemetry.pressure import LIMIT_MIN, Thresholds

LIMITS = Thresholds(pace_lag_ms=10, throttle_lag_ms=200)


def narrow(used: int = LIMIT_MIN) -> AppendLimiter:
    """A limiter that lets the least through, and is full."""
    limiter = AppendLimiter(LIMITS)
    limiter.sample(50.0)
    for _ in range(used):
        assert limiter.has_room
        limiter.go_in(1)
    assert not limiter.has_room
    return limiter


class Appends:
    """Appends that enter a limiter, and the order in which they did."""

    def __init__(self, limiter: AppendLimiter | PageWindow, nursery: trio.Nursery) -> None:
        self.limiter = limiter
        self.nursery = nursery
        self.entered: list[str] = []

    async def add(self, owner: str, count: int = 1, size: int = 1) -> None:
        for _ in range(count):
            self.nursery.start_soon(self._enter, owner, size)
            await trio.testing.wait_all_tasks_blocked()

    async def _enter(self, owner: str, size: int) -> None:
        await self.limiter.enter(owner, size)
        self.entered.append(owner)

    async def let_in(self, count: int) -> None:
        for _ in range(count):
            self.limiter.leave(1)
            await trio.testing.wait_all_tasks_blocked()


async def test_an_append_waits_until_another_leaves_and_none_overtakes_its_own_key() -> None:
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        appends = Appends(limiter, nursery)
        await appends.add("a", 3)
        assert appends.entered == [] and not limiter.has_room
        await appends.let_in(3)
        assert len(appends.entered) == 3
    assert (limiter.in_flight, limiter.paced_count, limiter.throttled_count) == (LIMIT_MIN, 3, 0)


class InlineAppends:
    """Appends without a task of their own while they wait: they enter inside the call that lets them in."""

    def __init__(self, limiter: AppendLimiter, nursery: trio.Nursery) -> None:
        self.limiter = limiter
        self.nursery = nursery
        #: Numbers in the order in which the appends began to wait.
        self.entered: list[int] = []
        self.refused: list[int] = []
        self._numbers = count()

    async def add(self, how_many: int, *, fails: bool = False) -> list[trio.CancelScope]:
        scopes = [trio.CancelScope() for _ in range(how_many)]
        for scope in scopes:
            self.nursery.start_soon(self._run, scope, fails)
        await trio.testing.wait_all_tasks_blocked()
        return scopes

    async def _run(self, scope: trio.CancelScope, fails: bool) -> None:
        with scope:
            await InlineCoroutine(self._enter(fails)).run()

    async def _enter(self, fails: bool) -> None:
        number = next(self._numbers)
        try:
            await self.limiter.enter("a", 1)
        except Throttled:
            self.refused.append(number)
            return
        assert inline.current_run is not None
        self.entered.append(number)
        if fails:
            self.limiter.leave(1)


async def test_an_append_that_runs_inline_enters_inside_the_call_that_lets_it_in() -> None:
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        appends = InlineAppends(limiter, nursery)
        await appends.add(3)
        assert appends.entered == []
        limiter.leave(1)
        limiter.leave(1)
        assert appends.entered == [0, 1], "no turn of the event loop was needed"
        limiter.leave(1)
    assert (limiter.in_flight, limiter.paced_count) == (LIMIT_MIN, 3)


async def test_an_append_that_waits_inline_is_refused_when_its_time_is_over(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        appends = InlineAppends(limiter, nursery)
        await appends.add(2)
        limiter.leave(1)
        await trio.sleep(WAIT_S_MAX - 0.1)
        limiter.sample(50.0)
        assert appends.refused == []
        await trio.sleep(0.2)
        limiter.sample(50.0)
    assert (appends.entered, appends.refused, limiter.throttled_count) == ([0], [1], 1)


async def test_an_append_that_waits_inline_and_is_cancelled_takes_no_place() -> None:
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        appends = InlineAppends(limiter, nursery)
        scopes = await appends.add(2)
        scopes[0].cancel()
        await trio.testing.wait_all_tasks_blocked()
        limiter.leave(1)
        assert len(appends.entered) == 1
    assert limiter.in_flight == LIMIT_MIN


async def test_thousands_that_wait_inline_and_fail_at_once_do_not_nest() -> None:
    """Each of them leaves inside the call that let it in, and lets the next one in."""
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        appends = InlineAppends(limiter, nursery)
        await appends.add(2_000, fails=True)
        limiter.leave(1)
        assert appends.entered == list(range(2_000))
    assert limiter.in_flight == LIMIT_MIN - 1


async def test_keys_take_turns_at_the_gate_however_many_appends_each_of_them_has() -> None:
    """Failed before: the appends of the second key waited for all of the first."""
    async with trio.open_nursery() as nursery:
        appends = Appends(narrow(), nursery)
        await appends.add("many", 20)
        await appends.add("few", 4)
        await appends.let_in(9)
        assert appends.entered.count("few") == 4
        nursery.cancel_scope.cancel()


async def test_a_key_pays_for_the_bytes_of_its_bodies() -> None:
    async with trio.open_nursery() as nursery:
        appends = Appends(narrow(), nursery)
        await appends.add("large", 5, size=1 << 20)
        await appends.add("small", 30)
        await appends.let_in(29)
        assert appends.entered == ["small"] * 29
        await appends.let_in(2)
        assert appends.entered[-1] == "large"
        nursery.cancel_scope.cancel()


async def test_bodies_in_flight_are_bounded_and_one_always_fits() -> None:
    limiter = AppendLimiter(LIMITS)
    async with trio.open_nursery() as nursery:
        appends = Appends(limiter, nursery)
        await appends.add("a", 2, size=2 * BODY_WINDOW_BYTES)
        assert appends.entered == ["a"]
        limiter.leave(2 * BODY_WINDOW_BYTES)
        await trio.testing.wait_all_tasks_blocked()
        assert appends.entered == ["a", "a"]


async def test_an_urgent_append_does_not_wait_unless_too_many_of_them_are_in_flight(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limiter = narrow()
    for _ in range(URGENT_MAX):
        assert await limiter.enter("a", 1, is_urgent=True) == 0
    with trio.move_on_after(1) as scope:
        await limiter.enter("a", 1, is_urgent=True)
    assert scope.cancelled_caught
    for _ in range(URGENT_MAX):
        limiter.leave_urgent(1)
    assert (limiter.in_flight, limiter.urgent) == (LIMIT_MIN, 0)


async def test_an_urgent_append_takes_the_urgent_link_and_nothing_in_a_body_makes_one_urgent() -> None:
    used: list[str] = []
    dispatch = noting_dispatch(used)
    await dispatch.append(wire.RequestHead("b"), b"{}", is_urgent=True)
    await dispatch.append(wire.RequestHead("b"), b'{"disable_backpressure":true}')
    assert used == ["urgent", "other"]
    assert dispatch.append_limiters[0].in_flight == dispatch.append_limiters[0].urgent == 0


async def test_an_append_that_has_waited_long_is_delayed_and_not_refused() -> None:
    """Failed before: what had waited for a quarter of a second for its turn was answered 429."""
    used: list[str] = []
    dispatch = noting_dispatch(used)
    _, waited_s = await dispatch.append(wire.RequestHead("b"), b"{}", 3.0)
    assert waited_s == 3.0 and used == ["other"]


async def test_a_shard_that_is_behind_refuses_nothing_at_the_gateway(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Failed before: newcomers were refused while the first in line had waited for 200 ms."""
    limiter = narrow()
    for _ in range(10):
        limiter.sample(500.0)
    async with trio.open_nursery() as nursery:
        appends = Appends(limiter, nursery)
        await appends.add("a")
        await trio.sleep(1)
        await appends.add("a")
        await appends.let_in(2)
        assert len(appends.entered) == 2
    assert limiter.throttled_count == 0


async def test_no_append_waits_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    limiter = narrow()
    began_s = trio.current_time()
    with pytest.raises(Throttled) as refused:
        await limiter.enter("a", 1)
    assert trio.current_time() - began_s == pytest.approx(WAIT_S_MAX)
    assert refused.value.detail["retry_after_ms"] >= 100
    assert (limiter.in_flight, limiter.throttled_count) == (LIMIT_MIN, 1)


async def test_the_queue_is_bounded(mock_clock: trio.testing.MockClock) -> None:
    """Time stands still: nobody's wait is over while the queue fills."""
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        for _ in range(WAITING_MAX):
            nursery.start_soon(limiter.enter, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Throttled):
            await limiter.enter("a", 1)
        nursery.cancel_scope.cancel()
    assert "0 waiting" in repr(limiter)


async def test_an_append_that_gives_up_while_waiting_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limiter = narrow()
    with trio.move_on_after(0.01):
        await limiter.enter("a", 1)

    async def append_and_go(scope: trio.CancelScope) -> None:
        with scope:
            await limiter.enter("a", 1)

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(append_and_go, scope)
        await trio.testing.wait_all_tasks_blocked()
        limiter.leave(1)  # its turn comes
        scope.cancel()  # and it goes, in the same moment
    for _ in range(limiter.in_flight):
        limiter.leave(1)
    assert (limiter.in_flight, limiter.bytes_used) == (0, 0) and limiter.has_room


async def test_pressure_that_is_over_is_forgotten() -> None:
    limiter = narrow()
    for _ in range(10):
        limiter.sample(500.0)
    assert limiter.is_busy
    for _ in range(80):
        limiter.sample(0.0)
    for _ in range(1000):
        assert limiter.has_room
        limiter.go_in(1)


async def test_how_late_the_gateway_itself_is_does_not_narrow_the_gate(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed before: a busy gateway sent its shards ever fewer appends, which made it no less busy."""
    monkeypatch.setattr(pressure, "own_lag_ms", lambda late_s, cpu_s: 500.0)
    dispatch = noting_dispatch([])
    measured = GatewayPressure(dispatch, LIMITS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(measured.run)
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    assert measured.report().level == pressure.THROTTLING
    assert dispatch.append_limiters[0].count_max == pressure.LIMIT_MAX


async def test_a_gateway_whose_clients_wait_for_their_turn_is_under_pressure(
    autojump_clock: trio.testing.MockClock,
) -> None:
    scheduler = RequestScheduler()
    measured = GatewayPressure(noting_dispatch([]), LIMITS)
    measured.watch_over(scheduler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(measured.run)
        await trio.sleep(1)
        assert measured.report().level == pressure.NONE
        nursery.start_soon(scheduler.take, "a")
        await trio.sleep(2)
        assert measured.report().level == pressure.THROTTLING
        nursery.start_soon(scheduler.run)
        await trio.sleep(2)
        assert measured.report().level == pressure.NONE
        nursery.cancel_scope.cancel()


# -- pages


async def test_large_pages_wait_for_each_other_fairly_by_key() -> None:
    """Failed before: a hundred readers of one key were all asked for before the one of another key."""
    window = PageWindow()
    async with trio.open_nursery() as nursery:
        pages = Appends(window, nursery)
        await pages.add("many", 10, size=PAGE_WINDOW_BYTES)
        await pages.add("few", 2, size=PAGE_WINDOW_BYTES)
        assert pages.entered == ["many"], "one fills the link"
        for _ in range(4):
            window.leave(PAGE_WINDOW_BYTES)
            await trio.testing.wait_all_tasks_blocked()
        assert pages.entered.count("few") == 2
        nursery.cancel_scope.cancel()


def test_an_owner_of_small_pages_waits_for_nothing_whatever_its_pages_may_bring() -> None:
    window = PageWindow()
    assert window.guess("new", 8 << 20) == 0
    for _ in range(100):
        window.note_size("a", 300)
    assert window.guess("a", 8 << 20) == 0


def test_a_large_page_counts_at_once_and_small_ones_bit_by_bit() -> None:
    window = PageWindow()
    window.note_size("a", 100)
    window.note_size("a", 8 << 20)
    assert window.guess("a", 8 << 20) == 8 << 20
    assert window.guess("a", 1 << 20) == 1 << 20, "no page is larger than it was asked for"
    window.note_size("a", 0)
    assert window.guess("a", 8 << 20) == 7 << 20
    for _ in range(100):
        window.note_size("a", 0)
    assert window.guess("a", 8 << 20) == 0


def noting_dispatch(used: list[str]) -> Dispatch:
    """Notes which link was taken."""

    def link(name: str) -> Link:
        async def call(op: int, head: bytes, body: bytes) -> wire.Message:
            if op == wire.OP_APPEND:
                used.append(name)
            return wire.Message(wire.REPLY, 0, op, 1, b"", b"")

        found = Link(0, "nowhere")
        found.call = call  # type: ignore[method-assign, assignment]
        return found

    return Dispatch(even(1), [link("other")], LIMITS, [link("urgent")])


async def test_an_append_to_a_stream_takes_its_turn_and_keeps_its_place(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Inputs of a session reach the shard in their order, whichever requests wait meanwhile."""
    link = Link(0, "nowhere")
    dispatch = Dispatch(even(1), [link], LIMITS)
    limiter = dispatch.append_limiters[0] = narrow()
    calls = ShardCalls(dispatch)
    sent: list[int] = []
    answers: list[OnAnswer] = []

    def post(op: int, head: bytes, body: bytes, on_answer: OnAnswer) -> int:
        sent.append(len(body))
        answers.append(on_answer)
        return len(sent)

    link.post = post  # type: ignore[method-assign, assignment]
    given = [Input([InputRecord(None, [], b"x" * size)]) for size in (1, 2, 3)]
    posted: list[PostedAppend] = []

    async def append() -> None:
        for each in given:
            posted.append(await calls.post_append("basin/stream", each, None, "chain", lambda: None))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append)
        await trio.testing.wait_all_tasks_blocked()
        assert sent == [] and limiter.paced_count == 1, "it waits in the limiter, and those behind it for it"
        for _ in given:
            limiter.leave(1)
        await trio.testing.wait_all_tasks_blocked()
    assert sent == sorted(sent) and len(sent) == 3
    assert limiter.in_flight == LIMIT_MIN, "three have left, three have entered"
    answers[0](ShardUnavailable())
    posted[1].close()
    posted[2].close()
    assert limiter.in_flight == LIMIT_MIN - 3, "all have left"
    assert isinstance(posted[0].result, ShardUnavailable)
    posted[0].close()
    assert limiter.in_flight == LIMIT_MIN - 3, "each once"


async def test_an_input_of_a_session_is_never_refused(autojump_clock: trio.testing.MockClock) -> None:
    """Under pressure, for however long: its client is held back by flow control. An append of its own is."""
    limiter = narrow()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(limiter.enter_from_session, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Throttled):
            await limiter.enter("a", 1)
        await trio.sleep(10 * WAIT_S_MAX)
        limiter.leave(1)
    assert limiter.in_flight == LIMIT_MIN, "it enters when there is room"


async def test_an_input_that_is_cancelled_at_the_gate_leaves_no_trace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limiter = narrow()
    with trio.move_on_after(1):
        await limiter.enter_from_session("a", 1)
    limiter.leave(1)
    assert limiter.in_flight == LIMIT_MIN - 1 and limiter.has_room
