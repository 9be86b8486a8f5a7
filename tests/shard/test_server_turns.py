"""Who sends a lot at once does not keep others waiting for all of it (`shard/server.py`).

Method: the real server over real Unix sockets in this process; who sends later sends when the first message
of the crowd is handled.
"""

from __future__ import annotations

import socket
from pathlib import Path

import trio
import trio.testing

from shard.server import Server
from streams.protocol import wire
from streams.protocol.appends import RecordLimits

CROWD = 500


def ping(level: int) -> bytes:
    return wire.frame(wire.REQUEST, 0, wire.OP_PING, 1, b"", 1) + bytes((level,))


async def test_a_message_that_comes_meanwhile_is_handled_before_the_end_of_a_long_wake_up(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "shard.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = Server(listener, RecordLimits())
        handled: list[int] = []
        with socket.socket(socket.AF_UNIX) as crowd, socket.socket(socket.AF_UNIX) as other:

            def told(level: int) -> None:
                if not handled:
                    other.sendall(ping(1))
                handled.append(level)

            server.pressure.told = told  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                crowd.connect(path)
                other.connect(path)
                await trio.testing.wait_all_tasks_blocked()
                crowd.sendall(ping(0) * CROWD)
                with trio.fail_after(60):
                    while len(handled) < CROWD + 1:
                        await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
    assert handled.index(1) < CROWD // 2
