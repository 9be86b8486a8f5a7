"""Goal: the tag index finds every live record with a tag, exactly or by prefix, and nothing else."""

from __future__ import annotations

import pytest
from pyroaring import BitMap64

from shard.core.boxes import tags as tags_module
from shard.core.boxes.tags import Tags
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch, render
from tests.support.machines import Driver, columns


def batch(first_seq: int, *tags: str) -> Batch:
    return render(columns(*({"data": 1, "tag": tag} for tag in tags)), first_seq=first_seq, times=1)


def found(tags: Tags, text: str, *, prefix: bool = False) -> list[int]:
    """All of them, two at a time."""
    seqs = BitMap64()
    position: tuple[str, int] | None = (text, 0)
    while position is not None:
        some, position = tags.find_some(Match(text, is_prefix=prefix), position, 2)
        assert len(some) <= 2
        seqs |= some
    return list(seqs)


def test_tags_are_found_exactly_and_by_prefix() -> None:
    tags = Tags()
    tags.take_in([batch(1, "u-1", "", "u-2"), batch(4, "v", "u-1"), batch(6, "", "")])
    assert found(tags, "u-1") == [1, 5]
    assert found(tags, "u-") == []
    assert found(tags, "u-", prefix=True) == [1, 3, 5]
    assert found(tags, "", prefix=True) == [1, 3, 4, 5]
    assert found(tags, "w", prefix=True) == []
    assert tags.upto_seq == 7 and repr(tags) == "<Tags 3 tags, 4 entries up to 7>"


def test_many_records_of_one_tag_are_found_a_few_at_a_time() -> None:
    tags = Tags()
    tags.take_in([batch(1, *"aaaaabbbc")])
    assert found(tags, "a") == [1, 2, 3, 4, 5] and found(tags, "", prefix=True) == [*range(1, 10)]
    assert tags.find_some(Match("a"), ("a", 0), 2) == (BitMap64([1, 2]), ("a", 2))
    assert tags.find_some(Match("a"), ("a", 4), 2) == (BitMap64([5]), None)


def test_a_batch_is_taken_in_once() -> None:
    tags = Tags()
    first = batch(1, "x")
    tags.take_in([first])
    tags.take_in([first, batch(2, "x")])
    assert found(tags, "x") == [1, 2]


def test_an_index_of_mostly_dead_records_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags_module, "_STALE_MIN", 2)
    tags = Tags()
    tags.take_in([batch(1, "a", "b", "c")])
    assert tags.is_stale(1) and not tags.is_stale(2)


def test_a_stale_index_is_made_anew_and_still_finds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags_module, "_STALE_MIN", 2)
    driver = Driver()
    driver.put(cap_records=2)
    indexes = []
    for index in range(6):
        driver.append({"data": index, "tag": f"t{index % 2}"})
        assert driver.delete(tag="none").deleted == 0
        indexes.append(driver.machine.boxes["b"].tags)
    assert indexes[0] is not indexes[-1]
    driver.append({"data": 9, "tag": "t0"})
    assert driver.delete(tag="t0").deleted == 1
    assert driver.seqs(5) == [6]


def test_a_delete_by_tag_is_bounded_by_its_seq_and_by_the_head() -> None:
    driver = Driver()
    driver.append(*({"data": index, "tag": "x"} for index in range(4)), {"data": 9})
    assert driver.delete(3, "x").deleted == 2
    assert driver.delete(0, "x").deleted == 0
    assert driver.delete(tag="x").deleted == 2
    assert driver.delete(tag="*").deleted == 0, "untagged records never match"
    driver.append({"data": 1, "tag": "x"})
    assert driver.seqs() == [5, 6]
