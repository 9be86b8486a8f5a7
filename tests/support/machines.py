"""A machine with its log beside it: what the engine and the disk do, in a list, without a disk or a clock.

`Driver` hands commands to a real `Machine`, keeps every change it makes as encoded frames (the very bytes
that `shard/storage/frames.py` would log) and can recover another machine from any prefix of them, with or
without a snapshot, by the steps of `shard/recovery/recovery.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, settings

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import NeedsAnotherStep, NotLoaded, Segment, Span, TagsNotLoaded
from shard.core.boxes.upkeep import SealPolicy, plan_rewrite
from shard.core.changes import BatchAppended, BatchKept, Change
from shard.core.machine import LogEntries, Machine, Missing, Outcome
from shard.core.snapshot_facts import SegmentFacts, ShardState
from shard.core.transactions.chunks import ChunksNotLoaded
from shard.core.transactions.unrendered import NotRendered, UnrenderedRows
from shard.recovery.commit_renderer import render_chunks
from shard.storage import frames
from shard.storage.files import DiskLike
from shard.storage.segments import build_index, write_segment
from shard.storage.segments.store import segment_of
from streams.protocol.errors import StreamsError
from streams.protocol.messages import bulk, commands, forwards, queues, routers, schedules
from streams.protocol.messages.commands import Command
from streams.protocol.messages.routers import Route
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.records import Batch, Columns
from streams.protocol.payloads.appends import RecordLimits, parse_append
from streams.protocol.payloads.packed import PackedColumns, pack, unpack_again

#: `STREAMS_SWEEP=full` looks twenty times as far.
SWEEP_FACTOR = 20 if os.environ.get("STREAMS_SWEEP") == "full" else 1


def sampled(examples: int, steps: int = 50) -> settings:
    """Settings of a property test: `examples` by default, many more in a full sweep."""
    return settings(
        max_examples=examples * SWEEP_FACTOR,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class Frame(NamedTuple):
    kind: int
    version: int
    lsn: int
    content: bytes


def encoded(lsn: int, change: Change) -> Frame:
    kind, version, found_lsn, parts = frames.encode(lsn, change)
    return Frame(kind, version, found_lsn, b"".join(parts))


def decoded(frame: Frame) -> Change:
    return frames.decode(frame.kind, frame.version, memoryview(frame.content))


def columns(*records: Any, node: str | None = None) -> Columns:
    """Columns of a write, by the road every write takes. A record that is no dict is its `data`."""
    full = [record if isinstance(record, dict) else {"data": record} for record in records]
    body = {"records": full} if node is None else {"records": full, "node": node}
    return parse_append(msgspec.json.encode(body), RecordLimits()).columns


def patch(**fields: Any) -> BoxPatch:
    return msgspec.convert(fields, BoxPatch)


class Shelf:
    """Segment files without files: what was written under a name is there for good."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int, int], list[bytes]] = {}

    def write(self, generation: int, serial: int, batches: Iterable[Batch]) -> Segment:
        kept = list(batches)
        index = build_index(generation=generation, serial=serial, batches=kept)
        self._written[generation, kept[0].first_seq, serial] = [b"".join(batch.to_parts()) for batch in kept]
        return segment_of(index)

    def read(self, segment: Segment, at: int) -> Batch:
        return Batch.from_bytes(
            memoryview(self._written[segment.generation, segment.first_seq, segment.serial][at])
        )

    def open(self, generation: int, facts: SegmentFacts) -> Segment:
        written = self._written[generation, facts.first_seq, facts.serial]
        batches = [Batch.from_bytes(memoryview(content)) for content in written]
        return segment_of(build_index(generation=generation, serial=facts.serial, batches=batches))

    def store(self, disk: DiskLike, directory: str) -> None:
        """Puts everything into real files."""
        for (generation, _, serial), contents in self._written.items():
            batches = [Batch.from_bytes(memoryview(content)) for content in contents]
            write_segment(disk, directory, generation=generation, serial=serial, batches=batches)

    def load_all(self, machine: Machine, generation: int) -> None:
        """Every payload of a box: what is read then is not cut short where memory ends."""
        for segment in machine.generations[generation].log.segments:
            for at in range(segment.front, len(segment)):
                segment.load(at, self.read(segment, at))

    def load(self, missing: Missing, machine: Machine) -> None:
        if isinstance(missing, NeedsAnotherStep):
            return
        if isinstance(missing, NotLoaded):
            self.load_all(machine, missing.segment.generation)
            return
        assert isinstance(missing, TagsNotLoaded)
        for segment in missing.segments:
            batches = [self.read(segment, at) for at in range(len(segment))]
            tagged = [
                (batch.first_seq + at, batch.size(at, at))
                for batch in batches
                for at, tag in enumerate(batch.tag_list() or ())
                if missing.match.accepts(tag)
            ]
            machine.generations[segment.generation].volatile.tag_lookups[segment.serial, missing.match] = (
                [seq for seq, _ in tagged],
                [size for _, size in tagged],
            )


