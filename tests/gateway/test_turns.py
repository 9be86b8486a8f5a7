"""Rounds of the event loop stay short, and what is urgent does not wait for a later one (v0 §9).

Method: real tasks and real sockets. What many clients have sent before the front looks comes in one round.
"""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from gateway.gate import says_urgent
from gateway.http import Request, Response
from gateway.turns import (
    BEHIND_URGENT_S,
    MISSED_MAX,
    PER_ROUND,
    PER_ROUND_URGENT,
    PRESSED_S,
    REST_S,
    Turns,
)
from tests.gateway.edge_harness import PATIENCE_S, running_front


async def test_so_many_begin_in_a_round_and_the_rest_in_later_ones_in_the_order_of_coming() -> None:
    turns = Turns(3)
    begun: list[tuple[int, int]] = []
    round_number = 0

    async def count_rounds() -> None:
        nonlocal round_number
        while True:
            round_number += 1
            await trio.lowlevel.checkpoint()

    async def begin(number: int) -> None:
        if not turns.try_take():
            await turns.take()
        begun.append((number, round_number))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        await trio.testing.wait_all_tasks_blocked()
        assert [turns.try_take() for _ in range(4)] == [True, True, True, False]
        for number in range(10):
            nursery.start_soon(begin, number)
            # Not a round of its own: the giver has had none since the last turn was taken.
        nursery.start_soon(count_rounds)
        with trio.fail_after(PATIENCE_S):
            while len(begun) < 10:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    rounds = [number for _, number in begun]
    assert rounds == sorted(rounds)
    assert all(rounds.count(number) <= 2 * 3 for number in rounds), "what is left, and what is given"


async def test_who_waits_is_served_first_come_first_served() -> None:
    turns = Turns(1)
    begun: list[int] = []

    async def begin(number: int) -> None:
        await turns.take()
        begun.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(begin, number)
            await trio.testing.wait_all_tasks_blocked()
        assert turns.try_take()
        nursery.start_soon(turns.run)
        with trio.fail_after(PATIENCE_S):
            while len(begun) < 5:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert begun == [0, 1, 2, 3, 4]


