"""Goal: what any version of us has written can be read.

Method: a shard's folder and a backup of it as format 1 wrote them (`golden/`), held against the history they
were made from. Manifests, segments and stubs have golden files of their own, and so has every kind of change
(`test_golden_facts.py`). To make them again: `python -m tests.storage.test_golden`; what exists is never
overwritten, because it is what others have.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shard.core.machine import Outcome
from shard.offline.restore import RestoreJob
from shard.offline.verify import Scope, verify_shard
from shard.storage.cold import FolderCold
from shard.storage.files import Disk
from shard.storage.segments.store import SegmentStore
from shard.transfer.backup import BackupStore, ShardSource
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import end_life, parts_of, read_shard
from streams.cli.signing import load_verifier
from streams.protocol.messages import bulk, commands
from streams.protocol.model.slots import SLOTS
from streams.protocol.payloads.packed import pack
from tests.support.folders import FILE_BYTES, contents, write_folder
from tests.support.machines import Driver, held_of, put_of

GOLDEN = Path(__file__).parent / "golden"
SHARD, BACKUP, SIGNED_BACKUP = GOLDEN / "shard-v1", GOLDEN / "backup-v1", GOLDEN / "backup-v2"
TRANSACTIONS = GOLDEN / "transactions-v1"


def history() -> Driver:
    """A little of everything that the log of format 1 can hold."""
    driver = Driver(now_ms=1_700_000_000_000)
    driver.start("boot-1")
    driver.put("kept", durability="fsync", cap_records=6)
    driver.append({"data": 1, "tag": "a"}, {"data": [1.0], "node": "n"}, box="kept", idempotency_key="k")
    driver.append(*({"data": {"n": n}, "tag": "b", "meta": {"m": n}} for n in range(3)), box="kept")
    driver.seal("kept")
    driver.append({"data": "tail", "tag": "a"}, {"data": "ü"}, {"data": None}, box="kept")
    driver.delete(tag="a", box="kept")
    driver.ask(commands.SetFence("kept", "token"))
    driver.put("disk", ttl_ms=50)
    driver.append("old", box="disk")
    driver.now_ms += 100
    driver.append("new", "newer", box="disk")
    driver.relog("disk")
    driver.put("memory", durability="memory")
    driver.append("gone", box="memory")
    driver.put("once", auto_create=False)
    driver.ask(commands.DeleteBox("once"))
    driver.stop()
    return driver


def test_the_golden_shard_of_format_one_is_read() -> None:
    disk = Disk()
    store = SegmentStore(disk, f"{SHARD}/segments")
    assert verify_shard(disk, Scope(str(SHARD), str(SHARD), store, lambda slot: True)).problems == []
    found = contents(disk, str(SHARD))
    assert sorted(found) == ["disk", "kept", "memory"]
    kept = found["kept"]
    assert kept["token"] == "token" and [key for key, _ in kept["keys"]] == ["k"]
    assert kept["positions"] == (8, 8, 3, 3, 0) and sorted(kept["live"]) == [3, 4, 5, 7, 8]
    assert kept["live"][8] == b'{"$seq":8,"$ts":1700000000000,"data":null}'
    assert sorted(found["disk"]["live"]) == [2, 3] and found["disk"]["positions"][4] == 2
    assert read_shard(disk, str(SHARD)).not_recreated == {"once": None}


def test_the_golden_shard_is_what_its_history_comes_to_today(tmp_path: Path) -> None:
    write_folder(Disk(), f"{tmp_path}/shard", history(), snapshots=(0.6,))
    assert contents(Disk(), f"{tmp_path}/shard") == contents(Disk(), str(SHARD))


@pytest.mark.parametrize("backup", [BACKUP, SIGNED_BACKUP])
def test_the_golden_backups_of_both_formats_are_restored(tmp_path: Path, backup: Path) -> None:
    disk = Disk()
    verify = load_verifier(backup / "backup.pub") if backup == SIGNED_BACKUP else None
    target = BackupStore(FolderCold(str(backup), disk), disk, verify=verify)
    (id,) = target.ids()
    RestoreJob(
        disk,
        target,
        target.load(id),
        data_dir=str(tmp_path),
        folders=["shard-00"],
        slots=[0] * SLOTS,
        boot_id="boot-2",
        now_ms=1_700_000_001_000,
    ).run()
    assert contents(disk, f"{tmp_path}/shard-00") == contents(disk, str(SHARD))


def transactions() -> Driver:
    """Rows that are held, logged again, dropped and committed, before and behind a snapshot."""
    driver = Driver(now_ms=1_700_000_000_000)
    driver.start("boot-1")
    driver.put("a", durability="fsync", cap_records=4)
    driver.append("before", box="a")
    for epoch in (1, 2, 3):
        packed = pack(
            ["a", "b"], [2, 1], [b"%d" % epoch, b'{"n":1.0}', b'"\xc3\xbc"'], tag=[b"t", b"", b""],
            meta=[b"", b'{"m":1}', b""], default_node="n",
        )  # fmt: skip
        txn = bulk.Txn("w", epoch, "q")
        for parcel in ("p", "q"):
            driver.ask(put_of(txn, parcel, 0, packed))
        if epoch == 1:
            driver.keep(driver.machine.keep_held(driver.machine.lsn) or Outcome([], None))
            driver.ask(bulk.TxnAbort(txn, ["q"]))
        if epoch < 3:
            driver.ask(bulk.TxnCommit(txn, [("p", 1)]))
    driver.stop()
    return driver


def test_golden_transactions_of_format_one_are_read(tmp_path: Path) -> None:
    disk = Disk()
    found = contents(disk, str(TRANSACTIONS))
    assert sorted(found["a"]["live"]) == [2, 3, 4, 5] and sorted(found["b"]["live"]) == [1, 2]
    assert found["b"]["live"][2] == '{"$seq":2,"$ts":1700000000000,"$node":"n","data":"ü"}'.encode()
    machine = read_shard(disk, str(TRANSACTIONS))
    assert [(mark.epoch, mark.query) for mark in machine.txns.marks["w"]] == [(2, "q")]
    assert {key: sorted(epoch.parcels) for key, epoch in machine.txns.epochs.items()} == {
        ("w", 3): ["p", "q"]
    }
    write_folder(disk, f"{tmp_path}/shard", transactions(), snapshots=(0.5,))
    today = read_shard(disk, f"{tmp_path}/shard")
    assert contents(disk, f"{tmp_path}/shard") == found and held_of(today) == held_of(machine)


def main() -> None:
    disk = Disk()
    if not TRANSACTIONS.exists():
        write_folder(disk, str(TRANSACTIONS), transactions(), snapshots=(0.5,))
    if not SHARD.exists():
        write_folder(disk, str(SHARD), history(), snapshots=(0.6,))
    if not BACKUP.exists():
        BACKUP.mkdir()
        machine = read_shard(disk, str(SHARD))
        end_life(machine, boot_id="boot-2", now_ms=1_700_000_001_000)
        export = f"{BACKUP}/export"
        write_export(disk, export, parts_of(machine), now_ms=1_700_000_001_000, file_bytes=FILE_BYTES)
        source = ShardSource(export, SegmentStore(disk, f"{SHARD}/segments"), 1_700_000_001_000)
        BackupStore(FolderCold(str(BACKUP), disk), disk).take([source], [(0, SLOTS, 0)])
        shutil.rmtree(export)


if __name__ == "__main__":
    main()
