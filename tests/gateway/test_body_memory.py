"""Goal: a long body costs what has come of it, and the event loop no long copies. Method: bodies around the
limits, in pieces of several sizes, from a real budget; and a front with two clients."""

from __future__ import annotations

import mmap
import random

import pytest
import trio
import trio.testing

from gateway.admission.memory import EVERYONE, MemoryBudget
from gateway.admission.request_scheduler import PIECE_BYTES, RequestScheduler
from gateway.http.body_memory import FIRST_STEP_BYTES, MAPPED_BYTES_MIN, BodyMemory
from gateway.requests.request import Request, Response
from streams.protocol.errors import Throttled
from tests.gateway.edge_harness import head_and, read_until, running_front

MIB = 1024 * 1024
WHOLE = random.Random(1).randbytes(9 * MIB)


def budget_of(bytes_max: int) -> MemoryBudget:
    return MemoryBudget(bytes_max, limit="body_bytes_in_flight", what="the bodies of requests")


@pytest.mark.parametrize(
    "length", [2, FIRST_STEP_BYTES, 65_537, MAPPED_BYTES_MIN, MAPPED_BYTES_MIN + 1, 9 * MIB]
)
@pytest.mark.parametrize("first", [0, 1, 40_000])
async def test_a_body_is_whole_and_takes_at_most_twice_what_has_come(length: int, first: int) -> None:
    budget, sent = budget_of(64 * MIB), WHOLE[:length]
    charge = budget.open(EVERYONE)
    body = BodyMemory(charge, length, sent[: min(first, length - 1)])
    rng = random.Random(length)
    while body.have < length:
        space = body.space()
        assert 0 < len(space) <= PIECE_BYTES
        count = min(len(space), rng.choice([1, 1000, PIECE_BYTES]) if length < 100_000 else PIECE_BYTES)
        space[:count] = sent[body.have : body.have + count]
        del space
        body.have += count
        assert charge.size <= 2 * max(body.have, FIRST_STEP_BYTES)
    whole = body.take_whole()
    assert whole == sent and charge.size == length
    assert (isinstance(whole, memoryview) and isinstance(whole.obj, mmap.mmap)) == (length > MAPPED_BYTES_MIN)


async def test_a_body_grows_no_further_than_its_owner_has_room() -> None:
    charge = budget_of(2 * MIB).open(EVERYONE)
    body = BodyMemory(charge, 60 * MIB, b"")
    with pytest.raises(Throttled):
        while True:
            body.have += len(body.space())
    assert body.have <= 2 * MIB


async def test_pieces_of_a_long_body_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is paid for in the scheduler as it comes, and the next request does not pay for it again."""
    taken: list[int] = []
    try_take = RequestScheduler.try_take

    def noted(self: RequestScheduler, cost: int = 0) -> bool:
        taken.append(cost)
        return try_take(self, cost)

    async def handler(request: Request) -> Response:
        assert bytes(request.body) == WHOLE
        return Response(200, b"{}")

    monkeypatch.setattr(RequestScheduler, "try_take", noted)
    async with running_front(handler) as running, await running.connect() as stream:
        await stream.send_all(head_and(WHOLE, Content_Length=str(len(WHOLE))))
        with trio.fail_after(60):
            await read_until(stream, b"{}")
    of_body = [cost for cost in taken if cost >= PIECE_BYTES]
    assert sum(of_body) >= len(WHOLE) - PIECE_BYTES and max(taken) <= 3 * PIECE_BYTES
