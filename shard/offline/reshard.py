"""Moves boxes into the folders of another number of shards. The supervisor runs it as a process of its own.

    old folders ──read, one after the other──► boxes, each by the slot of its name ──► new folders

The supervisor marks the new folders in the manifest as unfinished, and activates them when this process
succeeds. Until then the old folders count and are only read. So it may be killed at any time: the next start
removes the unfinished folders and starts again.

Segment files get a hard link in the new folder, which costs almost nothing; a file system without hard links
gets copies. One old shard is in memory at a time, plus the facts of all boxes.

Arguments: --plan JSON · --parent-fd P (end of file: stop) · --report-fd R (`progress 0.42`, `error why`)
Exit codes: 0 done · 1 a bug, or the disk failed · 2 refused · 3 damaged data.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from shard.core.machine import Machine
from shard.core.snapshot_facts import BoxFacts
from shard.recovery.page_cache import has_failed, page_cache_id
from shard.storage import segments
from shard.storage.files import Corrupt, Disk, DiskLike
from shard.storage.segments.store import Name
from shard.storage.wal import FILE_BYTES
from shard.transfer.shard_folders import (
    Parts,
    ShardBuilder,
    end_life,
    has_links,
    parts_of,
    read_shard,
    servers_of,
)
from shard.transfer.transaction_marks import MarkMerge, owners_of
from streams.protocol.model.slots import SLOTS, slot_of

EXIT_FAILED, EXIT_REFUSED, EXIT_CORRUPT = 1, 2, 3

#: Free space that is not used, for logs, snapshots and names.
_SPARE_BYTES = 16 << 20
#: Upper bounds of the overhead of a frame and of a box.
_FRAME_BYTES, _BOX_BYTES = 64, 1024

#: The share of reading in the work for one old shard.
_READING = 0.5

#: The smallest progress that is reported.
_STEP = 0.002

Report = Callable[[float], None]


class NotEnoughSpace(Exception):
    """The disk has not enough space; nothing was changed."""


class ReshardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The request of the supervisor."""

    data_dir: str
    #: Folders of the old and of the new shards, by shard number.
    sources: list[str]
    targets: list[str]
    #: The new placement: runs of slots (start, end, shard), as in the manifest.
    slots: list[tuple[int, int, int]]
    #: The old placement.
    old_slots: list[tuple[int, int, int]]
    wal_file_bytes: int = FILE_BYTES

    def owners(self) -> list[int]:
        """Return the new shard of each slot."""
        owners = owners_of(self.slots)
        assert len(owners) == SLOTS and max(owners) < len(self.targets)
        return owners


class ReshardResult(NamedTuple):
    """Counts of the moved boxes and files. Its fields are part of the report line."""

    boxes: int
    batches: int
    linked: int
    copied_bytes: int


def reshard(
    disk: DiskLike, plan: ReshardPlan, *, boot_id: str, now_ms: int, report: Report = lambda ratio: None
) -> ReshardResult:
    """Build all new folders from the old ones."""
    return _Reshard(disk, plan, boot_id=boot_id, now_ms=now_ms, report=report).run()


