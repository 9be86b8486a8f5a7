"""Goal: a gateway does not wait for a shard that will not come, and waits for one that is starting."""

from __future__ import annotations

import socket
from pathlib import Path

import trio
import trio.testing

from gateway.links import Link
from tests.gateway.edge_harness import PATIENCE_S


async def test_a_link_is_settled_when_nobody_listens_any_more_but_not_while_a_shard_starts(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "shard.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        link = Link(0, path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0) as scope:
                await link.settled()
            assert scope.cancelled_caught, "it is connected, and nobody has answered yet"
            listener.close()
            with trio.fail_after(PATIENCE_S):
                await link.settled()
            assert not link.is_up
            nursery.cancel_scope.cancel()
