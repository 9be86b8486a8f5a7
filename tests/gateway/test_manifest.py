"""Goal: a manifest says which folder is which shard's, or that it is damaged; never another thing.

Method: manifests of every shape are written and read; every bit of one is flipped; golden files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.shards.placement import even, resize
from gateway.supervise.manifest import Manifest, ManifestDamaged, ManifestUnknown, folders, fresh

GOLDEN = Path(__file__).parent / "golden"
PLAIN = fresh(2, now_ms=1_700_000_000_000, salt=123_456_789)
#: As formats 1 and 2 have it.
WITHOUT_SALT = replace(PLAIN, server="1700000000000")
BUSY = Manifest(
    resize(even(3), 2),
    ("shard-00-v2", "shard-01"),
    5,
    building=("shard-00-v3", "restore-01"),
    dropping=("shard-00", "shard-02"),
    is_restoring=True,
)


@pytest.mark.parametrize("manifest", [PLAIN, BUSY, fresh(256, now_ms=0, salt=0)])
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.is_settled == (manifest is not BUSY)
    final = manifest.without_intents()
    assert final.is_settled and final.directories == manifest.directories


@pytest.mark.parametrize("manifest", [PLAIN, BUSY])
def test_every_flipped_bit_of_a_manifest_is_found(manifest: Manifest) -> None:
    content = manifest.encode()
    for at in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            with pytest.raises((ManifestDamaged, ManifestUnknown)):
                Manifest.decode(bytes(damaged))


def test_a_manifest_that_was_cut_or_has_grown_is_damaged() -> None:
    content = PLAIN.encode()
    for damaged in (*(content[:size] for size in range(len(content))), content + b" ", content + content):
        with pytest.raises(ManifestDamaged) as caught:
            Manifest.decode(damaged)
        assert 0 <= caught.value.offset <= len(damaged)


def test_the_golden_manifests_of_all_formats_are_read() -> None:
    for name in ("manifest-v1.json", "manifest-v2.json"):
        assert Manifest.decode((GOLDEN / name).read_bytes()) == WITHOUT_SALT
    assert PLAIN.encode() == (GOLDEN / "manifest-v3.json").read_bytes(), "format 3 is written as it was"


def test_the_number_of_a_server_stays_when_its_manifest_is_written_in_a_newer_format() -> None:
    old = Manifest.decode((GOLDEN / "manifest-v2.json").read_bytes())
    assert Manifest.decode(old.encode()).server == old.server == "1700000000000"


@pytest.mark.parametrize(
    "wrong",
    [
        {"directories": ("shard-00",)},
        {"directories": ("shard-00", "shard-00")},
        {"directories": ("shard-00", "../shard-01")},
        {"directories": ("shard-00", "LOCK")},
        {"building": ("/etc",)},
        {"dropping": ("shard-00",)},
    ],
)
def test_no_manifest_names_a_folder_twice_or_one_that_is_no_shards(wrong: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError):
        replace(PLAIN, **wrong)  # type: ignore[arg-type]


def test_folders_of_another_version_have_other_names() -> None:
    assert folders(2) == ("shard-00", "shard-01")
    assert folders(2, 3) == ("shard-00-v3", "shard-01-v3")
