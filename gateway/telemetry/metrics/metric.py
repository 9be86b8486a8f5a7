"""A metric, and the families of metrics that share their labels and their rows.

A family knows the rows of a report: one for each shard, gateway, process, box, queue, router or group. A
metric of a family says which number of a row it shows. A metric of no family brings its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.histogram import TIMES_S, HistogramFacts
from streams.protocol.telemetry.reports import (
    BoxRow,
    GatewayReport,
    GroupRow,
    PressureReport,
    ProcessReport,
    QueueRow,
    RouterRow,
    ShardReport,
)

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
#: Values of the labels, in the order of `Metric.labels`, and the measured value.
Sample = tuple[Labels, int | float | HistogramFacts]
Row = TypeVar("Row")


class Metric(NamedTuple):
    name: str
    kind: Kind
    labels: Labels
    help: str
    samples: Callable[[Reports], Iterable[Sample]]
    #: Of a histogram.
    bounds: tuple[float, ...] = TIMES_S


class Family(Generic[Row]):
    """Makes metrics with the same labels, one sample for each row."""

    def __init__(self, labels: Labels, rows: Callable[[Reports], Iterable[tuple[Labels, Row]]]) -> None:
        self.labels = labels
        self._rows = rows

    def __repr__(self) -> str:
        return f"<Family {self.labels}>"

    def gauge(self, name: str, help: str, value: Callable[[Row], int | float]) -> Metric:
        return self._metric(name, "gauge", help, value)

    def counter(self, name: str, help: str, value: Callable[[Row], int | float]) -> Metric:
        return self._metric(name, "counter", help, value)

    def histogram(self, name: str, help: str, value: Callable[[Row], HistogramFacts]) -> Metric:
        return self._metric(name, "histogram", help, value)

    def _metric(
        self, name: str, kind: Kind, help: str, value: Callable[[Row], int | float | HistogramFacts]
    ) -> Metric:
        def samples(reports: Reports) -> Iterator[Sample]:
            for labels, row in self._rows(reports):
                yield labels, value(row)

        return Metric(name, kind, self.labels, help, samples)


def processes_of(reports: Reports) -> Iterator[tuple[str, ProcessReport, PressureReport]]:
    """Yield every process that has reported, with its name."""
    for shard in reports.shards:
        yield f"shard-{shard.shard:02d}", shard.process, shard.pressure
    for gateway in reports.gateways:
        yield f"gateway-{gateway.gateway}", gateway.process, gateway.pressure


def sum_histograms(histograms: list[HistogramFacts]) -> HistogramFacts:
    counts = tuple(map(sum, zip(*(each.counts for each in histograms), strict=True)))
    return HistogramFacts(counts, sum(each.sum for each in histograms))


def _queue_rows(reports: Reports) -> Iterator[tuple[Labels, QueueRow]]:
    for shard, row in reports.boxes:
        if row.queue is not None:
            yield (shard, row.box), row.queue


_BOX: Final = ("shard", "box")

SERVER: Final[Family[Reports]] = Family((), lambda reports: [((), reports)])
SHARDS: Final[Family[ShardReport]] = Family(
    ("shard",), lambda reports: (((str(shard.shard),), shard) for shard in reports.shards)
)
GATEWAYS: Final[Family[GatewayReport]] = Family(
    ("gateway",), lambda reports: (((str(gateway.gateway),), gateway) for gateway in reports.gateways)
)
PROCESSES: Final[Family[ProcessReport]] = Family(
    ("process",), lambda reports: (((name,), process) for name, process, _ in processes_of(reports))
)
PRESSURES: Final[Family[PressureReport]] = Family(
    ("process",), lambda reports: (((name,), pressure) for name, _, pressure in processes_of(reports))
)
BOXES: Final[Family[BoxRow]] = Family(
    _BOX, lambda reports: (((shard, row.box), row) for shard, row in reports.boxes)
)
QUEUES: Final[Family[QueueRow]] = Family(_BOX, _queue_rows)
ROUTERS: Final[Family[RouterRow]] = Family(
    ("shard", "router"), lambda reports: (((shard, row.router), row) for shard, row in reports.routers)
)
GROUPS: Final[Family[GroupRow]] = Family(
    ("shard", "box", "group"),
    lambda reports: (((shard, row.box, row.group), row) for shard, row in reports.groups),
)
