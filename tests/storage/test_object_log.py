"""Goal: objects that any version of us has put into a store for object boxes are read as they were meant.

Method: each `golden/objects-v1*.frames` is one, decoded and compared with its changes; the newest also byte
for byte. A change to a struct in it needs a new file: `python -m tests.storage.test_object_log` writes
`NEWEST` if it does not exist. A file that exists is never overwritten: users have such objects in stores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shard.core.changes import BasinDropped, BatchAppended, BoxCreated, Change, TokenFenced
from shard.storage import object_log
from shard.storage.object_log import ChainName, LogName
from streams.protocol.model.boxes import BoxConfig
from tests.storage.test_golden_facts import in_words
from tests.support.segments import a_batch

GOLDEN = Path(__file__).parent / "golden"
#: The first version, and the one whose boxes have settings of job queues.
FILES = [GOLDEN / "objects-v1.frames", GOLDEN / "objects-v1-job-settings.frames"]
NEWEST = FILES[-1]
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_object_of_version_one_is_read(path: Path) -> None:
    content = path.read_bytes()
    found = object_log.decode(CHAIN.root + LOG.text, content)
    assert (found.previous_lsn, found.last_lsn) == (40, 44)
    assert in_words([change for _, change in found.changes]) == in_words([change for _, change in changes()])
    assert [lsn for lsn, _ in found.changes] == [41, 42, 44, 44]


def test_objects_are_written_as_in_the_newest_file() -> None:
    assert written() == NEWEST.read_bytes()


def test_names_are_read_as_they_are_written_and_others_are_none() -> None:
    assert CHAIN.root == "object/00000003-002-1700000000000/"
    assert ChainName.parse(CHAIN.text) == CHAIN and ChainName.parse("3-2-1") is None
    assert LogName.parse(LOG.text) == LOG and LogName.parse(LOG.text + ".tmp") is None
    assert object_log.base_lsn(f"backups/{object_log.base_id(44)}.json") == 44
    assert object_log.base_lsn("backups/20261116T163512042Z-9f3a.json") is None


if __name__ == "__main__" and not NEWEST.exists():
    NEWEST.write_bytes(written())
