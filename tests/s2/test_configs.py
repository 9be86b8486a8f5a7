"""Goal: configs mean what the S2 API says: merged leaf by leaf, patched in three states (s2 §7)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.requests.s2_errors import S2Error
from gateway.s2 import configs
from streams.protocol.messages.s2 import DEFAULTS, Basin, BasinConfig, Spec, Stream


def body(**fields: Any) -> configs.StreamBody:
    return configs.decode_body(msgspec.json.encode(fields), configs.StreamBody)


FULL = {
    "storage_class": "standard",
    "retention_policy": {"age": 60},
    "timestamping": {"mode": "arrival", "uncapped": True},
    "delete_on_empty": {"min_age_secs": 5},
}
FULL_SPEC = Spec(storage_class="standard", age_secs=60, mode="arrival", uncapped=True, min_age_secs=5)


def test_a_config_that_creates_says_what_it_names() -> None:
    assert body(**FULL).spec() == FULL_SPEC
    assert body().spec() == body(**dict.fromkeys(FULL)).spec() == Spec()
    assert body(retention_policy={"infinite": {}}).spec() == Spec(age_secs=0)
    assert body(delete_on_empty={}).spec() == Spec(min_age_secs=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, FULL_SPEC),
        ({"storage_class": None}, {"storage_class": None}),
        ({"retention_policy": None}, {"age_secs": None}),
        ({"timestamping": None}, {"mode": None, "uncapped": None}),
        ({"timestamping": {"mode": None}}, {"mode": None}),
        ({"timestamping": {"uncapped": False}}, {"uncapped": False}),
        ({"delete_on_empty": None}, {"min_age_secs": None}),
        ({"delete_on_empty": {"min_age_secs": None}}, {"min_age_secs": None}),
        ({"retention_policy": {"infinite": {}}}, {"age_secs": 0}),
    ],
)
def test_a_patch_keeps_takes_back_or_changes(fields: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, dict):
        expected = msgspec.structs.replace(FULL_SPEC, **expected)
    assert body(**fields).patch().apply(FULL_SPEC) == expected


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"retention_policy": {"age": 0}}, "invalid"),
        ({"retention_policy": {"age": -1}}, "bad_json"),
        ({"delete_on_empty": {"min_age_secs": -1}}, "bad_json"),
        ({"retention_policy": {}}, "bad_json"),
        ({"retention_policy": {"age": 1, "infinite": {}}}, "bad_json"),
        ({"retention_policy": "forever"}, "bad_json"),
        ({"timestamping": {"mode": "sometimes"}}, "bad_json"),
        ({"storage_class": "cheap"}, "bad_json"),
    ],
)
def test_what_does_not_parse_is_told_apart_from_what_makes_no_sense(
    fields: dict[str, Any], code: str
) -> None:
    with pytest.raises(S2Error) as refused:
        body(**fields).patch()
    assert refused.value.code == code


def test_a_basin_shows_what_was_set_and_a_stream_all_of_it() -> None:
    assert configs.describe_basin_config(BasinConfig()) == {
        "default_stream_config": None,
        "stream_cipher": None,
        "create_stream_on_append": False,
        "create_stream_on_read": False,
    }
    assert configs.describe_stream_config(Spec(min_age_secs=0)) == {
        "storage_class": None,
        "retention_policy": None,
        "timestamping": None,
        "delete_on_empty": {"min_age_secs": 0},
    }
    assert configs.describe_stream_config(FULL_SPEC) == FULL
    assert configs.describe_stream_config(Spec(age_secs=0).over(DEFAULTS)) == {
        "storage_class": "express",
        "retention_policy": {"infinite": {}},
        "timestamping": {"mode": "client-prefer", "uncapped": False},
        "delete_on_empty": {"min_age_secs": 0},
    }


def test_a_flag_of_a_basin_cannot_be_taken_back() -> None:
    with pytest.raises(S2Error) as refused:
        configs.decode_body(b'{"create_stream_on_append":null}', configs.BasinBody)
    assert refused.value.code == "bad_json"


def test_times_are_shown_with_microseconds() -> None:
    basin = Basin(name="b", number=1, config=BasinConfig(), created_ms=1_767_323_045_678, deleted_ms=0)
    assert configs.describe_basin(basin)["created_at"] == "2026-01-02T03:04:05.678000Z"
    stream = Stream(basin_number=1, spec=DEFAULTS, created_ms=5, deleted_ms=1_767_323_045_000)
    assert configs.describe_stream("s", stream)["deleted_at"] == "2026-01-02T03:04:05.000000Z"
