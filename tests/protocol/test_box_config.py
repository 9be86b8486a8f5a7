"""Goal: a patch changes what it names and nothing else, and no illegal config comes of it (v0 §1)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams.protocol.errors import BoxExistsIncompatible, InvalidRequest
from streams.protocol.model.boxes import BoxConfig, BoxPatch, RetryBackoff, Timestamping, merge


def merged(config: BoxConfig, *, exists: bool = True, **fields: Any) -> BoxConfig:
    return merge(config, msgspec.convert(fields, BoxPatch), box="b", exists=exists)


def test_an_empty_patch_changes_nothing() -> None:
    config = BoxConfig(ttl_ms=5, cap_records=3, priority=7)
    assert merged(config) == config


def test_every_field_can_be_set_and_the_others_stay() -> None:
    values: dict[str, Any] = {
        "ttl_ms": 1,
        "cap_records": 2,
        "cap_bytes": 3,
        "discard": "reject",
        "durability": "memory",
        "priority": 4,
        "auto_priority": False,
        "auto_create": False,
        "idempotency_window_ms": 5,
        "dedupe_node": False,
        "delete_on_empty_ms": 6,
        "compact": "tag",
        "lease_ms": 700,
        "claim_jitter_ms": 8,
        "max_deliveries": 9,
        "dead_letter": "other",
        "leases_durable": True,
        "paused": True,
        "rate_per_s": 2.5,
        "retry_backoff": RetryBackoff(initial_ms=5),
        "key_concurrency": 1,
        "fair": True,
    }
    for name, value in values.items():
        changed = merged(BoxConfig(), **{name: value})
        assert changed == msgspec.structs.replace(BoxConfig(), **{name: value})
    assert set(values) | {"type", "timestamping"} == set(BoxConfig.__struct_fields__)


def test_durable_is_an_alias_that_gives_way_to_durability() -> None:
    assert merged(BoxConfig(), durable=True).durability == "fsync"
    assert merged(BoxConfig(durability="fsync"), durable=False).durability == "disk"
    assert merged(BoxConfig(), durable=True, durability="memory").durability == "memory"
    assert BoxConfig(durability="fsync").to_fields()["durable"] is True
    assert BoxConfig(durability="memory").to_fields()["durable"] is False


@pytest.mark.parametrize(
    ("name", "value", "clamped"),
    [
        ("priority", 5000, 1000),
        ("priority", -5000, -1000),
        ("priority", None, None),
        ("lease_ms", 1, 100),
        ("lease_ms", 10**12, 86_400_000),
        ("claim_jitter_ms", 9999, 5000),
    ],
)
def test_some_values_are_pulled_in_rather_than_refused(name: str, value: Any, clamped: Any) -> None:
    assert getattr(merged(BoxConfig(priority=1), **{name: value}), name) == clamped


def test_timestamping_is_merged_field_by_field() -> None:
    config = BoxConfig(timestamping=Timestamping("client-prefer", True))
    assert merged(config, timestamping={"mode": "arrival"}).timestamping == Timestamping("arrival", True)
    assert merged(config, timestamping={"uncapped": False}).timestamping == Timestamping(
        "client-prefer", False
    )
    assert merged(config, timestamping={}).timestamping == config.timestamping


def test_a_box_keeps_its_type_for_life() -> None:
    with pytest.raises(BoxExistsIncompatible, match="type: b is a log and cannot become a queue"):
        merged(BoxConfig(), type="queue")
    assert merged(BoxConfig(), exists=False, type="queue").type == "queue"
    assert merged(BoxConfig(type="queue"), type="queue").type == "queue"


def test_a_dead_letter_box_is_another_box() -> None:
    with pytest.raises(InvalidRequest, match="dead_letter: a box cannot be its own"):
        merged(BoxConfig(), dead_letter="b")
    with pytest.raises(InvalidRequest, match=r"dead_letter: .* is not a box name"):
        merged(BoxConfig(), dead_letter="a/b")
    assert merged(BoxConfig(dead_letter="c"), dead_letter=None).dead_letter is None
