"""Builds the next page of a box for a watcher, from its cursor on (v0 §7). No SSE text.

The shard keeps no state of a watcher. A gateway requests the page after its cursor and gets the reply when
there is one: the log is the buffer, one reply is in flight at a time, and after a crash of either side the
gateway repeats the request.

Invariant
- DURABLE: a strong reader sees only records that are on the disk, and its cursor is never mistaken for a
  cursor of another generation because of that.
"""

from __future__ import annotations

from shard.core.boxes.box import Box
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.commands import Follow, FollowResult


def page_for(box: Box, command: Follow, durable_lsn: int) -> FollowResult | None:
    """Return the next page, or None when it would be empty and the reader waits."""
    upto = None
    if command.strong:
        upto = durable_seq(box, durable_lsn)
        is_same_life = command.generation in (None, box.generation)
        if is_same_life and upto < command.from_seq <= box.log.visible_seq:
            # The client has seen more as an eventual reader than is on the disk: it waits for the disk.
            return None if command.wait_ms else _nothing(box, command, upto)
    page = box.read(command, upto=upto)
    if (
        command.wait_ms
        and not page.records
        and page.tombstone is None
        and page.next_from_seq == page.head_seq
        # A cursor that skipped hidden records is returned, so that they are not scanned again.
        and page.next_from_seq == command.from_seq
    ):
        return None
    return FollowResult(
        box=page.box,
        records=page.records,
        next_from_seq=page.next_from_seq,
        generation=page.generation,
        head_seq=page.head_seq,
        earliest_seq=page.earliest_seq,
        tombstone=page.tombstone,
        records_scanned=page.records_scanned,
        appended_ms=box.last_append_ms,
    )


def durable_seq(box: Box, durable_lsn: int) -> int:
    """Return the last seq of the box that is visible and on the disk.

    It scans the batches that are not on the disk from the end: those of one sync interval."""
    if box.is_memory:
        raise InvalidRequest(
            f"consistency: {box.name} is a memory box, whose records are never on disk; use eventual",
            field="consistency",
            box=box.name,
        )
    log = box.log
    seq = log.visible_seq
    for at in range(len(log.tail) - 1, log.tail.front - 1, -1):  # sealed batches are on the disk
        batch = log.tail.batches[at]
        if batch.lsn and batch.lsn <= durable_lsn:
            break
        if batch.lsn:
            seq = min(seq, batch.first_seq - 1)
    return seq


def _nothing(box: Box, command: Follow, upto: int) -> FollowResult:
    return FollowResult(
        box=box.name,
        records=b"",
        next_from_seq=command.from_seq,
        generation=box.generation,
        head_seq=upto,
        earliest_seq=min(box.log.earliest_seq, upto + 1),
        tombstone=None,
        records_scanned=0,
    )
