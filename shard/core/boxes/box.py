"""One box's policy over its log: caps, TTL, timestamps, idempotency, the fence, own-node filtering, reads.

Methods that decide (`plan_…`, `read`, `check_…`) compute what a write would become or what a read shows, and
change nothing. Methods that apply a change (`apply_…`) decide nothing. A box knows no other box.

Invariants
- KEYS: an idempotency key inside its window points at the seqs it was first answered with.
- CEILING: a disk box never shows or acks a seq above `reserved_seq`.
"""

from __future__ import annotations

from functools import lru_cache

from pyroaring import BitMap64

from shard.core import changes
from shard.core.boxes import priority
from shard.core.boxes.box_log import BoxLog
from shard.core.boxes.deletion import Deletion
from shard.core.boxes.groups import Groups
from shard.core.boxes.holes import Hole
from shard.core.boxes.idempotency_keys import IdempotencyKey, IdempotencyKeys
from shard.core.boxes.live_runs import walk_live_runs
from shard.core.boxes.pages import PageCollector, ReadBounds, ScanRuns
from shard.core.boxes.sealed import Segment
from shard.core.boxes.sized_seqs import SizedSeqs
from shard.core.boxes.tags import Tags
from shard.core.boxes.volatile import Volatile
from shard.core.queues.move_queue import MoveQueue
from shard.core.queues.new_jobs import job_fields_of
from shard.core.queues.output_queue import Outputs
from shard.core.queues.queue import Queue, QueueCopy
from shard.core.routers import router_outbox
from shard.core.routers.copy_sources import Origin
from shard.core.routers.outbox import Outbox
from shard.core.s2.stream import StreamState
from shard.core.schedules.schedule import NO_SCHEDULES, Schedule
from shard.core.snapshot_facts import BoxFacts, SegmentFacts
from shard.core.transactions.unrendered import UnrenderedRows
from streams.protocol.errors import BoxFull, FencingTokenMismatch, InvalidRequest, RecordTooLarge, SeqMismatch
from streams.protocol.messages.commands import Append, DiffResult, ReadBox, Scan, Tombstone
from streams.protocol.model.boxes import BoxConfig
from streams.protocol.model.matches import Match
from streams.protocol.model.records import render, resolve_times
from streams.protocol.payloads.scans import RunWriter, ScanPageHead, ScanReply

#: Seqs that a disk box reserves at a time. At a million records per second, a new reservation is logged about
#: every 65 ms. The sync interval is 50 ms, so a reservation is durable before it is needed.
RESERVE_SEQS = 131_072

#: How many expired idempotency keys one append drops. It adds at most one, so expired keys cannot pile up.
#: While there are no appends, ticks drop them (`key_expiry.py`).
APPEND_KEYS_MAX = 64


@lru_cache(maxsize=1024)
def _intern_config(config: BoxConfig) -> BoxConfig:
    """Return the first of equal configs: boxes have few different ones, and each is 180 bytes."""
    return config


