"""Who sends a lot at once does not keep others waiting for all of it (`shard/server/connection.py`).

Method: the real server over real Unix sockets in this process; who sends later sends when the first message
of the crowd is handled.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from shard.server.server import Server
from streams.protocol.wire import framing as wire
from streams.protocol.wire.appends import RecordLimits

CROWD = 500


def ping(level: int, size: int = 1) -> bytes:
    return wire.frame(wire.REQUEST, 0, wire.OP_PING, 1, b"", size) + bytes((level,)) * size


async def test_a_message_that_comes_meanwhile_is_handled_before_the_end_of_a_long_wake_up(
    tmp_path: Path,
) -> None:
    handled = await handled_by(tmp_path, ping(0) * CROWD, CROWD, urgent_until_ns=0)
    assert handled.index(1) < CROWD // 2


@pytest.mark.parametrize(("urgent_until_ns", "is_soon"), [(0, False), (2**62, True)])
async def test_while_there_are_urgent_appends_other_links_are_looked_at_after_each_batch(
    tmp_path: Path, urgent_until_ns: int, is_soon: bool
) -> None:
    """A batch of a hundred records has some twelve kilobytes."""
    batches = ping(0, 12 * 1024) * 12
    handled = await handled_by(tmp_path, batches, 12, urgent_until_ns=urgent_until_ns)
    assert (handled.index(1) <= 3) is is_soon


async def handled_by(tmp_path: Path, messages: bytes, count: int, *, urgent_until_ns: int) -> list[int]:
    """The order in which messages of a crowd (0) and one that comes with their first (1) are handled."""
    path = str(tmp_path / "shard.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = Server(listener, RecordLimits())
        server.urgent_until_ns = urgent_until_ns
        handled: list[int] = []
        with socket.socket(socket.AF_UNIX) as crowd, socket.socket(socket.AF_UNIX) as other:

            def told(level: int) -> None:
                if not handled:
                    other.sendall(ping(1))
                handled.append(level)

            server.pressure.note_gateway_level = told  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                crowd.connect(path)
                other.connect(path)
                await trio.testing.wait_all_tasks_blocked()
                crowd.sendall(messages)
                with trio.fail_after(60):
                    while len(handled) < count + 1:
                        await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
    return handled
