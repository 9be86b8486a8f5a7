"""Goal: a backup that somebody else has written can neither place a file outside its data directory nor pass
for one that was signed.

Method: manifests of a real backup are rewritten, checksums included, as an attacker would; links are planted
where the restore writes; what is below the parent directory is compared before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from xxhash import xxh3_64_hexdigest

from shard.offline.restore import RestoreJob
from shard.storage.cold import FolderCold
from shard.storage.files import ConfinedDisk, Corrupt, Disk, remove_tree
from shard.transfer.backup import BackupStore, BadSignature
from streams.cli.signing import signer_of, verifier_of
from streams.protocol.model.slots import SLOTS
from tests.storage.test_backup import SLOT_RUNS, simple, source_of
from tests.support.folders import contents, write_folder

DISK = Disk()


@pytest.fixture
def target(tmp_path: Path) -> BackupStore:
    (tmp_path / "target").mkdir()
    (tmp_path / "data").mkdir()
    write_folder(DISK, f"{tmp_path}/one", simple())
    return BackupStore(FolderCold(f"{tmp_path}/target", DISK), DISK)


def take(target: BackupStore, tmp_path: Path, taken_ms: int = 5_000, **options: Any) -> str:
    place = (DISK, str(tmp_path))
    return target.take([source_of(place, "one", taken_ms)], SLOT_RUNS, **options).backup.id


def rewrite(tmp_path: Path, id: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest, and makes its checksum right again."""
    path = tmp_path / "target" / "backups" / f"{id}.json"
    fields = msgspec.json.decode(path.read_bytes().splitlines()[0])
    change(fields)
    line = msgspec.json.encode(fields)
    path.write_bytes(line + b"\n" + xxh3_64_hexdigest(line).encode() + b"\n")


def restore(target: BackupStore, tmp_path: Path, id: str) -> None:
    disk = ConfinedDisk(f"{tmp_path}/data")
    RestoreJob(
        disk,
        BackupStore(target.store, disk),
        target.load(id),
        data_dir=f"{tmp_path}/data",
        folders=["shard-00"],
        slots=[0] * SLOTS,
        boot_id="boot-9",
        now_ms=9_000,
    ).run()


def everything_below(tmp_path: Path) -> set[Path]:
    return set(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "path",
    [
        "../../home/.ssh/authorized_keys",
        "/etc/passwd",
        "wal/../../outside.wal",
        "wal/000000000001.wal/../../../outside",
        "wal/000000000001.wal\n",
        "wal/١٢٣٤٥٦٧٨٩٠١٢.wal",
        "snapshot/000000000001.wal",
        "segments/1/00000000000000000001-000000000001.seg",
        "",
    ],
)
def test_a_manifest_that_names_a_file_we_never_write_is_refused_with_nothing_written(
    target: BackupStore, tmp_path: Path, path: str
) -> None:
    id = take(target, tmp_path)

    def change(fields: dict[str, Any]) -> None:
        files = fields["shards"][0]["files"]
        files[path] = next(iter(files.values()))

    rewrite(tmp_path, id, change)
    before = everything_below(tmp_path)
    with pytest.raises(Corrupt, match="is not the name of a file in a backup"):
        restore(target, tmp_path, id)
    assert everything_below(tmp_path) == before


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        at: Any = fields
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


_FIRST_FILE = "wal/000000000001.wal"


@pytest.mark.parametrize(
    "change",
    [
        _set("id", value="20261116T163512042Z-9f3a"),
        _set("format", value="one"),
        _set("shards", value=[]),
        _set("slots", value=[[0, 4096, 1]]),
        _set("slots", value=[[0, 4095, 0]]),
        _set("slots", value=[[0, 4096, -1]]),
        _set("shards", 0, "files", _FIRST_FILE, 0, value="backups/../../../etc/shadow"),
        _set("shards", 0, "files", _FIRST_FILE, 0, value="backup-shards/x/shard-00/wal/000000000001.wal"),
        _set("shards", 0, "files", _FIRST_FILE, 1, value=-1),
        _set("shards", 0, "files", _FIRST_FILE, value=[]),
        _set("shards", 0, "segments", 0, 0, value=-1),
        _set("shards", 0, "segments", 0, 1, value="../../x"),
        _set("shards", 0, "segments", 0, 4, value=1 << 64),
    ],
)
def test_a_manifest_with_anything_else_than_what_we_write_is_refused(
    target: BackupStore, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    id = take(target, tmp_path)
    rewrite(tmp_path, id, change)
    before = everything_below(tmp_path)
    with pytest.raises(Corrupt):
        restore(target, tmp_path, id)
    assert everything_below(tmp_path) == before


def test_a_segment_of_a_box_that_the_backup_does_not_have_is_refused(
    target: BackupStore, tmp_path: Path
) -> None:
    id = take(target, tmp_path)
    rewrite(tmp_path, id, _set("shards", 0, "segments", 0, 0, value=7))
    with pytest.raises(Corrupt, match="belongs to no box of this backup"):
        restore(target, tmp_path, id)


def test_a_link_in_the_data_directory_is_not_followed(target: BackupStore, tmp_path: Path) -> None:
    id = take(target, tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "data" / "restore-00").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        restore(target, tmp_path, id)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_confined_disk_creates_only_new_files_below_its_directory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / "data" / "planted").symlink_to(tmp_path / "victim")
    (tmp_path / "data" / "there").write_text("as it was")
    disk = ConfinedDisk(f"{tmp_path}/data")
    for name in ("planted", "there"):
        with pytest.raises(FileExistsError):
            disk.create(f"{tmp_path}/data/{name}")
    with pytest.raises(OSError):
        disk.open(f"{tmp_path}/data/planted", writable=True)
    for path in (f"{tmp_path}/victim", f"{tmp_path}/data/../victim", f"{tmp_path}/database", "victim"):
        with pytest.raises(ValueError, match="is not below"):
            disk.create(path)
    assert (tmp_path / "victim").read_text() == (tmp_path / "data" / "there").read_text() == "as it was"
    assert disk.exists(f"{tmp_path}/data/planted") and not disk.is_dir(f"{tmp_path}/data/planted")
    disk.close_root()


