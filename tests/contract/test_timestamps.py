"""`$ts` (§1 `timestamping`, §0.3): whose clock it is, and that it never goes back.

Method: client timestamps in the far past and future, so that no assertion depends on how fast the test runs.
"""

import time

import pytest

FUTURE = 4_102_444_800_000  # the year 2100


def times(api, box):
    return [record["$ts"] for record in api.diff(box)["records"]]


def now_ms():
    return time.time_ns() // 1_000_000


def test_by_default_the_time_is_that_of_arrival(api, box):
    """§1: `arrival`; a client `ts` has no say."""
    before = now_ms()
    api.append(box, records=[{"data": 1}, {"data": 2, "ts": 1000}, {"data": 3, "ts": FUTURE}])
    after = now_ms()
    for ts in times(api, box):
        assert before - 1 <= ts <= after + 1


def test_client_prefer_takes_the_clients_time_and_falls_back_to_arrival(api, box):
    """§1"""
    api.put(box, timestamping={"mode": "client-prefer"})
    before = now_ms()
    api.append(box, records=[{"data": 1, "ts": 1000}, {"data": 2, "ts": 2000}, {"data": 3}])
    first, second, third = times(api, box)
    assert (first, second) == (1000, 2000)
    assert before - 1 <= third <= now_ms() + 1


def test_client_require_refuses_a_record_without_a_time(api, box):
    """§1: and the whole write with it."""
    api.put(box, timestamping={"mode": "client-require"})
    with api.unchanged(box):
        body = {"records": [{"data": 1, "ts": 1000}, {"data": 2}]}
        api.refused(api.post(box, body), 400, "invalid_request", "ts")
    api.append(box, records=[{"data": 1, "ts": 1000}])
    assert times(api, box) == [1000]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["client-prefer", "client-require"])
def test_a_time_in_the_future_is_capped_at_arrival(api, box, mode):
    """§1"""
    api.put(box, timestamping={"mode": mode})
    before = now_ms()
    api.append(box, records=[{"data": 1, "ts": FUTURE}])
    assert before - 1 <= times(api, box)[0] <= now_ms() + 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["client-prefer", "client-require"])
def test_uncapped_lets_a_time_in_the_future_stand(api, box, mode):
    """§1"""
    api.put(box, timestamping={"mode": mode, "uncapped": True})
    api.append(box, records=[{"data": 1, "ts": FUTURE}])
    assert times(api, box) == [FUTURE]


def test_times_are_made_non_decreasing_within_a_write_and_between_writes(api, box):
    """§1"""
    api.put(box, timestamping={"mode": "client-require"})
    api.append(box, records=[{"data": n, "ts": ts} for n, ts in enumerate([5000, 3000, 6000, 6000, 1000])])
    api.append(box, records=[{"data": 5, "ts": 2000}])
    api.append(box, records=[{"data": 6, "ts": 7000}])
    assert times(api, box) == [5000, 5000, 6000, 6000, 6000, 6000, 7000]


@pytest.mark.exhaustive
def test_arrival_never_falls_behind_a_time_already_given(api, box):
    """§1: always non-decreasing, also after an uncapped future."""
    api.put(box, timestamping={"mode": "client-prefer", "uncapped": True})
    api.append(box, records=[{"data": 1, "ts": FUTURE}])
    api.append(box, 2)
    assert times(api, box) == [FUTURE, FUTURE]
    api.put(box, timestamping={"mode": "arrival", "uncapped": False})
    api.append(box, 3)
    assert times(api, box) == [FUTURE, FUTURE, FUTURE]


@pytest.mark.exhaustive
def test_times_stay_non_decreasing_after_everything_was_deleted(api, box):
    """§1: from_ts relies on it for as long as the box lives."""
    api.put(box, timestamping={"mode": "client-require"})
    api.append(box, records=[{"data": 1, "ts": 9000}])
    api.delete(box, before_seq=2)
    api.append(box, records=[{"data": 2, "ts": 1000}])
    assert times(api, box) == [9000]


@pytest.mark.exhaustive
def test_a_time_of_zero_is_a_time(api, box):
    """§0.3"""
    api.put(box, timestamping={"mode": "client-require"})
    api.append(box, records=[{"data": 1, "ts": 0}])
    assert times(api, box) == [0]


@pytest.mark.exhaustive
def test_a_deduped_repeat_keeps_the_first_time(api, box):
    """§3"""
    api.put(box, timestamping={"mode": "client-require"})
    api.append(box, records=[{"data": 1, "ts": 1000}], idempotency_key="k")
    api.append(box, records=[{"data": 1, "ts": 2000}], idempotency_key="k")
    assert times(api, box) == [1000]


@pytest.mark.exhaustive
def test_a_record_in_an_uncapped_future_does_not_expire(api, box):
    """§1 ttl_ms: by `$ts`."""
    api.put(box, ttl_ms=1, timestamping={"mode": "client-prefer", "uncapped": True})
    api.append(box, records=[{"data": 1, "ts": FUTURE}])
    api.let_time_pass(20, f"{box}.quiet")
    assert api.data(box) == [1]


@pytest.mark.exhaustive
def test_a_ttl_of_zero_is_never(api, box):
    """§1"""
    api.put(box, timestamping={"mode": "client-prefer"})
    api.append(box, records=[{"data": 1, "ts": 1}])
    assert api.data(box) == [1]


def test_the_tail_and_the_state_tell_the_time_of_the_last_write(api, box):
    """§2.2, §4.7: in an arrival box both are the clock's."""
    before = now_ms()
    api.append(box, 1)
    after = now_ms()
    assert before - 1 <= api.tail(box)["last_ts"] <= after + 1
    assert before - 1 <= api.state(box)["last_write_ts"] <= after + 1
