"""Decides when a reply may go and when a record may be seen. Nothing else decides either.

A change is applied, then *logged* (in the file), *durable* (fsynced) and, if it concerns boxes of class
object, *stored* (in the object store). A process death keeps what is logged, a power cut what is durable, and
the loss of the machine what is stored. A reply must not report a change that may yet vanish, so it waits for
a stage of the change that it rests on. That holds for refusals, reads and repeated requests as for writes.

    what a reply rests on      memory      disk        fsync       object
    ─────────────────────      ────────    ────────    ────────    ────────
    records                    at once*    logged**    durable     stored
    a strong read              (refused)   durable     durable     stored
    a copy that arrived        at once*    durable     durable     stored
    a planned move             at once*    durable     durable     stored
    a list                     at once*    logged**    durable     durable
    the box itself             durable     durable     durable     stored

    readers see                memory      disk        fsync       object
    ─────────────────────      ────────    ────────    ────────    ────────
    appended records           at once     logged**    durable     stored
    committed records          at once     durable     durable     stored

    replies about no box       without a store         with a store
    ─────────────────────      ───────────────────     ─────────────────────────────────────────────
    a register                 durable                 stored if registers are, else durable
    an endpoint of a router    durable                 durable
    a transaction              durable                 stored, once anything was ever to be stored
    held rows                  logged                  logged
    a box that is not there    durable                 stored if the deletion of this name is on its way

    A copy inside a shard is logged with its record if both wait for the same stage, otherwise when readers
    see the record (`copyable_seq`).

     *  Records of a memory box are in no log. The box itself is: a reply waits until its creation is durable.
    **  Durable while the disk box has writes that wait for the disk: those above the durable ceiling of its
        reserved seqs, and all behind one that waits, so that none overtakes another.

A list does not wait for the object store: while the store is down, it would hold up lists of all boxes.

Rules of the file
- A wait whose stage is reached already is `NOTHING`: the reply may go, and asks for no sync.
- Waiting records are queued in the order of their lsns, because lsns are given in that order.

Invariants
- STAGES: durable_lsn <= logged_lsn.
- ORDER: a queue of waiting records is ordered by lsn.
- VISIBLE: a box shows only records whose stage is reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple, Protocol

from shard.core.boxes.box import Box
from streams.protocol.messages.forwards import RELAY


class Stage(Enum):
    AT_ONCE = 0
    LOGGED = 1
    DURABLE = 2
    STORED = 3


_AT_ONCE, _LOGGED, _DURABLE, _STORED = Stage


def _by_class(*stages: Stage) -> Mapping[str, Stage]:
    return dict(zip(("memory", "disk", "fsync", "object"), stages, strict=True))


class ReplyKind(Enum):
    """Kinds of replies about a box, and the stage that each waits for: the first table above."""

    RECORDS = ("records", _AT_ONCE, _LOGGED, _DURABLE, _STORED)
    STRONG_READ = ("a strong read", _DURABLE, _DURABLE, _DURABLE, _STORED)
    COPY = ("a copy that arrived", _AT_ONCE, _DURABLE, _DURABLE, _STORED)
    MOVE = ("a planned move", _AT_ONCE, _DURABLE, _DURABLE, _STORED)
    LIST = ("a list", _AT_ONCE, _LOGGED, _DURABLE, _DURABLE)
    BOX = ("the box itself", _DURABLE, _DURABLE, _DURABLE, _STORED)

    def __init__(self, title: str, *stages: Stage) -> None:
        self.title = title
        self.by_class = _by_class(*stages)


#: When readers see records: the second table above.
APPENDED_RECORDS = _by_class(_AT_ONCE, _LOGGED, _DURABLE, _STORED)
COMMITTED_RECORDS = _by_class(_AT_ONCE, _DURABLE, _DURABLE, _STORED)


class Wait(NamedTuple):
    """The condition for a reply: `lsn` is logged, or durable, or stored. 0 = send it at once."""

    lsn: int
    until_durable: bool = False
    until_uploaded: bool = False


NOTHING = Wait(0)


class ObjectStoreState(Protocol):
    """The state of the object store that this module reads."""

    @property
    def position(self) -> int:
        """All that must be in the store up to this lsn is there, and durable."""

    @property
    def is_on(self) -> bool:
        """True if anything is, or ever was, to be stored."""

    @property
    def registers(self) -> bool:
        """True if changes of registers count only when they are stored."""

    def deletion_of(self, name: str) -> int:
        """The lsn of the deletion of this box if it is on its way to the store, else 0."""


class _WaitingRecords(NamedTuple):
    """Readers may see the box up to `seq` when `lsn` has reached the stage of the queue."""

    lsn: int
    box: Box
    seq: int
    ts: int = 0


class Durability:
    def __init__(self, *, on_shown: Callable[[Box], bool]) -> None:
        """`on_shown` is called with a box whose readers see more. It returns True if the relay has work."""
        self._on_shown = on_shown
        self._store: ObjectStoreState | None = None
        self.logged_lsn = 0
        self.durable_lsn = 0
        #: The last deletion of a box.
        self._deleted_lsn = 0
        self._until_logged: deque[_WaitingRecords] = deque()
        self._until_durable: deque[_WaitingRecords] = deque()
        self._until_stored: deque[_WaitingRecords] = deque()
        #: Reserved seqs of disk boxes that are not durable yet.
        self._reservations: deque[_WaitingRecords] = deque()

    def __repr__(self) -> str:
        return f"<Durability {self.durable_lsn}/{self.logged_lsn}>"

    def use_store(self, store: ObjectStoreState) -> None:
        self._store = store

    # -- replies

    def wait_for(self, answer: ReplyKind, box: Box, lsn: int) -> Wait:
        """Return the wait of a reply about a box that depends on the change at `lsn`."""
        stage = answer.by_class[box.config.durability]
        if stage is _LOGGED:
            if box.volatile.staged_durable_lsn > self.durable_lsn:
                stage = _DURABLE
            else:
                return NOTHING if lsn <= self.logged_lsn else Wait(lsn)
        elif stage is _AT_ONCE:
            stage, lsn = _DURABLE, box.config_lsn
        return self.wait_until(stage, lsn)

    def wait_until(self, stage: Stage, lsn: int) -> Wait:
        """Return the wait of a reply that must not be sent before `lsn` has reached this stage."""
        if stage is _STORED:
            assert self._store is not None, "STORE"
            return NOTHING if lsn <= self._store.position else Wait(lsn, True, True)
        if stage is _DURABLE:
            return NOTHING if lsn <= self.durable_lsn else Wait(lsn, True)
        return NOTHING if stage is _AT_ONCE or lsn <= self.logged_lsn else Wait(lsn)

    def is_over(self, wait: Wait) -> bool:
        """Return True if a wait has reached its stage."""
        if wait.until_uploaded:
            assert self._store is not None, "STORE"
            return wait.lsn <= self._store.position
        return wait.lsn <= (self.durable_lsn if wait.until_durable else self.logged_lsn)

    def wait_for_config(self, lsn: int, *classes: str) -> Wait:
        """Return the wait of a reply that describes a box. `classes`: its durability before and after."""
        stages = {ReplyKind.BOX.by_class[each] for each in classes}
        return self.wait_until(_STORED if _STORED in stages else _DURABLE, lsn)

    def wait_for_commit(self, lsn: int, boxes: Iterable[Box]) -> Wait:
        """Return the wait of the reply to a commit that wrote to these boxes."""
        stages = {COMMITTED_RECORDS[box.config.durability] for box in boxes}
        return self.wait_until(_STORED if _STORED in stages else _DURABLE, lsn)

    def wait_for_transaction(self, lsn: int) -> Wait:
        """Return the wait of a reply about a transaction's result. It may have written to object boxes."""
        is_on = self._store is not None and self._store.is_on
        return self.wait_until(_STORED if is_on else _DURABLE, lsn)

    def wait_for_held_rows(self, lsn: int) -> Wait:
        return self.wait_until(_LOGGED, lsn)

    def wait_for_register(self, lsn: int) -> Wait:
        """Return the wait of a reply about routers, basins or access tokens."""
        in_store = self._store is not None and self._store.registers
        return self.wait_until(_STORED if in_store else _DURABLE, lsn)

    def wait_for_endpoint(self, lsn: int) -> Wait:
        """Return the wait of a reply about endpoints of routers."""
        return self.wait_until(_DURABLE, lsn)

    def wait_for_absence(self, name: str = "") -> Wait:
        """Return the wait of a reply that this box does not exist; without a name, of a list of boxes."""
        deletion_lsn = self._store.deletion_of(name) if self._store is not None and self._store.is_on else 0
        if deletion_lsn:
            return self.wait_until(_STORED, deletion_lsn)
        return self.wait_until(_DURABLE, self._deleted_lsn)

    def wait_for_list(self, boxes: Iterable[tuple[Box, int]]) -> Wait:
        """Return the wait of a reply that lists these boxes only, each with the lsn it depends on."""
        lsn = self.wait_for_absence().lsn
        for box, rests_on in boxes:
            lsn = max(lsn, self.wait_for(ReplyKind.LIST, box, rests_on).lsn)
        return Wait(lsn, True) if lsn else NOTHING

    # -- records

    def show_append(self, box: Box, lsn: int, last_seq: int, last_ts: int) -> Stage:
        """Queues an append for the readers of its box. Returns the stage that its reply waits for too."""
        stage = APPENDED_RECORDS[box.config.durability]
        if stage is _LOGGED:
            if (
                last_seq <= box.volatile.reserved_durable_seq
                and box.volatile.staged_durable_lsn <= self.durable_lsn
            ):
                self._until_logged.append(_WaitingRecords(lsn, box, last_seq, last_ts))
                return stage
            stage = _DURABLE
        if stage is _DURABLE:
            box.volatile.staged_durable_lsn = lsn
            self._until_durable.append(_WaitingRecords(lsn, box, last_seq, last_ts))
        return stage  # records of object boxes are queued when they are applied, in recovery too

    def show_commit(self, box: Box, lsn: int) -> None:
        """Queues the rows of a commit, which are at the end of the box, for its readers. Rows of object boxes
        are queued when they are rendered (`Txns._ship`)."""
        if COMMITTED_RECORDS[box.config.durability] is _DURABLE:
            box.volatile.staged_durable_lsn = lsn
            self._until_durable.append(_WaitingRecords(lsn, box, box.log.head_seq, box.log.last_ts))

    def copyable_seq(self, source: Box, dest: Box) -> int:
        """Return the last seq of a source whose copy into another box of this shard may be logged now.

        No reader may see a copy before readers of the source can see the record. In the log the copy follows
        its record. So a copy may be logged with its record if both wait for the same stage. An earlier stage
        would show the copy first. A later one would have the reply to the record wait for a sync that only
        the copy needs. Then the copy follows when the record is visible. It also does if the record waits for
        the object store, which may get the boxes in another order.
        """
        log = source.log
        if log.visible_seq == log.head_seq or source.is_object or log.tail.has_unrendered:
            return log.visible_seq
        if self._shows_when_logged(source):
            is_same_stage = dest.is_disk and dest.volatile.staged_durable_lsn <= self.durable_lsn
        else:
            is_same_stage = APPENDED_RECORDS[dest.config.durability] in (_DURABLE, _STORED)
        return log.head_seq if is_same_stage else log.visible_seq

    def _shows_when_logged(self, box: Box) -> bool:
        """Return True if readers see all records of this box when they are logged."""
        volatile = box.volatile
        return (
            APPENDED_RECORDS[box.config.durability] is _LOGGED
            and box.log.head_seq <= volatile.reserved_durable_seq
            and volatile.staged_durable_lsn <= self.durable_lsn
        )

    def show_when_stored(self, box: Box, lsn: int, seq: int, ts: int) -> None:
        self._until_stored.append(_WaitingRecords(lsn, box, seq, ts))

    @property
    def shows_when_logged(self) -> bool:
        """True if readers get something when what is applied now is logged."""
        return bool(self._until_logged)

    # -- progress

    def note_deletion(self, lsn: int) -> None:
        self._deleted_lsn = lsn

    def note_reservation(self, box: Box, lsn: int) -> None:
        """The seqs that this disk box has reserved may be used without waiting when `lsn` is durable."""
        box.volatile.reserved_lsn = lsn
        self._reservations.append(_WaitingRecords(lsn, box, box.reserved_seq))

    def on_logged(self, lsn: int) -> list[str]:
        """Notes that everything up to `lsn` is in the file. Returns the boxes whose readers may see more."""
        self.logged_lsn = max(self.logged_lsn, lsn)
        return self._show(self._until_logged, lsn)

    def on_durable(self, lsn: int) -> list[str]:
        """Notes that everything up to `lsn` is on the disk. Returns the boxes whose readers may see more."""
        self.logged_lsn = max(self.logged_lsn, lsn)
        self.durable_lsn = max(self.durable_lsn, lsn)
        reservations = self._reservations
        while reservations and reservations[0].lsn <= lsn:
            reservation = reservations.popleft()
            volatile = reservation.box.volatile
            if reservation.lsn == volatile.reserved_lsn:  # a later reservation may be smaller
                volatile.reserved_durable_seq = reservation.seq
        return self._show(self._until_logged, lsn) + self._show(self._until_durable, lsn)

    def on_stored(self, lsn: int) -> list[str]:
        """Notes that everything up to `lsn` is in the store. Returns the boxes whose readers may see more."""
        return self._show(self._until_stored, lsn)

    def _show(self, waiting: deque[_WaitingRecords], lsn: int) -> list[str]:
        names: list[str] = []
        while waiting and waiting[0].lsn <= lsn:
            entry = waiting.popleft()
            log = entry.box.log
            if entry.seq > log.visible_seq:  # else the box went to memory meanwhile, where all is shown
                log.show(entry.seq, entry.ts)
                names.append(entry.box.name)
                if entry.box.outboxes and self._on_shown(entry.box):
                    names.append(RELAY)
        return names

    def check(self) -> None:
        """Asserts the invariants named above. For tests."""
        assert self.durable_lsn <= self.logged_lsn, "STAGES"
        for waiting in (self._until_logged, self._until_durable, self._until_stored, self._reservations):
            lsns = [entry.lsn for entry in waiting]
            assert lsns == sorted(lsns), "ORDER"
