"""Metrics of the resources of a server: pressure, disk, memory, processor, files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.telemetry.metrics.metric import (
    PRESSURES,
    PROCESSES,
    SERVER,
    SHARDS,
    Metric,
    Sample,
    processes_of,
)
from gateway.telemetry.server_reports import Reports


def _gc_runs(reports: Reports) -> Iterator[Sample]:
    for name, process, _ in processes_of(reports):
        for generation, count in enumerate(process.gc_runs):
            yield (name, str(generation)), count


RESOURCES: Final = (
    PRESSURES.gauge(
        "streams_pressure_level",
        "0: none; 1: low-priority delivery is paced; 2: appends are refused.",
        lambda p: p.level,
    ),
    PRESSURES.gauge(
        "streams_loop_lag_seconds", "How long what is ready waits for its turn.", lambda p: p.lag_s
    ),
    PRESSURES.counter(
        "streams_throttled_total", "Appends refused because of pressure.", lambda p: p.throttled
    ),
    PRESSURES.counter(
        "streams_paced_total",
        "Shards: deliveries held back because of pressure; gateways: appends that waited for their turn.",
        lambda p: p.paced,
    ),
    SHARDS.gauge(
        "streams_disk_level",
        "0: enough space; 1: commands that add data are refused; 2: all that write are.",
        lambda s: s.disk.level,
    ),
    SHARDS.counter(
        "streams_disk_refused_total",
        "Commands refused because the disk is full (507).",
        lambda s: s.disk.refused,
    ),
    PROCESSES.gauge("streams_process_resident_bytes", "Memory of a process.", lambda p: p.resident_bytes),
    PROCESSES.counter("streams_process_cpu_seconds_total", "Processor time it has used.", lambda p: p.cpu_s),
    PROCESSES.gauge("streams_process_open_files", "Files and sockets it has open.", lambda p: p.open_files),
    PROCESSES.gauge(
        "streams_process_open_files_max",
        "The most files and sockets that it may have open.",
        lambda p: p.open_files_max,
    ),
    PROCESSES.gauge(
        "streams_process_memory_limit_bytes",
        "The memory that it may have together with the other processes; 0 is not known.",
        lambda p: p.memory_limit_bytes,
    ),
    Metric(
        "streams_process_gc_runs_total",
        "counter",
        ("process", "generation"),
        "Runs of Python's garbage collector, by generation.",
        _gc_runs,
    ),
    PROCESSES.counter(
        "streams_process_gc_seconds_total",
        "Time that they took; nothing else of the process runs meanwhile.",
        lambda p: p.gc_s,
    ),
    PROCESSES.gauge("streams_process_uptime_seconds", "How long it has been running.", lambda p: p.uptime_s),
    SERVER.gauge(
        "streams_disk_bytes",
        "Size of the file system that the data is on.",
        lambda reports: reports.disk_bytes,
    ),
    SERVER.gauge("streams_disk_free_bytes", "What is free of it.", lambda reports: reports.disk_free_bytes),
)
