"""Slots are counted over all keys and for each, and come back however they are given (v0 §12)."""

from __future__ import annotations

import pytest

from gateway.admission.limits import InFlight, StreamSlots, share_of
from streams.protocol.access.key_limits import Limits
from streams.protocol.access.keys import Key, KeyRing
from streams.protocol.errors import Throttled

ONE, OTHER = Key("1" * 64), Key("2" * 64)


def limit_of(caught: pytest.ExceptionInfo[Throttled]) -> str:
    return str(caught.value.detail["limit"])


def test_streams_are_limited_in_all_and_for_each_key() -> None:
    slots = StreamSlots(total_max=3, per_key_max=2)
    held = [slots.take(ONE), slots.take(ONE)]
    with pytest.raises(Throttled) as caught:
        slots.take(ONE)
    assert limit_of(caught) == "sse_connections_per_key"
    held.append(slots.take(OTHER))
    for key in (OTHER, None):
        with pytest.raises(Throttled) as caught:
            slots.take(key)
        assert limit_of(caught) == "sse_connections"
    held[0].give_back()
    held[0].give_back()  # twice is once
    assert len(slots) == 2
    held[0] = slots.take(ONE)
    for slot in held:
        slot.give_back()
    assert len(slots) == 0 and repr(slots) == "<StreamSlots 0 of 3>"


def test_zero_is_no_limit() -> None:
    slots, in_flight = StreamSlots(), InFlight()
    assert len([slots.take(ONE) for _ in range(50)]) == len(slots) == 50
    for _ in range(50):
        in_flight.take(ONE)
    assert repr(in_flight) == "<InFlight 50 of 1 keys>"


def test_a_share_is_rounded_up_so_that_a_limit_is_never_nothing() -> None:
    assert [share_of(limit, 4) for limit in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_key_that_is_gone_ends_its_streams_now_or_when_they_begin() -> None:
    slots = StreamSlots()
    ended: list[str] = []
    kept, gone, opening = slots.take(ONE), slots.take(OTHER), slots.take(OTHER)
    slots.take(None)
    kept.on_revoked(lambda: ended.append("kept"))
    gone.on_revoked(lambda: ended.append("gone"))
    assert slots.revoke_all_but(KeyRing((ONE,))) == 2
    assert ended == ["gone"] and repr(gone) == "<Slot taken, revoked>"
    opening.on_revoked(lambda: ended.append("opening"))
    assert ended == ["gone", "opening"]


def test_s2_sessions_of_a_key_are_limited_by_its_share_and_other_streams_are_not() -> None:
    key = Key("3" * 64, limits=Limits(sessions=3))
    slots = StreamSlots(gateways=2)
    held = [slots.take(key, is_session=True), slots.take(key, is_session=True)]
    with pytest.raises(Throttled) as caught:
        slots.take(key, is_session=True)
    assert limit_of(caught) == "sessions_per_key"
    held += [slots.take(key), slots.take(ONE, is_session=True), slots.take(None, is_session=True)]
    assert slots.sessions_by_key == {key.id: 2, ONE.id: 1}
    for slot in held:
        slot.give_back()
    assert slots.sessions_of(key.id) == 0 and not slots.sessions_by_key


def test_requests_in_flight_are_limited_for_each_key_and_nothing_is_kept_of_the_others() -> None:
    in_flight = InFlight(per_key_max=2)
    in_flight.take(ONE)
    in_flight.take(ONE)
    in_flight.take(OTHER)
    with pytest.raises(Throttled) as caught:
        in_flight.take(ONE)
    assert limit_of(caught) == "inflight_per_key"
    in_flight.give(ONE)
    in_flight.take(ONE)
    for key in (ONE, ONE, OTHER):
        in_flight.give(key)
    assert repr(in_flight) == "<InFlight 0 of 0 keys>"
