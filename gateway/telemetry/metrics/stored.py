"""Metrics of the stored data: in total, and of the largest boxes, queues, groups and routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.telemetry.metrics.metric import BOXES, GROUPS, QUEUES, ROUTERS, SERVER, SHARDS, Metric, Sample
from gateway.telemetry.server_reports import Reports


def _by_class(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        for durability, count in shard.totals.boxes.items():
            yield (str(shard.shard), durability), count


def _jobs(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        jobs = shard.totals.jobs
        for state in ("ready", "in_flight", "delayed", "dead_lettered"):
            yield (str(shard.shard), state), getattr(jobs, state)


STORED: Final = (
    Metric("streams_boxes", "gauge", ("shard", "durability"), "Boxes, by durability class.", _by_class),
    SHARDS.gauge("streams_queues", "Boxes that are queues.", lambda s: s.totals.queues),
    SHARDS.gauge("streams_records", "Live records of all boxes.", lambda s: s.totals.records),
    SHARDS.gauge(
        "streams_bytes",
        "Bytes of live records of all boxes, as `GET` of a box counts them.",
        lambda s: s.totals.bytes,
    ),
    SHARDS.gauge(
        "streams_segments", "Segment files, here and in the cold store.", lambda s: s.totals.segments
    ),
    Metric(
        "streams_jobs",
        "gauge",
        ("shard", "state"),
        "Jobs of all queues: ready, in_flight, delayed; dead_lettered are those moved away so far.",
        _jobs,
    ),
    SHARDS.gauge("streams_routers", "Routers whose source is on this shard.", lambda s: s.totals.routers),
    SHARDS.gauge(
        "streams_routers_blocked",
        "Those of them whose destination does not take copies.",
        lambda s: s.totals.routers_blocked,
    ),
    SHARDS.gauge(
        "streams_routers_lag_records",
        "Records that all of them have yet to look at.",
        lambda s: s.totals.router_lag,
    ),
    SHARDS.gauge(
        "streams_routers_lag_seconds",
        "Age of the oldest record that some router has yet to look at.",
        lambda s: s.totals.router_lag_s,
    ),
    SHARDS.gauge(
        "streams_jobs_oldest_seconds",
        "Age of the oldest job of all queues that is not acked.",
        lambda s: s.totals.jobs.oldest_s,
    ),
    SHARDS.gauge("streams_groups", "Groups of all boxes.", lambda s: s.totals.groups),
    SHARDS.gauge(
        "streams_groups_lag_seconds",
        "Age of the oldest record that some group has not committed.",
        lambda s: s.totals.group_lag_s,
    ),
    BOXES.gauge("streams_box_head_seq", "The seq of the newest record of a box.", lambda row: row.head_seq),
    BOXES.gauge(
        "streams_box_earliest_seq", "The seq of its first live record.", lambda row: row.earliest_seq
    ),
    BOXES.gauge("streams_box_records", "Its live records.", lambda row: row.records),
    BOXES.gauge("streams_box_bytes", "Their bytes.", lambda row: row.bytes),
    BOXES.gauge(
        "streams_box_lag_records",
        "Records that its slowest reader has yet to get: ready jobs, or the lag of a router or group.",
        lambda row: row.lag,
    ),
    BOXES.gauge(
        "streams_box_append_rate",
        "Records appended to it a second, over the last 10 s or more.",
        lambda row: row.rate,
    ),
    QUEUES.gauge(
        "streams_queue_oldest_seconds",
        "Age of the oldest job of a queue that is not acked.",
        lambda queue: queue.oldest_s,
    ),
    GROUPS.gauge(
        "streams_group_lag_records",
        "Records behind the cursor of a group, for the groups that lag most.",
        lambda row: row.lag,
    ),
    GROUPS.gauge(
        "streams_group_lag_seconds",
        "Age of the first record behind the cursor of a group.",
        lambda row: row.lag_s,
    ),
    QUEUES.gauge("streams_queue_ready", "Jobs of a queue that can be claimed.", lambda queue: queue.ready),
    QUEUES.gauge("streams_queue_in_flight", "Jobs that are leased.", lambda queue: queue.in_flight),
    QUEUES.gauge(
        "streams_queue_delayed",
        "Jobs given back with a delay, or on their way to the dead letter box.",
        lambda queue: queue.delayed,
    ),
    QUEUES.gauge(
        "streams_queue_dead_lettered",
        "Jobs that were moved to the dead letter box so far.",
        lambda queue: queue.dead_lettered,
    ),
    QUEUES.gauge(
        "streams_queue_ready_seconds",
        "For how long the job that the next claim gets has been ready.",
        lambda queue: queue.ready_s,
    ),
    QUEUES.counter(
        "streams_queue_delivered_total",
        "Jobs that were delivered, redeliveries included; its rate is the delivery rate.",
        lambda queue: queue.deliveries,
    ),
    QUEUES.gauge(
        "streams_queue_outputs_pending",
        "Outputs of acked jobs that are not in their boxes yet.",
        lambda queue: queue.outputs_pending,
    ),
    ROUTERS.gauge(
        "streams_router_lag_records", "Records that a router has yet to look at.", lambda row: row.lag
    ),
    ROUTERS.gauge(
        "streams_router_lag_seconds",
        "Age of the first record that a router has yet to look at.",
        lambda row: row.lag_s,
    ),
    ROUTERS.counter("streams_router_forwarded_total", "Copies it has made.", lambda row: row.forwarded_count),
    ROUTERS.gauge(
        "streams_router_blocked",
        "1 when its destination does not take copies.",
        lambda row: int(row.is_blocked),
    ),
    SERVER.gauge(
        "streams_box_series_truncated",
        "1 when there are more boxes, routers or groups than are shown one by one (`STREAMS_METRICS_BOXES`).",
        lambda reports: int(reports.is_truncated),
    ),
)
