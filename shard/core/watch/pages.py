"""What somebody who stays is owed: the next page of a box from their cursor on (v0 §7). No SSE text.

The shard keeps nothing about a watcher. A gateway asks for the page after its cursor and is answered when
there is one: the log is the buffer, one answer on its way is all the credit there is, and after a crash of
either side the same question is simply asked again.

Invariant
- DURABLE: a strong reader is shown nothing that is not on the disk, and its cursor is never taken for one of
  another life because of that.
"""

from __future__ import annotations

from shard.core.boxes.box import Box
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages.commands import Follow, Page


def page_for(box: Box, command: Follow, durable_lsn: int) -> Page | None:
    """The next page, or None when there is nothing yet and the reader is willing to wait."""
    upto = None
    if command.strong:
        upto = durable_seq(box, durable_lsn)
        is_same_life = command.generation in (None, box.generation)
        if is_same_life and upto < command.from_seq <= box.log.visible_seq:
            # Somebody who has seen more than is on the disk, as a reader of another kind, waits for it here.
            return None if command.wait_ms else _nothing(box, command, upto)
    found = box.read(command, upto=upto)
    if (
        command.wait_ms
        and not found.records
        and found.tombstone is None
        and found.next_from_seq == found.head_seq
        # A cursor that has passed over hidden records is told, so that they are not looked at again.
        and found.next_from_seq == command.from_seq
    ):
        return None
    return Page(
        box=found.box,
        records=found.records,
        next_from_seq=found.next_from_seq,
        generation=found.generation,
        head_seq=found.head_seq,
        earliest_seq=found.earliest_seq,
        tombstone=found.tombstone,
        records_scanned=found.records_scanned,
        appended_ms=box.last_append_ms,
    )


def durable_seq(box: Box, durable_lsn: int) -> int:
    """The last seq of the box that is on the disk and visible. Looks at the batches that are not, from the
    end: those of one sync interval."""
    if box.is_memory:
        raise InvalidRequest(
            f"consistency: {box.name} is a memory box, nothing in it is ever on the disk; use eventual",
            field="consistency",
            box=box.name,
        )
    log = box.log
    seq = log.visible_seq
    for at in range(len(log.tail) - 1, log.tail.front - 1, -1):  # what is sealed is on the disk
        batch = log.tail.batches[at]
        if batch.lsn and batch.lsn <= durable_lsn:
            break
        if batch.lsn:
            seq = min(seq, batch.first_seq - 1)
    return seq


def _nothing(box: Box, command: Follow, upto: int) -> Page:
    return Page(
        box=box.name,
        records=b"",
        next_from_seq=command.from_seq,
        generation=box.generation,
        head_seq=upto,
        earliest_seq=min(box.log.earliest_seq, upto + 1),
        tombstone=None,
        records_scanned=0,
    )
