"""What handling a command comes to. Everything that handles commands shares it."""

from __future__ import annotations

from typing import NamedTuple

from shard.core.boxes.sealed import NeedsAnotherStep, NotLoaded, TagsNotLoaded
from shard.core.changes import Change
from shard.core.durability import Wait
from shard.core.transactions.chunks import ChunksNotLoaded
from streams.protocol.errors import StreamsError
from streams.protocol.messages.commands import Reply

#: Changes in the order in which they were applied, each with its lsn.
LogEntries = list[tuple[int, Change]]


#: What a command needs before it can go on: something that is not in memory, to be fetched from a segment, or
#: only another turn.
Missing = NotLoaded | TagsNotLoaded | ChunksNotLoaded | NeedsAnotherStep


class Outcome(NamedTuple):
    """What a command comes to.

    `waits_for_lsn` is 0 when the reply may go at once; otherwise it goes when that lsn is logged, or durable
    if `until_durable`, or stored if `until_uploaded`, when it is durable too. `reply` is None when a read has
    nothing yet and the caller may wait (`wait_ms`); it is not to be asked again before `not_before_ms`. Or it
    is None because the command cannot be finished now: `needs` says why. Then the same command is handled
    again. What it has logged by then is in `changes`, and is complete in itself (`kernel.py`). Changes after
    `waits_for_lsn` need not be in the log when the reply goes if it has `afterthoughts`.
    """

    changes: LogEntries
    reply: Reply | StreamsError | None
    waits_for_lsn: int = 0
    until_durable: bool = False
    wakes: tuple[str, ...] = ()
    not_before_ms: int = 0
    needs: tuple[Missing, ...] = ()
    until_uploaded: bool = False
    afterthoughts: bool = False


def reply_after(
    wait: Wait, entries: LogEntries, reply: Reply | StreamsError, wakes: tuple[str, ...] = ()
) -> Outcome:
    """A reply that goes when `durability.py` says that it may."""
    lsn, until_durable, until_uploaded = wait
    return Outcome(entries, reply, lsn, until_durable, wakes, 0, (), until_uploaded)
