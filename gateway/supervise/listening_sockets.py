"""Opens the listening sockets of a server: for clients, for gateways at the shards, and for clients of
shards.

The supervisor owns them and keeps them open while a process restarts, so that connections wait for it.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack, closing

from gateway.shards.unix_sockets import listen_tcp, listen_unix
from gateway.supervise.data_dir import CannotServe
from streams.config import Config, is_loopback, refusal_to_serve_openly


def listen_for_clients(config: Config) -> list[socket.socket]:
    """Open the sockets that all gateways share. Raises `CannotServe`, also for a public address without
    keys."""
    address = f"{config.host}:{config.port}"
    try:
        listeners = listen_tcp(config.host, config.port)
    except socket.gaierror as error:
        raise CannotServe(
            f"STREAMS_HOST is {config.host}, which is not an address of this machine ({error.strerror})"
        ) from error
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "another program listens there" if in_use else os.strerror(error.errno or 0)
        raise CannotServe(
            f"cannot listen on {address}: {why}. Choose another address with STREAMS_HOST, or another "
            "port with STREAMS_PORT or --port (0 picks a free one)"
        ) from error
    bound = [listener.getsockname()[0] for listener in listeners]
    if not (config.has_keys or config.allow_insecure_no_auth or all(map(is_loopback, bound))):
        for listener in listeners:
            listener.close()
        raise CannotServe(refusal_to_serve_openly(f"{config.host} ({', '.join(bound)})"))
    return listeners


def listen_for_gateways(config: Config, stack: ExitStack) -> list[socket.socket]:
    """Open the sockets of the shards. A link that connects while a shard restarts waits for it."""
    paths = [config.shard_socket(index) for index in range(config.shards)]
    return [stack.enter_context(closing(listen_unix(path))) for path in paths]


def listen_for_peers(config: Config, stack: ExitStack) -> list[list[socket.socket]]:
    """Open the TCP sockets of each shard, all on one port; none unless STREAMS_SHARD_HOST is set."""
    host, first = config.shard_host, config.shard_port
    if not host:
        return [[] for _ in range(config.shards)]
    by_shard: list[list[socket.socket]] = []
    for index in range(config.shards):
        try:
            listeners = listen_tcp(host, first + index if first else 0)
        except OSError as error:
            port = f" port {first + index}" if first else ""
            raise CannotServe(
                f"cannot listen for clients of shard {index} on {host}{port}: {error.strerror or error}. "
                "Choose another address with STREAMS_SHARD_HOST or STREAMS_SHARD_PORT"
            ) from error
        by_shard.append([stack.enter_context(closing(listener)) for listener in listeners])
    return by_shard
