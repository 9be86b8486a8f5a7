"""Goal: a session is found by every gateway while it lives, belongs to one of them, and lapses in its time
(§7.1, §7.2, §12)."""

from __future__ import annotations

import pytest

from shard.core.machine import Machine
from shard.core.watch import sessions as module
from shard.core.watch.sessions import Sessions
from streams.protocol import wire
from streams.protocol.errors import Forbidden, NotFound, SeqMismatch, ShardUnavailable, Throttled
from streams.protocol.messages import requests
from streams.protocol.messages.commands import KeepSession, PutSession, SessionReply, TakeSession
from streams.protocol.payloads.appends import RecordLimits
from tests.support.machines import Driver

TTL_MS = 100


def test_a_session_is_taken_only_by_whose_it_is_and_its_holder_does_not_notice() -> None:
    sessions = Sessions(0)
    sessions.handle(PutSession("w", b"{}", TTL_MS, 0, "mine"), 0)
    assert sessions.handle(TakeSession("w", TTL_MS, "mine"), 0) == SessionReply(1, b"{}")
    for owner in ("", "another's"):
        assert isinstance(sessions.handle(TakeSession("w", TTL_MS, owner), 0), Forbidden)
    assert sessions.handle(KeepSession("w", 1, b"[]", TTL_MS), 0) == SessionReply(1)


def put(wid: str, state: bytes = b"{}", epoch: int = 0) -> PutSession:
    return PutSession(wid, state, TTL_MS, epoch)


def test_what_was_put_is_taken() -> None:
    sessions = Sessions(0)
    assert sessions.handle(put("w", b'{"a":1}'), 0) == SessionReply(0)
    assert sessions.handle(TakeSession("w", TTL_MS), 1) == SessionReply(1, b'{"a":1}')


def test_only_the_last_taker_may_keep_it() -> None:
    sessions = Sessions(0)
    sessions.handle(put("w"), 0)
    for epoch in (1, 2):
        assert sessions.handle(TakeSession("w", TTL_MS), 0) == SessionReply(epoch, b"{}")
    assert isinstance(sessions.handle(KeepSession("w", 1, b"[1]", TTL_MS), 0), SeqMismatch)
    assert sessions.handle(KeepSession("w", 2, b"[2]", TTL_MS), 0) == SessionReply(2)
    assert sessions.handle(TakeSession("w", TTL_MS), 0) == SessionReply(3, b"[2]")


def test_a_session_lapses_and_every_touch_puts_that_off() -> None:
    sessions = Sessions(0)
    sessions.handle(put("lapses"), 0)
    sessions.handle(put("kept"), 0)
    sessions.handle(KeepSession("kept", 0, b"{}", TTL_MS), 60)
    assert isinstance(sessions.handle(TakeSession("lapses", TTL_MS), 100), NotFound)
    assert sessions.handle(TakeSession("kept", TTL_MS), 159) == SessionReply(1, b"{}")
    assert isinstance(sessions.handle(TakeSession("kept", TTL_MS), 259), NotFound)
    assert len(sessions) == 0


def test_the_limit_counts_living_sessions() -> None:
    sessions = Sessions(2)
    for wid in ("a", "b"):
        sessions.handle(put(wid), 0)
    refusal = sessions.handle(put("c"), 99)
    assert isinstance(refusal, Throttled) and refusal.detail["limit"] == "watch_sessions"
    assert sessions.handle(put("c"), 100) == SessionReply(0)


def test_their_text_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STATE_BYTES_MAX", 10)
    sessions = Sessions(0)
    sessions.handle(put("a", b"123456"), 0)
    assert isinstance(sessions.handle(put("b", b"12345"), 0), Throttled)
    sessions.handle(KeepSession("a", 0, b"1", TTL_MS), 0)
    assert sessions.handle(put("b", b"12345"), 0) == SessionReply(0)


def test_of_two_streams_that_put_a_session_back_the_newer_one_wins_whichever_comes_first() -> None:
    for first, second in (((1, b"[1]"), (2, b"[2]")), ((2, b"[2]"), (1, b"[1]"))):
        sessions = Sessions(1)
        sessions.begin(7)
        assert sessions.handle(put("w", first[1], first[0]), 0) == SessionReply(first[0])
        answer = sessions.handle(put("w", second[1], second[0]), 0)
        assert isinstance(answer, SeqMismatch) if second[0] == 1 else answer == SessionReply(2)
        assert isinstance(sessions.handle(KeepSession("w", 1, b"[1]", TTL_MS), 0), SeqMismatch)
        assert repr(sessions) == "<Sessions 1, 3 B>"
        taken = sessions.handle(TakeSession("w", TTL_MS, has_cursor=True), 0)
        assert isinstance(taken, SessionReply) and taken.state == b"[2]"


def test_a_session_that_was_put_back_is_given_without_a_cursor_when_every_stream_has_had_time_to_do_so() -> (
    None
):
    sessions = Sessions(0)
    sessions.begin(1_000)
    ttl_ms = 60_000
    assert sessions.handle(PutSession("stale", b"[10]", ttl_ms, 1), 1_500) == SessionReply(1)
    assert sessions.handle(PutSession("new", b"[0]", ttl_ms, 0), 1_500) == SessionReply(0)
    assert isinstance(sessions.handle(TakeSession("stale", ttl_ms), 1_600), ShardUnavailable)
    assert isinstance(sessions.handle(TakeSession("new", ttl_ms), 1_600), SessionReply)
    assert sessions.handle(PutSession("stale", b"[20]", ttl_ms, 2), 6_900) == SessionReply(2)
    assert isinstance(sessions.handle(TakeSession("stale", ttl_ms), 7_999), ShardUnavailable)
    taken = sessions.handle(TakeSession("stale", ttl_ms), 8_000)
    assert isinstance(taken, SessionReply) and taken.state == b"[20]" and taken.epoch > 2
    sessions.handle(PutSession("told", b"[10]", ttl_ms, 1), 1_500)
    assert isinstance(sessions.handle(TakeSession("told", ttl_ms, has_cursor=True), 1_600), SessionReply)


