"""Goal: a key sends as many requests a second as its limit says, in each process its share (v0 §12).

Method: a bucket with the clock as an argument.
"""

from __future__ import annotations

import pytest

from streams.protocol.access import rates
from streams.protocol.access.key_limits import Limits
from streams.protocol.access.keys import Key
from streams.protocol.access.rates import RequestRates
from streams.protocol.errors import Throttled


def key_of(limit: int, id: str = "k") -> Key:
    return Key(id, id=id, limits=Limits(requests_per_s=limit))


def admitted(found: RequestRates, key: Key, now_s: float, tries: int = 50) -> int:
    count = 0
    for _ in range(tries):
        try:
            found.take(key, now_s)
            count += 1
        except Throttled:
            pass
    return count


def test_a_key_sends_a_seconds_worth_at_once_and_then_as_time_brings_more() -> None:
    found, key = RequestRates(), key_of(10)
    assert admitted(found, key, 100.0) == 10 and found.in_use(key, 100.0) == 10
    assert admitted(found, key, 100.55) == 5
    assert admitted(found, key, 1000.0) == 10
    found, key = RequestRates(), key_of(10)
    for _ in range(10):
        found.take(key, 1000.0)
    with pytest.raises(Throttled) as caught:
        found.take(key, 1000.0)
    assert caught.value.detail["limit"] == "requests_per_s_per_key"
    assert caught.value.detail["retry_after_ms"] == 101
    assert "10 requests a second" in caught.value.message


def test_processes_share_a_limit_and_each_admits_something() -> None:
    key = key_of(10)
    assert admitted(RequestRates(2), key, 0.0) == 5
    slow = RequestRates(4)
    assert admitted(slow, key_of(1), 0.0) == 1
    assert admitted(slow, key_of(1), 3.9) == 0 and admitted(slow, key_of(1), 4.1) == 1


def test_what_may_wait_is_told_how_long() -> None:
    found, key = RequestRates(), key_of(2)
    waits = [found.reserve(key, 0.0) for _ in range(5)]
    assert waits == [0.0, 0.0, 0.5, 1.0, 1.5]
    assert found.reserve(key, 10.0) == 0.0


def test_keys_do_not_count_for_each_other_and_one_without_the_limit_is_not_counted() -> None:
    found, free = RequestRates(), Key("free")
    assert admitted(found, key_of(3, "a"), 0.0) == admitted(found, key_of(3, "b"), 0.0) == 3
    assert admitted(found, free, 0.0) == 50 and found.reserve(free, 0.0) == 0.0
    assert found.in_use(free, 0.0) == found.in_use(key_of(3, "c"), 0.0) == 0
    assert repr(found) == "<RequestRates of 2 keys>"


def test_buckets_of_keys_that_are_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "BUCKETS_MAX", 2)
    found = RequestRates()
    for id in "abc":
        found.take(key_of(1, id), 0.0)
    assert repr(found) == "<RequestRates of 1 keys>"


def test_requests_that_are_refused_together_come_back_one_after_the_other() -> None:
    """Failed before: all were asked to come back for the next token, and all but one were refused again."""
    found, key = RequestRates(), key_of(10)
    for _ in range(10):
        found.take(key, 50.0)
    waits: list[int] = []
    for _ in range(14):
        with pytest.raises(Throttled) as caught:
            found.take(key, 50.0)
        waits.append(caught.value.detail["retry_after_ms"])
    assert waits[:4] == pytest.approx([101, 201, 301, 401], abs=1)
    assert max(waits) <= 1001 and waits[-1] == max(waits), "by then there is a second's worth"
    found.take(key, 50.11)
    with pytest.raises(Throttled):
        found.take(key, 50.11)