#: Of the history that is under way: a driver that begins a new one begins with it anew.
SHELF = Shelf()


class Driver:
    """A machine, its log, and the two positions that the committer reports."""

    def __init__(
        self, machine: Machine | None = None, now_ms: int = 1_000, make: Callable[[], Machine] = Machine
    ) -> None:
        """`make` is asked for a machine for each life."""
        global SHELF
        if machine is None:
            SHELF = Shelf()
        self.machine = machine or make()
        self.make = make
        #: Of the boxes of a random history.
        self.classes: tuple[str, ...] = ("memory", "disk", "disk", "disk", "fsync", "fsync")
        self.log: list[Frame] = []
        self.now_ms = now_ms

    def __repr__(self) -> str:
        return f"<Driver {self.machine!r} at {self.now_ms}>"

    # -- commands

    def do(self, command: Command) -> Outcome:
        """Handles a command, again and again until it has all that it needs from segments."""
        made: list[tuple[int, Change]] = []
        for _ in range(1000):
            outcome = self.machine.handle(command, self.now_ms)
            made += outcome.changes
            if not outcome.needs:
                return self.keep(outcome._replace(changes=made))
            assert outcome.reply is None
            for missing in outcome.needs:
                if isinstance(missing, NotRendered):
                    made += self._render(next(iter(self.machine.txns.commits)), 1).changes
                elif isinstance(missing, ChunksNotLoaded):
                    for chunk in missing.chunks:
                        held = self.read_chunk(chunk.lsn, made)
                        chunk.load(held.packed, held.body)
                else:
                    SHELF.load(missing, self.machine)
        raise AssertionError("a command never has what it needs")

    def read_chunk(self, lsn: int, made: LogEntries) -> changes.TxnHeld:
        """A chunk, from the log or from what is to be logged."""
        fresh = dict(made)
        change = fresh[lsn] if lsn in fresh else decoded(self.log[lsn - 1])
        assert isinstance(change, changes.TxnHeld)
        return change

    def _render(self, commit_lsn: int, bytes_max: int, batches_max: int = 1_000_000) -> Outcome:
        """The next step of a commit; or only some of its batches, as if a crash came then."""
        commit = self.machine.txns.commits[commit_lsn]
        step = commit.plan(bytes_max)
        rendered = render_chunks(step, lambda lsn: self.read_chunk(lsn, []))
        is_all = batches_max >= len(rendered)
        return self.machine.keep_rendered(commit, rendered[:batches_max], len(step.chunks) if is_all else 0)

    def render(self, bytes_max: int = 1 << 40, batches_max: int = 1_000_000) -> bool:
        """A step of every commit that has rows left; whether there was one."""
        self.sync()  # a step begins when its commit is on the disk
        commits = list(self.machine.txns.commits)
        for lsn in commits:
            if lsn in self.machine.txns.commits:
                self.keep(self._render(lsn, bytes_max, batches_max))
        return bool(commits)

    def keep(self, outcome: Outcome) -> Outcome:
        for lsn, change in outcome.changes:
            assert lsn == len(self.log) + 1, "LSN"
            self.log.append(encoded(lsn, change))
        self.machine.check()
        return outcome

    def ask(self, command: Command) -> Any:
        """Does it, makes everything durable, and returns the reply; raises what it refuses with."""
        outcome = self.do(command)
        self.sync()
        if isinstance(outcome.reply, StreamsError):
            raise outcome.reply
        return outcome.reply

    def put(self, box: str = "b", **fields: Any) -> Any:
        return self.ask(commands.PutBox(box, patch(**fields)))

    def append(self, *records: Any, box: str = "b", node: str | None = None, **options: Any) -> Any:
        return self.ask(self.write(*records, box=box, node=node, **options))

    def write(
        self, *records: Any, box: str = "b", node: str | None = None, **options: Any
    ) -> commands.Append:
        return commands.Append(box=box, columns=columns(*records, node=node), **options)

    def read(self, from_seq: int = 0, *, box: str = "b", **options: Any) -> commands.DiffResult:
        reply = self.ask(commands.ReadBox(box=box, from_seq=from_seq, **options))
        assert isinstance(reply, commands.DiffResult)
        return reply

    def seqs(self, from_seq: int = 0, *, box: str = "b", **options: Any) -> list[int]:
        return seqs_of(self.read(from_seq, box=box, **options))

    def state(self, box: str = "b") -> commands.BoxState:
        reply = self.ask(commands.GetState(box, False))
        assert isinstance(reply, commands.BoxState)
        return reply

    def delete(self, before_seq: int | None = None, tag: str | None = None, *, box: str = "b") -> Any:
        match = None if tag is None else commands.Match(tag.rstrip("*"), is_prefix=tag.endswith("*"))
        return self.ask(commands.DeleteRecords(box, before_seq, match))

    # -- the committer

    def logged(self, lsn: int | None = None) -> list[str]:
        return self.machine.on_logged(self.machine.lsn if lsn is None else lsn)

    def sync(self, lsn: int | None = None) -> list[str]:
        return self.machine.on_durable(self.machine.lsn if lsn is None else lsn)

    def copy_locally(self, *, is_early: bool = False) -> Outcome:
        """A step of the copies inside this shard, as the engine takes it, and the fetch that it needs."""
        copies = self.machine.local_copies
        outcome = self.keep(copies.step(self.now_ms, is_early=is_early))
        for missing in outcome.needs:
            if isinstance(missing, NotRendered):
                self.render()
            else:
                SHELF.load(missing, self.machine)
            copies.resume(None, self.now_ms)
        return outcome

    def copy_all_locally(self) -> None:
        """Steps until nothing is left to copy inside this shard, with everything durable in between."""
        for _ in range(10_000):
            self.sync()
            if not self.machine.local_copies.is_due:
                return
            self.copy_locally()
        raise AssertionError("it never ends")

    def tick(self) -> Outcome:
        outcome = self.keep(self.machine.tick(self.now_ms))
        for missing in outcome.needs:
            if not isinstance(missing, NotRendered):
                SHELF.load(missing, self.machine)
        return outcome

    # -- upkeep

    def seal(self, box: str = "b", batches: int = 1_000_000) -> bool:
        """Seals the oldest unsealed batches of a box; whether there were any."""
        found = self.machine.boxes[box]
        sealable = found.log.sealable(durable_lsn=self.machine.durable_lsn, bytes_max=1 << 40)[:batches]
        if not sealable or found.is_memory:
            return False
        segment = SHELF.write(found.generation, found.last_serial + 1, sealable)
        self.commit(changes.SegmentSealed(found.generation, segment.serial, segment.to_bytes()))
        SHELF.load_all(self.machine, found.generation)
        return True

    def rewrite(self, policy: SealPolicy) -> bool:
        """Writes segments anew where it is worth it; whether it was."""
        plan = plan_rewrite(self.machine, policy)
        if plan is None:
            return False
        live = [
            batch
            for part in plan.parts
            for at in range(len(part.segment))
            for batch in parts_of(SHELF.read(part.segment, at), part.runs.get(at))
        ]
        assert plan.still_stands(self.machine)
        segment = SHELF.write(plan.box.generation, plan.serial, live)
        serials = [part.segment.serial for part in plan.parts]
        self.commit(changes.SegmentsReplaced(plan.box.generation, serials, plan.serial, segment.to_bytes()))
        SHELF.load_all(self.machine, plan.box.generation)
        return True

    def relog(self, box: str = "b") -> bool:
        """Writes the unsealed batches of a box to the log again; whether there were any."""
        found = self.machine.boxes[box]
        batches = [batch for batch in found.log.tail if batch.dead < batch.count]
        if found.log.tail.has_unrendered:
            return False
        if found.is_memory or not batches or batches[-1].lsn > self.machine.durable_lsn:
            return False
        for batch in batches:
            self.commit(changes.BatchKept(found.generation, batch))
        return True

    def commit(self, change: Change) -> None:
        lsn = self.machine.lsn + 1
        self.machine.apply(change, lsn)
        self.keep(Outcome([(lsn, change)], None))

    def forget(self) -> None:
        """Drops every payload that is in a segment from memory."""
        for segment in self.machine.segments():
            for at in range(len(segment)):
                segment.forget(at)

    def some_upkeep(self, rng: random.Random) -> None:
        box = rng.choice(list(self.machine.boxes) or [""])
        kind = rng.randrange(6)
        if kind == 5:
            if (
                self.machine.txns.commits
                and next(iter(self.machine.txns.commits)) <= self.machine.durable_lsn
            ):
                lsn = next(iter(self.machine.txns.commits))
                self.keep(self._render(lsn, rng.choice((1, 3000, 1 << 30)), rng.choice((1, 2, 1000))))
        elif kind == 4:
            kept = self.machine.keep_held(rng.randint(0, self.machine.logged_lsn))
            if kept is not None:
                self.keep(kept)
        elif kind == 0 and box:
            self.seal(box, rng.choice((1, 2, 5, 1000)))
        elif kind == 1:
            self.rewrite(SealPolicy(rng.choice((4, 10, 40)), 100_000, 1))
        elif kind == 2:
            self.forget()
        elif box:
            self.relog(box)

    # -- lives

    def start(self, boot_id: str) -> Outcome:
        outcome = self.keep(self.machine.start(boot_id=boot_id, now_ms=self.now_ms))
        self.sync()
        return outcome

    def stop(self) -> Outcome:
        outcome = self.keep(self.machine.stop(self.now_ms))
        self.sync()
        return outcome

    def reborn(self, lsn: int | None = None, state: ShardState | None = None) -> Driver:
        """Another driver, recovered from the log up to `lsn`; not yet started."""
        kept = self.log[: self.machine.lsn if lsn is None else lsn]
        other = Driver(recovered(kept, state, self.make), self.now_ms, self.make)
        other.classes = self.classes
        other.log = list(kept)
        return other

    def after_power_cut(self, lsn: int | None = None, boot_id: str = "another-boot") -> Driver:
        other = self.reborn(self.machine.durable_lsn if lsn is None else lsn)
        other.start(boot_id)
        return other