def test_a_newer_stream_keeps_a_session_that_an_older_one_has_put_back() -> None:
    sessions = Sessions(0)
    sessions.handle(put("w", b"[1]", 1), 0)
    assert sessions.handle(KeepSession("w", 2, b"[2]", TTL_MS), 0) == SessionReply(2)
    assert isinstance(sessions.handle(KeepSession("w", 1, b"[1]", TTL_MS), 0), SeqMismatch)


def test_whoever_takes_a_session_that_was_put_back_is_newer_than_every_stream_of_the_last_life() -> None:
    sessions = Sessions(0)

    def take() -> int:
        taken = sessions.handle(TakeSession("w", TTL_MS, has_cursor=True), 0)
        assert isinstance(taken, SessionReply)
        return taken.epoch

    sessions.begin(7)
    sessions.handle(put("w"), 0)
    old = [take() for _ in range(3)]
    sessions.clear()
    sessions.begin(8)
    sessions.handle(put("w", b"[1]", old[0]), 0)
    new = take()
    for epoch in old:
        assert isinstance(sessions.handle(KeepSession("w", epoch, b"[3]", TTL_MS), 0), SeqMismatch)
    assert sessions.handle(KeepSession("w", new, b"[]", TTL_MS), 0) == SessionReply(new)


def test_a_session_put_back_keeps_its_epoch() -> None:
    sessions = Sessions(0)
    sessions.handle(put("w", epoch=7), 0)
    assert sessions.handle(KeepSession("w", 7, b"{}", TTL_MS), 0) == SessionReply(7)


def test_sessions_through_the_machine_and_the_wire() -> None:
    machine = Machine(sessions_max=1)

    def ask(op: int, query: str, body: bytes = b"") -> bytes:
        head = wire.head_encoder.encode(wire.RequestHead("wid_x", query))
        outcome = machine.handle(requests.decode_command(op, head, body, RecordLimits()), 0)
        assert not outcome.changes
        assert isinstance(outcome.reply, SessionReply), outcome.reply
        return requests.encode_reply(outcome.reply)

    assert ask(wire.OP_PUT_SESSION, "ttl_ms=100&epoch=3", b'{"a":1}') == b'{"epoch":3,"state":null}'
    assert ask(wire.OP_TAKE_SESSION, "ttl_ms=100&has_cursor=0") == b'{"epoch":4,"state":{"a":1}}'
    assert ask(wire.OP_KEEP_SESSION, "ttl_ms=100&epoch=4", b"{}") == b'{"epoch":4,"state":null}'
    assert repr(machine.sessions) == "<Sessions 1, 2 B>"


def lives_of(driver: Driver) -> tuple[Driver, Driver]:
    """The next life after an orderly stop, and after a crash of that one."""
    driver.do(put("w", b'{"at":1}'))
    driver.do(TakeSession("w", TTL_MS))
    driver.stop()
    driver.sync()
    state = driver.machine.snapshot()
    after = driver.reborn(state=state)
    after.start("boot")
    after.sync()
    crashed = after.reborn(state=state)
    crashed.start("boot")
    return after, crashed


def test_an_orderly_stop_keeps_sessions_where_they_were_and_a_crash_does_not() -> None:
    driver = Driver()
    driver.start("boot")
    after, crashed = lives_of(driver)
    taken = after.ask(TakeSession("w", TTL_MS))
    assert taken.state == b'{"at":1}' and taken.epoch > 1
    with pytest.raises(NotFound):  # it would be at a place where its reader has long gone past
        crashed.ask(TakeSession("w", TTL_MS))
    assert len(crashed.machine.sessions) == 0


def test_a_session_lapses_while_the_server_is_stopped() -> None:
    driver = Driver()
    driver.start("boot")
    after, _ = lives_of(driver)
    after.now_ms += TTL_MS
    with pytest.raises(NotFound):
        after.ask(TakeSession("w", TTL_MS))


def test_a_session_of_a_server_whose_keys_had_no_ids_is_dropped() -> None:
    sessions = Sessions(0)
    snapshot = Machine().snapshot()
    snapshot.sessions = [("wid_1", 1, b"{}", 5000, "ab" * 32), ("wid_2", 1, b"{}", 5000, "key-1")]
    sessions.restore(snapshot)
    assert "wid_1" not in sessions and "wid_2" in sessions
    assert sessions.count_of("key-1") == 1


def test_a_snapshot_of_a_running_shard_has_no_sessions() -> None:
    driver = Driver()
    driver.start("boot")
    driver.do(put("w"))
    assert driver.machine.snapshot().sessions == []


def test_a_session_lapses_in_time_after_a_restart_with_a_clock_that_was_set_back() -> None:
    driver = Driver(now_ms=10_000_000)
    driver.start("boot")
    driver.ask(put("w"))
    driver.stop()
    again = driver.reborn(state=driver.machine.snapshot())
    again.now_ms -= 3_600_000
    again.start("boot")
    again.now_ms += TTL_MS - 1
    assert again.ask(TakeSession("w", 1)).state == b"{}"
    again.now_ms += 1
    with pytest.raises(NotFound):
        again.ask(TakeSession("w", 1))
