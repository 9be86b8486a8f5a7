"""Dispatches commands and applies changes. Knows no feature by name.

Theory of operation
-------------------

A shard is a state machine. The engine hands it a command with the time, and logs what comes out:

    handle(command, now_ms) ─► a handler decides ─► log(change) ─► apply(change, lsn) ─► an applier mutates
                                    │
                                    ▼
                     Outcome: changes to log · reply · what the reply waits for · boxes to wake

    recovery: apply(change, lsn) for every change of the log, in order. No handler runs.

*Handlers* decide. They look at state and never change what is rebuilt from the log, except through `log`. A
handler raises `StreamsError` to refuse.

*Handled again.* A command that cannot be finished now returns `Outcome.needs`, of type `Missing`, and is
handled again when the engine has what it needs. Changes that it has logged by then (an expiry, the change of
a long delete) are complete in themselves. Five reasons; the first three are raised, and caught in `handle`:

    NotLoaded         the payload of a sealed batch: fetched from its segment (`boxes/sealed.py`)
    NotRendered       a NotLoaded. Rows of a commit: waits until they are rendered
                      (`transactions/unrendered.py`)
    TagsNotLoaded     records of sealed batches by tag: looked up in tag indexes (`boxes/sealed.py`)

The other two are returned by handlers:

    ChunksNotLoaded   held rows that a commit needs whole: read from the log (`transactions/chunks.py`)
    NeedsAnotherStep  nothing is to be fetched; other commands, or the log, get their turn in between
                      (`boxes/sealed.py`)

*Appliers* mutate. A change is a fact, worked out in full: an applier asks no question whose answer could
differ when the log is replayed. Every applier sees the same changes in the same order, live and in recovery.

*Validators* come first. One looks whether what the change rests on is there, and raises `DoesNotApply` while
nothing is changed. That happens where a log has lost frames, and `shard/offline/repair.py` goes on; live it
would be a bug.

*State* is of two kinds. Logged state is changed by appliers alone, rebuilt by replay, and written into
snapshots by its feature (`on_snapshot`). Volatile state
(timers, queues of waiting replies, counters) is lost with the process, and rebuilt or begun anew by `start`.

*Time* comes in as an argument. There is no clock, file, socket, randomness or lock in the core.

*Durability* is not decided here: `durability.py` says when a reply may go and when a record may be seen.

A feature registers its handlers and appliers when the machine is built. `on_command` and `on_change` are
generic, so that a type checker rejects a handler of another command.

Invariants
- LSN: changes are applied in lsn order without a gap. Changes that are never logged (of memory boxes) have
  lsn 0.
- REGISTERED: each kind of command has one handler, and each kind of change one applier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from shard.core.boxes.sealed import NotLoaded, TagsNotLoaded
from shard.core.changes import Change
from shard.core.outcome import LogEntries, Outcome
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import StreamsError
from streams.protocol.messages.commands import Command

AnyCommand = TypeVar("AnyCommand")
AnyChange = TypeVar("AnyChange")
Observer = Callable[[Change, int], None]


class DoesNotApply(Exception):
    """A change rests on something that is not there. Nothing was changed."""


class Kernel:
    def __init__(self) -> None:
        #: The lsn of the last change that was applied.
        self.lsn = 0
        #: The time of the last change.
        self.last_ms = 0
        self._handlers: dict[type[object], Callable[[object, int, LogEntries], Outcome]] = {}
        self._appliers: dict[type[object], Callable[[object, int], None]] = {}
        self._validators: dict[type[object], Callable[[object], None]] = {}
        #: Called with every change, before and after it is applied. Mostly empty: appends pay for each.
        self.before_apply: list[Observer] = []
        self.after_apply: list[Observer] = []
        self._checks: list[Callable[[], None]] = []
        self._snapshots: list[tuple[Callable[[ShardState], None], Callable[[ShardState], None]]] = []

    # -- registration

    def on_command(
        self, kind: type[AnyCommand], handle: Callable[[AnyCommand, int, LogEntries], Outcome]
    ) -> None:
        """Registers the handler of a kind of command."""
        assert kind not in self._handlers, "REGISTERED"
        self._handlers[kind] = cast(Callable[[object, int, LogEntries], Outcome], handle)

    def on_change(
        self,
        kind: type[AnyChange],
        apply: Callable[[AnyChange, int], None],
        validate: Callable[[AnyChange], None] | None = None,
    ) -> None:
        """Registers the applier of a kind of change, and what raises `DoesNotApply` before it."""
        assert kind not in self._appliers, "REGISTERED"
        self._appliers[kind] = cast(Callable[[object, int], None], apply)
        if validate is not None:
            self._validators[kind] = cast(Callable[[object], None], validate)

    def observe_before(self, kinds: Iterable[type[object]], observe: Observer) -> None:
        """Has changes of these kinds shown to `observe` before they are applied. Others pay nothing."""
        for kind in kinds:
            self._appliers[kind] = _with_observer(observe, self._appliers[kind])

    def on_snapshot(self, take: Callable[[ShardState], None], restore: Callable[[ShardState], None]) -> None:
        """Registers what writes the logged state of a feature into a snapshot, and what takes it back."""
        self._snapshots.append((take, restore))

    def fill_snapshot(self, state: ShardState) -> None:
        """Has every feature write its logged state into a snapshot. Shares nothing with it."""
        for take, _ in self._snapshots:
            take(state)

    def restore_snapshot(self, state: ShardState) -> None:
        """Has every feature take its state back, in the order in which they registered."""
        for _, restore in self._snapshots:
            restore(state)

    def on_check(self, check: Callable[[], None]) -> None:
        """Registers a method of a feature that asserts its named invariants."""
        self._checks.append(check)

    def check(self) -> None:
        """Asserts the named invariants of all features. For tests, and for tools that verify data files."""
        for check in self._checks:
            check()

    # -- commands

    def handle(self, command: Command, now_ms: int) -> Outcome:
        entries: LogEntries = []
        try:
            return self._handlers[type(command)](command, now_ms, entries)
        # Drop tracebacks: they would keep every frame that the exception passed, and what it looked at.
        except (NotLoaded, TagsNotLoaded) as missing:
            return Outcome(entries, None, needs=(missing.with_traceback(None),))
        except StreamsError as error:
            return self.refuse(command, error.with_traceback(None), entries)

    def refuse(self, command: Command, error: StreamsError, entries: LogEntries) -> Outcome:
        """Turns an error of a handler into an outcome."""
        return Outcome(entries, error)

    # -- changes

    def log(self, change: Change, entries: LogEntries) -> int:
        """Applies a change and notes it for the log. Returns its lsn."""
        lsn = self.lsn + 1
        self.apply(change, lsn)
        entries.append((lsn, change))
        return lsn

    def apply(self, change: Change, lsn: int) -> None:
        """Makes a fact true. `lsn` is 0 for facts that are never logged (memory boxes). Raises `DoesNotApply`
        before anything is changed."""
        kind = type(change)
        validate = self._validators.get(kind)
        if validate is not None:
            validate(change)
        for observe in self.before_apply:
            observe(change, lsn)
        if lsn:
            assert lsn == self.lsn + 1, "LSN"
            self.lsn = lsn
        at_ms = getattr(change, "at_ms", 0)
        if at_ms > self.last_ms:
            self.last_ms = at_ms
        self._appliers[kind](change, lsn)
        for observe in self.after_apply:
            observe(change, lsn)


def _with_observer(observe: Observer, apply: Callable[[object, int], None]) -> Callable[[object, int], None]:
    def observe_and_apply(change: object, lsn: int) -> None:
        observe(cast(Change, change), lsn)
        apply(change, lsn)

    return observe_and_apply
