"""Builds a new folder from the folder of a damaged shard: drops damaged data and reports every loss.

    damaged folder ──LogRepair, SegmentRepair──► machine, losses as holes ──ShardBuilder──► new folder

| damaged                    | repair                                                                     |
|----------------------------|----------------------------------------------------------------------------|
| a snapshot                 | uses the one before it, with the log since; or the log alone, from lsn 1   |
| a frame of the log         | skips it; intact frames after it count (`log_repair.py`)                   |
| a batch in a segment       | loses its live records; rewrites the segment without it                    |
| tags of a segment          | rewrites the segment; nothing is lost                                      |
| the index of a segment     | uses the index of its stub, or of the copy in the cold store; without any, |
|                            | loses all its live records                                                 |
| a stub                     | rewrites it from the copy in the cold store; nothing is lost               |
| a batch in the cold store  | loses its live records; rewrites the rest of the segment locally, and the  |
|                            | server drops the copy in the cold store                                    |

A cold store that does not answer, or is not configured, proves nothing about its content. The repair is
refused instead of dropping data because of it.

A server drops a copy from the cold store when it finds a stub that nothing names. So the new folder gets such
stubs: of copies that were waiting to be dropped, unless a damaged log may have named them, and of segments
that the repair drops. If the store has no copy of such a segment, its stub is not taken over: the configured
store may be the wrong one, and the copy in the right one must survive that mistake.

Other shards may know records that a repaired shard has lost: copies, dead letters, streams. So the shards are
compared as after a restore (`reconcile.py`), and a shard that needs corrections is rebuilt too.

Rules of the file
- The damaged folder is only read.
- After damage, the counts in changes are not trusted: live records are counted again, from the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shard.core.boxes import offline_edits
from shard.offline.log_repair import LogRepair
from shard.offline.reconcile import Corrections, Reconciler, ShardChanges
from shard.offline.repair_findings import CannotRepair, Findings, Loss
from shard.offline.segment_repair import SegmentRepair
from shard.recovery.page_cache import has_failed
from shard.storage import segments
from shard.storage.files import DiskLike
from shard.storage.segments.store import SegmentStore
from shard.storage.wal import FILE_BYTES
from shard.transfer.shard_folders import ShardBuilder, end_life, parts_of, read_shard, servers_of

if TYPE_CHECKING:
    from shard.storage.cold import ColdStore

__all__ = ["CannotRepair", "Loss", "RepairResult", "compare_shards", "repair_shard"]


class RepairResult(NamedTuple):
    """The losses and notes of a repair, and the size of the new folder."""

    losses: list[Loss]
    #: Other repairs, as sentences for the operator.
    notes: list[str]
    boxes: int
    records: int


def repair_shard(
    disk: DiskLike,
    source: str,
    target: str,
    *,
    shard: int,
    boot_id: str,
    now_ms: int,
    cold: ColdStore | None = None,
    verifies_cold: bool = False,
    server: str = "",
    file_bytes: int = FILE_BYTES,
) -> RepairResult:
    """Build `target`, a folder that does not exist yet, from the intact data in `source`.

    `server` is the number of the data directory, which is part of the segment names in `cold`. With
    `verifies_cold` every byte of these segments is read, too.
    """
    store = SegmentStore(disk, f"{source}/segments", cold, server=server)
    findings = Findings()
    segment_repair = SegmentRepair(disk, source, store, findings, verifies_cold=verifies_cold)
    log_repair = LogRepair(disk, source, shard, segment_repair, findings)
    log_repair.recover()
    machine = log_repair.machine
    builder = ShardBuilder(disk, target, file_bytes=file_bytes)
    segment_repair.rewrite_damaged(
        machine.boxes.values(), log_repair.suspect_boxes, SegmentStore(disk, builder.segments)
    )
    for box in machine.boxes.values():
        offline_edits.settle_rest(box)
    cache_survived = not has_failed(disk, source)
    end_life(machine, boot_id=boot_id, now_ms=now_ms, cache_survived=cache_survived)
    parts = parts_of(machine)
    for facts in parts.state.boxes:
        builder.import_segments(f"{source}/segments", segment_repair.keep_intact_segments(facts))
        builder.add(facts, parts.batches_of(facts))
    for index in segment_repair.stubs_to_write.values():
        segments.write_stub(disk, builder.segments, index)
    for stub in segment_repair.stubs_to_drop:
        builder.import_stub(f"{source}/segments", stub)
    builder.add_not_recreated(parts.state.not_recreated)
    builder.add_routers(parts.state)
    builder.add_marks(parts.state.marks)
    builder.add_follows(servers_of(parts.state))
    builder.finish(last_generation=machine.last_generation, boot_id=boot_id, now_ms=now_ms)
    builder.check()
    records = sum(facts.live_count for facts in parts.state.boxes)
    return RepairResult(findings.losses, findings.notes, len(parts.state.boxes), records)


def compare_shards(
    disk: DiskLike,
    folders: Sequence[str],
    stores: Sequence[SegmentStore],
    owner_of: Callable[[str], int],
    *,
    now_ms: int,
) -> tuple[Corrections, list[ShardChanges]]:
    """Find the corrections that make the shards agree. Returns them with the changes of each shard; writes
    nothing."""
    machines = [
        read_shard(disk, folder, shard=shard, open_segment=store.open)
        for shard, (folder, store) in enumerate(zip(folders, stores, strict=True))
    ]
    reconciler = Reconciler(
        machines, stores, owner_of, cuts={}, later_boxes=set(), until_ms=None, now_ms=now_ms
    )
    return reconciler.run(), reconciler.changes_by_shard
