"""Runs one gateway process: parse arguments, connect to the shards, serve, drain. Nothing else.

SIGTERM, or the end of the supervisor, drains it. It ignores SIGINT, which a terminal also sends to the
supervisor. SIGHUP makes it read the keys again.
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
from gateway.access.key_use import KeyUseExchange
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
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from gateway.shards.placement import Placement
from gateway.shards.pressure import GatewayPressure
from gateway.shards.process_states import StatesReader
from gateway.shards.router_reconciler import RouterReconciler
from gateway.shards.router_relay import RouterRelay
from gateway.telemetry import report_server
from gateway.telemetry.collector import Collector
from gateway.telemetry.history import Histories, Sampler
from gateway.watch.service import Watch
from streams import __version__, logs, process
from streams.config import ChildArgs, Config, ConfigError, describe
from streams.protocol.access.grants import Grant
from streams.protocol.access.rates import RequestRates

log = structlog.get_logger()

#: Delay before a drain ends long polls: other reads finish within it.
_POLLS_S = 0.25
#: Time limit for the links to come up. A shard answers a hello even while it replays its log, so a shard that
#: takes longer has ended.
_LINKS_S_MAX = 5.0
#: Between two heartbeats.
_BEAT_S = 1.0


class Gateway:
    """Builds and connects all parts of one gateway process."""

    def __init__(self, arguments: ChildArgs) -> None:
        config = arguments.config
        self._arguments = arguments
        self._states = StatesReader(config.run_dir)
        self._links = self._to_shards()
        self._urgent = self._to_shards(is_urgent=True)
        self._bulk = self._to_shards()
        self._others = [
            Link(gateway, str(report_server.socket_of(config.run_dir, gateway)))
            for gateway in range(config.gateways)
            if gateway != arguments.index
        ]
        placement = Placement.from_json(arguments.placement)
        self._dispatch = Dispatch(placement, self._links, config.thresholds, self._urgent, self._bulk)
        self._pressure = GatewayPressure(self._dispatch, config.thresholds)
        self._draining = trio.Event()
        self._guard = guard = _guard(arguments)
        self._watch = Watch(
            self._dispatch,
            connections_max=share_of(config.max_sse_connections, config.gateways),
            connections_per_key_max=share_of(config.max_sse_connections_per_key, config.gateways),
            node_bytes_max=config.max_node_bytes,
            gateways=config.gateways,
        )
        self._origins = Origins(
            has_keys=guard is not None,
            hosts=config.allowed_hosts,
            bound_to=config.host,
            origins=config.cors_origins,
        )
        self._s2 = S2(
            self._dispatch,
            self._draining,
            drain_s=config.drain_ms / 1000,
            watch=self._watch,
            admit=None if guard is None else partial(_grant_of, guard),
            in_flight=None if guard is None else guard.in_flight,
            origins=self._origins,
        )
        self._limits = _front_limits(config)
        self._bodies = body_budget(self._limits)
        self._table = ConnectionTable(self._limits.connections_max, self._limits.connections_per_address_max)
        budgets = {"bodies": self._bodies, "answers": self._dispatch.answers}
        self._report = SelfReport(
            arguments.index, self._dispatch, self._watch, self._pressure, self._s2.append_window, budgets
        )
        rates = None if guard is None else guard.in_flight.rates
        self._key_use = KeyUseExchange(self._dispatch, self._watch.slots, rates, self._others)
        self._sampler = Sampler(self._dispatch, self._report, samples_shards=arguments.index == 0)
        self._api = self._build_api()

    def __repr__(self) -> str:
        return f"<Gateway {self._arguments.index}>"

    def _to_shards(self, *, is_urgent: bool = False) -> list[Link]:
        paths = enumerate(self._arguments.sockets)
        return [Link(shard, path, is_urgent=is_urgent, states=self._states) for shard, path in paths]

    def _build_api(self) -> Api:
        arguments, config = self._arguments, self._arguments.config
        collector = Collector(
            self._dispatch,
            here=self._report,
            others=self._others,
            version=__version__,
            data_dir=config.data_dir,
            rows_max=config.metrics_boxes,
            states=self._states,
        )
        return Api(
            self._dispatch,
            body_bytes_max=config.max_body_bytes,
            version=__version__,
            sockets=arguments.sockets,
            addresses=arguments.addresses,
            draining=self._draining,
            watch=self._watch,
            guard=self._guard,
            origins=self._origins,
            collector=collector,
            response_counts=self._report.response_counts,
            route_times=self._report.route_times,
            logs_access=config.log == "debug",
            s2=self._s2,
            key_use=self._key_use,
            histories=Histories(self._sampler, self._others, len(self._links)),
            settings=describe(config, arguments.origins),
            guide=config.guide,
        )

    async def run(self) -> None:
        """Serve until the gateway is drained."""
        arguments = self._arguments
        async with trio.open_nursery() as nursery:
            self._start_tasks(nursery)
            await nursery.start(self._watch.run, self._draining)
            async with trio.open_nursery() as fronts:
                for fd in arguments.listen_fds:
                    await self._open_front(socket.socket(fileno=fd), fronts)
                gc.collect()
                gc.freeze()
                # Refused and cancelled requests leave garbage in reference cycles: with a threshold of 50,000
                # objects, some 10 MB. Collecting 5,000 objects takes a fifth of a millisecond.
                gc.set_threshold(5_000, 50, 100)
                nursery.start_soon(
                    _report_ready,
                    arguments.ready_fd,
                    self._links + self._urgent + self._bulk,
                    self._others,
                )
            await self._s2.history.finish(arguments.config.drain_ms / 1000)
            nursery.cancel_scope.cancel()
        log.info("gateway drained: all requests have ended")

    def _start_tasks(self, nursery: trio.Nursery) -> None:
        arguments, dispatch, guard = self._arguments, self._dispatch, self._guard
        for link in self._links + self._urgent + self._bulk + self._others:
            nursery.start_soon(link.run)
        if arguments.index == 0:  # one of each is enough, and two would slow each other down
            nursery.start_soon(RouterRelay(dispatch).run)
            nursery.start_soon(RouterReconciler(dispatch).run)
            nursery.start_soon(self._s2.housekeeping.run)
            if guard is not None and len(self._links) > 1:
                nursery.start_soon(self._key_use.run, lambda: guard.ring)
        if self._others:
            path = report_server.socket_of(arguments.config.run_dir, arguments.index)
            nursery.start_soon(report_server.serve, path, self._report, self._sampler.ring)
        nursery.start_soon(self._sampler.run)
        nursery.start_soon(self._s2.history.run)
        nursery.start_soon(self._pressure.run)
        nursery.start_soon(dispatch.answers.run)
        nursery.start_soon(_end_polls, self._links + self._bulk, self._draining)
        nursery.start_soon(_watch_signals, self._draining, self._read_keys_again)
        nursery.start_soon(_watch_parent, arguments.parent_fd, self._draining)

    async def _open_front(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        front: FrontName = "hypercorn" if self._arguments.config.front == "hypercorn" else "edge"
        front_server = await nursery.start(
            partial(
                serve_front,
                listener,
                self._api.handle,
                draining=self._draining,
                limits=self._limits,
                front=front,
                socket_handler=self._api.websockets.serve,
                admit=None if self._guard is None else self._api.admit_body,
                bodies=self._bodies,
                table=self._table,
                answers=self._dispatch.answers,
            )
        )
        self._report.fronts.append(front_server)
        self._pressure.watch_over(front_server.scheduler)

    def _read_keys_again(self) -> None:
        if self._guard is not None:
            self._guard.ring = read_ring(self._arguments.keys_file)
            count = self._watch.on_keys_change(self._guard.ring)
            log.info("keys reloaded", keys=len(self._guard.ring.keys), streams_ended=count)


def _front_limits(config: Config) -> FrontLimits:
    return FrontLimits(
        body_bytes_max=config.max_body_bytes,
        # A key can hold half of it: one compressed body and its decompressed bytes.
        body_bytes_in_flight_max=max(BODY_BYTES_IN_FLIGHT, 4 * config.max_body_bytes),
        drain_s=config.drain_ms / 1000,
        connections_max=fit_connections(config.max_connections),
        connections_per_address_max=config.max_connections_per_address,
    )


async def _run(arguments: ChildArgs) -> None:
    await Gateway(arguments).run()


async def _end_polls(links: list[Link], draining: trio.Event) -> None:
    await draining.wait()
    await trio.sleep(_POLLS_S)
    count = sum(link.end_polls() for link in links)
    log.info("long polls ended for the drain; their clients will retry", count=count)


def _guard(arguments: ChildArgs) -> Guard | None:
    """Return the guard, or None on a server without keys. A key file that cannot be read ends this process:
    it must never serve without keys by accident."""
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


async def _report_ready(fd: int, to_shards: list[Link], to_gateways: list[Link]) -> None:
    """Report to the supervisor that this gateway is ready, then send a heartbeat every second.

    It is ready when its links to all shards and gateways are up, or after `_LINKS_S_MAX`: a shard that stays
    down must not keep the boxes of other shards waiting."""
    with trio.move_on_after(_LINKS_S_MAX):
        for link in to_shards:
            await link.wait_decided()
        for link in to_gateways:
            await link.wait_up()
    _send_line(fd, b"ready\n")
    os.set_blocking(fd, False)  # a supervisor that does not read must not block this process
    while True:
        _send_line(fd, b"beat\n")
        await trio.sleep(_BEAT_S)


def _send_line(fd: int, line: bytes) -> None:
    try:
        os.write(fd, line)
    except OSError:
        pass  # the supervisor has ended; `_watch_parent` handles that


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        arguments = ChildArgs.parse(sys.argv[1:], os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    process.time_gc()
    logs.setup(arguments.config.log, arguments.config.log_format, process=f"gateway-{arguments.index}")
    trio.run(_run, arguments)
    return 0


if __name__ == "__main__":
    process.leave(main())
