"""Folders of shards: written from a history, read back, and compared by what readers would get."""

from __future__ import annotations

from typing import Any

from shard.core.boxes.sealed import NotLoaded
from shard.core.changes import BatchKept, BoxConfigured, BoxRestated, TxnCommitted
from shard.core.machine import Machine
from shard.storage import frames
from shard.storage.files import DiskLike
from shard.storage.segments.store import Name, SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import HEADER_BYTES, Wal
from shard.transfer.shard_folders import read_shard
from tests.support import machines
from tests.support.machines import Driver, Frame, decoded, recovered

FILE_BYTES = HEADER_BYTES + 4_000


def _at_rest(log: list[Frame], lsn: int) -> int:
    """The next lsn at which no box is half restated, and no commit half logged: no snapshot is taken in the
    middle of a command."""
    half: set[int] = set()
    unkept = 0
    for frame in log:
        change = decoded(frame)
        if not isinstance(change, BatchKept):
            unkept = 0  # what a crash cut off of a commit is logged anew, ahead of anything else
        if frame.lsn > lsn and not half and not unkept:
            return frame.lsn - 1
        if isinstance(change, TxnCommitted):
            unkept = sum(len(part.counts) for part in change.parts)
        elif isinstance(change, BatchKept):
            unkept = max(0, unkept - 1)
        if isinstance(change, BoxRestated):
            half.add(change.generation)
        elif isinstance(change, BoxConfigured):
            half.discard(change.generation)
    return len(log)


def write_folder(
    disk: DiskLike, directory: str, driver: Driver, *, snapshots: tuple[float, ...] = ()
) -> None:
    """The folder that a shard with this history would leave, had it died now. Snapshots by where in the log
    they were taken, from 0 to 1."""
    disk.mkdir(directory)
    wal = Wal(disk, f"{directory}/wal", file_bytes=FILE_BYTES)
    for _ in wal.scan():
        pass
    wal.settle()
    machines.SHELF.store(disk, f"{directory}/segments")
    log = driver.log
    for at in range(0, len(log), 7):
        wal.append([(kind, version, lsn, (content,)) for kind, version, lsn, content in log[at : at + 7]])
        wal.sync()
    wal.close()
    for part in snapshots:
        state = recovered(log[: _at_rest(log, int(part * len(log)))]).snapshot()
        Snapshots(disk, f"{directory}/snapshot").write(state.lsn, frames.encode_state(state))
    disk.fsync_dir(directory)


def contents(disk: DiskLike, directory: str) -> dict[str, Any]:
    """What readers and writers of each box of a folder would find, payloads included, without any lsn."""
    machine = read_shard(disk, directory)
    machine.check()
    return contents_of(machine, SegmentStore(disk, f"{directory}/segments"))


def contents_of(machine: Machine, store: SegmentStore) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, box in machine.boxes.items():
        log = box.log
        found[name] = {"generation": box.generation, "config": box.config, "created_ms": box.created_ms}
        if box.is_memory:
            found[name].pop("generation")
            continue
        found[name] |= {
            "token": box.fencing_token,
            "keys": [(key, entry[:3]) for key, entry in box.keys.items()],
            "reserved": box.reserved_seq,
            "positions": (log.head_seq, log.visible_seq, log.earliest_seq, log.cap_floor, log.ttl_floor),
            "times": (log.last_ts, log.evicted_ts, box.last_append_ms, box.emptied_ms),
            "totals": (log.count, log.bytes),
            "holes": [(hole.first_seq, hole.last_seq) for hole in log.holes],
            "live": _live(machine, name, store),
        }
    return found


def _live(machine: Machine, name: str, store: SegmentStore) -> dict[int, bytes]:
    log = machine.boxes[name].log
    live: dict[int, bytes] = {}
    for span in log.spans():
        for first, last in log.runs(span, 0, span.count - 1):
            try:
                batch = span.payload
            except NotLoaded as missing:
                (batch,) = store.read(Name.of(missing.segment), missing.at, bytes_max=1)
            for index in range(first, last + 1):
                text = batch.text_as(index, index, tags=True, meta=True, data=True)
                live[batch.first_seq + index] = bytes(text)
    return live


def all_contents(disk: DiskLike, directories: list[str]) -> dict[str, Any]:
    """Of several shards. A box that two of them have is a failure."""
    found: dict[str, Any] = {}
    for directory in directories:
        for name, box in contents(disk, directory).items():
            assert name not in found, f"{name} has two owners"
            found[name] = box
    return found
