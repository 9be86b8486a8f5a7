"""The outcome of handling a command, shared by everything that handles commands."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from shard.core.boxes.sealed import NeedsAnotherStep, NotLoaded, TagsNotLoaded
from shard.core.changes import Change
from shard.core.durability import Wait
from shard.core.transactions.chunks import ChunksNotLoaded
from streams.protocol.errors import StreamsError
from streams.protocol.messages.commands import Reply

#: Changes in the order in which they were applied, each with its lsn.
LogEntries = list[tuple[int, Change]]


#: The reason why a command cannot go on yet: data that is not in memory and must be fetched, or only that it
#: needs another turn.
Missing = NotLoaded | TagsNotLoaded | ChunksNotLoaded | NeedsAnotherStep


class Outcome(NamedTuple):
    """The result of handling a command.

    `waits_for_lsn` is 0 when the reply may go at once; otherwise it goes when that lsn is logged, or durable
    if `until_durable`, or stored if `until_uploaded`, when it is durable too. `reply` is None when a read has
    nothing yet and the caller may wait (`wait_ms`); it is not to be asked again before `not_before_ms`. Or it
    is None because the command cannot be finished now: `needs` says why. Then the same command is handled
    again. `changes` has what it has logged by then, complete in itself (`kernel.py`). Changes after
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
    #: True if the reply waits until its changes are durable, and asks for no sync: the next one serves.
    is_patient: bool = False


def reply_after(
    wait: Wait, entries: LogEntries, reply: Reply | StreamsError, wakes: tuple[str, ...] = ()
) -> Outcome:
    """A reply that goes when `durability.py` says that it may."""
    lsn, until_durable, until_uploaded = wait
    return Outcome(entries, reply, lsn, until_durable, wakes, 0, (), until_uploaded)


class OutcomeLogger(Protocol):
    def __call__(self, outcome: Outcome) -> None:
        """Stage changes of the machine and hand them to the log."""
