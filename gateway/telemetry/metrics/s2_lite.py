"""Metrics with the names of `s2 lite`, so that its charts and alerts keep working.

They have no labels, as there: of all gateways or processes together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.telemetry.metrics.metric import Metric, processes_of, sum_histograms
from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.histogram import HistogramFacts
from streams.protocol.telemetry.reports import (
    S2_BATCH_BYTES,
    S2_BATCH_RECORDS,
    S2_TIMES_S,
    ProcessReport,
    S2Report,
)


def _s2(value: Callable[[S2Report], HistogramFacts]) -> Callable[[Reports], Any]:
    """Add up the histograms of all gateways."""
    return lambda reports: [((), sum_histograms([value(gateway.s2) for gateway in reports.gateways]))]


def _everyone(value: Callable[[ProcessReport], int | float]) -> Callable[[Reports], Any]:
    """Add up a number of all processes."""
    return lambda reports: [((), sum(value(process) for _, process, _ in processes_of(reports)))]


def _first_start(reports: Reports) -> Any:
    """Return the start time of the oldest process."""
    start_times = [process.started_s for _, process, _ in processes_of(reports) if process.started_s]
    return [((), min(start_times, default=0))]


S2_LITE: Final = (
    Metric(
        "s2_append_permit_latency_seconds",
        "histogram",
        (),
        "S2: how long appends wait until their bytes may be on the way.",
        _s2(lambda s2: s2.permit),
        S2_TIMES_S,
    ),
    Metric(
        "s2_append_ack_latency_seconds",
        "histogram",
        (),
        "S2: from then until they are durable and acked.",
        _s2(lambda s2: s2.ack),
        S2_TIMES_S,
    ),
    Metric(
        "s2_append_batch_records",
        "histogram",
        (),
        "S2: records of the appends that were acked.",
        _s2(lambda s2: s2.records),
        S2_BATCH_RECORDS,
    ),
    Metric(
        "s2_append_batch_bytes",
        "histogram",
        (),
        "S2: their metered bytes.",
        _s2(lambda s2: s2.bytes),
        S2_BATCH_BYTES,
    ),
    Metric(
        "process_cpu_seconds_total",
        "counter",
        (),
        "Processor time that all processes of the server have used.",
        _everyone(lambda p: p.cpu_s),
    ),
    Metric(
        "process_resident_memory_bytes", "gauge", (), "Their memory.", _everyone(lambda p: p.resident_bytes)
    ),
    Metric(
        "process_open_fds",
        "gauge",
        (),
        "Files and sockets that they have open.",
        _everyone(lambda p: p.open_files),
    ),
    Metric(
        "process_max_fds",
        "gauge",
        (),
        "Files and sockets that they may have open.",
        _everyone(lambda p: p.open_files_max),
    ),
    Metric(
        "process_virtual_memory_bytes",
        "gauge",
        (),
        "Their address space.",
        _everyone(lambda p: p.virtual_bytes),
    ),
    Metric("process_threads", "gauge", (), "Their threads.", _everyone(lambda p: p.threads)),
    Metric(
        "process_start_time_seconds",
        "gauge",
        (),
        "When the first of them that runs was started, in seconds since 1970.",
        _first_start,
    ),
)
