"""Goal: a connection that has sent nothing costs no task, and is served, closed and drained like any other.
Method: fronts on real sockets; tasks of the event loop are counted."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from gateway.admission.connection_table import ConnectionTable, OpenConnection
from gateway.http.edge import UNSENT_BYTES_MAX, FrontLimits, FrontName
from gateway.http.pending_connections import ADMIT_MAX, PendingConnections
from gateway.requests.request import Request, Response
from tests.gateway.edge_harness import (
    Recorder,
    Running,
    head_and,
    no_connections,
    parse_answers,
    read_to_end,
    read_until,
    running_front,
)

GET = head_and(line="GET / HTTP/1.1")
FRONTS: list[FrontName] = ["edge", "hypercorn"]


async def open_silent(running: Running, stack: AsyncExitStack, count: int) -> list[trio.SocketStream]:
    streams = [await stack.enter_async_context(await running.connect()) for _ in range(count)]
    await trio.testing.wait_all_tasks_blocked()
    return streams


@pytest.mark.parametrize("front", FRONTS)
async def test_a_silent_connection_has_no_task_and_is_answered_when_it_speaks(front: FrontName):
    async with running_front(Recorder(), front=front) as running, AsyncExitStack() as stack:
        await trio.testing.wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        silent = await open_silent(running, stack, 40)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert running.front.statistics().connections == 40
        for stream in silent:
            await stream.send_all(GET)
        for stream in silent:
            await read_until(stream, b'"body":""')
        assert running.front.statistics().connections == 40
        running.front.table.check()


@pytest.mark.parametrize("front", FRONTS)
async def test_a_silent_connection_is_closed_after_the_keep_alive_time(front: FrontName):
    limits = FrontLimits(keep_alive_s=0.1)
    async with running_front(Recorder(), front=front, limits=limits) as running, AsyncExitStack() as stack:
        for stream in await open_silent(running, stack, 3):
            assert await read_to_end(stream) == b""
        await no_connections(running)
        assert repr(running.front.table) == "<ConnectionTable 0 kept, 0 strangers>"


async def test_a_client_that_goes_without_a_word_leaves_nothing():
    async with running_front(Recorder()) as running, AsyncExitStack() as stack:
        gone, half_closed = await open_silent(running, stack, 2)
        await gone.aclose()
        await half_closed.send_eof()
        assert await read_to_end(half_closed) == b""
        await no_connections(running)
        assert repr(running.front.table) == "<ConnectionTable 0 kept, 0 strangers>"


async def test_a_drain_closes_silent_connections_and_serves_what_has_come():
    """The request is there before the drain begins, and `PendingConnections` has not seen it."""
    async with running_front(Recorder()) as running, AsyncExitStack() as stack:
        silent, late = await open_silent(running, stack, 2)
        with socket.socket(fileno=late.socket.detach()) as speaking:
            speaking.send(GET)
            running.draining.set()
            assert await read_to_end(silent) == b""
            await no_connections(running)
            speaking.setblocking(True)
            [answer] = parse_answers(speaking.recv(65536))
        assert answer.status == 200


async def test_a_front_that_is_cancelled_closes_silent_connections():
    async with AsyncExitStack() as stack:
        async with running_front(Recorder()) as running:
            silent = await open_silent(running, stack, 3)
        for stream in silent:
            assert await read_to_end(stream) == b""


async def test_connections_have_the_options_of_their_listener():
    seen: list[tuple[int, ...]] = []

    async def handler(_: Request) -> Response:
        [sock] = running.front._sockets
        seen.append(
            (
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT),
            )
        )
        return Response(200, b"{}")

    async with running_front(handler) as running, await running.connect() as stream:
        await stream.send_all(GET)
        await read_until(stream, b"{}")
    assert seen == [(1, 1, 30, 10, 3, UNSENT_BYTES_MAX)]


@asynccontextmanager
async def pending_of(
    count: int,
) -> AsyncIterator[tuple[PendingConnections, list[socket.socket], list[OpenConnection]]]:
    """Pending connections, their clients' sockets, and the list of those that were admitted."""
    table, admitted = ConnectionTable(1000), []
    clients = []
    with PendingConnections(table, lambda connection, _: admitted.append(connection)) as pending:
        for _ in range(count):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            connection = table.add(ours, "10.0.0.1")
            assert connection is not None
            pending.add(connection, "10.0.0.1", trio.current_time() + 1)
            clients.append(theirs)
        yield pending, clients, admitted
    for each in clients + [connection.sock for connection in admitted]:
        each.close()
    table.check()


async def test_one_turn_admits_a_few_and_loses_none():
    async with pending_of(16) as (pending, clients, admitted):
        for each in clients:
            each.send(b"G")
        assert len(clients) == ADMIT_MAX
        pending.admit()
        pending.admit()
        assert len(admitted) == 16 and not len(pending)
        assert all(connection.pending_set is None and connection.server is None for connection in admitted)


async def test_the_table_closes_a_connection_of_the_pending_set_at_once():
    async with pending_of(3) as (pending, clients, admitted):
        clients[0].send(b"G")
        table = pending._table
        assert table.close_stranger()
        assert len(pending) == 2 and repr(table) == "<ConnectionTable 0 kept, 2 strangers>"
        assert clients[1].recv(1) == b""
        pending.admit()
        assert [connection.address for connection in admitted] == ["10.0.0.1"]
