"""One gateway process: parse arguments, connect to the shards, serve, drain. Nothing else.

SIGTERM, or the end of the supervisor, drains it; a terminal's SIGINT is the supervisor's business. SIGHUP is
taken and has nothing to re-read yet.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from functools import partial

import structlog
import trio

from gateway.api.routes import Api
from gateway.carrier import Carrier
from gateway.dispatch import Dispatch
from gateway.edge import FrontLimits, FrontName, serve_front
from gateway.links import Link
from gateway.placement import Placement
from gateway.registrar import Registrar
from gateway.s2.endpoints import S2
from gateway.watch.service import Watch
from streams import __version__, logs
from streams.config import ChildArgs, ConfigError

log = structlog.get_logger()

#: A shard answers a hello even while it replays its log, so one that takes longer has ended.
_LINKS_S_MAX = 5.0


async def run(arguments: ChildArgs) -> int:
    config = arguments.config
    links = [Link(shard, path) for shard, path in enumerate(arguments.sockets)]
    dispatch = Dispatch(Placement.from_json(arguments.placement), links)
    draining = trio.Event()
    watch = Watch(
        dispatch,
        # A gateway's share of the server's limit, rounded up: the kernel spreads connections over them.
        connections_max=-(-config.max_sse_connections // config.gateways),
        node_bytes_max=config.max_node_bytes,
    )
    s2 = S2(dispatch, draining, drain_s=config.drain_ms / 1000)
    api = Api(
        dispatch,
        body_bytes_max=config.max_body_bytes,
        version=__version__,
        sockets=arguments.sockets,
        draining=draining,
        watch=watch,
        s2=s2,
    )
    limits = FrontLimits(body_bytes_max=config.max_body_bytes, drain_s=config.drain_ms / 1000)
    front: FrontName = "hypercorn" if config.front == "hypercorn" else "edge"
    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(link.run)
        if arguments.index == 0:  # one of each is enough, and two would be in each other's way
            nursery.start_soon(Carrier(dispatch).run)
            nursery.start_soon(Registrar(dispatch).run)
            nursery.start_soon(s2.housekeeping.run)
        nursery.start_soon(_watch_signals, draining)
        nursery.start_soon(_watch_parent, arguments.parent_fd, draining)
        await nursery.start(watch.run, draining)
        async with trio.open_nursery() as fronts:
            for fd in arguments.listen_fds:
                listener = socket.socket(fileno=fd)
                await fronts.start(
                    partial(
                        serve_front,
                        listener,
                        api.handle,
                        draining=draining,
                        limits=limits,
                        front=front,
                        socket_handler=api.sockets.serve,
                    )
                )
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 50, 100)
            nursery.start_soon(_tell_when_linked, arguments.ready_fd, links)
        nursery.cancel_scope.cancel()
    log.info("drained")
    return 0


async def _watch_signals(draining: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
        async for number in signals:
            if number == signal.SIGTERM:
                draining.set()


async def _watch_parent(parent_fd: int, draining: trio.Event) -> None:
    await trio.lowlevel.wait_readable(parent_fd)
    draining.set()


async def _tell_when_linked(fd: int, links: list[Link]) -> None:
    """Ready is who can answer for every shard. One that stays away keeps no other's boxes waiting."""
    with trio.move_on_after(_LINKS_S_MAX):
        for link in links:
            await link.came_up()
    _tell(fd, b"ready\n")


def _tell(fd: int, line: bytes) -> None:
    try:
        os.write(fd, line)
    except OSError:
        pass  # the supervisor is gone; `_watch_parent` sees to that


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        arguments = ChildArgs.parse(sys.argv[1:], os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    logs.setup(arguments.config.log, arguments.config.log_format, process=f"gateway-{arguments.index}")
    return trio.run(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
