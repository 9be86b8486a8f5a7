"""Unix sockets work at any path length, and one host gives one port on all its addresses."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.shards.unix_sockets import UNIX_PATH_BYTES_MAX, connectable_path, listen_tcp, listen_unix, url_of


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose own path is far shorter than the limit, wherever the others are."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("extra", [0, 1, 150])
def test_a_socket_can_be_bound_and_reached_around_and_far_over_the_limit(short: Path, extra: int) -> None:
    fill = UNIX_PATH_BYTES_MAX - len(str(short / "d" / "s.sock")) + extra
    folder = short / ("d" + "d" * fill)
    folder.mkdir()
    path = folder / "s.sock"
    assert len(str(path)) == UNIX_PATH_BYTES_MAX + extra
    with listen_unix(path) as listener, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with connectable_path(path) as reachable:
            client.connect(reachable)
        listener.accept()[0].close()


def test_a_socket_file_left_by_a_dead_server_is_replaced(tmp_path: Path) -> None:
    listen_unix(tmp_path / "s.sock").close()
    with listen_unix(tmp_path / "s.sock"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s.sock"))


def test_port_zero_is_one_free_port_for_all_addresses_of_a_name() -> None:
    listeners = listen_tcp("localhost", 0)
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
        assert listeners[0].getsockname()[1] != 0
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:4000"),
        ("0.0.0.0", "http://127.0.0.1:4000"),
        ("::", "http://[::1]:4000"),
        ("::1", "http://[::1]:4000"),
        ("localhost", "http://localhost:4000"),
    ],
)
def test_the_url_is_one_that_works_from_this_machine(host: str, url: str) -> None:
    assert url_of(host, 4000) == url