async def test_who_gives_up_waiting_takes_no_turn() -> None:
    turns = Turns(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await turns.take()
    assert scope.cancelled_caught
    begun = trio.Event()

    async def begin() -> None:
        await turns.take()
        begun.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(turns.run)
        with trio.fail_after(PATIENCE_S):
            await begun.wait()
        nursery.cancel_scope.cancel()


async def test_a_socket_with_something_gets_its_turn_and_others_sleep_on() -> None:
    turns = Turns(1)
    served: list[int] = []
    pairs = [socket.socketpair() for _ in range(3)]

    async def serve(number: int) -> None:
        assert await turns.wait_readable(pairs[number][0]) >= 0
        served.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        for number in range(3):
            nursery.start_soon(serve, number)
        await trio.testing.wait_all_tasks_blocked()
        for number in (2, 0):
            pairs[number][1].send(b"x")
            await wait_served(served, number)
        pairs[1][1].close()  # its end is something, too
        await wait_served(served, 1)
        nursery.cancel_scope.cancel()
    assert served == [2, 0, 1]
    for one, other in pairs:
        one.close()
        other.close()


async def wait_served(served: list[int], number: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while number not in served:
            await trio.lowlevel.checkpoint()


async def test_who_sleeps_can_be_interrupted_or_give_up_and_sleep_again() -> None:
    turns = Turns()
    one, other = socket.socketpair()
    with one, other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turns.run)
            with trio.move_on_after(0.01) as scope:
                await turns.wait_readable(one)
            assert scope.cancelled_caught
            raised: list[BaseException] = []

            async def sleep() -> None:
                try:
                    await turns.wait_readable(one)
                except trio.ClosedResourceError as error:
                    raised.append(error)

            nursery.start_soon(sleep)
            await trio.testing.wait_all_tasks_blocked()
            turns.interrupt(one)
            turns.interrupt(one)  # nobody sleeps there any more
            await trio.testing.wait_all_tasks_blocked()
            assert len(raised) == 1
            other.send(b"x")
            with trio.fail_after(PATIENCE_S):
                await turns.wait_readable(one)
            nursery.cancel_scope.cancel()


async def test_under_pressure_connections_that_are_not_urgent_are_served_in_their_turn() -> None:
    """And are ended like others when the front drains."""
    order: list[str] = []

    async def handler(request: Request) -> Response:
        order.append(request.path)
        return Response(200, b"{}")

    async with running_front(handler, is_urgent=says_urgent) as running:
        streams = [await running.connect() for _ in range(3 * PER_ROUND)]
        for name in ("first", "second", "third"):
            running.front.turns.sample(is_pressed=True, is_urgent=True)
            await trio.testing.wait_all_tasks_blocked()
            for number, stream in enumerate(streams):
                send(stream.socket, f"/{name}/{number}", b'{"records":[]}')
            urgent = name == "third"
            if urgent:
                late = await running.connect()
                send(late.socket, "/urgent", b'{"records":[],"disable_backpressure":true}')
                streams.append(late)
            with trio.fail_after(PATIENCE_S):
                for stream in streams:
                    assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 200")
        running.draining.set()
        with trio.fail_after(PATIENCE_S):
            for stream in streams:
                assert await stream.receive_some(65536) == b""
                await stream.aclose()
    assert len(set(order)) == len(order) == 9 * PER_ROUND + 1
    assert order.index("/urgent") < len(order) - PER_ROUND, "it came last"


async def test_only_the_first_of_what_comes_in_one_piece_has_waited_for_its_turn() -> None:
    waited: list[float] = []

    async def handler(request: Request) -> Response:
        waited.append(request.waited_s)
        return Response(200, b"{}")

    async with running_front(handler) as running, await running.connect() as stream:
        await trio.testing.wait_all_tasks_blocked()
        running.front.turns._left = 0  # Others have them.
        send(stream.socket, "/one", b"{}")
        send(stream.socket, "/two", b"{}")
        await trio.testing.wait_all_tasks_blocked()
        running.front.turns._wake_giver()
        with trio.fail_after(PATIENCE_S):
            while len(waited) < 2:
                await stream.receive_some(65536)
    assert waited[0] > 0
    assert waited[1] == 0


async def test_rounds_are_short_under_pressure_and_for_a_while_after_it_if_anything_is_urgent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    turns = Turns()
    turns.sample(is_pressed=False, is_urgent=True)
    assert not turns.rests and turns.per_round == PER_ROUND
    turns.sample(is_pressed=True, is_urgent=True)
    assert turns.rests and turns.per_round == PER_ROUND_URGENT
    await trio.sleep(0.9 * PRESSED_S)
    turns.sample(is_pressed=False, is_urgent=True)
    assert turns.rests
    turns.sample(is_pressed=False, is_urgent=False)
    assert not turns.rests
    await trio.sleep(0.2 * PRESSED_S)
    turns.sample(is_pressed=False, is_urgent=True)
    assert not turns.rests


@pytest.mark.parametrize(("is_urgent", "rests"), [(False, 0), (True, 4)])
async def test_rounds_under_pressure_leave_room_for_what_is_urgent(
    is_urgent: bool, rests: int, autojump_clock: trio.testing.MockClock
) -> None:
    turns = Turns()
    turns.sample(is_pressed=True, is_urgent=is_urgent)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as waiting:
            for _ in range(rests * PER_ROUND_URGENT + 1):
                waiting.start_soon(turns.take)
            await trio.testing.wait_all_tasks_blocked()
            began_s = trio.current_time()
            nursery.start_soon(turns.run)
        assert trio.current_time() - began_s == pytest.approx(rests * REST_S)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("lasts_s", "waits_s"),
    [
        (0.0, 0.0),
        (1.5 * REST_S, 3 * REST_S),  # and a millisecond more, in whole rests
        (100 * REST_S, MISSED_MAX * REST_S),  # never, as far as the others are concerned
    ],
)
async def test_under_pressure_no_round_begins_while_something_urgent_is_under_way(
    lasts_s: float, waits_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """Neither the first one, when nobody has waited, nor a later one."""
    assert REST_S / 2 < BEHIND_URGENT_S <= 1.5 * REST_S
    turns = Turns()
    turns.sample(is_pressed=True, is_urgent=True)
    begun: list[float] = []

    async def begin() -> None:
        if not turns.try_take():
            await turns.take()
        begun.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        await trio.sleep(1)
        if lasts_s:
            turns.urgency.begin()
        began_s = trio.current_time()
        for _ in range(2 * PER_ROUND_URGENT):
            nursery.start_soon(begin)
        await trio.sleep(lasts_s)
        if lasts_s:
            turns.urgency.end()
        await trio.sleep(1)
        assert len(begun) == 2 * PER_ROUND_URGENT
        assert [each - began_s for each in begun[:PER_ROUND_URGENT]] == pytest.approx(
            [waits_s] * PER_ROUND_URGENT
        )
        assert begun[-1] > begun[0] or not lasts_s
        nursery.cancel_scope.cancel()


async def test_where_something_urgent_is_always_under_way_those_who_come_too_late_are_told_no_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    turns = Turns()
    turns.late_s = 1.0
    turns.sample(is_pressed=True, is_urgent=True)
    turns.urgency.begin()
    begun: list[float] = []

    async def begin() -> None:
        await turns.take()
        begun.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        count = (1 + MISSED_MAX) * PER_ROUND_URGENT
        for _ in range(2 * count):
            nursery.start_soon(begin)
        await trio.sleep(2 * turns.late_s)
        nursery.start_soon(turns.run)
        await trio.sleep(1)
        rounds_s = sorted({round(each, 6) for each in begun})
        assert len(begun) == 2 * count and len(rounds_s) == 2
        assert rounds_s[1] - rounds_s[0] == pytest.approx((1 + MISSED_MAX) * REST_S)
        nursery.cancel_scope.cancel()


async def test_it_says_how_long_the_next_one_has_waited(autojump_clock: trio.testing.MockClock) -> None:
    turns = Turns()
    assert turns.longest_s == 0
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(turns.take)
            await trio.sleep(0.5)
        assert turns.longest_s == pytest.approx(1.0)
        nursery.cancel_scope.cancel()


async def test_who_comes_too_late_takes_no_turn_from_others(autojump_clock: trio.testing.MockClock) -> None:
    turns = Turns(3)
    turns.late_s = 1.0
    begun: list[str] = []

    async def begin(name: str) -> None:
        await turns.take()
        begun.append(name)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(begin, "late")
        await trio.sleep(1.0)
        for _ in range(5):
            nursery.start_soon(begin, "in time")
        await trio.testing.wait_all_tasks_blocked()
        turns._give(3, 3, trio.current_time() - turns.late_s)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(begun) == ["in time"] * 3 + ["late"] * 2
        nursery.cancel_scope.cancel()


async def test_it_is_pressure_when_more_wait_than_a_round_serves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    turns = Turns()
    async with trio.open_nursery() as nursery:
        for _ in range(PER_ROUND + 1):
            nursery.start_soon(turns.take)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            await trio.sleep(2 * PRESSED_S)
            turns.sample(is_pressed=False, is_urgent=True)
            assert turns.rests
        while turns.try_take():
            pass
        nursery.start_soon(turns.run)
        await trio.testing.wait_all_tasks_blocked()
        turns.sample(is_pressed=False, is_urgent=True)  # they have waited since the last time
        await trio.sleep(2 * PRESSED_S)
        turns.sample(is_pressed=False, is_urgent=True)
        assert not turns.rests
        nursery.cancel_scope.cancel()


async def test_of_many_requests_at_once_the_urgent_one_is_among_the_first() -> None:
    order: list[str] = []

    async def handler(request: Request) -> Response:
        order.append(request.path)
        return Response(200, b"{}")

    crowd = 4 * PER_ROUND
    async with running_front(handler, is_urgent=says_urgent) as running:
        streams = [await running.connect() for _ in range(crowd + 1)]
        await trio.testing.wait_all_tasks_blocked()
        # Blocking, so that the front sees nothing before all have sent.
        for number, stream in enumerate(streams[:-1]):
            send(stream.socket, f"/{number}", b'{"records":[]}')
        send(streams[-1].socket, "/urgent", b'{"records":[],"disable_backpressure":true}')
        with trio.fail_after(PATIENCE_S):
            for stream in streams:
                assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 200")
                await stream.aclose()
    assert len(order) == crowd + 1
    assert order.index("/urgent") <= 2 * PER_ROUND


def send(sock: trio.socket.SocketType, path: str, body: bytes) -> None:
    """In one piece, without giving others a turn."""
    whole = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    twin = socket.socket(fileno=socket.dup(sock.fileno()))
    with twin:
        assert twin.send(whole) == len(whole)
