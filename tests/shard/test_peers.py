"""Admission to a shard (`shard/server/peers.py`): TCP peers without a key are bounded in time and number, and
the Unix socket is for our own user.

Method: the real server over real sockets in this process, with a clock that jumps when nothing happens.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

import shard.server.peers
from shard.server.peers import HELLO_S, Peers
from shard.server.server import ShardServer
from streams.protocol import wire
from streams.protocol.access.keys import entries_of_list, parse_ring
from streams.protocol.payloads.appends import RecordLimits

SECRET = "a-secret-of-some-length"
OTHER_SECRET = "another-secret-of-some-length"
PLACEMENT = json.dumps({"slots": [[0, 4096, 0]]})


@asynccontextmanager
async def listening(tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    keys = tmp_path / "keys.json"
    keys.write_bytes(parse_ring(entries_of_list(f"{SECRET},{OTHER_SECRET}"))[0].to_json())
    peers = Peers(shard=0, keys_file=str(keys), placement=PLACEMENT, body_bytes_max=1 << 20)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "shard.sock"))
    unix.listen()
    with unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ShardServer(unix, RecordLimits(), None, [tcp], peers).run)
            yield "127.0.0.1", tcp.getsockname()[1]
            nursery.cancel_scope.cancel()


async def test_who_says_no_hello_is_cut_off_in_time(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with listening(tmp_path) as address:
        silent, slow, good = [await trio.open_tcp_stream(*address) for _ in range(3)]
        hello = wire.frame(wire.REQUEST, 0, wire.OP_HELLO, 1, b"", len(SECRET)) + SECRET.encode()
        await good.send_all(hello)
        assert await good.receive_some()
        began = trio.current_time()
        await slow.send_all(hello[:10])
        assert await silent.receive_some() == b"" and await slow.receive_some() == b""
        assert HELLO_S <= trio.current_time() - began < 2 * HELLO_S
        with trio.move_on_after(10 * HELLO_S):
            await good.receive_some()
            raise AssertionError("a peer with a key may be silent")


async def is_greeted(stream: trio.SocketStream, secret: str = SECRET) -> bool:
    """Says hello. True if it is welcome, False if it is refused or cut off."""
    hello = wire.frame(wire.REQUEST, 0, wire.OP_HELLO, 1, b"", len(secret)) + secret.encode()
    try:
        await stream.send_all(hello)
        answer = await stream.receive_some()
    except trio.BrokenResourceError:
        return False
    return bool(answer) and not answer[5] & wire.FAILED


async def test_there_are_only_so_many_and_one_that_leaves_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.server.peers, "PEERS_MAX", 2)
    with trio.fail_after(30):
        async with listening(tmp_path) as address:
            first, second, third = [await trio.open_tcp_stream(*address) for _ in range(3)]
            assert await is_greeted(first) and await is_greeted(second)
            assert not await is_greeted(third)
            await first.aclose()
            while not await is_greeted(await trio.open_tcp_stream(*address)):
                await trio.lowlevel.checkpoint()


async def test_silent_peers_do_not_shut_a_valid_key_out_and_the_oldest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard.server.peers, "STRANGERS_MAX", 4)
    monkeypatch.setattr(shard.server.peers, "PEERS_MAX", 4)
    with trio.fail_after(30), capture_logs() as logs:
        async with listening(tmp_path) as address:
            silent = [await trio.open_tcp_stream(*address) for _ in range(8)]
            for _ in range(3):  # as many as fit, beside those that are silent
                assert await is_greeted(await trio.open_tcp_stream(*address))
            for stream in silent[:4]:
                assert await stream.receive_some() == b""
            # Those that are left may still say who they are.
            assert await is_greeted(silent[-1])
    warnings = [each for each in logs if "to make room" in each["event"]]
    assert len(warnings) == 1 and warnings[0]["address"] == "127.0.0.1"


async def test_one_key_does_not_take_all_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.server.peers, "KEY_PEERS_MAX", 2)
    with trio.fail_after(30), capture_logs() as logs:
        async with listening(tmp_path) as address:
            greedy = [await trio.open_tcp_stream(*address) for _ in range(4)]
            assert [await is_greeted(each) for each in greedy] == [True, True, False, False]
            assert await is_greeted(await trio.open_tcp_stream(*address), OTHER_SECRET)
            await greedy[0].aclose()
            while not await is_greeted(await trio.open_tcp_stream(*address)):
                await trio.lowlevel.checkpoint()
    assert [each["of_key"] for each in logs if each["event"].startswith("refused")] == [2]


def test_peers_leave_file_descriptors_for_the_log(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (656, before[1]))
    try:
        keys = tmp_path / "keys.json"
        keys.write_bytes(parse_ring(entries_of_list(SECRET))[0].to_json())
        peers = Peers(shard=0, keys_file=str(keys), placement=PLACEMENT, body_bytes_max=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert repr(peers) == "<Peers 0 of 300, 0 strangers>"  # and 100 strangers, and 256 for the log


async def test_the_unix_socket_is_for_our_own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the modes say. Root can play another user; others play one to a server that is not theirs."""
    hello = wire.frame(wire.REQUEST, 0, wire.OP_HELLO, 1, b"", 0)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/shard.sock"
        os.chmod(folder, 0o755)
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen()

        async def is_answered(*, as_user: int) -> bool:
            link = socket.socket(socket.AF_UNIX)
            before = os.geteuid()
            os.seteuid(as_user)
            try:
                link.connect(path)  # the kernel notes the user of this moment
            finally:
                os.seteuid(before)
            link.setblocking(False)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(link)) as stream:
                try:
                    await stream.send_all(hello)
                    return bool(await stream.receive_some())
                except trio.BrokenResourceError:
                    return False

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ShardServer(listener, RecordLimits()).run)
                user = os.geteuid()
                assert await is_answered(as_user=user)
                if user != 0:
                    monkeypatch.setattr(os, "getuid", lambda: user + 1)
                assert not await is_answered(as_user=user or 65534)
                nursery.cancel_scope.cancel()
