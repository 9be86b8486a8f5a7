"""One gateway process: parse arguments, connect to the shards, serve, drain. Nothing else.

SIGTERM, or the end of the supervisor, drains it; a terminal's SIGINT is the supervisor's business. SIGHUP has
it read the keys again.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import structlog
import trio

from gateway.access.auth import Guard, read_ring
from gateway.access.key_use import KeyUse
from gateway.access.origins import Origins
from gateway.admission.connection_table import ConnectionTable
from gateway.admission.descriptors import fit_connections
from gateway.admission.limits import share_of
from gateway.api.routes import Api
from gateway.http.edge import FrontLimits, FrontName, serve_front
from gateway.http.edge_rules import BODY_BYTES_IN_FLIGHT, body_budget
from gateway.reporting import SelfReport
from gateway.requests.request import Request
from gateway.s2.endpoints import S2
from gateway.shards.carrier import Carrier
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from gateway.shards.placement import Placement
from gateway.shards.pressure import GatewayPressure
from gateway.shards.process_states import StatesReader
from gateway.shards.registrar import Registrar
from gateway.telemetry import peers
from gateway.telemetry.collector import Collector
from gateway.watch.service import Watch
from streams import __version__, logs, process
from streams.config import ChildArgs, ConfigError
from streams.protocol.access.grants import Grant
from streams.protocol.access.rates import RequestRates

log = structlog.get_logger()

#: What a read that does not wait for anything may still take when the gateway drains.
_POLLS_S = 0.25
#: A shard answers a hello even while it replays its log, so one that takes longer has ended.
_LINKS_S_MAX = 5.0
#: Between two heartbeats.
_BEAT_S = 1.0


async def run(arguments: ChildArgs) -> int:
    config = arguments.config
    states = StatesReader(config.run_dir)
    links = [Link(shard, path, states=states) for shard, path in enumerate(arguments.sockets)]
    urgent = [
        Link(shard, path, is_urgent=True, states=states) for shard, path in enumerate(arguments.sockets)
    ]
    bulk = [Link(shard, path, states=states) for shard, path in enumerate(arguments.sockets)]
    dispatch = Dispatch(Placement.from_json(arguments.placement), links, config.thresholds, urgent, bulk)
    pressure = GatewayPressure(dispatch, config.thresholds)
    draining = trio.Event()
    watch = Watch(
        dispatch,
        connections_max=share_of(config.max_sse_connections, config.gateways),
        connections_per_key_max=share_of(config.max_sse_connections_per_key, config.gateways),
        node_bytes_max=config.max_node_bytes,
        gateways=config.gateways,
    )
    guard = _guard(arguments)
    others = [
        Link(gateway, str(peers.socket_of(config.run_dir, gateway)))
        for gateway in range(config.gateways)
        if gateway != arguments.index
    ]
    origins = Origins(
        has_keys=guard is not None,
        hosts=config.allowed_hosts,
        bound_to=config.host,
        origins=config.cors_origins,
    )
    s2 = S2(
        dispatch,
        draining,
        drain_s=config.drain_ms / 1000,
        watch=watch,
        admit=None if guard is None else partial(_grant_of, guard),
        in_flight=None if guard is None else guard.in_flight,
        origins=origins,
    )
    limits = FrontLimits(
        body_bytes_max=config.max_body_bytes,
        # A key can hold half of it: one body that is compressed, and what it becomes.
        body_bytes_in_flight_max=max(BODY_BYTES_IN_FLIGHT, 4 * config.max_body_bytes),
        drain_s=config.drain_ms / 1000,
        connections_max=fit_connections(config.max_connections),
        connections_per_address_max=config.max_connections_per_address,
    )
    bodies = body_budget(limits)
    table = ConnectionTable(limits.connections_max, limits.connections_per_address_max)
    budgets = {"bodies": bodies, "answers": dispatch.answers}
    report = SelfReport(arguments.index, dispatch, watch, pressure, s2.inflight, budgets)
    collector = Collector(
        dispatch,
        here=report,
        others=others,
        version=__version__,
        data_dir=config.data_dir,
        rows_max=config.metrics_boxes,
        states=states,
    )
    key_use = KeyUse(dispatch, watch.slots, None if guard is None else guard.in_flight.rates, others)
    api = Api(
        dispatch,
        body_bytes_max=config.max_body_bytes,
        version=__version__,
        sockets=arguments.sockets,
        addresses=arguments.addresses,
        draining=draining,
        watch=watch,
        guard=guard,
        origins=origins,
        collector=collector,
        answered=report.answered,
        route_times=report.route_times,
        logs_access=config.log == "debug",
        s2=s2,
        key_use=key_use,
    )
    front: FrontName = "hypercorn" if config.front == "hypercorn" else "edge"
    async with trio.open_nursery() as nursery:
        for link in links + urgent + bulk + others:
            nursery.start_soon(link.run)
        if arguments.index == 0:  # one of each is enough, and two would be in each other's way
            nursery.start_soon(Carrier(dispatch).run)
            nursery.start_soon(Registrar(dispatch).run)
            nursery.start_soon(s2.housekeeping.run)
            if guard is not None and len(links) > 1:
                nursery.start_soon(key_use.run, lambda: guard.ring)
        if others:
            nursery.start_soon(peers.serve, peers.socket_of(config.run_dir, arguments.index), report)
        nursery.start_soon(s2.history.run)
        nursery.start_soon(pressure.run)
        nursery.start_soon(dispatch.answers.run)
        nursery.start_soon(_end_polls, links + bulk, draining)
        nursery.start_soon(_watch_signals, draining, partial(_read_keys_again, arguments, guard, watch))
        nursery.start_soon(_watch_parent, arguments.parent_fd, draining)
        await nursery.start(watch.run, draining)
        async with trio.open_nursery() as fronts:
            for fd in arguments.listen_fds:
                listener = socket.socket(fileno=fd)
                served = await fronts.start(
                    partial(
                        serve_front,
                        listener,
                        api.handle,
                        draining=draining,
                        limits=limits,
                        front=front,
                        socket_handler=api.sockets.serve,
                        admit=None if guard is None else api.admit_body,
                        bodies=bodies,
                        table=table,
                        answers=dispatch.answers,
                    )
                )
                report.fronts.append(served)
                pressure.watch_over(served.scheduler)
            gc.collect()
            gc.freeze()
            # What was refused or cancelled is garbage in cycles, some 10 MB of it before 50,000 objects have
            # piled up. To look at 5,000 takes a fifth of a millisecond.
            gc.set_threshold(5_000, 50, 100)
            nursery.start_soon(_tell_when_linked, arguments.ready_fd, links + urgent + bulk, others)
        await s2.history.finish(config.drain_ms / 1000)
        nursery.cancel_scope.cancel()
    log.info("drained")
    return 0


async def _end_polls(links: list[Link], draining: trio.Event) -> None:
    await draining.wait()
    await trio.sleep(_POLLS_S)
    ended = sum(link.end_polls() for link in links)
    log.info("long polls were told to come back", count=ended)


def _guard(arguments: ChildArgs) -> Guard | None:
    """None when no keys are asked for. A file of keys that cannot be read ends this process: it must never
    serve openly by accident."""
    if not arguments.keys_file:
        return None
    config = arguments.config
    return Guard(
        read_ring(arguments.keys_file),
        probe_auth=config.probe_auth,
        in_flight_per_key_max=share_of(config.max_inflight_per_key, config.gateways),
        rates=RequestRates(config.gateways),
    )


def _grant_of(guard: Guard, request: Request) -> Grant:
    request.key = guard.identify(request, takes_token=False)
    return request.key.grant


def _read_keys_again(arguments: ChildArgs, guard: Guard | None, watch: Watch) -> None:
    if guard is not None:
        guard.ring = read_ring(arguments.keys_file)
        ended = watch.keys_changed(guard.ring)
        log.info("keys read again", keys=len(guard.ring.keys), streams_ended=ended)


async def _watch_signals(draining: trio.Event, read_keys_again: Callable[[], None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
        async for number in signals:
            if number == signal.SIGTERM:
                draining.set()
            else:
                read_keys_again()


async def _watch_parent(parent_fd: int, draining: trio.Event) -> None:
    await trio.lowlevel.wait_readable(parent_fd)
    draining.set()


async def _tell_when_linked(fd: int, to_shards: list[Link], to_gateways: list[Link]) -> None:
    """Ready is who can answer for every shard, and knows the other gateways. One that stays away keeps no
    other's boxes waiting. Then a heartbeat every second says that the event loop moves."""
    with trio.move_on_after(_LINKS_S_MAX):
        for link in to_shards:
            await link.settled()
        for link in to_gateways:
            await link.came_up()
    _tell(fd, b"ready\n")
    os.set_blocking(fd, False)  # a supervisor that reads nothing must not stop us
    while True:
        _tell(fd, b"beat\n")
        await trio.sleep(_BEAT_S)


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
    process.time_gc()
    logs.setup(arguments.config.log, arguments.config.log_format, process=f"gateway-{arguments.index}")
    return trio.run(run, arguments)


if __name__ == "__main__":
    process.leave(main())
