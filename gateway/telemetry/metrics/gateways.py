"""Metrics of gateways: connections, requests, event streams, and the memory of bodies and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from gateway.telemetry.metrics.metric import GATEWAYS, Metric, Sample, sum_histograms
from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.reports import BudgetReport


def _routes(reports: Reports) -> Iterator[Sample]:
    """Add up the times of all gateways, by route."""
    for route in sorted({route for gateway in reports.gateways for route in gateway.routes}):
        times = [gateway.routes[route] for gateway in reports.gateways if route in gateway.routes]
        yield (route,), sum_histograms(times)


def _statuses(reports: Reports) -> Iterator[Sample]:
    for gateway in reports.gateways:
        for status, count in sorted(gateway.requests.items()):
            yield (str(gateway.gateway), str(status)), count


def _budgets(counts: Callable[[BudgetReport], dict[str, int]]) -> Callable[[Reports], Any]:
    def samples(reports: Reports) -> Iterator[Sample]:
        for gateway in reports.gateways:
            for name, budget in gateway.budgets.items():
                for owner, count in counts(budget).items():
                    yield (str(gateway.gateway), name, owner), count

    return samples


def _closed_connections(reports: Reports) -> Iterator[Sample]:
    for gateway in reports.gateways:
        for reason, count in gateway.connections_closed.items():
            yield (str(gateway.gateway), reason), count


def _in_flight(reports: Reports) -> Iterator[Sample]:
    for gateway in reports.gateways:
        for shard, count in enumerate(gateway.in_flight):
            yield (str(gateway.gateway), str(shard)), count


GATEWAY_WORK: Final = (
    GATEWAYS.gauge(
        "streams_sse_connections", "Open event streams and WebSockets.", lambda g: g.sse_connections
    ),
    GATEWAYS.gauge(
        "streams_feeds", "Boxes, and ways to show them, that are followed for watchers.", lambda g: g.feeds
    ),
    GATEWAYS.counter(
        "streams_pages_delivered_total", "Pages handed to watchers, one each.", lambda g: g.pages_delivered
    ),
    GATEWAYS.gauge("streams_http_connections", "Open HTTP connections.", lambda g: g.connections),
    GATEWAYS.counter(
        "streams_http_connections_accepted_total",
        "HTTP connections so far.",
        lambda g: g.connections_accepted,
    ),
    Metric(
        "streams_http_connections_closed_total",
        "counter",
        ("gateway", "reason"),
        "Connections that a gateway closed to protect others, by reason.",
        _closed_connections,
    ),
    Metric(
        "streams_http_requests_total",
        "counter",
        ("gateway", "status"),
        "Requests answered, by status.",
        _statuses,
    ),
    Metric(
        "streams_http_request_seconds",
        "histogram",
        ("route",),
        "From a whole request to its answer, by route: waits of long polls are in it, and of a stream the "
        "time to its beginning. All requests of the S2 API are the route /v1.",
        _routes,
    ),
    GATEWAYS.gauge(
        "streams_http_body_bytes",
        "Bodies of requests that are in memory, decompressed ones included.",
        lambda g: g.budgets["bodies"].bytes,
    ),
    GATEWAYS.gauge(
        "streams_http_answer_bytes",
        "Answers of more than 16 KiB that are asked for or in memory, and not with the kernel yet.",
        lambda g: g.budgets["answers"].bytes,
    ),
    Metric(
        "streams_memory_refused_total",
        "counter",
        ("gateway", "budget", "owner"),
        "Requests refused for lack of memory, by budget (bodies, answers) and owner: a key, a stranger "
        "(without a key) or everyone (a server without keys).",
        _budgets(lambda budget: budget.refused),
    ),
    Metric(
        "streams_memory_stalled_total",
        "counter",
        ("gateway", "budget", "owner"),
        "Clients disconnected because they had stalled while others needed the memory.",
        _budgets(lambda budget: budget.stalled),
    ),
    Metric(
        "streams_requests_in_flight",
        "gauge",
        ("gateway", "shard"),
        "Requests that a shard has yet to answer, long polls and feeds among them.",
        _in_flight,
    ),
)
