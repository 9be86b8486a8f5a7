"""A name's slot never changes and equals Spark's; a placement gives every slot exactly one owner.

Method: the published examples of Spark SQL's `xxhash64` (its reference documentation), frozen slots of a few
names, and properties of the even map.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from gateway.shards.placement import SEED, SLOTS, Placement, even, resize, slot_of

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=255)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize(
    ("columns", "spark"),
    [
        ([b"ABC"], 4105715581806190027),
        ([b"ABC", b"DEF"], 3233247871021311208),
        # xxhash64('Spark', array(123), 2): an int is hashed as its four bytes, little end first.
        ([b"Spark", (123).to_bytes(4, "little"), (2).to_bytes(4, "little")], 5602566077635097486),
    ],
)
def test_our_hash_is_the_one_spark_documents(columns: list[bytes], spark: int) -> None:
    found = SEED
    for column in columns:
        found = xxh64_intdigest(column, found)
    assert signed(found) == spark


def test_a_slot_is_what_spark_calls_pmod_of_the_hash() -> None:
    # Python's % of a negative number by a positive one is Spark's pmod.
    for name in ("ABC", "orders", "jobs.dlq", "a:b-c_d"):
        assert slot_of(name) == signed(xxh64_intdigest(name.encode(), SEED)) % SLOTS
    assert slot_of("ABC") == 4105715581806190027 % 4096 == FROZEN["ABC"]


#: Data directories are laid out by these. A failure here means that every box has moved.
FROZEN = {"ABC": 3531, "orders": 2662, "jobs.dlq": 696, "a": 204, "z" * 255: 479}


def test_slots_of_names_are_frozen() -> None:
    assert {name: slot_of(name) for name in FROZEN} == FROZEN


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 16, 255, 256])
def test_an_even_map_is_whole_dense_and_even(shards: int) -> None:
    placement = even(shards)
    sizes = Counter(placement.slots)
    assert sorted(sizes) == list(range(shards))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert [shard for _, _, shard in placement.ranges()] == list(range(shards))


@given(st.lists(st.integers(1, 256), min_size=2, max_size=6))
def test_another_number_of_shards_moves_only_what_must_move(numbers: list[int]) -> None:
    placement = even(numbers[0])
    for shards in numbers[1:]:
        after = resize(placement, shards)
        before, sizes = Counter(placement.slots), Counter(after.slots)
        assert sorted(sizes) == list(range(shards))
        assert max(sizes.values()) - min(sizes.values()) <= 1
        moved = sum(old != new for old, new in zip(placement.slots, after.slots, strict=True))
        assert moved == sum(max(0, before[shard] - sizes[shard]) for shard in before)
        assert after.version == placement.version + 1
        placement = after


@given(st.integers(1, 256), NAMES)
def test_a_name_lives_on_the_shard_of_its_slot(shards: int, name: str) -> None:
    placement = even(shards)
    assert placement.shard_of(name) == placement.slots[slot_of(name)] < shards


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 4)), max_size=40), st.integers(1, 2**53))
def test_any_map_survives_its_json(moves: list[tuple[int, int]], version: int) -> None:
    slots = bytearray(even(5).slots)
    for slot, shard in moves:
        slots[slot] = shard
    placement = Placement(bytes(slots), shards=5, version=version)
    assert Placement.from_json(placement.to_json()) == placement


@pytest.mark.parametrize(
    "slots",
    [
        [],
        [[0, 4095, 0]],
        [[0, 4097, 0]],
        [[1, 4096, 0]],
        [[0, 2048, 0], [2047, 4096, 1]],
        [[0, 2048, 0], [2049, 4096, 1]],
        [[0, 0, 0], [0, 4096, 0]],
        [[0, 4096, 2]],
        [[0, 4096, 256]],
        [[0, 4096, -1]],
        [[0, 4096]],
        [[0, 4096, "0"]],
        None,
        [[0, 10**12, 0]],
    ],
)
def test_a_map_that_leaves_a_slot_in_doubt_is_refused(slots: object) -> None:
    with pytest.raises(ValueError):
        Placement.from_json(json.dumps({"shards": 2, "slots": slots, "version": 1}))
