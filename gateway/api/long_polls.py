"""Sends requests that may wait in the shard: a diff or a claim with `wait_ms` (v0 §4.6, §8).

Memory: before a request is sent, the largest page it can return is reserved in the budget of answers. The
unused part is released when the reply arrives. A request that waits in the shard releases its reservation
while it waits, or a thousand long polls would use up the budget; its page is charged when it arrives.
"""

from __future__ import annotations

import re

import trio

from gateway.admission.append_limiter import PageWindow
from gateway.admission.inline import need_task
from gateway.admission.memory import MemoryBudget
from gateway.requests.request import Buffer, Request
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import OutcomeUnknown, StreamsError
from streams.protocol.messages.requests import DIFF_BYTES_DEFAULT, DIFF_BYTES_MAX

_WAIT_FIELD = b"wait_ms"
#: A request without a reply after this long is waiting in the shard for new records.
_PARK_DELAY_S = 0.01

_MAX_BYTES = re.compile(rb'"max_bytes"\s*:\s*(\d{1,19})').findall
_MAX = re.compile(rb'"max"\s*:\s*(\d{1,19})').findall
_PAGE_BYTES_MAX = DIFF_BYTES_MAX
#: A job has at most a megabyte by default. A claim returns at most as many bytes as a diff.
_JOB_BYTES = 1024 * 1024


def page_bytes_max(op: int, body: Buffer) -> int:
    """Return an upper bound for the page that a diff or a claim returns.

    The body is searched, not parsed: if it names several sizes, the largest counts.
    """
    if b"\\" in body:  # field names may be escaped
        return _PAGE_BYTES_MAX
    if op == wire.OP_DIFF:
        sizes = [int(each) or DIFF_BYTES_DEFAULT for each in _MAX_BYTES(body)]
        return min(max(sizes, default=DIFF_BYTES_DEFAULT), _PAGE_BYTES_MAX)
    return min(max(map(int, _MAX(body)), default=1) * _JOB_BYTES, _PAGE_BYTES_MAX)


async def call_owner(
    dispatch: Dispatch, op: int, request: Request, head: wire.RequestHead, body: Buffer
) -> wire.Message:
    """Send a request to the owner of its box and return the reply.

    The memory of its page is charged and handed over in `request.page_charge`.
    """
    if op not in (wire.OP_DIFF, wire.OP_CLAIM):
        return await dispatch.to_owner(op, head, body)
    answers, owner = dispatch.answers, request.owner
    size = page_bytes_max(op, body)
    await answers.take(owner, size)
    reservation = _PageReservation(answers, owner, size)
    try:
        window = dispatch.page_windows[dispatch.placement.shard_of(head.box)]
        await reservation.enter(window)
        message = await _call_until_disconnect(dispatch, op, request, head, body, reservation)
        window.note_size(owner, len(message.body))
        reservation.leave()
        request.page_charge = answers.charge(owner, reservation.hand_over(), len(message.body))
    finally:
        reservation.release()
    return message


class _PageReservation:
    """A reservation for a page that has not arrived: memory of the budget, and window of the shard's link."""

    __slots__ = ("_answers", "_expected_bytes", "_owner", "_window", "reserved_bytes")

    def __init__(self, answers: MemoryBudget, owner: str, reserved_bytes: int) -> None:
        self._answers = answers
        self._owner = owner
        self.reserved_bytes = reserved_bytes
        self._window: PageWindow | None = None
        self._expected_bytes = 0

    async def enter(self, window: PageWindow) -> None:
        """Wait for room in the link's window, if the owner's last pages were large."""
        self._expected_bytes = window.guess(self._owner, self.reserved_bytes)
        if self._expected_bytes:
            await window.enter(self._owner, self._expected_bytes)
            self._window = window

    @property
    def is_bulk(self) -> bool:
        return self._expected_bytes > 0

    def leave(self) -> None:
        """Leave the window: the page has arrived, or the request waits in the shard."""
        window, self._window = self._window, None
        if window is not None:
            window.leave(self._expected_bytes)

    def hand_over(self) -> int:
        reserved_bytes, self.reserved_bytes = self.reserved_bytes, 0
        return reserved_bytes

    def release(self) -> None:
        self.leave()
        if self.reserved_bytes:
            self._answers.give(self._owner, self.hand_over())

    async def release_when_parked(self) -> None:
        await trio.sleep(_PARK_DELAY_S)
        self.release()


async def _call_until_disconnect(
    dispatch: Dispatch,
    op: int,
    request: Request,
    head: wire.RequestHead,
    body: Buffer,
    reservation: _PageReservation,
) -> wire.Message:
    """Send the request. If it may wait, withdraw it when the client disconnects.

    Then the shard leases no job to a worker that is gone.
    """
    watch_peer = request.watch_peer
    if watch_peer is None or _WAIT_FIELD not in body:
        return await dispatch.to_owner(op, head, body, is_bulk=reservation.is_bulk)
    answer: wire.Message | None = None
    refusal: StreamsError = OutcomeUnknown(
        "the client disconnected while its request waited", outcome="unknown"
    )
    await need_task()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_peer, nursery.cancel_scope)
        nursery.start_soon(reservation.release_when_parked)
        try:
            answer = await dispatch.to_owner(op, head, body, is_bulk=reservation.is_bulk)
        except StreamsError as error:  # a nursery would wrap it in a group
            refusal = error
        nursery.cancel_scope.cancel()
    if answer is None:
        raise refusal
    return answer
