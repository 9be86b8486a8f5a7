"""Goal: a client that sends much at once does not keep others waiting for all of it.

Method: the real server (`shard/server/connection.py`) over real Unix sockets in this process. The second
client sends when the first message of the crowd is handled.
"""

from __future__ import annotations

import socket
from pathlib import Path

import trio
import trio.testing

from shard.server.server import ShardServer
from streams.protocol import wire
from streams.protocol.payloads.appends import RecordLimits

CROWD = 500


def ping(level: int = 0) -> bytes:
    return wire.frame(wire.REQUEST, 0, wire.OP_PING, 1, b"", 1) + bytes((level,))


async def test_a_new_message_is_handled_before_a_long_wake_up_of_another_link_ends(tmp_path: Path) -> None:
    handled = await handled_by(tmp_path, ping() * CROWD, CROWD)
    assert handled.index(1) < CROWD // 2


async def handled_by(tmp_path: Path, messages: bytes, count: int) -> list[int]:
    """The order in which messages of a crowd (0) and one that comes with their first (1) are handled."""
    path = str(tmp_path / "shard.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = ShardServer(listener, RecordLimits())
        handled: list[int] = []
        with socket.socket(socket.AF_UNIX) as crowd, socket.socket(socket.AF_UNIX) as other:

            def note_level(level: int) -> None:
                if not handled:
                    other.sendall(ping(1))
                handled.append(level)

            server.pressure.note_gateway_level = note_level  # type: ignore[method-assign]
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
