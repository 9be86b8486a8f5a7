"""Makes the folder of a damaged shard whole: cuts what is damaged, invents nothing, tells what is lost.

    damaged folder ──read, as far as it goes──► machine ──what is lost: holes──► ShardBuilder ──► new folder

| damaged                    | what is done                                                               |
|----------------------------|----------------------------------------------------------------------------|
| a snapshot                 | the one before it is used, with the log since; or the log alone, from lsn 1 |
| a frame of the log         | passed over; what is whole behind it counts (below)                        |
| a batch in a segment       | its live records are lost; the segment is written anew without it          |
| tags of a segment          | the segment is written anew; nothing is lost                               |
| the index of a segment     | that of its stub is used, or of the copy in the cold store; without any all |
|                            | its live records are lost                                                  |
| a stub                     | it is written anew from the copy in the cold store; nothing is lost        |
| a batch in the cold store  | its live records are lost; the rest of the segment is written anew, here,  |
|                            | and the server drops the copy in the cold store                            |

A cold store that does not answer, or is not named, proves nothing about what is in it: then nothing is given
up because of it, and the repair is refused.

A server drops a copy from the cold store when it finds a stub that nothing names. So the new folder gets such
stubs: of the copies that were waiting to be dropped, unless a damaged log may have named them, and of the
segments that the repair gives up. If the store has no copy of such a segment, its stub stays behind: the
store may be the wrong one, and the copy in the right one must survive that mistake.

What a repaired shard has lost may be known to others: copies of its records, dead letters, streams. So the
shards are compared as after a restore (`reconcile.py`), and one that has to be corrected is built anew too.

Rules of the file
- The damaged folder is only read.
- Numbers that changes carry are not believed behind damage: what is live is measured again, from the payload.
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
from shard.transfer.boxes import ShardBuilder, end_life, parts_of, read_shard, servers_of

if TYPE_CHECKING:
    from shard.storage.cold import ColdStore

__all__ = ["CannotRepair", "Loss", "RepairResult", "compare_shards", "repair_shard"]


class RepairResult(NamedTuple):
    losses: list[Loss]
    #: What was done beside that, for people.
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
    """Builds `target`, a folder that is not there yet, from what is whole in `source`. `server` is the number
    of the data directory, under which `cold` has its segments. With `looks_at_cold` every byte of them is
    read, too."""
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
    """Finds out what the shards do not agree about. Returns the changes of each that make them agree; nothing
    is written."""
    machines = [
        read_shard(disk, folder, shard=shard, open_segment=store.open)
        for shard, (folder, store) in enumerate(zip(folders, stores, strict=True))
    ]
    reconciler = Reconciler(
        machines, stores, owner_of, cuts={}, later_boxes=set(), until_ms=None, now_ms=now_ms
    )
    return reconciler.run(), reconciler.changes_by_shard