def recovered(
    log: list[Frame], state: ShardState | None = None, make: Callable[[], Machine] = Machine
) -> Machine:
    """What `shard/recovery/recovery.py` makes of a snapshot and a log, without files."""
    machine = replayed(log, state, make)
    machine.end_recovery(machine.lsn)
    machine.check()
    return machine


def replayed(
    log: list[Frame], state: ShardState | None = None, make: Callable[[], Machine] = Machine
) -> Machine:
    machine = make()
    wanted: dict[int, Any] = {}
    held: set[int] = set()
    snapshot_lsn = 0
    if state is not None:
        parts = b"".join(frames.encode_state(state))
        named = machine.restore(frames.decode_state(memoryview(parts)))
        wanted = dict(named.batches)
        held = set(named.held_lsns)
        for box, facts in named.segments:
            box.log.attach(SHELF.open(box.generation, facts), facts.dead)
        snapshot_lsn = state.lsn
    for frame in log[:snapshot_lsn]:
        box = wanted.pop(frame.lsn, None)
        if box is not None:
            change = decoded(frame)
            assert isinstance(change, BatchAppended | BatchKept)
            assert state is not None and frame.lsn >= state.needs_lsn, "needs_lsn covers every named batch"
            change.batch.lsn = frame.lsn
            box.log.hydrate(change.batch)
        elif frame.lsn in held:
            held.remove(frame.lsn)
            chunk = decoded(frame)
            assert isinstance(chunk, changes.TxnHeld)
            machine.txns.give_back(chunk, frame.lsn)
    assert not wanted and not held
    machine.end_hydration()
    for frame in log[snapshot_lsn:]:
        machine.apply(decoded(frame), frame.lsn)
    return machine


