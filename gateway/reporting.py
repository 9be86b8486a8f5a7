"""Builds the report of a gateway from the reports of its parts. It measures nothing itself."""

from __future__ import annotations

from gateway.admission.memory import MemoryBudget
from gateway.http.edge import Front
from gateway.s2.append_window import AppendWindow
from gateway.shards.dispatch import Dispatch
from gateway.shards.pressure import GatewayPressure
from gateway.watch.service import Watch
from streams import process
from streams.protocol.telemetry.histogram import Histogram
from streams.protocol.telemetry.reports import GatewayReport


class SelfReport:
    def __init__(
        self,
        gateway: int,
        dispatch: Dispatch,
        watch: Watch,
        pressure: GatewayPressure,
        append_window: AppendWindow,
        budgets: dict[str, MemoryBudget],
    ) -> None:
        self._gateway = gateway
        self._dispatch = dispatch
        self._watch = watch
        self._pressure = pressure
        self._append_window = append_window
        self._budgets = budgets
        #: One for each listening socket.
        self.fronts: list[Front] = []
        #: Responses by status. Bound: the statuses in `requests/errors.py`, and a few more.
        self.response_counts: dict[int, int] = {}
        #: By route: time from the complete request to its answer, or to the beginning of a stream.
        self.route_times: dict[str, Histogram] = {}

    def __repr__(self) -> str:
        return f"<SelfReport of gateway {self._gateway}, {sum(self.response_counts.values())} responses>"

    def __call__(self) -> GatewayReport:
        fronts = [front.statistics() for front in self.fronts]
        feeds = self._watch.feeds.statistics()
        return GatewayReport(
            gateway=self._gateway,
            process=process.report(),
            pressure=self._pressure.report(),
            connections=sum(front.connections for front in fronts),
            connections_accepted=sum(front.connections_total for front in fronts),
            connections_closed=fronts[0].closed_by_reason if fronts else {},  # they share one table
            budgets={name: budget.report() for name, budget in self._budgets.items()},
            sse_connections=self._watch.connections,
            feeds=feeds.feeds,
            pages_delivered=feeds.pages_delivered,
            requests=self.response_counts,
            routes={route: times.facts() for route, times in self.route_times.items() if times.is_used},
            in_flight=[
                sum(link.in_flight for link in set(links))
                for links in zip(
                    self._dispatch.links, self._dispatch.urgent, self._dispatch.bulk, strict=True
                )
            ],
            delivery=[times.facts() for times in self._watch.feeds.delivery_times],
            s2=self._append_window.report(),
            s2_sessions=self._watch.slots.sessions_by_key,
        )
