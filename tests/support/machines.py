"""A machine with its log beside it: what the engine and the disk do, in a list, without a disk or a clock.

`Driver` hands commands to a real `Machine`, keeps every change it makes as encoded frames (the very bytes that
`shard/storage/frames.py` would log) and can recover another machine from any prefix of them, with or without a
snapshot, by the steps of `shard/recovery.py`.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, settings

from shard.core.changes import BatchAppended, Change, ShardState
from shard.core.machine import Machine, Outcome
from shard.storage import frames
from streams.protocol import commands
from streams.protocol.boxes import BoxPatch
from streams.protocol.commands import Command
from streams.protocol.errors import StreamsError
from streams.protocol.records import Columns, RecordLimits, parse_append

#: `STREAMS_SWEEP=full` looks twenty times as far.
SWEEP_FACTOR = 20 if os.environ.get("STREAMS_SWEEP") == "full" else 1


def sampled(examples: int, steps: int = 50) -> settings:
    """Settings of a property test: `examples` by default, many more in a full sweep."""
    return settings(
        max_examples=examples * SWEEP_FACTOR,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        derandomize=False,
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


class Driver:
    """A machine, its log, and the two positions that the committer reports."""

    def __init__(self, machine: Machine | None = None, now_ms: int = 1_000) -> None:
        self.machine = machine or Machine()
        self.log: list[Frame] = []
        self.now_ms = now_ms

    def __repr__(self) -> str:
        return f"<Driver {self.machine!r} at {self.now_ms}>"

    # -- commands

    def do(self, command: Command) -> Outcome:
        return self.keep(self.machine.handle(command, self.now_ms))

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

    def read(self, from_seq: int = 0, *, box: str = "b", **options: Any) -> commands.Records:
        reply = self.ask(commands.Diff(box=box, from_seq=from_seq, **options))
        assert isinstance(reply, commands.Records)
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
        return self.machine.logged(self.machine.lsn if lsn is None else lsn)

    def sync(self, lsn: int | None = None) -> list[str]:
        return self.machine.durable(self.machine.lsn if lsn is None else lsn)

    def tick(self) -> Outcome:
        return self.keep(self.machine.tick(self.now_ms))

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
        other = Driver(recovered(kept, state), self.now_ms)
        other.log = list(kept)
        return other

    def after_power_cut(self, lsn: int | None = None, boot_id: str = "another-boot") -> Driver:
        other = self.reborn(self.machine.durable_lsn if lsn is None else lsn)
        other.start(boot_id)
        return other


def recovered(log: list[Frame], state: ShardState | None = None) -> Machine:
    """What `shard/recovery.py` makes of a snapshot and a log, without files."""
    machine = replayed(log, state)
    machine.recovered(machine.lsn)
    machine.check()
    return machine


def replayed(log: list[Frame], state: ShardState | None = None) -> Machine:
    machine = Machine()
    wanted: dict[int, Any] = {}
    snapshot_lsn = 0
    if state is not None:
        parts = b"".join(frames.encode_state(state))
        wanted = machine.restore(frames.decode_state(memoryview(parts)))
        snapshot_lsn = state.lsn
    for frame in log[:snapshot_lsn]:
        box = wanted.pop(frame.lsn, None)
        if box is not None:
            change = decoded(frame)
            assert isinstance(change, BatchAppended)
            assert state is not None and frame.lsn >= state.needs_lsn, "needs_lsn covers every named batch"
            change.batch.lsn = frame.lsn
            box.log.hydrate(change.batch)
    assert not wanted
    machine.hydrated()
    for frame in log[snapshot_lsn:]:
        machine.apply(decoded(frame), frame.lsn)
    return machine


def records_of(reply: commands.Records) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(b"[" + reply.records + b"]")
    return found


def seqs_of(reply: commands.Records) -> list[int]:
    return [record["$seq"] for record in records_of(reply)]
