"""Listening sockets, and Unix socket paths of any length.

A Unix socket's address holds 107 bytes of path, which a data directory in a deep tree exceeds. Linux lets us
name the directory by an open descriptor instead: `/proc/self/fd/7/shard-00.sock`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: sizeof(sockaddr_un.sun_path) is 108 on Linux and the path ends with a NUL.
UNIX_PATH_BYTES_MAX: Final = 107

#: Connections the kernel keeps for us while no gateway accepts, for example while one restarts.
BACKLOG: Final = 1024


@contextmanager
def connectable_path(path: str | Path) -> Iterator[str]:
    """Yield a spelling of `path` that is short enough to bind or connect to, valid inside the `with`
    block."""
    if len(os.fsencode(path)) <= UNIX_PATH_BYTES_MAX:
        yield os.fspath(path)
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen_unix(path: Path) -> socket.socket:
    """Create a listening socket at `path`. Replaces the socket of an earlier server: we hold its lock."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with connectable_path(path) as short:
            listener.bind(short)
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Create listening sockets on every address of `host`, all on one port; port 0 picks a free one."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            port = port or (listeners[0].getsockname()[1] if len(listeners) > 1 else 0)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def url_of(host: str, port: int) -> str:
    """Return the URL under which a client on this machine reaches a server bound to `host`."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "[::1]"
    elif ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def address_of(host: str, port: int) -> str:
    """Return host:port for clients on other machines. The host is empty for a listener on every address: only
    the clients know by which address they reach this machine."""
    if host in ("", "0.0.0.0", "::"):
        host = ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
