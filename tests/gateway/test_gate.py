"""The gate before a shard (v0 §9): turns in order, bounded waits, and nothing leaks however a wait ends.

Method: real tasks on a clock that jumps; samples are given by hand.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

from gateway.dispatch import Dispatch
from gateway.gate import WAITING_MAX, Gate
from gateway.links import Link, OnAnswer
from gateway.placement import even
from gateway.pressure import GatewayPressure
from gateway.s2.calls import Calls, PostedAppend
from gateway.s2.messages import Given, Input
from gateway.turns import Turns
from streams.protocol import pressure, wire
from streams.protocol.errors import ShardUnavailable, Throttled
from streams.protocol.pressure import LIMIT_MIN, Thresholds

LIMITS = Thresholds(pace_lag_ms=10, throttle_lag_ms=200)


def narrow(used: int = LIMIT_MIN) -> Gate:
    """A gate that lets the least through, and is full."""
    gate = Gate(LIMITS)
    gate.sample(50.0)
    for _ in range(used):
        assert gate.try_enter()
    return gate


async def test_who_waits_gets_in_when_another_leaves_in_the_order_of_coming(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = narrow()
    entered: list[int] = []

    async def append(number: int) -> None:
        assert await gate.enter() >= 0
        entered.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(append, number)
            await trio.testing.wait_all_tasks_blocked()
        assert not gate.try_enter(), "nobody overtakes who waits"
        for count in range(3):
            assert entered == list(range(count))
            gate.leave()
            await trio.testing.wait_all_tasks_blocked()
    assert (gate.under_way, gate.paced, gate.throttled) == (LIMIT_MIN, 3, 0)


LONG = b'{"records":[%b]' % b",".join([b'{"data":"aaaaaaaaaaaaaaaa"}'] * 500)


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("", b'{"records":[],"disable_backpressure" : true}'),
        ("", b'{"disable_backpressure":true,%b}' % LONG[1:]),
        ("", b'%b,"disable_backpressure":true}' % LONG),
        ("disable_backpressure=true", b""),
        ("return_seqs=false&disable_backpressure=true", LONG + b"}"),
    ],
)
async def test_who_skips_the_throttle_does_not_wait_and_goes_by_the_urgent_link(
    query: str, body: bytes
) -> None:
    told: list[str] = []
    dispatch = told_dispatch(told)
    await dispatch.append(wire.RequestHead("b", query), body)
    dispatch.gates[0] = narrow()
    await dispatch.append(wire.RequestHead("b", query), body)
    assert told == ["urgent", "urgent"]
    assert dispatch.gates[0].under_way == LIMIT_MIN, "it has left again"


@pytest.mark.parametrize(
    "body",
    [
        b'{"disable_backpressure":false}',
        rb'{"data":"\"disable_backpressure\":true"}',
        LONG + b"}",
    ],
)
async def test_to_speak_of_skipping_is_not_to_skip(
    body: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    told: list[str] = []
    dispatch = told_dispatch(told)
    await dispatch.append(wire.RequestHead("b"), body)
    assert told == ["other"]
    gate = dispatch.gates[0] = narrow()
    with trio.move_on_after(0.1) as scope:
        await dispatch.append(wire.RequestHead("b"), body)
    assert scope.cancelled_caught and gate.under_way == LIMIT_MIN
    assert told == ["other"]


async def test_who_has_waited_too_long_before_the_gate_is_refused_and_told_when_to_come_back() -> None:
    told: list[str] = []
    dispatch = told_dispatch(told)
    late_s = LIMITS.throttle_lag_ms / 1000
    _, waited_s = await dispatch.append(wire.RequestHead("b"), b"{}", late_s - 0.01)
    assert waited_s == late_s - 0.01
    with pytest.raises(Throttled) as refused:
        await dispatch.append(wire.RequestHead("b"), b"{}", late_s)
    assert refused.value.detail == {"retry_after_ms": 2 * LIMITS.throttle_lag_ms}
    await dispatch.append(wire.RequestHead("b"), b'{"disable_backpressure":true}', late_s)
    assert told == ["other", "urgent"]
    assert (dispatch.gates[0].under_way, dispatch.gates[0].throttled) == (0, 1)


async def test_what_is_urgent_is_under_way_until_it_is_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    told: list[str] = []
    dispatch = told_dispatch(told)
    turns = Turns()
    GatewayPressure(dispatch, LIMITS).watch_over(turns)
    await dispatch.append(wire.RequestHead("b"), b"{}")
    assert not turns.urgency.is_under_way
    seen: list[bool] = []
    answer = dispatch.urgent[0].call

    async def call(op: int, head: bytes, body: bytes) -> wire.Message:
        seen.append(turns.urgency.is_under_way)
        await trio.sleep(1)
        seen.append(turns.urgency.is_under_way)
        if body.endswith(b" "):
            raise ShardUnavailable
        return await answer(op, head, body)

    dispatch.urgent[0].call = call  # type: ignore[method-assign, assignment]
    await dispatch.append(wire.RequestHead("b"), b'{"disable_backpressure":true}')
    with pytest.raises(ShardUnavailable):
        await dispatch.append(wire.RequestHead("b"), b'{"disable_backpressure":true} ')
    with trio.move_on_after(0.5):
        await dispatch.append(wire.RequestHead("b"), b'{"disable_backpressure":true}')
    assert seen == [True] * 5
    await trio.sleep(1)
    assert not turns.urgency.is_under_way


async def test_a_gateway_whose_clients_wait_for_their_turn_is_under_pressure(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dispatch = told_dispatch([])
    turns = Turns()
    measured = GatewayPressure(dispatch, LIMITS)
    measured.watch_over(turns)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(measured.run)
        await trio.sleep(1)
        assert measured.report().level == pressure.NONE
        nursery.start_soon(turns.take)
        await trio.sleep(2)
        dispatch.urgency.begin()
        dispatch.urgency.end()
        await trio.sleep(0.2)
        assert measured.report().level == pressure.THROTTLING
        assert not turns.rests, "that somebody waits for a round is no reason for shorter ones"
        nursery.start_soon(turns.run)
        await trio.sleep(2)
        assert measured.report().level == pressure.NONE
        nursery.cancel_scope.cancel()


async def test_where_there_is_room_a_long_body_is_looked_at_from_both_ends_only() -> None:
    """In its middle it does not say so before the throttle would be felt."""
    told: list[str] = []
    dispatch = told_dispatch(told)
    middle = LONG + b',"disable_backpressure":true,' + LONG[1:] + b"}"
    await dispatch.append(wire.RequestHead("b"), middle)
    dispatch.gates[0] = narrow()
    await dispatch.append(wire.RequestHead("b"), middle)
    assert told == ["other", "urgent"]


def told_dispatch(told: list[str]) -> Dispatch:
    """Says which link was taken."""

    def link(name: str) -> Link:
        async def call(op: int, head: bytes, body: bytes) -> wire.Message:
            told.append(name)
            return wire.Message(wire.REPLY, 0, op, 1, b"", b"")

        made = Link(0, "nowhere")
        made.call = call  # type: ignore[method-assign, assignment]
        return made

    return Dispatch(even(1), [link("other")], LIMITS, [link("urgent")])


async def test_nobody_waits_longer_than_twice_the_threshold(autojump_clock: trio.testing.MockClock) -> None:
    gate = narrow()

    async def keep_sampling() -> None:
        while True:
            await trio.sleep(0.025)
            gate.sample(50.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_sampling)
        began_s = trio.current_time()
        with pytest.raises(Throttled) as refused:
            await gate.enter()
        assert 0.4 <= trio.current_time() - began_s < 0.5
        nursery.cancel_scope.cancel()
    assert refused.value.detail["retry_after_ms"] >= 100
    assert (gate.under_way, gate.throttled) == (LIMIT_MIN, 1)


async def test_newcomers_are_refused_at_once_while_others_wait_for_too_long(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = narrow()

    async def append() -> None:
        await gate.enter()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append)
        await trio.sleep(0.25)
        with pytest.raises(Throttled) as refused:
            await gate.enter()
        assert refused.value.detail == {"retry_after_ms": 500}, "twice what the first one has waited"
        nursery.cancel_scope.cancel()


async def test_the_queue_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    gate = narrow()

    async def append() -> None:
        await gate.enter()

    async with trio.open_nursery() as nursery:
        for _ in range(WAITING_MAX):
            nursery.start_soon(append)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Throttled):
            await gate.enter()
        nursery.cancel_scope.cancel()
    assert "0 waiting" in repr(gate)


async def test_who_goes_away_while_waiting_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = narrow()
    with trio.move_on_after(0.01):
        await gate.enter()

    async def append_and_go(scope: trio.CancelScope) -> None:
        with scope:
            await gate.enter()

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(append_and_go, scope)
        await trio.testing.wait_all_tasks_blocked()
        gate.leave()  # its turn comes
        scope.cancel()  # and it goes, in the same moment
    for _ in range(gate.under_way):
        gate.leave()
    assert gate.under_way == 0 and gate.try_enter()


async def test_a_way_that_is_far_behind_refuses_nothing_while_there_is_room() -> None:
    """Failed before: on a machine that others kept busy single appends were refused."""
    gate = Gate(LIMITS)
    for _ in range(10):
        gate.sample(5000.0)
    assert all(gate.try_enter() for _ in range(LIMIT_MIN))
    with pytest.raises(Throttled):
        await gate.enter()


async def test_pressure_that_is_over_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    gate = narrow()
    for _ in range(10):
        gate.sample(500.0)
    with pytest.raises(Throttled):
        await gate.enter()
    assert gate.is_busy
    for _ in range(80):
        gate.sample(0.0)
    assert all(gate.try_enter() for _ in range(1000))


async def test_an_append_to_a_stream_takes_its_turn_and_keeps_its_place(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Inputs of a session reach the shard in their order, whoever waits meanwhile."""
    link = Link(0, "nowhere")
    dispatch = Dispatch(even(1), [link], LIMITS)
    gate = dispatch.gates[0] = narrow()
    calls = Calls(dispatch)
    sent: list[int] = []
    answers: list[OnAnswer] = []

    def post(op: int, head: bytes, body: bytes, on_answer: OnAnswer) -> int:
        sent.append(len(body))
        answers.append(on_answer)
        return len(sent)

    link.post = post  # type: ignore[method-assign, assignment]
    given = [Input([Given(None, [], b"x" * size)]) for size in (1, 2, 3)]
    posted: list[PostedAppend] = []

    async def append() -> None:
        for each in given:
            posted.append(await calls.post_append("basin/stream", each, None, "chain", lambda: None))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append)
        await trio.testing.wait_all_tasks_blocked()
        assert sent == [] and gate.paced == 1, "it waits at the gate, and those behind it for it"
        for _ in given:
            gate.leave()
        await trio.testing.wait_all_tasks_blocked()
    assert sent == sorted(sent) and len(sent) == 3
    assert gate.under_way == LIMIT_MIN, "three have left, three have entered"
    answers[0](ShardUnavailable())
    posted[1].close()
    posted[2].close()
    assert gate.under_way == LIMIT_MIN - 3, "all have left"
    assert isinstance(posted[0].result, ShardUnavailable)
    posted[0].close()
    assert gate.under_way == LIMIT_MIN - 3, "each once"