def records_of(reply: commands.DiffResult) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(b"[" + reply.records + b"]")
    return found


def seqs_of(reply: commands.DiffResult) -> list[int]:
    return [record["$seq"] for record in records_of(reply)]


# -- the whole state, to be compared


def facts_of(machine: Machine) -> dict[str, Any]:
    """Everything that a restart must bring back, and nothing else: no payload of memory boxes, no positions
    of the committer, and deletes as the records that are left."""
    boxes: dict[str, Any] = {}
    for name, box in machine.boxes.items():
        boxes[name] = {
            "generation": box.generation,
            "config": box.config,
            "created_ms": box.created_ms,
            # What a memory box was sent is not logged, unless it was tied.
            "tied": sorted(
                name for name, known in box.origins.items() if known.is_pinned or not box.is_memory
            ),
            "schedules": [schedule.facts() for schedule in box.schedules.values()],
            # How far one of a memory box has come is not logged either: it begins anew with the box.
            "outboxes": [
                (name, outbox.generation, outbox.dest) + (() if box.is_memory else outbox.log_position)
                for name, outbox in box.outboxes.items()
            ],
        }
        if box.config.durability == "memory":
            continue
        log = box.log
        boxes[name] |= {
            "last_append_ms": box.last_append_ms,
            "reserved_seq": box.reserved_seq,
            "fencing_token": box.fencing_token,
            "keys": list(box.keys.items()),
            "head_seq": log.head_seq,
            "floors": (log.earliest_seq, log.cap_floor, log.ttl_floor),
            "times": (log.last_ts, log.evicted_ts),
            "totals": (log.count, log.bytes),
            "holes": [(hole.first_seq, hole.last_seq, hole.missed_count) for hole in log.holes],
            "origins": list(box.origins.items()),
            "live": live_texts(machine, name),
            "groups": box.groups.facts(),
            "moves": [line.facts() for line in box.moves.values()],
            "outputs": None if box.outputs is None else box.outputs.facts(),
        }
        if box.stream is not None:
            boxes[name]["stream"] = box.stream.facts()
        if box.queue is not None:
            leases_kept = box.config.leases_durable or machine.stopped_clean
            boxes[name]["queue"] = box.queue.facts(leases_kept=leases_kept)
    return {
        "lsn": machine.lsn,
        "boot_id": machine.boot_id,
        "stopped_clean": machine.stopped_clean,
        "last_generation": machine.last_generation,
        "not_recreated": list(machine.not_recreated),
        "routers": (list(machine.routers.routers.values()), machine.routers.last_number),
        "keys": machine.statistics()["idempotency_keys"] if not _has_memory(machine) else None,
        "boxes": boxes,
        "held": held_of(machine),
        "marks": machine.txns.mark_facts(),
        "commits": [commit.facts() for commit in machine.txns.commits.values()],
        "basins": (list(machine.basins.basins.values()), machine.basins.last_number),
        "tokens": list(machine.tokens.tokens.values()),
        "uploads": (
            machine.uploading.chain,
            machine.uploading.follows,
            machine.uploading.lsn,
            machine.uploading.tail_lsn,
        ),
    }