class _Reshard:
    def __init__(
        self, disk: DiskLike, plan: ReshardPlan, *, boot_id: str, now_ms: int, report: Report
    ) -> None:
        self._disk = disk
        self._plan = plan
        self._owners = plan.owners()
        self._marks = MarkMerge(owners_of(plan.old_slots), self._owners)
        self._boot_id = boot_id
        self._now_ms = now_ms
        self._report = report
        self._has_links = has_links(disk, plan.data_dir)
        self._last_generation = 0
        self._result = ReshardResult(0, 0, 0, 0)
        self._builders = [
            ShardBuilder(disk, f"{plan.data_dir}/{name}", file_bytes=plan.wal_file_bytes)
            for name in plan.targets
        ]

    def __repr__(self) -> str:
        return f"<_Resharding {len(self._plan.sources)} -> {len(self._builders)}: {self._result}>"

    def run(self) -> ReshardResult:
        for number, name in enumerate(self._plan.sources):
            self._move_all(number, f"{self._plan.data_dir}/{name}")
        for number, builder in enumerate(self._builders):
            builder.add_marks(self._marks.of(number))
            builder.finish(last_generation=self._last_generation, boot_id=self._boot_id, now_ms=self._now_ms)
            builder.check()
        self._report(1.0)
        return self._result

    def _move_all(self, number: int, source: str) -> None:
        def report_progress(done_ratio: float) -> None:
            self._report((number + done_ratio) / len(self._plan.sources))

        machine = read_shard(
            self._disk, source, shard=number, report=lambda ratio: report_progress(_READING * ratio)
        )
        cache_survived = not has_failed(self._disk, source)
        end_life(machine, boot_id=self._boot_id, now_ms=self._now_ms, cache_survived=cache_survived)
        parts = parts_of(machine)
        self._refuse_if_full(machine, parts, source)
        for at, facts in enumerate(parts.state.boxes):
            self._move(facts, parts, source)
            report_progress(_READING + (1 - _READING) * at / len(parts.state.boxes))
        self._move_stubs(machine, source)
        for builder, names in self._by_owner(parts.state.not_recreated):
            builder.add_not_recreated(names)
        self._builders[0].add_routers(parts.state)
        self._marks.add(number, parts.state.marks)
        for builder in self._builders:
            builder.add_follows(servers_of(parts.state))
        self._last_generation = max(self._last_generation, machine.last_generation)

    def _move(self, facts: BoxFacts, parts: Parts, source: str) -> None:
        builder = self._owner(facts.name)
        batches = parts.batches_of(facts)
        files = builder.import_segments(f"{source}/segments", facts)
        builder.add(facts, batches)
        result = self._result
        self._result = ReshardResult(
            result.boxes + 1,
            result.batches + len(batches),
            result.linked + files.linked_files,
            result.copied_bytes + files.copied_bytes,
        )

    def _move_stubs(self, machine: Machine, source: str) -> None:
        """Move stubs that nothing names to the shard of their box, or to any shard if the box is gone.

        The next segment of the box might get the same number.
        """
        stubs_in_use = {Name.of(segment).stub for segment in machine.segments()}
        for stub in segments.list_stubs(self._disk, f"{source}/segments"):
            if stub not in stubs_in_use:
                generation = int(stub.partition("/")[0])
                box = machine.generations.get(generation)
                builder = self._builders[generation % len(self._builders)]
                if box is not None:
                    builder = self._owner(box.name)
                builder.import_stub(f"{source}/segments", stub)

    def _owner(self, name: str) -> ShardBuilder:
        return self._builders[self._owners[slot_of(name)]]

    def _by_owner(self, names: list[str]) -> list[tuple[ShardBuilder, list[str]]]:
        names_by_shard: dict[int, list[str]] = {}
        for name in names:
            names_by_shard.setdefault(self._owners[slot_of(name)], []).append(name)
        return [(self._builders[shard], mine) for shard, mine in sorted(names_by_shard.items())]

    def _refuse_if_full(self, machine: Machine, parts: Parts, source: str) -> None:
        batches = (batch for tail in parts.tails.values() for batch in tail)
        needed_bytes = _SPARE_BYTES + sum(len(batch.blob) + _FRAME_BYTES for batch in batches)
        needed_bytes += _BOX_BYTES * len(parts.state.boxes)
        if not self._has_links:
            directory = f"{source}/segments"
            files = {Name.of(segment).file for segment in machine.segments()}
            present = files & set(segments.list_segments(self._disk, directory))
            needed_bytes += sum(self._disk.size(f"{directory}/{file}") for file in present)
        free_bytes = self._disk.free_bytes(self._plan.data_dir)
        if free_bytes < needed_bytes:
            raise NotEnoughSpace(
                f"moving the boxes of {source} needs {needed_bytes >> 20} MiB, and {free_bytes >> 20} MiB "
                "are free on the disk; free some space, or start with the old number of shards"
            )


# ---------------------------------------------------------------------------------------------------
# The process


def _watch_parent(descriptor: int) -> None:
    """End the process when the supervisor ends: the unfinished folders are useless without it."""

    def watch() -> None:
        os.read(descriptor, 1)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> int:
    from shard.offline.system_clock import now_ms

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to every process; the supervisor decides
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    arguments = parser.parse_args()
    _watch_parent(arguments.parent_fd)

    last_ratio = -1.0

    def write_line(line: str) -> None:
        os.write(arguments.report_fd, line.replace("\n", " ").encode() + b"\n")

    def report(ratio: float) -> None:
        nonlocal last_ratio
        if ratio - last_ratio >= _STEP:
            last_ratio = ratio
            write_line(f"progress {ratio:.4f}")

    plan = msgspec.json.decode(arguments.plan, type=ReshardPlan)
    try:
        life = page_cache_id(plan.data_dir)
        result = reshard(Disk(), plan, boot_id=life, now_ms=now_ms(), report=report)
    except Corrupt as damage:
        write_line(f"error {damage}")
        return EXIT_CORRUPT
    except NotEnoughSpace as refusal:
        write_line(f"error {refusal}")
        return EXIT_REFUSED
    except OSError as error:
        write_line(f"error {error}")
        return EXIT_FAILED
    write_line(f"done {msgspec.json.encode(result._asdict()).decode()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