async def test_an_input_of_a_session_is_never_refused(autojump_clock: trio.testing.MockClock) -> None:
    """Under pressure, for however long: its client is held back by flow control. An append of its own is."""
    gate = narrow()
    entered: list[str] = []

    async def input_of_session() -> None:
        await gate.enter_from_session()
        entered.append("session")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(input_of_session)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(100):
            await trio.sleep(pressure.SAMPLE_S)
            gate.sample(5_000.0)
        with pytest.raises(Throttled):
            await gate.enter()
        gate.sample(0.0)
    assert entered == ["session"], "it enters when the pressure is over"


async def test_sessions_and_appends_take_turns_at_the_gate(autojump_clock: trio.testing.MockClock) -> None:
    gate = narrow()
    entered: list[str] = []

    async def input_of_session() -> None:
        await gate.enter_from_session()
        entered.append("session")

    async def append() -> None:
        await gate.enter()
        entered.append("append")

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(input_of_session)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            nursery.start_soon(append)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(6):
            gate.leave()
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(entered) == ["append"] * 3 + ["session"] * 3
    assert all(one != next for one, next in pairwise(entered))


async def test_an_input_that_is_cancelled_at_the_gate_leaves_no_trace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = narrow()
    with trio.move_on_after(1):
        await gate.enter_from_session()
    gate.leave()
    assert gate.under_way == LIMIT_MIN - 1 and gate.has_room