def held_of(machine: Machine) -> dict[Any, Any]:
    """What is held for transactions, and where the log has it."""
    return {
        key: (
            epoch.query,
            epoch.put_ms,
            {
                name: {
                    at: (list(chunk.pieces()), chunk.create, chunk.bytes, chunk.at_ms, chunk.lsn)
                    for at, chunk in chunks.items()
                }
                for name, chunks in epoch.parcels.items()
            },
        )
        for key, epoch in machine.txns.epochs.items()
    }


def _has_memory(machine: Machine) -> bool:
    return any(box.config.durability == "memory" for box in machine.boxes.values())


def live_texts(machine: Machine, name: str, upto_seq: int = 2**64) -> dict[int, tuple[int, bytes]]:
    """The live records of a box: their lsn and their text, by seq."""
    log = machine.boxes[name].log
    found: dict[int, tuple[int, bytes]] = {}
    for span in log.spans():
        if isinstance(span, UnrenderedRows):
            unrendered = dict.fromkeys(range(span.first_seq, span.last_seq + 1), (span.commit_lsn, b""))
            found |= {seq: each for seq, each in unrendered.items() if seq <= upto_seq}
            continue
        for first, last in log.runs(span, 0, span.count - 1):
            batch = payload_of(span)
            for index in range(first, last + 1):
                seq = batch.first_seq + index
                if seq <= upto_seq:
                    text = batch.text_as(index, index, tags=True, meta=True, data=True)
                    found[seq] = (batch.lsn, bytes(text))
    return found


def payload_of(span: Span) -> Batch:
    """The payload, wherever it is; loaded or not, it stays as it was."""
    try:
        return span.payload
    except NotLoaded as missing:
        return SHELF.read(missing.segment, missing.at)


def parts_of(batch: Batch, runs: list[tuple[int, int]] | None) -> list[Batch]:
    return [batch] if runs is None else [batch.part(first, last) for first, last in runs]


# -- a random history, the same for the same seed