class Box:
    __slots__ = (
        "config",
        "config_lsn",
        "created_ms",
        "emptied_ms",
        "fencing_token",
        "floor_lsn",
        "generation",
        "groups",
        "keys",
        "last_append_ms",
        "last_lsn",
        "last_serial",
        "log",
        "moves",
        "name",
        "origins",
        "outboxes",
        "outputs",
        "queue",
        "reserved_seq",
        "schedules",
        "stream",
        "tags",
        "volatile",
    )

    def __init__(
        self, *, name: str, generation: int, config: BoxConfig, created_ms: int, reserved_seq: int
    ) -> None:
        self.name = name
        self.generation = generation
        self.config = _intern_config(config)
        self.created_ms = created_ms
        self.log = BoxLog()
        #: Tags of the unsealed batches; the tags of a segment are in its file.
        self.tags = Tags()
        #: The highest serial number of a segment of this box.
        self.last_serial = 0
        self.queue = Queue(self.log, config) if config.type == "queue" else None
        self.groups = Groups()
        #: The additional state of a box that is a stream.
        self.stream: StreamState | None = None
        #: Records that move to other boxes, by destination box and by whether they are dead letters.
        self.moves: dict[tuple[str, bool], MoveQueue] = {}
        #: None until a job of this queue is acked with outputs.
        self.outputs: Outputs | None = None
        self.schedules: dict[str, Schedule] = NO_SCHEDULES
        self.fencing_token = ""
        self.keys = IdempotencyKeys()
        self.reserved_seq = reserved_seq
        #: Where copies come from, and where they go (`routers/`).
        self.origins: dict[str, Origin] = {}
        self.outboxes: dict[str, Outbox] = {}
        # Times and lsns of the last changes of this box.
        self.last_append_ms = created_ms
        #: The time when the box became empty; 0 while it has live records.
        self.emptied_ms = created_ms
        self.last_lsn = 0
        #: The lsn of the last change that affects every read of the box: of a floor, the config or the fence.
        self.floor_lsn = 0
        self.config_lsn = 0
        self.volatile = Volatile(created_ms)

    def __repr__(self) -> str:
        return f"<Box {self.name} g{self.generation} {self.config.durability} {self.log!r}>"

    @property
    def is_memory(self) -> bool:
        return self.config.durability == "memory"

    @property
    def is_disk(self) -> bool:
        return self.config.durability == "disk"

    @property
    def is_object(self) -> bool:
        return self.config.durability == "object"

    @property
    def visible_earliest_seq(self) -> int:
        return min(self.log.earliest_seq, self.log.visible_seq + 1)

    # -- deciding

    def known_key(self, key: str, now_ms: int) -> IdempotencyKey | None:
        entry = self.keys.get(key)
        if entry is None or entry.at_ms + self.config.idempotency_window_ms < now_ms:
            return None
        return entry

    def key_lapse_ms(self) -> int | None:
        """Return when the oldest idempotency key expires; None if there is no key."""
        oldest = self.keys.oldest()
        return None if oldest is None else oldest.at_ms + self.config.idempotency_window_ms + 1

    def check_conditions(self, command: Append) -> None:
        if self.fencing_token and command.fencing_token != self.fencing_token:
            raise FencingTokenMismatch(
                f"fencing_token: {self.name} is fenced by another token; this writer has been replaced",
                field="fencing_token",
            )
        next_seq = self.log.head_seq + 1
        if command.match_seq is not None and command.match_seq != next_seq:
            raise SeqMismatch(
                f"match_seq: the next seq of {self.name} is {next_seq}, not {command.match_seq}",
                next_seq=next_seq,
            )
        if command.trim_before_seq is not None and command.trim_before_seq > next_seq:
            raise InvalidRequest(
                f"trim_before_seq: {command.trim_before_seq} is above this write's first seq, {next_seq}",
                field="trim_before_seq",
            )

    def plan_append(self, command: Append, now_ms: int, wall_ms: int) -> changes.BatchAppended:
        """Return the change that this write would log. The caller has evicted expired records."""
        config, log = self.config, self.log
        times = resolve_times(
            command.columns.times,
            command.columns.count,
            now_ms=now_ms,
            not_before=log.last_ts,
            mode=config.timestamping.mode,
            allow_future=config.timestamping.uncapped,
        )
        batch = render(command.columns, first_seq=log.head_seq + 1, times=times)
        if command.columns.job_fields is not None or command.columns.delays_ms is not None:
            is_queue = self.queue is not None
            batch.job_fields = job_fields_of(command.columns, self.name, is_queue=is_queue, wall_ms=wall_ms)
        key = command.idempotency_key if config.idempotency_window_ms else None
        trim_before_seq = command.trim_before_seq or 0
        evict_before_seq = 0
        if config.cap_records or config.cap_bytes:
            evict_before_seq = self.fit(batch.count, batch.live_bytes, trim_before_seq)
        if not trim_before_seq and not evict_before_seq:
            return changes.BatchAppended(self.generation, batch, now_ms, key)
        return changes.BatchAppended(
            self.generation,
            batch,
            now_ms,
            key,
            trim_before_seq,
            evict_before_seq,
            log.measure_before(trim_before_seq),
            log.measure_before(evict_before_seq, above=trim_before_seq),
            log.newest_ts_before(evict_before_seq),
        )

    def plan_eviction(self, before_seq: int, reason: str, now_ms: int) -> changes.RecordsEvicted:
        cut_bytes = self.log.measure_before(before_seq)
        evicted_ts = self.log.newest_ts_before(before_seq)
        return changes.RecordsEvicted(self.generation, before_seq, reason, cut_bytes, evicted_ts, now_ms)

    def fit(self, new_count: int, new_bytes: int, trim_before_seq: int = 0) -> int:
        """Return the seq below which records must be evicted so that a write fits; 0 = none."""
        config, log = self.config, self.log
        if (config.cap_records and new_count > config.cap_records) or (
            config.cap_bytes and new_bytes > config.cap_bytes
        ):
            raise RecordTooLarge(
                f"records: a write of {new_count} records and {new_bytes} bytes can never fit into "
                f"{self.name} (cap_records {config.cap_records}, cap_bytes {config.cap_bytes})",
                cap_records=config.cap_records,
                cap_bytes=config.cap_bytes,
            )
        trim_count, trim_bytes = log.live_before(trim_before_seq)
        count = log.count - trim_count + new_count
        size = log.bytes - trim_bytes + new_bytes
        over = (config.cap_records and count > config.cap_records) or (
            config.cap_bytes and size > config.cap_bytes
        )
        if not over:
            return 0
        if config.discard == "reject":
            raise BoxFull(
                f"{self.name} is full: {log.count} records, {log.bytes} bytes "
                f"(cap_records {config.cap_records}, cap_bytes {config.cap_bytes})",
                count=log.count,
                bytes=log.bytes,
                cap_records=config.cap_records,
                cap_bytes=config.cap_bytes,
            )
        return log.floor_for_caps(
            config.cap_records,
            config.cap_bytes,
            extra=new_count - trim_count,
            extra_bytes=new_bytes - trim_bytes,
            above=trim_before_seq,
        )

    def floor_for_caps(self) -> int:
        """Return the seq below which records exceed the caps; 0 if all stored records fit."""
        return self.log.floor_for_caps(self.config.cap_records, self.config.cap_bytes)

    def expiry_ms(self) -> int | None:
        """Return when the oldest live record expires (earlier if its `$ts` is not in memory), or None."""
        oldest = self.log.oldest
        if not self.config.ttl_ms or oldest is None:
            return None
        index = max(0, self.log.earliest_seq - oldest.first_seq)
        ts = oldest.ts_at_least(index)
        if self.queue is not None:  # the TTL of a delayed job counts from its time
            ts = max(ts, self.queue.time_of(self.log.earliest_seq))
        return ts + self.config.ttl_ms + 1

    def floor_for_ttl(self, now_ms: int, wall_ahead_ms: int = 0) -> int:
        """Return the seq below which all records have expired; 0 if none has."""
        expiry = self.expiry_ms()
        if expiry is None or expiry > now_ms:
            return 0
        floor = self.log.first_seq_at(now_ms - self.config.ttl_ms)
        if self.queue is not None:
            floor = self.queue.floor_for_ttl(floor, now_ms + wall_ahead_ms - self.config.ttl_ms)
        return floor if floor > self.log.earliest_seq else 0

    def gone_ms(self) -> int | None:
        """Return when to delete this box because it is empty or its stream is being deleted, or None."""
        if self.stream is not None and self.stream.gone_ms is not None:
            return self.stream.gone_ms
        has_outputs = self.outputs is not None and self.outputs.pending_bytes > 0
        if not self.config.delete_on_empty_ms or not self.emptied_ms or has_outputs:
            return None
        return self.emptied_ms + self.config.delete_on_empty_ms

    def plan_trim(self, before_seq: int, now_ms: int) -> changes.RecordsDeleted:
        """Return the change that deletes all records below `before_seq`."""
        top = min(before_seq, self.log.head_seq + 1)
        return changes.RecordsDeleted(self.generation, top, self.log.measure_before(top), at_ms=now_ms)

    def begin_deletion(self, command: object, match: Match, before_seq: int | None = None) -> Deletion:
        """Return the progress of this delete by tag. Ends any other one: a box runs one at a time."""
        if self.volatile.deletion is None or self.volatile.deletion.command is not command:
            self.end_deletion()
            self.volatile.deletion = Deletion(command, match, self.log.head_seq, before_seq)
        return self.volatile.deletion

    def new_line(self, dest: str, *, is_dead: bool, position: int = 0) -> MoveQueue:
        """Create and store the queue of moves to another box; there must be none yet."""
        line = self.moves[dest, is_dead] = MoveQueue(
            source=self.name,
            generation=self.generation,
            log=self.log,
            dest=dest,
            is_dead=is_dead,
            position=position,
        )
        return line

    def end_deletion(self) -> None:
        """Drop the progress of a delete by tag that is finished or was given up."""
        self.volatile.deletion = None
        self.volatile.tag_lookups.clear()

    def plan_deletes(self, seqs: BitMap64, sized_seqs: SizedSeqs, now_ms: int) -> changes.RecordsDeleted:
        """Return the change that deletes the live `seqs`. `sized_seqs` has the sizes of sealed records."""
        live = self.log.live_of(seqs)
        sizes = self.log.measure_seqs(live, sized_seqs)
        return changes.RecordsDeleted(self.generation, 0, 0, live, sizes, now_ms)

    def effective_priority(self, now_ms: int) -> float:
        config = self.config
        return priority.base(
            config.priority,
            is_automatic=config.auto_priority,
            last_read_ms=self.volatile.last_read_ms,
            now_ms=now_ms,
        )

    # -- reading

    def read(self, command: ReadBox, *, upto: int | None = None) -> DiffResult:
        """Return the page for a reader at this cursor (v0 §4). Expired records have been evicted already.
        `upto` limits a reader that may see less than is visible."""
        bounds = self._bounds_of(command, self.log.visible_seq if upto is None else upto)
        page = PageCollector(command, nodes_filtered=self.config.dedupe_node)
        last_seq = walk_live_runs(page, self.log, bounds.from_seq + 1, bounds.upto_seq)
        return DiffResult(
            box=self.name,
            records=page.text(),
            next_from_seq=max(bounds.from_seq, last_seq),
            generation=self.generation,
            head_seq=bounds.head_seq,
            earliest_seq=bounds.earliest_seq,
            tombstone=bounds.tombstone,
            records_scanned=page.examined_count,
        )

    def _bounds_of(self, command: ReadBox, head_seq: int) -> ReadBounds:
        """Return where a read begins and ends, and the tombstone that comes first, if any."""
        log = self.log
        earliest_seq = min(log.earliest_seq, head_seq + 1)
        from_seq, tombstone = self._start(command, head_seq, earliest_seq)
        upto_seq = head_seq
        hole = log.hole_after(from_seq)
        if hole is not None and hole.first_seq > head_seq:
            hole = None  # not visible yet, like the copies after it
        if hole is not None and tombstone is None and from_seq + 1 >= hole.first_seq:
            tombstone = Tombstone(
                from_seq + 1,
                hole.last_seq,
                hole.reason,
                hole.missed_after(from_seq),
                earliest_seq,
                head_seq,
            )
            from_seq = hole.last_seq
            hole = log.hole_after(from_seq)
        if hole is not None:
            # A page has at most one tombstone: this one ends before the hole, and the next one reports it.
            upto_seq = min(upto_seq, hole.first_seq - 1)
        return ReadBounds(from_seq, upto_seq, head_seq, earliest_seq, tombstone)

    def scan(self, command: Scan) -> ScanReply:
        """Read like `read`, but return stored runs of records, limited by bytes and without filters."""
        bounds = self._bounds_of(command, self.log.visible_seq)
        upto_seq = min(bounds.upto_seq, command.to_seq or bounds.upto_seq)
        runs = RunWriter(command.columns)
        last_seq = walk_live_runs(ScanRuns(runs, command.max_bytes), self.log, bounds.from_seq + 1, upto_seq)
        gap = bounds.tombstone
        head = ScanPageHead(
            max(bounds.from_seq, last_seq),
            self.generation,
            bounds.head_seq,
            bounds.earliest_seq,
            None if gap is None else (gap.gap_from, gap.gap_to, gap.reason, gap.missed_estimate),
            runs.heads,
        )
        return ScanReply(head, runs.parts())  # which adds the last head

    def _start(self, command: ReadBox, head_seq: int, earliest_seq: int) -> tuple[int, Tombstone | None]:
        """Return the cursor that a read really starts from, and the tombstone that comes first, if any."""
        log = self.log
        # A floor may be ahead of what is visible while its change is on the way to the disk.
        floor = min(log.evict_floor, head_seq + 1)
        from_seq = command.from_seq
        if command.from_ts is not None:
            from_seq = min(log.first_seq_at(command.from_ts) - 1, head_seq)
            hole = log.hole_before(from_seq + 1)
            if hole is not None:  # the lost records may have had this time or a later one
                from_seq = hole.first_seq - 1
            if log.evict_floor and command.from_ts <= log.evicted_ts:
                from_seq = max(0, min(from_seq, floor - 2))
        other_life = command.generation is not None and command.generation != self.generation
        if from_seq > head_seq or other_life:
            return earliest_seq - 1, Tombstone(1, head_seq, "recreated", head_seq, earliest_seq, head_seq)
        if from_seq + 1 < floor:
            tombstone = Tombstone(
                from_seq + 1,
                earliest_seq - 1,
                log.gap_reason(from_seq + 1),
                floor - from_seq - 1,
                earliest_seq,
                head_seq,
            )
            return earliest_seq - 1, tombstone
        return from_seq, None

    # -- applying

    def apply_append(self, change: changes.BatchAppended, lsn: int) -> int:
        """Applies an append. Returns how many records were evicted to stay within the caps."""
        batch, lost_count = change.batch, 0
        batch.lsn = lsn
        if not self.log.tail.records:
            self.volatile.unsealed_since_ms = change.at_ms
        self.log.append(batch)
        self.last_lsn = lsn
        self.last_append_ms = change.at_ms
        self.emptied_ms = 0
        if change.trim_before_seq:
            self.log.delete_before(change.trim_before_seq, cut_bytes=change.trim_cut_bytes)
            self.floor_lsn = lsn
        if change.evict_before_seq:
            lost_count = self.log.evict_before(
                change.evict_before_seq,
                "cap",
                cut_bytes=change.evict_cut_bytes,
                evicted_ts=change.evicted_ts,
            )
            self.floor_lsn = lsn
        if change.idempotency_key is not None:
            key = change.idempotency_key
            self.keys.note(IdempotencyKey(key, batch.first_seq, batch.last_seq, change.at_ms, lsn))
        if self.keys:
            self.drop_lapsed_keys(change.at_ms, APPEND_KEYS_MAX)
        return lost_count

    def drop_lapsed_keys(self, now_ms: int, keys_max: int) -> int:
        """Drops keys whose window is over, oldest first. Returns how many."""
        oldest_ms = now_ms - self.config.idempotency_window_ms
        count = 0
        while count < keys_max:
            oldest = self.keys.oldest()
            if oldest is None or oldest.at_ms >= oldest_ms:
                break
            del self.keys[oldest.key]
            count += 1
        return count

    def apply_eviction(self, change: changes.RecordsEvicted, lsn: int) -> int:
        self.last_lsn = self.floor_lsn = lsn
        lost_count = self.log.evict_before(
            change.before_seq, change.reason, cut_bytes=change.cut_bytes, evicted_ts=change.evicted_ts
        )
        self._note_empty(change.at_ms)
        return lost_count

    def apply_deletion(self, change: changes.RecordsDeleted, lsn: int) -> int:
        self.last_lsn = self.floor_lsn = lsn
        count = 0
        if change.before_seq:
            count += self.log.delete_before(change.before_seq, cut_bytes=change.cut_bytes)
        if change.seqs:
            count += self.log.delete_seqs(change.seqs, change.sizes, change.groups)
        self._note_empty(change.at_ms)
        return count

    def _note_empty(self, at_ms: int) -> None:
        if self.log.count == 0 and not self.emptied_ms:
            self.emptied_ms = at_ms

    def apply_seal(self, change: changes.SegmentSealed) -> Segment:
        """Moves the oldest batches of the tail into a segment."""
        segment = Segment.from_bytes(self.generation, change.serial, change.columns)
        self.last_serial = max(self.last_serial, change.serial)
        self.log.seal(segment)
        self.tags = Tags()
        self.volatile.unsealed_since_ms = self.last_append_ms
        return segment

    def apply_replacement(self, change: changes.SegmentsReplaced) -> None:
        """Replaces segments by one that was written without their dead records."""
        self.last_serial = max(self.last_serial, change.serial)
        segment = Segment.from_bytes(self.generation, change.serial, change.columns)
        self.log.replace(change.serials, segment)

    def apply_config(self, change: changes.BoxConfigured, lsn: int) -> None:
        self.last_lsn = self.floor_lsn = self.config_lsn = lsn
        self.config = _intern_config(change.config)
        if self.queue is not None:
            self.queue.configure(self.config)
        if change.reserved_seq:
            self.reserved_seq = change.reserved_seq
            # A reservation from an earlier time as a disk box protects nothing until this change is durable.
            self.volatile.reserved_durable_seq = 0

    def rewound(self, now_ms: int, ms: int) -> None:
        """Set later times to `now_ms`, because the shard's time restarted there, `ms` earlier. Leases and
        delays keep their remaining time. Records keep their times, and expire by them."""
        self.last_append_ms = min(self.last_append_ms, now_ms)
        self.volatile.unsealed_since_ms = min(self.volatile.unsealed_since_ms, now_ms)
        self.emptied_ms = min(self.emptied_ms, now_ms)
        self.keys = IdempotencyKeys(key._replace(at_ms=min(key.at_ms, now_ms)) for key in self.keys.values())
        if self.queue is not None:
            self.queue.rewind(ms)
        if self.stream is not None:
            self.stream.rewound(now_ms)

    # -- snapshots

    def copied_queue(self, *, leases_kept: bool) -> QueueCopy | None:
        """Return a copy of a large queue, from which a snapshot computes its facts later, or None."""
        if self.queue is None or self.is_memory or not self.queue.is_large:
            return None
        return self.queue.copy(leases_kept=leases_kept or self.config.leases_durable)

    def facts(self, *, whole: bool = False, leases_kept: bool = False, with_queue: bool = True) -> BoxFacts:
        """Return all state except payloads. For a memory box only a little of it, unless `whole` is set.
        Without `leases_kept`, leases that are not in the log are left out."""
        is_full = whole or not self.is_memory
        log = self.log if is_full else BoxLog()
        return BoxFacts(
            name=self.name,
            generation=self.generation,
            config=self.config,
            created_ms=self.created_ms,
            last_append_ms=self.last_append_ms,
            reserved_seq=self.reserved_seq,
            emptied_ms=self.emptied_ms,
            fencing_token=self.fencing_token if is_full else "",
            keys=list(self.keys.values()) if is_full else [],
            head_seq=log.head_seq,
            earliest_seq=log.earliest_seq,
            cap_floor=log.cap_floor,
            ttl_floor=log.ttl_floor,
            evicted_ts=log.evicted_ts,
            last_ts=log.last_ts,
            live_count=log.count,
            live_bytes=log.bytes,
            deleted=log.deleted_seqs.serialize(),
            holes=[(hole.first_seq, hole.last_seq) for hole in log.holes],
            batches=log.tail.lsns(),
            unrendered=[rows.facts() for rows in log.tail.unrendered_rows()],
            last_serial=self.last_serial,
            segments=[
                SegmentFacts(
                    segment.serial,
                    segment.first_seq,
                    segment.dead_batches(),
                    segment.is_cold,
                    segment.to_bytes() if whole else b"",
                )
                for segment in log.segments
            ],
            queue=None
            if self.queue is None or not is_full or not with_queue
            else self.queue.facts(leases_kept=leases_kept or self.config.leases_durable),
            groups=self.groups.facts() if is_full else [],
            moves=[line.facts() for line in self.moves.values()] if is_full else [],
            outputs=self.outputs.facts() if is_full and self.outputs is not None else None,
            trims=[(hole.first_seq, hole.missed_count) for hole in log.holes if hole.missed_count],
            origins=[(name, *origin.restart(is_memory=not is_full)) for name, origin in self.origins.items()],
            outboxes=router_outbox.facts_of(self.outboxes),
            stream=None if self.stream is None else self.stream.facts(),
            schedules=[schedule.facts() for schedule in self.schedules.values()],
            shown=(log.visible_seq, log.visible_ts)
            if self.is_object and log.visible_seq < log.head_seq
            else None,
        )

    @classmethod
    def from_facts(cls, facts: BoxFacts) -> Box:
        """Rebuild a box from a snapshot. The caller adds its batches (`log.attach`, `log.hydrate`)."""
        box = cls(
            name=facts.name,
            generation=facts.generation,
            config=facts.config,
            created_ms=facts.created_ms,
            reserved_seq=facts.reserved_seq,
        )
        box.restore_facts(facts)
        return box

    def restore_facts(self, facts: BoxFacts) -> None:
        """Restore all state except batches, which are added one by one afterwards."""
        self.last_serial = facts.last_serial
        self.last_append_ms = facts.last_append_ms
        self.volatile.unsealed_since_ms = facts.last_append_ms
        self.emptied_ms = facts.emptied_ms
        self.fencing_token = facts.fencing_token
        self.keys = IdempotencyKeys(IdempotencyKey(*entry) for entry in facts.keys)
        self.tags = Tags()
        log = self.log
        log.clear()
        log.head_seq = log.visible_seq = facts.head_seq
        log.earliest_seq = facts.earliest_seq
        log.cap_floor = facts.cap_floor
        log.ttl_floor = facts.ttl_floor
        log.evicted_ts = facts.evicted_ts
        log.last_ts = log.visible_ts = facts.last_ts
        if facts.shown is not None:
            log.visible_seq, log.visible_ts = facts.shown
        log.count = facts.live_count
        log.bytes = facts.live_bytes
        log.restore_deleted(facts.deleted)
        missed_by_seq = dict(facts.trims)
        log.holes = [Hole(first, last, missed_by_seq.get(first, 0)) for first, last in facts.holes]
        for segment in facts.segments:
            if segment.columns:
                whole = Segment.from_bytes(self.generation, segment.serial, segment.columns)
                whole.is_cold = segment.is_cold
                log.attach(whole, segment.dead)
        for rows in facts.unrendered:
            log.hydrate(UnrenderedRows.from_facts(self.generation, rows))
        log.records_awaited = log.count - sum(segment.count for segment in log.segments)
        self.origins = {each[0]: Origin(*each[1:]) for each in facts.origins}
        self.outboxes = router_outbox.restore_outboxes(facts.outboxes, log, self.generation)
        self.groups = Groups()
        self.groups.restore(facts.groups)
        if self.queue is not None:
            self.queue = Queue(log, self.config)
            if facts.queue is not None:
                self.queue.restore(facts.queue)
        self.schedules = NO_SCHEDULES
        if facts.schedules:
            self.schedules = {each.schedule: Schedule(each) for each in facts.schedules}
        self.moves = {}
        for each in facts.moves:
            line = self.new_line(each.dest, is_dead=each.is_dead, position=each.position)
            line.restore(each)
            if self.queue is not None:
                self.queue.mark_all_moving(line.moves.values())
        self.outputs = Outputs.from_facts(self.name, self.generation, facts.outputs)
        self.stream = None if facts.stream is None else StreamState.from_facts(facts.stream)
