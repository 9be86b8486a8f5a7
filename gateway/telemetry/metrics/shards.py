"""Metrics of the work of shards: writes, reads, the log, the object store, times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.telemetry.metrics.metric import SHARDS, Metric, Sample, sum_histograms
from gateway.telemetry.server_reports import Reports


def _delivery(reports: Reports) -> Iterator[Sample]:
    """Add up the delivery times of all gateways, by shard."""
    for shard in range(reports.shards_total):
        histograms = [each.delivery[shard] for each in reports.gateways if shard < len(each.delivery)]
        if histograms:
            yield (str(shard),), sum_histograms(histograms)


SHARD_WORK: Final = (
    SHARDS.counter(
        "streams_appends_total",
        "Writes of records: appends, and batches that routers brought.",
        lambda s: s.tally.appends,
    ),
    SHARDS.counter("streams_records_appended_total", "Records in them.", lambda s: s.tally.records_appended),
    SHARDS.counter(
        "streams_reads_total",
        "Pages read: diffs, long polls, and pages for watchers.",
        lambda s: s.tally.reads,
    ),
    SHARDS.counter(
        "streams_records_read_total", "Records examined for them.", lambda s: s.tally.records_read
    ),
    SHARDS.counter(
        "streams_records_evicted_total",
        "Records lost to a cap or to the TTL.",
        lambda s: s.tally.records_evicted,
    ),
    SHARDS.counter(
        "streams_records_deleted_total",
        "Records deleted on request, acked jobs among them; not those of deleted boxes.",
        lambda s: s.tally.records_deleted,
    ),
    SHARDS.counter(
        "streams_tombstones_total",
        "Times a reader got a tombstone for records it has missed.",
        lambda s: s.tally.tombstones,
    ),
    SHARDS.gauge(
        "streams_watch_sessions",
        "Watch sessions, with an open stream or without.",
        lambda s: s.watch_sessions,
    ),
    SHARDS.gauge(
        "streams_waiting_reads", "Long polls and feeds that wait for a record.", lambda s: s.waiting_reads
    ),
    SHARDS.gauge(
        "streams_waiting_claims",
        "Workers that wait for a job: claims with `wait_ms`, and streams of `/work`.",
        lambda s: s.waiting_claims,
    ),
    SHARDS.counter("streams_wal_frames_total", "Changes written to the log.", lambda s: s.wal.frames),
    SHARDS.counter("streams_wal_batches_total", "Groups that they were written in.", lambda s: s.wal.batches),
    SHARDS.counter("streams_wal_fsyncs_total", "Times the log was synced.", lambda s: s.wal.fsyncs),
    SHARDS.counter("streams_wal_bytes_total", "Bytes written to the log.", lambda s: s.wal.bytes),
    SHARDS.counter("streams_wal_rotations_total", "Log files begun.", lambda s: s.wal.rotations),
    SHARDS.gauge(
        "streams_wal_queue_bytes", "Bytes handed to the log and not yet written.", lambda s: s.wal.queue_bytes
    ),
    SHARDS.gauge(
        "streams_wal_unsynced_frames",
        "Changes that are not on the disk yet.",
        lambda s: s.wal.unsynced_frames,
    ),
    SHARDS.counter(
        "streams_object_puts_total",
        "Groups of changes to boxes of class object that were put into the object store.",
        lambda s: s.objects.objects,
    ),
    SHARDS.counter("streams_object_put_bytes_total", "Bytes of these groups.", lambda s: s.objects.bytes),
    SHARDS.counter(
        "streams_object_bases_total",
        "Times all boxes of class object were put there anew, so that older groups could go.",
        lambda s: s.objects.bases,
    ),
    SHARDS.counter(
        "streams_object_failures_total",
        "Times the object store did not take what it was given; it is tried again.",
        lambda s: s.objects.failures,
    ),
    SHARDS.gauge(
        "streams_object_backlog_bytes",
        "Bytes that wait for the object store; nothing of them is acknowledged yet.",
        lambda s: s.objects.backlog_bytes,
    ),
    SHARDS.histogram("streams_fsync_seconds", "What a sync of the log took.", lambda s: s.fsync),
    SHARDS.histogram(
        "streams_append_ack_seconds",
        "From the arrival of an append at its shard to its acknowledgement.",
        lambda s: s.ack,
    ),
    SHARDS.histogram(
        "streams_read_seconds",
        "From the arrival of a read at its shard to its answer; without reads that waited for a record.",
        lambda s: s.read,
    ),
    SHARDS.histogram(
        "streams_claim_seconds",
        "From the arrival of a claim at its shard to its answer; without claims that waited for a job.",
        lambda s: s.claim,
    ),
    Metric(
        "streams_delivery_seconds",
        "histogram",
        ("shard",),
        "From an append to its page being handed to the watchers of its box, to the millisecond; one "
        "observation a page.",
        _delivery,
    ),
    SHARDS.gauge(
        "streams_unsealed_bytes",
        "Memory of records that are in the log and not yet in segments.",
        lambda s: s.unsealed_bytes,
    ),
    SHARDS.gauge(
        "streams_cache_bytes", "Memory of records that were read from segments.", lambda s: s.cache_bytes
    ),
    SHARDS.gauge(
        "streams_idempotency_keys", "Idempotency keys that are remembered.", lambda s: s.idempotency_keys
    ),
    SHARDS.gauge("streams_schedules", "Schedules of the boxes of a shard.", lambda s: s.schedules),
    SHARDS.gauge(
        "streams_schedules_blocked",
        "Schedules whose box refuses their record.",
        lambda s: s.schedules_blocked,
    ),
    SHARDS.gauge(
        "streams_schedule_lag_seconds",
        "How late the latest schedule of a shard is: more than a second means that its box refuses records.",
        lambda s: s.schedule_lag_s,
    ),
    SHARDS.gauge(
        "streams_clock_ahead_seconds",
        "System clock minus the time of the shard, which follows it slowly when it is set.",
        lambda s: s.clock_ahead_s,
    ),
    SHARDS.counter(
        "streams_clock_steps_total",
        "Times that a shard has seen the system clock being set.",
        lambda s: s.faults.clock_steps,
    ),
)