# -- signatures

KEY, STRANGER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
SIGNER, VERIFY = signer_of(KEY), verifier_of(KEY.public_key())


def test_a_signed_backup_is_verified_restored_and_extended(target: BackupStore, tmp_path: Path) -> None:
    first = take(target, tmp_path, 1_000, signer=SIGNER)
    place = (DISK, str(tmp_path))
    again = target.take([source_of(place, "one", 2_000)], SLOT_RUNS, signer=SIGNER)
    assert again.copied_segments == 0, "those of a backup that this key has signed are known"
    trusted = BackupStore(target.store, DISK, verify=VERIFY)
    assert trusted.ids() == [first, again.backup.id]
    restore(trusted, tmp_path, again.backup.id)
    assert contents(DISK, f"{tmp_path}/data/shard-00") == contents(DISK, f"{tmp_path}/one")
    assert trusted.prune(1) == [first]
    assert sorted(target.store.names("backups/")) == [
        f"backups/{again.backup.id}.json",
        f"backups/{again.backup.id}.sig",
    ]


@pytest.mark.parametrize("how", ["unsigned", "another key", "changed", "signature of another backup"])
def test_a_manifest_that_is_not_signed_as_it_should_be_is_refused(
    target: BackupStore, tmp_path: Path, how: str
) -> None:
    signer = {"unsigned": None, "another key": signer_of(STRANGER)}.get(how, SIGNER)
    id = take(target, tmp_path, 1_000, signer=signer)
    if how == "changed":
        rewrite(tmp_path, id, _set("taken_ms", value=7))
    elif how == "signature of another backup":
        other = take(target, tmp_path, 2_000, signer=SIGNER)
        folder = tmp_path / "target" / "backups"
        (folder / f"{id}.sig").write_bytes((folder / f"{other}.sig").read_bytes())
    before = everything_below(tmp_path)
    trusted = BackupStore(target.store, DISK, verify=VERIFY)
    with pytest.raises(BadSignature, match="signed"):
        restore(trusted, tmp_path, id)
    assert everything_below(tmp_path) == before


def test_an_object_that_only_its_weak_checksum_matches_is_refused(
    target: BackupStore, tmp_path: Path
) -> None:
    """A signature covers what the objects hold, not just their names: by SHA-256, because whoever can write
    to the target can make other bytes with the same xxh3_64."""
    backup = target.load(take(target, tmp_path, 1_000, signer=SIGNER))
    strong = {stored.sha256 for stored in backup.shards[0].files.values()}
    strong |= {segment.sha256 for segment in backup.shards[0].segments}
    assert all(len(digest) == 64 for digest in strong) and len(strong) == 6
    for where in (("files", _FIRST_FILE, 3), ("segments", 0, 5)):
        id = take(target, tmp_path, signer=SIGNER)
        rewrite(tmp_path, id, _set("shards", 0, *where, value="0" * 64))
        with pytest.raises(Corrupt, match="SHA-256"):
            restore(target, tmp_path, id)
        remove_tree(DISK, f"{tmp_path}/data")
        (tmp_path / "data").mkdir()


def test_what_a_stranger_has_put_into_the_target_is_not_signed_along(
    target: BackupStore, tmp_path: Path
) -> None:
    id = take(target, tmp_path, 1_000, signer=SIGNER)
    rewrite(tmp_path, id, _set("shards", 0, "segments", 0, 5, value="0" * 64))
    place = (DISK, str(tmp_path))
    taken = target.take([source_of(place, "one", 2_000)], SLOT_RUNS, signer=SIGNER)
    assert taken.copied_segments == 3, "nothing of a manifest that this key has not signed is believed"
    restore(BackupStore(target.store, DISK, verify=VERIFY), tmp_path, taken.backup.id)


def test_a_signed_backup_is_restored_without_a_key_too(target: BackupStore, tmp_path: Path) -> None:
    restore(target, tmp_path, take(target, tmp_path, signer=SIGNER))
    assert contents(DISK, f"{tmp_path}/data/shard-00") == contents(DISK, f"{tmp_path}/one")
