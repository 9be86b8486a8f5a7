"""Goal: a heartbeat says that event loop and log move, and nothing more than that."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from shard.server.heartbeat import BEAT_S, Heartbeat


def test_beats_stop_while_the_log_has_work_and_finishes_none_of_it() -> None:
    log = {"is_working": False, "done": 0}
    heartbeat = Heartbeat(lambda: (bool(log["is_working"]), int(log["done"])), lambda: None)
    assert heartbeat.has_progress(), "an idle log"
    log["is_working"] = True
    assert heartbeat.has_progress(), "it may have begun just now"
    assert not heartbeat.has_progress(), "the same work for a whole beat"
    log["done"] = 1
    assert heartbeat.has_progress(), "it goes on"
    assert not heartbeat.has_progress()
    log["is_working"] = False
    assert heartbeat.has_progress()


async def test_a_shard_that_moves_beats_at_once_and_then_every_second(autojump_clock: MockClock) -> None:
    beats: list[float] = []
    heartbeat = Heartbeat(lambda: (False, 0), lambda: beats.append(trio.current_time()))
    began_s = trio.current_time()
    with trio.move_on_after(3.5 * BEAT_S):
        await heartbeat.run()
    assert [round(beat - began_s, 3) for beat in beats] == [0.0, BEAT_S, 2 * BEAT_S, 3 * BEAT_S]
