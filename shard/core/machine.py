"""The shard as a pure state machine: handle, apply, logged, durable, tick.

    handle(command, now_ms) ──► Outcome(changes to log, reply, what the reply waits for, boxes to wake)
    apply(change, lsn)      the only code that mutates; handle uses it, recovery replays through it
    logged(lsn)/durable(lsn)──► boxes whose readers may see more now; `uploading.moved` likewise
    tick(now_ms)            what time alone brings about (expiry); next_deadline_ms() says when to call

Time comes in as an argument. There is no clock, file, socket, randomness or lock here.

Rules of the file
- Dispatch and bookkeeping of positions only; what a box does is in `boxes/box.py`.
- Every change gets the next lsn when it is applied, and the engine logs them in that order. Changes of a
  memory box are applied under lsn 0 and never leave the machine.
- A reply waits for the same moment as its write, and so does a refusal or a read that rests on something
  staged: it would otherwise tell of what may yet vanish.

Invariants
- LSN: changes are applied in lsn order without a gap.
- NAMES: `boxes` and `generations` hold the same boxes.
- VISIBLE: a box's visible_seq only covers records whose promise is kept.
- UNSEALED: `unsealed` holds exactly the stored boxes with batches in their tails.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sortedcontainers import SortedDict

from shard.core import changes
from shard.core.boxes.box import RESERVE_SEQS, Box, stand_in
from shard.core.boxes.groups import GroupHandlers
from shard.core.boxes.key_expiry import KeyExpiry
from shard.core.boxes.scanning import Scanning
from shard.core.boxes.sealed import UNFINISHED, NotLoaded, Segment, TagsNotLoaded
from shard.core.boxes.unsealed import Unsealed
from shard.core.capture import Capture
from shard.core.changes import Change, SegmentFacts, ShardState
from shard.core.durability import Answer, Durability, Stage
from shard.core.limits.quota import Quota
from shard.core.limits.usage import Usage
from shard.core.objects.replication import OPENING, Uploading
from shard.core.outcome import Made as Made
from shard.core.outcome import Missing as Missing
from shard.core.outcome import Outcome as Outcome
from shard.core.outcome import reply_after
from shard.core.queues.jobs import Jobs
from shard.core.queues.queue import ADVANCE_MAX, Queue
from shard.core.queues.record_moves import Moves
from shard.core.routers.forwarding import Forwarding
from shard.core.routers.registry import Routers
from shard.core.s2.basins import Basins
from shard.core.s2.streams import Streams
from shard.core.s2.tokens import Tokens
from shard.core.transactions.commits import Commit
from shard.core.transactions.handlers import Committing
from shard.core.transactions.state import Txns
from shard.core.transactions.unrendered import NotRendered, UnrenderedRows
from shard.core.watch.pages import page_for
from shard.core.watch.sessions import Sessions
from streams.protocol import commands, forwards
from streams.protocol.boxes import DURABLE, BoxConfig, BoxPatch, merge
from streams.protocol.commands import Command, Reply
from streams.protocol.errors import (
    BoxNotEmpty,
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    NotFound,
    StreamsError,
    Throttled,
)
from streams.protocol.key_limits import AccountsUse, ExchangeUse
from streams.protocol.records import Batch
from streams.protocol.reports import TallyReport
from streams.protocol.streams import AppendStream

#: Boxes looked at in one tick, half a millisecond of work; the rest are due in the next one, at once. So are
#: jobs beyond `ADVANCE_MAX` whose leases or delays are over. After a
#: burst of writes to many disk boxes all of them give back what they reserved at about the same time.
TICK_BOXES_MAX = 64

#: A disk box that has not been written to for this long gives back the seqs it has reserved, so that a power
#: cut does not make it tell of a loss that cannot have happened.
RESERVATION_IDLE_MS = 5_000

#: When to look again at a box whose oldest record is being fetched because it may have expired.
FETCH_MS = 100

#: More than there can be shards. With it a generation stays below 2**53 until the year 2248.
GENERATIONS_PER_MS = 1024

#: Deleted names remembered because their box must not come back by itself. Beyond it the oldest is forgotten.
NOT_RECREATED_MAX = 100_000

#: Idempotency keys remembered per shard. One costs about 320 bytes, so this is at most about 320 MB; at the
#: default window of two minutes it allows 8,000 keyed writes a second. Beyond it, keyed writes are refused
#: until older keys lapse: forgetting a key early would break a promise silently.
KEYS_MAX = 1_000_000


class Wanted(NamedTuple):
    """What a snapshot names and does not hold."""

    #: By the lsn of its append: the box that gets the batch back through `log.hydrate`.
    batches: dict[int, Box]
    #: To be given back through `log.attach`.
    segments: list[tuple[Box, SegmentFacts]]
    #: The lsns of what is held for transactions: to be given back through `txns.give_back`.
    held: set[int]


class Machine:
    def __init__(
        self,
        *,
        boxes_max: int = 0,
        bytes_max: int = 0,
        routers_max: int = 0,
        sessions_max: int = 0,
        shard: int = 0,
        due_records: int = 10_000,
        due_bytes: int = 64 << 20,
        txn_bytes_max: int = 128 << 20,
        txn_ttl_ms: int = 3_600_000,
        has_store: bool = False,
        streams_in_store: bool = False,
        backlog_bytes_max: int = 64 << 20,
    ) -> None:
        self.boxes: SortedDict[str, Box] = SortedDict()
        self.generations: dict[int, Box] = {}
        self.lsn = 0
        self.durability = Durability(on_shown=self._on_shown)
        self.last_generation = 0
        self.boxes_max = boxes_max
        self._quota = Quota(bytes_max) if bytes_max else None
        self.shard = shard
        #: Stored boxes with batches that are not sealed.
        self.unsealed = Unsealed()
        #: Those of them that have as much as a segment should.
        self.due: dict[int, Box] = {}
        self.due_records, self.due_bytes = due_records, due_bytes
        #: Boxes in whose segments something has died, or to which one has come.
        self.dented: dict[int, Box] = {}
        #: Boxes to which a segment has come: they may have one to spare for the cold store.
        self.movable: dict[int, Box] = {}
        #: Boxes with `compact: "tag"` that were written to since they were last looked at.
        self.compactable: dict[int, Box] = {}
        #: Names of deleted boxes that said `auto_create: false`, oldest first.
        self.not_recreated: dict[str, None] = {}
        self.boot_id = ""
        self.stopped_clean = True
        #: The time of the last change.
        self.last_ms = 0
        self.sessions = Sessions(sessions_max)
        #: What keys with limits use here.
        self.usage = Usage(self)
        #: What was done in this life, for whoever looks on. Nothing here asks it.
        self.tally = TallyReport()
        self._keys = 0
        self._key_expiry = KeyExpiry()
        #: Snapshots that are being taken.
        self._captures: list[Capture] = []
        # (when, generation): when a box has something to expire. Entries may be out of date; a tick looks.
        self._deadlines: list[tuple[int, int]] = []
        self._deadline_of: dict[int, int] = {}
        self.uploading = Uploading(
            self, is_enabled=has_store, registers=streams_in_store, backlog_bytes_max=backlog_bytes_max
        )
        self.durability.use_store(self.uploading)
        self.forwarding = Forwarding(self)
        self.routers = Routers(self, routers_max)
        self._handlers: dict[type[Any], Callable[[Any, int, Made], Outcome]] = {
            commands.Append: self._append,
            commands.Diff: self._diff,
            commands.Follow: self._follow,
            commands.PutSession: self._session,
            commands.TakeSession: self._session,
            commands.KeepSession: self._session,
            commands.GetState: self._get_state,
            commands.PutBox: self._put_box,
            commands.ListBoxes: self._list_boxes,
            commands.DeleteBox: self._delete_box,
            commands.GetRecord: self._get_record,
            commands.GetTail: self._get_tail,
            commands.DeleteRecords: self._delete_records,
            commands.SetFence: self._set_fence,
            ExchangeUse: self._exchange_use,
            **self.forwarding.handlers,
            **self.routers.handlers,
        }
        self._appliers: dict[type[Any], Callable[[Any, int], None]] = {
            changes.BatchAppended: self._apply_appended,
            changes.BoxCreated: self._apply_created,
            changes.BoxConfigured: self._apply_configured,
            changes.BoxDeleted: self._apply_deleted,
            changes.RecordsEvicted: self._apply_evicted,
            changes.RecordsDeleted: self._apply_records_deleted,
            changes.TokenFenced: self._apply_fenced,
            changes.SeqsReserved: self._apply_reserved,
            changes.SeqsLost: self._apply_lost,
            changes.SegmentSealed: self._apply_sealed,
            changes.SegmentsReplaced: self._apply_replaced,
            changes.SegmentMoved: self._apply_moved,
            changes.BatchKept: self._apply_kept,
            changes.BoxRestated: self._apply_restated,
            changes.ShardStarted: self._apply_started,
            changes.ShardStopped: self._apply_stopped,
            changes.ShardRested: self._apply_rested,
            **self.uploading.appliers,
            **self.forwarding.appliers,
            **self.routers.appliers,
        }
        self._jobs = Jobs(self)
        self.moves = Moves(self)
        self.txns = Txns(self, bytes_max=txn_bytes_max, ttl_ms=txn_ttl_ms)
        self._committing = Committing(self)
        self.basins = Basins(self)
        self.tokens = Tokens(self)
        self.streams = Streams(self)
        for part in (
            self._jobs,
            self.moves,
            GroupHandlers(self),
            Scanning(self),
            self._committing,
            self.basins,
            self.tokens,
            self.streams,
        ):
            self._handlers |= part.handlers
            self._appliers |= part.appliers

    def __repr__(self) -> str:
        return f"<Machine {len(self.boxes)} boxes, lsn {self.durable_lsn}/{self.logged_lsn}/{self.lsn}>"

    # -- the surface

    def handle(self, command: Command, now_ms: int) -> Outcome:
        made: Made = []
        try:
            return self._handlers[type(command)](command, now_ms, made)
        # What is kept of an exception is what it says. With its traceback it would hold the frames that it
        # went through, all they looked at, and through them itself.
        except (NotLoaded, TagsNotLoaded) as missing:
            return Outcome(made, None, needs=(missing.with_traceback(None),))
        except StreamsError as error:
            return self._refuse(command, error.with_traceback(None), made)

    def apply(self, change: Change, lsn: int) -> None:
        """Makes a fact true. `lsn` is 0 for facts that are never logged (memory boxes)."""
        for capture in self._captures:
            capture.before(change)
        if lsn:
            assert lsn == self.lsn + 1, "LSN"
            self.lsn = lsn
        at_ms = getattr(change, "at_ms", 0)
        if at_ms > self.last_ms:
            self.last_ms = at_ms
        if self.uploading.is_on or type(change) in OPENING:
            self.uploading.note(change, lsn)
        self._appliers[type(change)](change, lsn)
        if self.usage.is_on:
            self.usage.note(change)

    def logged(self, lsn: int) -> list[str]:
        """Everything up to `lsn` is in the file. Returns the boxes whose readers may see more."""
        return self.durability.logged(lsn)

    def durable(self, lsn: int) -> list[str]:
        """Everything up to `lsn` is on the disk. Returns the boxes whose readers may see more."""
        shown = self.durability.durable(lsn)
        if self.moves.durable(lsn):
            shown.append(forwards.CARRIER)
        return shown

    @property
    def logged_lsn(self) -> int:
        return self.durability.logged_lsn

    @property
    def durable_lsn(self) -> int:
        return self.durability.durable_lsn

    def next_deadline_ms(self) -> int | None:
        soonest = self._next_box_ms()
        for when in (
            self.forwarding.outboxes.next_retry_ms(),
            self.txns.next_expiry_ms(),
            self._key_expiry.next_ms(),
        ):
            if when is not None and (soonest is None or when < soonest):
                soonest = when
        return soonest

    def _next_box_ms(self) -> int | None:
        while self._deadlines:
            when, generation = self._deadlines[0]
            if self._deadline_of.get(generation) == when:
                return when
            heapq.heappop(self._deadlines)
        return None

    def tick(self, now_ms: int) -> Outcome:
        made: Made = []
        woken: list[str] = []
        needs: list[Missing] = []
        jobs_back = 0
        for _ in range(TICK_BOXES_MAX):
            when = self._next_box_ms()
            if when is None or when > now_ms:
                break
            _, generation = heapq.heappop(self._deadlines)
            del self._deadline_of[generation]
            box = self.generations[generation]
            try:
                self._expire(box, now_ms, made)
            except NotLoaded as missing:
                needs.append(missing.with_traceback(None))
                self._watch_at(box, now_ms + FETCH_MS)
                continue
            back = box.queue.advance(now_ms) if box.queue is not None else 0
            if back:
                woken.append(box.name)
            jobs_back += back
            idle_at = self._idle_ms(box)
            if idle_at is not None and idle_at <= now_ms:
                self._log(changes.SeqsReserved(box.generation, box.log.head_seq), made)
            gone_at = box.gone_ms()
            if gone_at is not None and gone_at <= now_ms:
                self._log(changes.BoxDeleted(box.generation), made)
                woken.append(box.name)
            else:
                self._watch(box)
            if jobs_back >= ADVANCE_MAX:  # more may be due at once; others come first
                break
        self._keys -= self._key_expiry.step(self.generations, now_ms, self._on_keys_dropped)
        self._committing.tick(now_ms, made)
        if self.forwarding.outboxes.retry(now_ms):
            woken.append(forwards.CARRIER)
        return Outcome(made, None, wakes=tuple(woken), needs=tuple(needs))

    def start(self, *, boot_id: str, now_ms: int, cache_survived: bool = True) -> Outcome:
        """Begins a life of the shard, after recovery: settles what the last one left open. `boot_id` names
        the page cache, and `cache_survived` is False if it may be another in spite of the name."""
        made: Made = []
        if not self.stopped_clean and (self.boot_id != boot_id or not cache_survived):
            # The page cache is gone. Records of disk boxes that were acked but not yet synced may be
            # gone, and their seqs must not be given to others. After a mere process death they are not
            # gone: a disk record is acked when it is in the file, and the file outlives the process.
            for box in list(self.boxes.values()):
                if box.is_disk and box.reserved_seq > box.log.head_seq:
                    lost = changes.SeqsLost(box.generation, box.log.head_seq + 1, box.reserved_seq)
                    self._stage(lost, box, made)
        self._log(changes.ShardStarted(boot_id, now_ms, max(0, self.last_ms - now_ms)), made)
        self.tally = TallyReport()
        for box in self.boxes.values():
            self._watch(box)
            self.forwarding.note(box)
            self.moves.note(box)
        self.basins.lsn = self.tokens.lsn = self.lsn
        self.routers.lsn = self.forwarding.ties_lsn = self.lsn
        self.forwarding.outboxes.shard_life = self.lsn
        self.uploading.start()
        return Outcome(made, None, self.lsn, True)

    def stop(self, now_ms: int) -> Outcome:
        """Ends a life of the shard in order."""
        made: Made = []
        for box in self.boxes.values():
            if box.queue is not None and box.queue.jobs and not (box.is_memory or box.config.leases_durable):
                self._jobs.restate(box, made)
        self._log(changes.ShardStopped(now_ms), made)
        return Outcome(made, None, self.lsn, True)

    def rest(self, now_ms: int) -> Outcome:
        """Gives the next snapshot another lsn than the last one has, when nothing else does."""
        made: Made = []
        self._log(changes.ShardRested(now_ms), made)
        return Outcome(made, None)

    def upkeep(self, change: changes.UpkeepChange) -> Outcome:
        """Makes a change that background work has come to. Of a box in memory the log is told nothing."""
        made: Made = []
        self._stage(change, self.generations[change.generation], made)
        return Outcome(made, None)

    def give_up(self, command: Command) -> None:
        """Drops what was found for a command that is answered with an error, and not handled again."""
        box = self.boxes.get(getattr(command, "box", ""))
        if box is not None and box.deletion is not None and box.deletion.command is command:
            box.end_deletion()

    def let_moves_go(self, now_ms: int) -> Outcome:
        """Ends a hold of moves (`queues/record_moves.py`)."""
        made: Made = []
        freed = self.moves.let_go(now_ms, made)
        return Outcome(made, None, wakes=(forwards.CARRIER, *freed))

    def keep_held(self, pinned_lsn: int) -> Outcome | None:
        """Logs a chunk that is held for a transaction again, so that the log up to `pinned_lsn` is not needed
        for it. None when there is nothing to do."""
        made: Made = []
        kept = self.txns.to_keep(pinned_lsn)
        if kept is None:
            return None
        self._log(kept, made)
        return Outcome(made, None)

    def keep_rendered(self, commit: Commit, batches: Sequence[tuple[int, Batch]], chunks: int = 0) -> Outcome:
        """Logs batches of a commit that were rendered; with `chunks`, that so many chunks are done with."""
        made: Made = []
        self._committing.keep_rendered(commit, batches, made)
        if chunks:
            self._committing.end_step(commit, chunks, made)
        return Outcome(made, None)

    # -- helpers of handlers, those of other features included

    def _log(self, change: Change, made: Made) -> int:
        lsn = self.lsn + 1
        self.apply(change, lsn)
        made.append((lsn, change))
        return lsn

    def _stage(self, change: Change, box: Box, made: Made) -> int:
        """Applies a change of `box` and notes it for the log, unless the box lives in memory alone."""
        if box.is_memory:
            self.apply(change, 0)
            return 0
        return self._log(change, made)

    def _require(self, name: str) -> Box:
        box: Box | None = self.boxes.get(name)
        if box is None:
            raise BoxNotFound(
                f"box {name} does not exist; create it with PUT or by appending to it", box=name
            )
        return box

    def _found(self, name: str, now_ms: int, made: Made) -> Box:
        """The box, with what has expired evicted."""
        box = self._require(name)
        self._expire(box, now_ms, made)
        return box

    def _expire(self, box: Box, now_ms: int, made: Made) -> None:
        if box.stream is not None:
            self.streams.expire(box, box.stream, now_ms, made)
        if box.config.ttl_ms:
            floor = box.floor_for_ttl(now_ms)
            if floor:
                self._stage(box.plan_eviction(floor, "ttl", now_ms), box, made)

    def _idle_ms(self, box: Box) -> int | None:
        """When a disk box may give back what it has reserved."""
        if not box.is_disk or box.reserved_seq <= box.log.head_seq:
            return None
        return box.last_append_ms + RESERVATION_IDLE_MS

    def _watch(self, box: Box) -> None:
        """Sees to it that a tick comes when this box needs one."""
        due_ms = box.queue.next_due_ms() if box.queue is not None else None
        if box.stream is not None:
            due_ms = box.stream.due_ms()
        candidates = (box.expiry_ms(), self._idle_ms(box), box.gone_ms(), due_ms)
        times = [when for when in candidates if when is not None]
        if not times:
            return
        self._watch_at(box, min(times))

    def _watch_at(self, box: Box, when: int) -> None:
        if self._deadline_of.get(box.generation, when + 1) > when:
            self._deadline_of[box.generation] = when
            heapq.heappush(self._deadlines, (when, box.generation))

    @property
    def shows_when_logged(self) -> bool:
        """True if readers get something when what is staged is logged."""
        return self.durability.shows_when_logged

    def _on_shown(self, box: Box) -> bool:
        return self.forwarding.note(box)

    def _answer(self, box: Box, reply: Reply | StreamsError, made: Made, lsn: int) -> Outcome:
        """A reply that rests on records of this box, up to the change `lsn`."""
        return reply_after(self.durability.wait_for(Answer.RECORDS, box, lsn), made, reply)

    def when_registered(self, reply: Reply | StreamsError, lsn: int, made: Made) -> Outcome:
        """A reply about a register (of routers, basins, access tokens), whose last change is `lsn`."""
        return reply_after(self.durability.wait_for_register(lsn), made, reply)

    def _wait(self, made: Made, not_before_ms: int = 0) -> Outcome:
        """Nothing to answer yet."""
        return Outcome(made, None, not_before_ms=not_before_ms)

    def _refuse(self, command: Command, error: StreamsError, made: Made) -> Outcome:
        """A refusal waits until what it rests on cannot vanish: the box's last change, or its deletion."""
        box = self.boxes.get(getattr(command, "box", ""))
        if box is not None:
            return self._answer(box, error, made, box.last_lsn)
        return self._answer_absent(getattr(command, "box", ""), error, made)

    def _answer_absent(self, name: str, reply: Reply | StreamsError, made: Made) -> Outcome:
        """A reply that says of a box that it is not there."""
        return reply_after(self.durability.wait_for_absence(name), made, reply)

    # -- limits

    def require_room(self, account: str, size: int, now_ms: int, *, counts: bool = True) -> None:
        """Raises `Throttled` when `size` bytes more of live records would be too many, for the shard or for
        the key. They count from now on, unless the caller only asks."""
        if account:
            self.usage.require(account, "stored_bytes", size)
        if self._quota is not None:
            self._quota.check(self.boxes.values(), size, now_ms, counts=counts)

    def _exchange_use(self, command: ExchangeUse, now_ms: int, made: Made) -> Outcome:
        return Outcome(made, AccountsUse(self.usage.exchange(command.accounts, command.elsewhere)))

    def _on_keys_dropped(self, generation: int) -> None:
        if self.usage.is_on:
            self.usage.recount(generation)

    # -- boxes

    def plan_generation(self, now_ms: int) -> int:
        """The number of a box that is about to be made, if there is room for one."""
        if self.boxes_max and len(self.boxes) >= self.boxes_max:
            raise Throttled(
                f"there are {len(self.boxes)} boxes already; delete some or raise the limit", limit="boxes"
            )
        return self._next_generation(now_ms)

    def _plan_box(self, name: str, patch: BoxPatch | None, now_ms: int) -> changes.BoxCreated:
        generation = self.plan_generation(now_ms)
        config = merge(BoxConfig(), patch or BoxPatch(), box=name, exists=False)
        self._check_class(config, None)
        return changes.BoxCreated(
            generation, name, config, now_ms, RESERVE_SEQS if config.durability == "disk" else 0
        )

    def _check_class(self, config: BoxConfig, box: Box | None) -> None:
        if config.durability != "object" or self.uploading.is_enabled or (box is not None and box.is_object):
            return
        raise InvalidRequest(
            "durability: this server has no object store for boxes of class object; give it one with "
            "STREAMS_COLD_DIR",
            field="durability",
        )

    def _next_generation(self, now_ms: int) -> int:
        """A number that no box of any shard has had: shards count in different residues of one modulus, and
        take what moved to them into account."""
        after = self.last_generation + 1
        after += (self.shard - after) % GENERATIONS_PER_MS
        return max(now_ms * GENERATIONS_PER_MS + self.shard, after)

    def _put_box(self, command: commands.PutBox, now_ms: int, made: Made) -> Outcome:
        box = self.boxes.get(command.box)
        if box is None:
            if command.account:
                self.usage.require(command.account, "boxes")
            created = self._plan_box(command.box, command.patch, now_ms)
            lsn = self._log(created, made)
            put = commands.BoxPut(command.box, True, created.config)
            return reply_after(self.durability.wait_for_config(lsn, created.config.durability), made, put)
        self._expire(box, now_ms, made)  # by the old TTL: what has expired stays expired
        config = merge(box.config, command.patch, box=command.box, exists=True)
        self._check_class(config, box)
        old_class = box.config.durability
        if config != box.config:
            self._configure(box, config, made)
        # Also when nothing changes: a crash may have kept an earlier config and lost what it brought about.
        floor = box.floor_for_caps()
        if floor:
            self._stage(box.plan_eviction(floor, "cap", now_ms), box, made)
        self._expire(box, now_ms, made)
        self._watch(box)
        lsn = max(box.config_lsn, made[-1][0] if made else 0)
        wait = self.durability.wait_for_config(lsn, old_class, config.durability)
        wakes = (box.name,) if box.is_memory else ()
        return reply_after(wait, made, commands.BoxPut(command.box, False, config), wakes)

    def _configure(self, box: Box, config: BoxConfig, made: Made) -> None:
        was_memory = box.is_memory
        if was_memory and box.log.tail.has_unrendered:
            raise NotRendered(box.generation)
        leases_durable = box.config.leases_durable
        if was_memory and config.durability != "memory":
            self._log(changes.BoxRestated(box.facts(whole=True)), made)
            for batch in list(box.log.tail):
                if batch.dead < batch.count:
                    self._log(changes.BatchKept(box.generation, batch), made)
        into_disk = config.durability == "disk" and not box.is_disk
        reserved_seq = box.log.head_seq + RESERVE_SEQS if into_disk else 0
        self._log(changes.BoxConfigured(box.generation, config, reserved_seq), made)
        begins = config.leases_durable and (was_memory or not leases_durable) and not box.is_memory
        if begins and box.queue is not None:
            self._jobs.restate(box, made)

    def _get_state(self, command: commands.GetState, now_ms: int, made: Made) -> Outcome:
        box = self._found(command.box, now_ms, made)
        if command.touch:
            box.last_read_ms = now_ms
        log = box.log
        count, size = log.visible_totals()
        reply = commands.BoxState(
            box=box.name,
            type=box.config.type,
            head_seq=log.visible_seq,
            earliest_seq=box.visible_earliest_seq,
            next_seq=log.visible_seq + 1,
            generation=box.generation,
            count=count,
            bytes=size,
            config=box.config,
            effective_priority=box.effective_priority(now_ms),
            last_write_ts=log.visible_ts or None,
            last_read_ts=box.last_read_ms,
            fencing_token=box.fencing_token,
            queue=_queue_totals(box.queue, count, now_ms) if box.queue is not None else None,
        )
        return self._answer(box, reply, made, box.floor_lsn)

    def _list_boxes(self, command: commands.ListBoxes, now_ms: int, made: Made) -> Outcome:
        page: list[dict[str, Any]] = []
        more = False
        listed: list[tuple[Box, int]] = []
        start = max(command.prefix, command.after)
        for name in self.boxes.irange(minimum=start):
            if not name.startswith(command.prefix):
                break
            if name <= command.after:
                continue
            if len(page) == command.limit:
                more = True
                break
            box = self.boxes[name]
            try:
                self._expire(box, now_ms, made)
            except NotLoaded:
                pass  # a tick will see to it; a list does not wait for payloads
            listed.append((box, box.floor_lsn))
            page.append(self._listed(box, now_ms))
        return reply_after(self.durability.wait_for_list(listed), made, commands.BoxPage(page, more))

    def _listed(self, box: Box, now_ms: int) -> dict[str, Any]:
        count, size = box.log.visible_totals()
        return {
            "box": box.name,
            "type": box.config.type,
            "head_seq": box.log.visible_seq,
            "earliest_seq": box.visible_earliest_seq,
            "count": count,
            "bytes": size,
            "durable": box.config.durability in DURABLE,
            "durability": box.config.durability,
            "effective_priority": box.effective_priority(now_ms),
        }

    def _delete_box(self, command: commands.DeleteBox, now_ms: int, made: Made) -> Outcome:
        box = self.boxes.get(command.box)
        if box is None:
            return self._answer_absent(command.box, commands.BoxGone(command.box, False, []), made)
        self._expire(box, now_ms, made)
        if command.if_empty and box.log.count:
            raise BoxNotEmpty(f"{box.name} still holds {box.log.count} records", count=box.log.count)
        origins = self.forwarding.routers_of(box)
        lsn = self._log(changes.BoxDeleted(box.generation), made)
        gone = commands.BoxGone(command.box, True, origins)
        wait = self.durability.wait_for_config(lsn, box.config.durability)
        return reply_after(wait, made, gone, (command.box,))

    # -- records

    def _append(self, command: commands.Append, now_ms: int, made: Made) -> Outcome:
        box = self.boxes.get(command.box)
        created: changes.BoxCreated | None = None
        if box is None:
            if command.account:
                self.usage.require(command.account, "boxes")
            created, box = self._plan_created(command, now_ms)
        else:
            if command.idempotency_key is not None:
                known = box.known_key(command.idempotency_key, now_ms)
                if known is not None:
                    reply = commands.Appended(
                        box.name,
                        known.first_seq,
                        known.last_seq,
                        max(known.last_seq, box.log.visible_seq),
                        False,
                        True,
                        command.return_seqs,
                    )
                    # The write may have been one in memory, which the class of today has yet to make good.
                    return self._answer(box, reply, made, max(known.lsn, box.config_lsn))
            self._expire(box, now_ms, made)
        box.check_conditions(command)
        if command.idempotency_key is not None and (command.account or self._keys >= KEYS_MAX):
            self._make_room_for_keys(command.account, now_ms)
        change = box.plan_append(command, now_ms)
        if command.account or self._quota is not None:
            self.require_room(command.account, change.batch.live_bytes, now_ms)
        if created is not None:
            self._log(created, made)
            box = self.generations[created.generation]
        return self._write(command, box, change, created is not None, made)

    def _make_room_for_keys(self, account: str, now_ms: int) -> None:
        """Drops lapsed idempotency keys at a limit; raises `Throttled` when none has lapsed."""
        if self._keys < KEYS_MAX:
            try:
                self.usage.require(account, "idempotency_keys")
                return
            except Throttled:
                pass
        self._keys -= self._key_expiry.step(self.generations, now_ms, self._on_keys_dropped, slack_ms=0)
        self.usage.require(account, "idempotency_keys")
        if self._keys >= KEYS_MAX:
            raise Throttled(
                f"this shard remembers {self._keys} idempotency keys, which is its limit; retry when older "
                "keys have lapsed, or set a shorter idempotency_window_ms on the boxes that use many",
                limit="idempotency_keys",
            )

    def _plan_created(
        self, command: commands.Append | forwards.ForwardHead, now_ms: int
    ) -> tuple[changes.BoxCreated, Box]:
        """The box that this write would make, as a stand-in to check the write against."""
        may_create = command.box not in self.not_recreated if command.create is None else command.create
        if not may_create:
            raise BoxNotFound(
                f"box {command.box} does not exist and this write may not create it", box=command.box
            )
        created = self._plan_box(command.box, command.config, now_ms)
        return created, stand_in(created)

    def _write(
        self,
        command: commands.Append | forwards.Forward | AppendStream,
        box: Box,
        change: changes.BatchAppended,
        created: bool,
        made: Made,
    ) -> Outcome:
        batch = change.batch
        last_seq = batch.last_seq
        if box.is_object and box.log.tail.has_unrendered:  # the store is told in order
            raise NotRendered(box.generation)
        reserves = self._reserve(box, last_seq, made)
        lsn = self._stage(change, box, made)
        if reserves:
            self._watch(box)  # a tick gives back what it will not have used
        reply = commands.Appended(
            box.name, batch.first_seq, last_seq, last_seq, created, False, command.return_seqs
        )
        if lsn == 0:
            wakes: tuple[str, ...] = (box.name,)
            if box.outboxes and self.forwarding.note(box):
                wakes = (box.name, forwards.CARRIER)
            return self._answer(box, reply, made, 0)._replace(wakes=wakes)
        stage = self.durability.show_append(box, lsn, last_seq, batch.last_ts)
        return Outcome(made, reply, lsn, stage is not Stage.LOGGED, (), 0, (), stage is Stage.STORED)

    def _reserve(self, box: Box, last_seq: int, made: Made) -> bool:
        """Reserves seqs of a disk box if a write up to `last_seq` asks for it. Ahead of the write, so that
        wherever the write is found after a crash, its ceiling is too."""
        if not box.is_disk or last_seq + RESERVE_SEQS // 2 <= box.reserved_seq:
            return False
        self._log(changes.SeqsReserved(box.generation, last_seq + RESERVE_SEQS), made)
        return True

    def _diff(self, command: commands.Diff, now_ms: int, made: Made) -> Outcome:
        box = self._found(command.box, now_ms, made)
        box.last_read_ms = now_ms
        rests_on = box.floor_lsn
        if command.group is not None:
            group = box.groups.require(command.group, box.name)
            rests_on = max(rests_on, group.lsn)
            command = msgspec.structs.replace(command, from_seq=group.cursor)
        reply = box.read(command)
        nothing = not reply.records and reply.tombstone is None and reply.next_from_seq == reply.head_seq
        if nothing and command.wait_ms:
            return Outcome(made, None)
        self._count_read(reply)
        return self._answer(box, reply, made, rests_on)

    def _follow(self, command: commands.Follow, now_ms: int, made: Made) -> Outcome:
        if command.awaits_box and command.wait_ms and command.box not in self.boxes:
            return Outcome(made, None)
        box = self._found(command.box, now_ms, made)
        page = page_for(box, command, self.durable_lsn)
        if page is None:
            return Outcome(made, None)
        box.last_read_ms = now_ms
        self._count_read(page)
        answer = Answer.STRONG_READ if command.strong else Answer.RECORDS
        return reply_after(self.durability.wait_for(answer, box, box.floor_lsn), made, page)

    def _count_read(self, reply: commands.Records) -> None:
        tally = self.tally
        tally.reads += 1
        tally.records_read += reply.records_scanned
        if reply.tombstone is not None:
            tally.tombstones += 1

    def _session(self, command: commands.SessionCommand, now_ms: int, made: Made) -> Outcome:
        if isinstance(command, commands.PutSession) and command.owner in self.usage.accounts:
            self.sessions.drop_lapsed(now_ms)
            if command.wid not in self.sessions:
                self.usage.require(command.owner, "sessions")
        return Outcome(made, self.sessions.handle(command, now_ms))

    def _get_record(self, command: commands.GetRecord, now_ms: int, made: Made) -> Outcome:
        box = self._found(command.box, now_ms, made)
        log = box.log
        if command.seq > log.visible_seq or not log.is_live(command.seq):
            raise NotFound(f"{box.name} has no record {command.seq} (any more)", seq=command.seq)
        span = log.span_at(command.seq)
        assert span is not None
        index = command.seq - span.first_seq
        text = bytes(span.payload.text_as(index, index, tags=True, meta=True, data=True))
        return self._answer(box, commands.OneRecord(box.name, text), made, box.floor_lsn)

    def _get_tail(self, command: commands.GetTail, now_ms: int, made: Made) -> Outcome:
        box = self._found(command.box, now_ms, made)
        log = box.log
        reply = commands.Tail(box.name, log.visible_seq, log.visible_seq + 1, log.visible_ts or None)
        return self._answer(box, reply, made, box.floor_lsn)

    def _delete_records(self, command: commands.DeleteRecords, now_ms: int, made: Made) -> Outcome:
        box = self._found(command.box, now_ms, made)
        log = box.log
        before = log.count
        if command.match is None:
            change = box.plan_trim(command.before_seq or 0, now_ms)
            if change.before_seq > log.earliest_seq:
                self._stage(change, box, made)
            deleted = before - log.count
        else:
            deletion = box.begin_deletion(command, command.match)
            if deletion.deleted is None:
                found = deletion.step(box, now_ms)
                if found is None:
                    return Outcome(made, None, needs=(UNFINISHED,))
                if found.seqs:
                    self._stage(found, box, made)
                deletion.deleted = before - log.count
                is_settled = log.is_settled
            else:  # readers see all of it; what is counted per batch follows
                is_settled = not log.settle_deletes()
            if not is_settled:
                return Outcome(made, None, needs=(UNFINISHED,))
            box.end_deletion()
            deleted = deletion.deleted
        count, size = log.visible_totals()
        reply = commands.RecordsDeleted(
            box.name, deleted, box.visible_earliest_seq, log.visible_seq, count, size
        )
        return self._answer(box, reply, made, box.floor_lsn)

    def _set_fence(self, command: commands.SetFence, now_ms: int, made: Made) -> Outcome:
        box = self._require(command.box)
        if command.if_token is not None and command.if_token != box.fencing_token:
            raise FencingTokenMismatch(f"if_token: {box.name} is fenced by another token", field="if_token")
        if command.token != box.fencing_token:
            self._stage(changes.TokenFenced(box.generation, command.token), box, made)
        return self._answer(box, commands.FenceSet(box.name, command.token), made, box.last_lsn)

    # -- applying

    def _apply_created(self, change: changes.BoxCreated, lsn: int) -> None:
        assert change.name not in self.boxes and change.generation not in self.generations, "NAMES"
        box = Box(
            name=change.name,
            generation=change.generation,
            config=change.config,
            created_ms=change.at_ms,
            reserved_seq=change.reserved_seq,
        )
        box.last_lsn = box.floor_lsn = box.config_lsn = lsn
        self.boxes[change.name] = box
        self.generations[change.generation] = box
        self.last_generation = max(self.last_generation, change.generation)
        self.not_recreated.pop(change.name, None)
        self.durability.note_reservation(box, lsn)
        self._watch(box)

    def _apply_configured(self, change: changes.BoxConfigured, lsn: int) -> None:
        box = self.generations[change.generation]
        bytes_before = self.unsealed.bytes_of(box)
        box.configured(change, lsn)
        self._key_expiry.watch(box)  # the window may be shorter now
        if change.reserved_seq:
            self.durability.note_reservation(box, lsn)
        if box.is_memory:  # where a record is visible as soon as it has a seq
            box.log.show(box.log.head_seq, box.log.last_ts)
        if box.is_object:
            self.uploading.stage(box, lsn)
        self._note_unsealed(box, bytes_before)
        if box.config.compact == "tag":
            self.compactable[box.generation] = box

    def _apply_restated(self, change: changes.BoxRestated, lsn: int) -> None:
        """Live, the box is just that; in recovery it is made so."""
        box = self.generations[change.generation]
        box.last_lsn = lsn
        if box.facts(whole=True) == change.facts:
            return
        self._keys -= len(box.keys)
        for outbox in (*box.outboxes.values(), *box.moves.values()):
            self.forwarding.outboxes.close(outbox)
        box.restated(change.facts)
        self._keys += len(box.keys)
        self._key_expiry.watch(box)

    def _apply_deleted(self, change: changes.BoxDeleted, lsn: int) -> None:
        box = self.generations.pop(change.generation)
        del self.boxes[box.name]
        self.durability.note_deletion(lsn)
        self._deadline_of.pop(change.generation, None)
        self._keys -= len(box.keys)
        self._key_expiry.forget(change.generation)
        self.unsealed.forget(box)
        self._leave_alone(change.generation)
        self.forwarding.box_deleted(box, lsn)
        self.moves.close(box)
        if not box.config.auto_create:
            self.not_recreated[box.name] = None
            if len(self.not_recreated) > NOT_RECREATED_MAX:
                del self.not_recreated[next(iter(self.not_recreated))]

    def _leave_alone(self, generation: int) -> None:
        """There is nothing to be done about this box any more."""
        for waiting in (self.due, self.dented, self.compactable, self.movable):
            waiting.pop(generation, None)

    def _apply_appended(self, change: changes.BatchAppended, lsn: int) -> None:
        box = self.generations[change.generation]
        keys = len(box.keys)
        was_empty = box.log.count == 0
        bytes_before = self.unsealed.bytes_of(box)
        tally = self.tally
        tally.records_evicted += box.appended(change, lsn)
        tally.appends += 1
        tally.records_appended += change.batch.count
        self._keys += len(box.keys) - keys
        if not keys and box.keys:
            self._key_expiry.watch(box)
        self._note_unsealed(box, bytes_before)
        if change.trim_before_seq or change.evict_before_seq:
            self._note_dented(box)
        if box.config.compact == "tag":
            self.compactable[box.generation] = box
        if lsn == 0:
            box.log.show(box.log.head_seq, box.log.last_ts)
        elif box.is_object and not isinstance(change.batch, UnrenderedRows):
            self.uploading.stage(box, lsn)
        if was_empty:
            self._watch(box)
        if box.queue is not None:
            box.queue.dropped_before(box.log.earliest_seq)

    def _apply_evicted(self, change: changes.RecordsEvicted, lsn: int) -> None:
        box = self.generations[change.generation]
        bytes_before = self.unsealed.bytes_of(box)
        self.tally.records_evicted += box.evicted(change, lsn)
        self._note_unsealed(box, bytes_before)
        self._note_dented(box)
        if box.stream is not None:
            box.stream.dropped_before(box.log.earliest_seq)
        if box.queue is not None:
            box.queue.dropped_before(box.log.earliest_seq)
        if box.log.count == 0:
            self._watch(box)

    def _apply_records_deleted(self, change: changes.RecordsDeleted, lsn: int) -> None:
        box = self.generations[change.generation]
        bytes_before = self.unsealed.bytes_of(box)
        self.tally.records_deleted += box.deleted(change, lsn)
        self._note_unsealed(box, bytes_before)
        self._note_dented(box)
        if box.stream is not None:
            box.stream.dropped_before(box.log.earliest_seq)
        if box.queue is not None:
            if change.seqs is not None:
                box.queue.gone(change.seqs)
            box.queue.dropped_before(box.log.earliest_seq)
        if box.log.count == 0:
            self._watch(box)

    def _note_unsealed(self, box: Box, bytes_before: int) -> None:
        """Keeps count of the unsealed batches; those of this box cost `bytes_before` until now."""
        self.unsealed.note(box, bytes_before)
        tail = box.log.tail
        if (tail.records >= self.due_records or tail.held_bytes >= self.due_bytes) and not box.is_memory:
            self.due[box.generation] = box

    def _apply_sealed(self, change: changes.SegmentSealed, lsn: int) -> None:
        box = self.generations[change.generation]
        bytes_before = self.unsealed.bytes_of(box)
        box.sealed(change)
        self.due.pop(box.generation, None)
        self._note_unsealed(box, bytes_before)
        self._note_dented(box)
        self._note_movable(box)

    def _note_movable(self, box: Box) -> None:
        if box.log.segments:
            self.movable[box.generation] = box

    def _note_dented(self, box: Box) -> None:
        if box.log.segments:
            self.dented[box.generation] = box

    def _apply_replaced(self, change: changes.SegmentsReplaced, lsn: int) -> None:
        self.generations[change.generation].replaced(change)

    def _apply_moved(self, change: changes.SegmentMoved, lsn: int) -> None:
        for segment in self.generations[change.generation].log.segments:
            if segment.serial == change.serial:
                segment.is_cold = True

    def _apply_kept(self, change: changes.BatchKept, lsn: int) -> None:
        box = self.generations[change.generation]
        box.last_lsn = max(box.last_lsn, lsn)
        at = box.log.tail.at(change.batch.first_seq)
        rows = None if at is None else box.log.tail.batches[at]
        if at is not None and isinstance(rows, UnrenderedRows):
            change.batch.lsn = lsn
            bytes_before = self.unsealed.bytes_of(box)
            box.log.render(at, change.batch)
            self._note_unsealed(box, bytes_before)
            self.txns.rendered(rows, lsn)
            return
        if at is None:
            assert box.is_memory, "only what is there is kept, or what was restated just before"
            change.batch.lsn = lsn
            box.log.give_back(change.batch)
            return
        box.log.tail.relog(at, lsn)

    def _apply_fenced(self, change: changes.TokenFenced, lsn: int) -> None:
        box = self.generations[change.generation]
        box.fencing_token = change.token
        box.last_lsn = box.floor_lsn = lsn

    def _apply_reserved(self, change: changes.SeqsReserved, lsn: int) -> None:
        box = self.generations[change.generation]
        box.reserved_seq = change.reserved_seq
        box.reserved_durable_seq = min(box.reserved_durable_seq, change.reserved_seq)
        self.durability.note_reservation(box, lsn)

    def _apply_lost(self, change: changes.SeqsLost, lsn: int) -> None:
        box = self.generations[change.generation]
        box.log.lose(change.first_seq, change.last_seq, change.missed)
        box.last_lsn = box.floor_lsn = lsn

    def _apply_started(self, change: changes.ShardStarted, lsn: int) -> None:
        self.boot_id = change.boot_id
        self.last_ms = change.at_ms
        self.txns.rewound(change.at_ms)  # always: a snapshot does not have their times, their frames do
        if change.rewound_ms:
            self._rewind(change.at_ms, change.rewound_ms)
        if not self.stopped_clean:  # what the last snapshot has of them is from before the life that died
            self.sessions.clear()
        self._jobs.begin(lsn)
        self.sessions.begin(change.at_ms)
        for box in self.boxes.values():
            if box.queue is not None:
                box.queue.started(leases_kept=self.stopped_clean or box.config.leases_durable)
        self.stopped_clean = False
        for name in [name for name, box in self.boxes.items() if box.is_memory]:
            self._begin_anew(self.boxes[name], change.at_ms)

    def _rewind(self, now_ms: int, ms: int) -> None:
        """Time begins again at `now_ms`, earlier by `ms`."""
        self.sessions.rewound(ms)
        for box in self.boxes.values():
            box.rewound(now_ms, ms)
            self._key_expiry.watch(box)
            self._watch(box)
        self.unsealed.rewound()

    def _begin_anew(self, old: Box, at_ms: int) -> None:
        """A memory box after a restart: the same name and config, nothing in it, another generation."""
        generation = self._next_generation(at_ms)
        self.last_generation = generation
        box = Box(
            name=old.name, generation=generation, config=old.config, created_ms=old.created_ms, reserved_seq=0
        )
        box.emptied_ms = at_ms
        del self.generations[old.generation]
        self._leave_alone(old.generation)
        self._deadline_of.pop(old.generation, None)
        self._keys -= len(old.keys)
        self._key_expiry.forget(old.generation)
        self.forwarding.box_reborn(old, box)
        self.moves.close(old)
        self.boxes[old.name] = box
        self.generations[generation] = box

    def _apply_stopped(self, change: changes.ShardStopped, lsn: int) -> None:
        self.stopped_clean = True

    def _apply_rested(self, change: changes.ShardRested, lsn: int) -> None:
        """Only its lsn counts."""

    # -- recovery: restore a snapshot, give its batches their payload back, then apply the log after it

    def snapshot(self, keep: Callable[[Box], bool] | None = None) -> ShardState:
        """Everything but payloads, as of `self.lsn`. Shares nothing with the machine. Of boxes only those
        that are to be kept."""
        capture = self._new_capture(keep)
        while capture.step(len(self.boxes)):
            pass
        return capture.state()

    def begin_snapshot(
        self, keep: Callable[[Box], bool] | None = None, *, with_batches: bool = False
    ) -> Capture:
        """The same in steps, while the machine goes on; `end_snapshot` follows, whatever came of it."""
        capture = self._new_capture(keep, with_batches=with_batches)
        self._captures.append(capture)
        return capture

    def _new_capture(
        self, keep: Callable[[Box], bool] | None = None, *, with_batches: bool = False
    ) -> Capture:
        state = ShardState(
            lsn=self.lsn,
            needs_lsn=self.lsn + 1,
            boot_id=self.boot_id,
            stopped_clean=self.stopped_clean,
            last_generation=self.last_generation,
            not_recreated=list(self.not_recreated),
            boxes=[],
            routers=list(self.routers.routers.values()),
            last_router_number=self.routers.last_number,
            held=self.txns.held_lsns(),
            marks=self.txns.mark_facts(),
            commits=self.txns.commit_facts(),
            basins=list(self.basins.basins.values()),
            last_basin_number=self.basins.last_number,
            sessions=self.sessions.facts() if self.stopped_clean else [],
            tokens=list(self.tokens.tokens.values()),
            at_ms=self.last_ms,
            **self.uploading.facts(self.lsn),
        )
        boxes = self.generations
        if keep is not None:
            boxes = {generation: box for generation, box in boxes.items() if keep(box)}
        return Capture(state, boxes, with_batches=with_batches)

    def end_snapshot(self, capture: Capture) -> None:
        self._captures.remove(capture)

    def restore(self, state: ShardState) -> Wanted:
        """Takes over a snapshot. Returns what it names and does not hold."""
        assert self.lsn == 0 and not self.boxes, "restore comes first"
        self.lsn = state.lsn
        self.boot_id = state.boot_id
        self.stopped_clean = state.stopped_clean
        self.last_generation = state.last_generation
        self.last_ms = state.at_ms
        self.not_recreated = dict.fromkeys(state.not_recreated)
        for router in state.routers:
            self.routers.take_over(router)
        self.routers.last_number = state.last_router_number
        self.sessions.take_over(state.sessions)
        self.basins.restore(state.basins, state.last_basin_number)
        self.tokens.restore(state.tokens)
        self.txns.restore(state.marks, state.commits)
        wanted = Wanted({}, [], set(state.held))
        for facts in state.boxes:
            box = Box.from_facts(facts)
            self.boxes[box.name] = box
            self.generations[box.generation] = box
            self._keys += len(box.keys)
            self._key_expiry.watch(box)
            for lsn in array("Q", facts.batches):
                if lsn:
                    wanted.batches[lsn] = box
            wanted.segments.extend((box, segment) for segment in facts.segments)
            self.durability.note_reservation(box, state.lsn)
        self.uploading.restore(state, self.boxes.values())
        return wanted

    def hydrated(self) -> None:
        """All batches of the snapshot have been given back: settle what depends on them."""
        for box in self.boxes.values():
            box.log.hydrated()
            self._note_unsealed(box, 0)
            self._note_dented(box)
            self._note_movable(box)
            if box.config.compact == "tag":
                self.compactable[box.generation] = box
            self._watch(box)
        self.txns.hydrated()

    def segments(self) -> Iterator[Segment]:
        """Every segment that some box of this shard has."""
        for box in self.boxes.values():
            yield from box.log.segments

    def recovered(self, lsn: int) -> None:
        """Everything up to `lsn` has been replayed and is on the disk: it is all visible, but for what must
        be in the object store first."""
        self.durable(lsn)
        for box in self.boxes.values():
            while box.log.settle_deletes():
                pass
            if not box.is_object:
                box.log.show(box.log.head_seq, box.log.last_ts)

    def check(self) -> None:
        """Asserts the invariants of the machine and of every box. For tests."""
        assert len(self.boxes) == len(self.generations), "NAMES"
        for name, box in self.boxes.items():
            assert box.name == name and self.generations[box.generation] is box, "NAMES"
            box.log.check()
            if box.queue is not None:
                box.queue.check(box.log)
            if box.is_disk:
                assert box.log.visible_seq <= box.reserved_seq, "CEILING"
            if box.stream is not None:
                box.stream.check(box.log.earliest_seq)
        self.routers.check()
        self.txns.check()
        self.usage.check()
        assert self._keys == sum(len(box.keys) for box in self.boxes.values()), "KEYS"
        self._key_expiry.check(self.boxes.values())
        assert self.logged_lsn <= self.lsn, "LSN"
        self.durability.check()
        stored = [box for box in self.boxes.values() if not box.is_memory and box.log.tail.records]
        assert {box.generation for box in stored} == set(self.unsealed), "UNSEALED"
        self.unsealed.check()

    @property
    def keys_kept(self) -> int:
        """Idempotency keys that are remembered."""
        return self._keys

    def statistics(self) -> dict[str, int]:
        return {
            "boxes": len(self.boxes),
            "records": sum(box.log.count for box in self.boxes.values()),
            "bytes": sum(box.log.bytes for box in self.boxes.values()),
            "idempotency_keys": self._keys,
            "routers": len(self.routers.routers),
            "txn_epochs": len(self.txns.epochs),
            "txn_commits": len(self.txns.commits),
            "txn_bytes": self.txns.bytes,
            "txn_marks": len(self.txns.marks),
            "lsn": self.lsn,
            "durable_lsn": self.durable_lsn,
        }


def _queue_totals(queue: Queue, count: int, now_ms: int) -> dict[str, int]:
    """`ready`, `in_flight` and `delayed` make up `count`."""
    queue.advance(now_ms)
    return {
        "ready": queue.ready(count),
        "in_flight": queue.in_flight,
        "delayed": queue.delayed,
        "dead_lettered": queue.dead_lettered,
    }