def random_command(rng: random.Random, driver: Driver, number: int) -> Command:
    """Any command, likely to do something. `number` makes payloads unlike each other."""
    box = rng.choice("abcqq")
    known = driver.machine.boxes.get(box)
    head = known.log.head_seq if known is not None else 0
    if known is not None and known.queue is not None and rng.random() < 0.6:
        return random_queue_command(rng, known)
    kinds = (
        "append",
        "put",
        "delete",
        "delete_box",
        "fence",
        "read",
        "forwarding",
        "group",
        "txn",
        "schedule",
    )
    kind = rng.choices(kinds, weights=(56, 14, 10, 3, 5, 8, 20, 4, 20, 6))[0]
    if kind == "append":
        records = [
            {
                "data": [number, index, "x" * rng.randrange(20)],
                "tag": rng.choice(("", "", "u-1", "u-2", "v")),
                "node": rng.choice(("", "n1", "n2")),
                **({"meta": {"m": 1}} if rng.random() < 0.2 else {}),
                **({"ts": rng.randrange(3_000)} if rng.random() < 0.2 else {}),
                **random_job_fields(rng, is_queue=known is not None and known.queue is not None),
            }
            for index in range(rng.randrange(1, 7))
        ]
        return commands.Append(
            box=box,
            columns=columns(*records),
            idempotency_key=rng.choice((None, None, "k1", "k2", "k3")),
            fencing_token=known.fencing_token if known is not None else None,
            match_seq=head + 1 if rng.random() < 0.2 else None,
            trim_before_seq=max(0, head - rng.randrange(4)) if rng.random() < 0.15 else None,
            config=random_patch(rng, box, driver.classes),
            create=None if rng.random() < 0.7 else True,
        )
    if kind == "put":
        return commands.PutBox(box, random_patch(rng, box, driver.classes))
    if kind == "delete":
        before_seq = max(0, head - rng.randrange(8)) if rng.random() < 0.5 else None
        match = commands.Match(rng.choice(("u-", "v")), is_prefix=True) if rng.random() < 0.6 else None
        return commands.DeleteRecords(box, 0 if before_seq is None and match is None else before_seq, match)
    if kind == "delete_box":
        return commands.DeleteBox(box, rng.random() < 0.3)
    if kind == "forwarding":
        return random_forwarding(rng, driver, box, number)
    if kind == "fence":
        return commands.SetFence(box, rng.choice(("", "t1", "t2")))
    if kind == "txn":
        return random_txn_command(rng, driver, number)
    if kind == "schedule":
        return random_schedule_command(rng, box)
    if kind == "group":
        return random_group_command(rng, box, known.log.visible_seq if known is not None else 0)
    return commands.ReadBox(box=box, from_seq=max(0, head - rng.randrange(6)), nodes=frozenset({"n1", "n2"}))


def random_forwarding(rng: random.Random, driver: Driver, box: str, number: int) -> Command:
    """Anything about copies: parcels that fit and parcels that do not, ties, answers, routers."""
    known = driver.machine.boxes.get(box)
    life = known.generation if known is not None else 0
    kind = rng.choice(("forward", "forward", "tie", "untie", "collect", "carried", "router", "drop"))
    origin = rng.choice(("q!", "r#1", "r#2"))
    if kind == "forward":
        stands = known.origins[origin].position if known is not None and origin in known.origins else 0
        after = max(0, stands + rng.choice((0, 0, 0, 0, 1, -1)))
        count = rng.randrange(4)
        head = forwards.ForwardHead(
            box=box,
            origin=origin,
            life=rng.choice((1, 1, 1, 1, 2)),
            after=after,
            upto=after + count + rng.randrange(3),
            count=count,
            lost=rng.choice((0, 0, 0, 2)),
            hops=rng.randrange(1, 17),
            create=rng.random() < 0.3,
            bind=origin == "q!",
        )
        text = b",".join(b'{"$seq":1,"$ts":1,"data":[%d,%d,"f"]}' % (number, at) for at in range(count))
        return forwards.Forward(head, text)
    if kind == "tie":
        route = Route(source=box, dest=rng.choice("abc"), revision=number) if rng.random() < 0.5 else None
        return forwards.AttachEndpoint(
            box=box, origin=rng.choice(("r#1", "r#2")), life=life, position=0, route=route
        )
    if kind == "untie":
        return forwards.DetachEndpoint(box, origin)
    if kind == "collect":
        return forwards.Collect(rng.choice((1, 1, 1, 2)))
    if kind == "carried":
        outboxes = list(known.outboxes.values()) if known is not None else []
        batches = [batch for outbox in outboxes for batch in outbox.in_flight.values()]
        if not batches:
            return forwards.Collect(1)
        batch = rng.choice(batches)
        answer = forwards.ForwardReply(life, batch.upto, batch.upto, 7) if rng.random() < 0.8 else None
        return forwards.ReportDelivery(
            driver.machine.forwarding.outboxes.start_lsn, batch.number, answer, "busy"
        )
    if kind == "router":
        route = Route(source=box, dest=rng.choice("xyz"), preserve_tag=rng.random() < 0.5)
        return routers.PutRouter(rng.choice("12"), route)
    return routers.DropRouter(rng.choice("12"), rng.randrange(1, 5))


