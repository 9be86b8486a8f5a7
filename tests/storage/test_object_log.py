"""Goal: objects that any version of us has put into a store for object boxes are read as they were meant.

Method: `golden/objects-v1.frames` is one, held against the changes it was made from, byte for byte. To make
it again: `python -m tests.storage.test_object_log`; what exists is never overwritten: it is what others have.
"""

from __future__ import annotations

from pathlib import Path

from shard.core.changes import BasinDropped, BatchAppended, BoxCreated, Change, TokenFenced
from shard.storage import object_log
from shard.storage.object_log import ChainName, LogName
from streams.protocol.model.boxes import BoxConfig
from tests.storage.test_golden_facts import in_words
from tests.support.segments import a_batch

GOLDEN = Path(__file__).parent / "golden" / "objects-v1.frames"
CHAIN, LOG = ChainName(3, 2, "1700000000000"), LogName(41, 44, 17)


def changes() -> list[tuple[int, Change]]:
    batch = a_batch(1, 3)
    return [
        (41, BoxCreated(7, "orders", BoxConfig(durability="object"), 1_700_000_000_000, 0)),
        (42, BatchAppended(7, batch, 1_700_000_000_001, "key")),
        (44, TokenFenced(7, "token")),
        (44, BasinDropped("basin")),
    ]


def written() -> bytes:
    name = CHAIN.root + LOG.text
    return object_log.encode(name, changes(), previous_lsn=40, last_lsn=44, life=17)


def test_an_object_of_version_one_is_read_and_would_be_written_so_again() -> None:
    content = GOLDEN.read_bytes()
    found = object_log.decode(CHAIN.root + LOG.text, content)
    assert (found.previous_lsn, found.last_lsn) == (40, 44)
    assert in_words([change for _, change in found.changes]) == in_words([change for _, change in changes()])
    assert [lsn for lsn, _ in found.changes] == [41, 42, 44, 44]
    assert written() == content


def test_names_are_read_as_they_are_written_and_others_are_none() -> None:
    assert CHAIN.root == "object/00000003-002-1700000000000/"
    assert ChainName.parse(CHAIN.text) == CHAIN and ChainName.parse("3-2-1") is None
    assert LogName.parse(LOG.text) == LOG and LogName.parse(LOG.text + ".tmp") is None
    assert object_log.base_lsn(f"backups/{object_log.base_id(44)}.json") == 44
    assert object_log.base_lsn("backups/20261116T163512042Z-9f3a.json") is None


if __name__ == "__main__" and not GOLDEN.exists():
    GOLDEN.write_bytes(written())
