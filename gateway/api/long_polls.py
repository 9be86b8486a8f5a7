"""Questions that a shard may take its time to answer: a diff or a claim with `wait_ms` (v0 §4.6, §8).

And how much memory their answers may take: the largest page that a question can bring is taken from the
budget of answers before the question is sent, and what is not needed is given back with the answer. A
question that waits in the shard gives it back meanwhile, or a thousand long polls would take all of it; what
it brings in the end is charged when it is here.
"""

from __future__ import annotations

import re

import trio

from gateway.admission.append_limiter import PageWindow
from gateway.admission.memory import MemoryBudget
from gateway.requests.request import Buffer, Request
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import OutcomeUnknown, StreamsError
from streams.protocol.messages.requests import DIFF_BYTES_DEFAULT, DIFF_BYTES_MAX

_WAITS = b"wait_ms"
#: A question that has no answer after this long waits in the shard for something to come.
_PARKED_S = 0.01

_MAX_BYTES = re.compile(rb'"max_bytes"\s*:\s*(\d{1,19})').findall
_MAX = re.compile(rb'"max"\s*:\s*(\d{1,19})').findall
_PAGE_BYTES_MAX = DIFF_BYTES_MAX
#: A claim brings at most as many bytes as a diff. A job has at most a megabyte unless the settings say more.
_JOB_BYTES = 1024 * 1024


def page_bytes_max(op: int, body: Buffer) -> int:
    """The largest page that a diff or a claim can bring. The body is not parsed: where it is in doubt, the
    largest of what it says counts."""
    if b"\\" in body:  # names may be written in other ways
        return _PAGE_BYTES_MAX
    if op == wire.OP_DIFF:
        found = [int(each) or DIFF_BYTES_DEFAULT for each in _MAX_BYTES(body)]
        return min(max(found, default=DIFF_BYTES_DEFAULT), _PAGE_BYTES_MAX)
    return min(max(map(int, _MAX(body)), default=1) * _JOB_BYTES, _PAGE_BYTES_MAX)


async def ask(
    dispatch: Dispatch, op: int, request: Request, head: wire.RequestHead, body: Buffer
) -> wire.Message:
    """The owner's answer. The memory of a page is charged, and passed on in `request.page_charge`."""
    if op not in (wire.OP_DIFF, wire.OP_CLAIM):
        return await dispatch.to_owner(op, head, body)
    answers, owner = dispatch.answers, request.owner
    size = page_bytes_max(op, body)
    await answers.take(owner, size)
    room = _Room(answers, owner, size)
    try:
        window = dispatch.page_windows[dispatch.placement.shard_of(head.box)]
        await room.enter(window)
        message = await _ask(dispatch, op, request, head, body, room)
        window.note_size(owner, len(message.body))
        room.leave()
        request.page_charge = answers.charge(owner, room.hand_over(), len(message.body))
    finally:
        room.give()
    return message


class _Room:
    """What is taken for a page that is still to come: from the budget, and of the link that will carry it."""

    __slots__ = ("_answers", "_expected", "_owner", "_window", "taken")

    def __init__(self, answers: MemoryBudget, owner: str, taken: int) -> None:
        self._answers = answers
        self._owner = owner
        self.taken = taken
        self._window: PageWindow | None = None
        self._expected = 0

    async def enter(self, window: PageWindow) -> None:
        """Wait for the turn of a page that will be large, by the last ones of its owner."""
        self._expected = window.guess(self._owner, self.taken)
        if self._expected:
            await window.enter(self._owner, self._expected)
            self._window = window

    @property
    def is_bulk(self) -> bool:
        return self._expected > 0

    def leave(self) -> None:
        """The page has come, or will not come soon."""
        window, self._window = self._window, None
        if window is not None:
            window.leave(self._expected)

    def hand_over(self) -> int:
        taken, self.taken = self.taken, 0
        return taken

    def give(self) -> None:
        self.leave()
        if self.taken:
            self._answers.give(self._owner, self.hand_over())

    async def give_when_parked(self) -> None:
        await trio.sleep(_PARKED_S)
        self.give()


async def _ask(
    dispatch: Dispatch,
    op: int,
    request: Request,
    head: wire.RequestHead,
    body: Buffer,
    room: _Room,
) -> wire.Message:
    """The owner's answer. Where the body asks to wait, only for as long as whoever asked is there: the shard
    is told, and gives no job to a worker that has gone."""
    watch_peer = request.watch_peer
    if watch_peer is None or _WAITS not in body:
        return await dispatch.to_owner(op, head, body, is_bulk=room.is_bulk)
    answer: wire.Message | None = None
    refusal: StreamsError = OutcomeUnknown("the client went away while it waited", outcome="unknown")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_peer, nursery.cancel_scope)
        nursery.start_soon(room.give_when_parked)
        try:
            answer = await dispatch.to_owner(op, head, body, is_bulk=room.is_bulk)
        except StreamsError as error:  # kept, for a nursery would wrap it
            refusal = error
        nursery.cancel_scope.cancel()
    if answer is None:
        raise refusal
    return answer