def random_job_fields(rng: random.Random, *, is_queue: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if rng.random() < 0.1:
        fields["ordering_key"] = rng.choice(("k", "l"))
    if rng.random() < 0.1:
        fields["job_priority"] = rng.randrange(10)
    if is_queue and rng.random() < 0.1:
        fields["delay_ms"] = rng.choice((50, 200))
    return fields


QUEUE_COMMANDS = {
    "claim": 8,
    "together": 2,
    "ack": 4,
    "outputs": 2,
    "nack": 3,
    "extend": 2,
    "release": 1,
    "reschedule": 1,
    "reprioritize": 1,
    "pause": 1,
}


def random_queue_command(rng: random.Random, box: Box) -> Command:
    """A command of workers n1 and n2, of whom each may be a connection too."""
    assert box.queue is not None
    node = rng.choice(("n1", "n2"))
    leased = [seq for seq, job in box.queue.jobs.items() if job.node == node]
    seqs = rng.sample(leased, min(len(leased), rng.randrange(1, 4))) or [1]
    kind = rng.choices(tuple(QUEUE_COMMANDS), weights=tuple(QUEUE_COMMANDS.values()))[0]
    if kind == "outputs":
        # To one box: a restore cannot tell positions of another box from outputs that this one has had.
        outputs = (("a", columns(*([0, at, "o"] for at in range(rng.randrange(1, 3))))),)
        key = rng.choice(("o1", "o2", "o3"))
        return queues.AckWithOutputs(box=box.name, node=node, seqs=seqs, idempotency_key=key, outputs=outputs)
    if kind in ("reschedule", "reprioritize"):
        head = box.log.head_seq
        waiting = tuple(rng.sample(range(1, head + 2), rng.randint(1, min(3, head + 1))))
        if kind == "reschedule":
            return queues.Reschedule(box=box.name, seqs=waiting, delay_ms=rng.choice((0, 60)))
        return queues.Reprioritize(box=box.name, seqs=waiting, job_priority=rng.randrange(10))
    if kind == "pause":
        return queues.SetPaused(box.name, rng.random() < 0.4)
    if kind in ("claim", "together"):
        claims = [
            queues.Claim(
                box=box.name,
                node=node,
                max=rng.randrange(1, 5),
                lease_ms=rng.choice((None, 100, 200)),
                holder=rng.choice((0, 0, 1, 2)),
            )
            for _ in range(rng.randrange(1, 4))
        ]
        return claims[0] if kind == "claim" else queues.BatchClaim(box=box.name, claims=tuple(claims))
    if kind == "ack":
        return queues.Ack(box=box.name, node=node, seqs=seqs)
    if kind == "nack":
        delay_ms, error = rng.choice((0, 0, 50, None)), rng.choice(("", "", "no luck"))
        return queues.Nack(box=box.name, node=node, seqs=seqs, delay_ms=delay_ms, error=error)
    if kind == "extend":
        return queues.Extend(box=box.name, node=node, seqs=seqs, lease_ms=rng.choice((100, 300)))
    return queues.ReleaseHolder(box.name, rng.choice((1, 2)))


def random_group_command(rng: random.Random, box: str, visible_seq: int) -> Command:
    group = rng.choice(("g1", "g2"))
    if rng.random() < 0.3:
        return queues.DeleteGroup(box, group)
    return queues.CommitGroup(box, group, rng.randint(0, visible_seq))


def random_schedule_command(rng: random.Random, box: str) -> Command:
    """Names of one box are not those of another: a schedule keeps its box."""
    name = f"{box}{rng.choice('12')}"
    kind = rng.choice(("put", "put", "put", "run", "drop"))
    if kind == "run":
        return schedules.RunSchedule(box, name, rng.choice((None, "k1")))
    if kind == "drop":
        return schedules.DropSchedule(box, name)
    spec = schedules.ScheduleSpec(
        record=b'{"data":[0,0,"s"]}',
        every_ms=rng.choice((100, 150)),
        is_paused=rng.random() < 0.1,
        catch_up=rng.choice(("one", "all", "none")),
    )
    return schedules.PutSchedule(box, name, spec)


def random_txn_command(rng: random.Random, driver: Driver, number: int) -> Command:
    """Puts of tasks p1 and p2, and of some that died; commits of what is held; now and then an abort."""
    writer = rng.choice(("w1", "w2"))
    marks = driver.machine.txns.marks.get(writer, ())
    epoch = max((mark.epoch for mark in marks), default=0) + rng.choice((0, 1, 1, 1, 1, 2))
    txn = bulk.Txn(writer, epoch, rng.choice(("query", "query", "query", "another")), rng.random() < 0.5)
    held = driver.machine.txns.find(writer, epoch)
    parcels = list(held.parcels.items()) if held is not None else []
    kind = rng.choices(("put", "commit", "abort", "list"), weights=(10, 5, 1, 1))[0]
    if kind == "put":
        boxes = sorted(rng.sample("abcq", rng.randrange(1, 4)))
        counts = [rng.randrange(1, 4) for _ in boxes]
        rows = range(sum(counts))
        packed = pack(
            boxes,
            counts,
            [b'[%d,%d,"t"]' % (number, row) for row in rows],
            tag=[rng.choice((b"", b"u-1", b"v")) for _ in rows] if rng.random() < 0.5 else None,
            meta=[rng.choice((b"", b'{"m":2}')) for _ in rows] if rng.random() < 0.2 else None,
            ts=[rng.randrange(-1, 3_000) for _ in rows] if rng.random() < 0.2 else None,
            default_node=rng.choice(("", "n1")),
            create=rng.choice((None, None, True, False)),
        )
        parcel = rng.choice(("p1", "p1", "p2", f"zombie-{number}"))
        chunk = len(held.parcels.get(parcel, ())) if held is not None else 0
        return put_of(txn, parcel, max(0, chunk - (rng.random() < 0.1)), packed)
    if kind == "commit":
        rng.shuffle(parcels)
        some = [(name, len(chunks)) for name, chunks in parcels if not name.startswith("z")]
        return bulk.TxnCommit(txn, some if rng.random() < 0.9 else [*some, ("never-put", 1)])
    if kind == "abort":
        return bulk.TxnAbort(txn, [name for name, _ in parcels[:1]])
    return bulk.TxnList()


def put_of(txn: bulk.Txn, parcel: str, chunk: int, packed: PackedColumns) -> bulk.TxnPut:
    """A put as it comes out of its message; every second one without its rows, as if there were too many to
    remember."""
    head, body = packed.head(), b"".join(packed.buffers())
    return bulk.TxnPut(txn, parcel, chunk, head, body, None if chunk % 2 else unpack_again(head, body))


def random_patch(rng: random.Random, box: str, classes: tuple[str, ...]) -> BoxPatch:
    choices: dict[str, tuple[Any, ...]] = {
        "ttl_ms": (0, 40, 300),
        "cap_records": (0, 3, 8),
        "cap_bytes": (0, 300, 900),
        "discard": ("old", "reject"),
        "durability": classes,
        "auto_create": (True, True, False),
        "idempotency_window_ms": (0, 50, 120_000),
        "timestamping": ({"mode": "arrival"}, {"mode": "client-prefer"}, {"uncapped": True}),
    }
    chosen = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.15}
    if box == "q":
        chosen["type"] = "queue"
        chosen |= {"leases_durable": rng.random() < 0.5} if rng.random() < 0.3 else {}
        chosen |= {"claim_jitter_ms": rng.choice((0, 10))} if rng.random() < 0.1 else {}
        chosen |= {"max_deliveries": 2, "dead_letter": "d"} if rng.random() < 0.2 else {}
        chosen |= {"key_concurrency": rng.choice((0, 1))} if rng.random() < 0.1 else {}
        chosen |= {"fair": rng.random() < 0.5} if rng.random() < 0.1 else {}
        chosen |= {"rate_per_s": rng.choice((0, 20))} if rng.random() < 0.1 else {}
        chosen |= {"retry_backoff": rng.choice((None, {"initial_ms": 50}))} if rng.random() < 0.1 else {}
    return patch(**chosen)


def random_history(seed: int, steps: int) -> Driver:
    """A driver after a random run with late reports, ticks and restarts."""
    rng = random.Random(seed)
    driver = Driver()
    driver.start("boot")
    for number in range(steps):
        driver.do(random_command(rng, driver, number))
        chance = rng.random()
        if chance < 0.3:
            driver.now_ms += rng.randrange(60)
        elif chance < 0.4:
            driver.logged(rng.randint(driver.machine.logged_lsn, driver.machine.lsn))
        elif chance < 0.5:
            driver.sync(rng.randint(driver.machine.durable_lsn, driver.machine.lsn))
        elif chance < 0.55:
            driver.tick()
        elif chance < 0.75:
            driver.some_upkeep(rng)
        elif chance < 0.76:
            driver.sync()
            driver = driver.after_power_cut(boot_id=f"boot-{number}")
    driver.sync()
    return driver
