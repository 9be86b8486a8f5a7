"""Goal: a full table closes the right connection, and looks at few of them. Method: pairs of sockets whose
state the test sets, and a random walk that asks the table to check itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.admission import connection_table
from gateway.admission.connection_table import ConnectionTable, OpenConnection, address_group
from gateway.admission.descriptors import OTHERS, connections_within, fit_connections


@dataclass
class Served:
    is_idle: bool = True
    is_busy: bool = False
    request_count: int = 0


@dataclass
class Opener:
    """Connections of clients that stay silent."""

    table: ConnectionTable
    stack: ExitStack
    peers: dict[OpenConnection, socket.socket] = field(default_factory=dict)

    def open(self, address: str = "10.0.0.1", *, is_kept: bool = False, **state: bool) -> OpenConnection:
        connection = self.try_open(address, **state)
        assert connection is not None
        if is_kept:
            assert connection.keep()
        return connection

    def try_open(self, address: str, **state: bool) -> OpenConnection | None:
        ours, theirs = socket.socketpair()
        self.stack.enter_context(ours)
        self.stack.enter_context(theirs)
        connection = self.table.add(ours, address)
        if connection is not None:
            connection.server = Served(**state)
            self.peers[connection] = theirs
        return connection

    def is_open(self, connection: OpenConnection) -> bool:
        theirs = self.peers[connection]
        theirs.setblocking(False)
        try:
            return theirs.recv(1) != b""
        except BlockingIOError:
            return True


@pytest.fixture
def trio_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admission.close_counters.trio.current_time", lambda: 0.0)


def opener_of(connections_max: int, per_address_max: int = 0) -> Iterator[Opener]:
    with ExitStack() as stack:
        yield Opener(ConnectionTable(connections_max, per_address_max), stack)


@pytest.fixture
def ten(trio_clock: None) -> Iterator[Opener]:
    yield from opener_of(10)


def test_the_stranger_that_is_idle_longest_gives_way(ten: Opener) -> None:
    kept = [ten.open(is_kept=True) for _ in range(5)]
    first, second, *_ = strangers = [ten.open(f"10.0.1.{number}") for number in range(5)]
    assert ten.table.is_full and ten.table.make_room()
    assert not ten.is_open(first) and all(ten.is_open(each) for each in [*kept, *strangers[1:]])
    ten.open()
    assert isinstance(second.server, Served)
    second.server.request_count = 1  # It has just made a request, and been refused.
    assert ten.table.make_room()
    assert ten.is_open(second) and not ten.is_open(strangers[2])
    assert ten.table.close_counters.counts["no_key"] == 2
    ten.table.check()


def test_a_request_under_way_or_waiting_to_be_read_is_never_lost(ten: Opener) -> None:
    for _ in range(8):
        ten.open(is_idle=False, is_busy=True)
    waiting, other = ten.open(), ten.open()
    ten.peers[waiting].send(b"GET")
    assert ten.table.make_room()
    assert ten.is_open(waiting) and not ten.is_open(other)
    ten.open(is_idle=False, is_busy=True)
    assert not ten.table.make_room(of_kept=True)
    assert ten.is_open(waiting)


def test_a_stranger_with_half_a_head_or_an_unread_answer_gives_way(ten: Opener) -> None:
    half = [ten.open(is_idle=False, is_busy=False) for _ in range(10)]
    assert ten.table.make_room()
    assert not ten.is_open(half[0])


def test_kept_connections_give_way_only_when_asked_and_the_greedy_address_first(ten: Opener) -> None:
    modest = [ten.open(f"10.0.1.{number}", is_kept=True) for number in range(3)]
    greedy = [ten.open("10.0.0.9", is_kept=True) for _ in range(6)]
    ten.open(is_idle=False, is_busy=True)
    assert ten.table.is_full and not ten.table.make_room()
    assert ten.table.make_room(of_kept=True)
    assert all(ten.is_open(each) for each in modest)
    assert [ten.is_open(each) for each in greedy] == [False] + [True] * 5
    assert ten.table.close_counters.counts["idle"] == 1


def test_the_reserve_is_never_kept(ten: Opener) -> None:
    for _ in range(9):
        ten.open(is_kept=True)
    last = ten.open()
    assert not last.keep() and not last.is_kept
    assert ten.table.make_room()
    assert not ten.is_open(last)
    next_one = ten.open()
    ten.table.remove(next(iter(ten.table._kept_connections)))
    assert next_one.keep()
    ten.table.check()


def test_strangers_of_one_address_take_each_others_place(trio_clock: None) -> None:
    for opener in opener_of(100):
        other = opener.open("10.0.0.2")
        flood = [opener.open() for _ in range(30)]
        assert opener.is_open(other)
        assert [opener.is_open(each) for each in flood] == [False] * 14 + [True] * 16
        assert opener.table.close_counters.counts["address"] == 14
        opener.table.check()


def test_an_address_has_no_more_connections_than_the_limit(trio_clock: None) -> None:
    for opener in opener_of(100, per_address_max=2):
        first = opener.open(is_kept=True)
        second = opener.open()
        third = opener.open()
        assert opener.is_open(first) and not opener.is_open(second)
        assert third.keep()
        assert opener.try_open("10.0.0.1") is None
        assert opener.try_open("10.0.0.2") is not None
        assert opener.table.close_counters.counts["address_limit"] == 1
        opener.table.check()
    for opener in opener_of(100, per_address_max=1):
        for _ in range(3):
            opener.open()
        opener.table.check()


def test_a_new_connection_looks_at_few_however_many_are_open(
    ten: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ConnectionTable(10_000)
    ours, theirs = socket.socketpair()
    looks = 0

    def look(_: socket.socket) -> bool:
        nonlocal looks
        looks += 1
        return looks % 3 != 0

    monkeypatch.setattr(connection_table, "_has_input", look)
    with ours, theirs:
        for number in range(20_000):
            if table.is_full:
                before = looks
                assert table.make_room()
                assert looks - before <= connection_table.LOOKS_MAX
            connection = table.add(ours, f"10.{number % 200}.0.1")
            assert connection is not None
            connection.server = Served()
    table.check()
    assert looks <= 3 * 20_000


@given(st.lists(st.tuples(st.sampled_from("akrmik"), st.integers(0, 30)), max_size=200))
def test_any_order_of_events_leaves_the_table_whole(events: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("gateway.admission.close_counters.trio.current_time", lambda: 0.0)
        opener = Opener(ConnectionTable(8, 5), stack)
        connections: list[OpenConnection] = []
        for name, number in events:
            chosen = connections[number % len(connections)] if connections else None
            if name == "a":
                if opener.table.make_room(of_kept=number % 2 == 0):
                    added = opener.try_open(f"10.0.0.{number % 3}")
                    connections += [] if added is None else [added]
            elif chosen is not None and name == "k":
                chosen.keep()
            elif chosen is not None and name == "r":
                opener.table.remove(chosen)
            elif chosen is not None and name == "i":
                chosen.server = Served(is_idle=number % 2 == 0, is_busy=number % 4 == 1)
            elif name == "m":
                opener.table.close_stranger()
            opener.table.check()


def test_addresses_that_one_client_can_choose_from_count_as_one() -> None:
    assert address_group("10.0.0.1") == "10.0.0.1"
    assert address_group("2001:db8:1:2::1") == address_group("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert address_group("2001:db8:1:3::1") != address_group("2001:db8:1:2::1")
    assert address_group("::ffff:10.0.0.1") == "10.0.0.1"
    assert address_group("fe80::1%eth0") == "fe80::/64"
    assert address_group("") == ""


def test_connections_are_fitted_to_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections_within(20_000, 10_000) == 10_000
    assert connections_within(1024, 10_000) == 1024 - OTHERS
    assert connections_within(100, 10_000) == 50
    limits = []
    monkeypatch.setattr("gateway.admission.descriptors.resource.getrlimit", lambda _: (512, 1024))
    monkeypatch.setattr(
        "gateway.admission.descriptors.resource.setrlimit", lambda _, both: limits.append(both)
    )
    with capture_logs() as logs:
        assert fit_connections(10_000) == 768
        assert fit_connections(500) == 500
    assert limits == [(1024, 1024)] * 2
    assert [line["connections"] for line in logs] == [768]
