"""Every metric of a server: one table, from which text, JSON and the reference page come (v0 §13). Pure.

Names never change; a metric that means something else gets another name.

Bounds: series by box, router and group are those of the largest ones (`top_rows.py`), and
`streams_box_series_truncated` says that there are others; every other label has as many values as there are
shards, processes, statuses, routes or reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from gateway.shards.process_states import REASONS, RESTART_REASONS, ProcessState, ProcessStates
from streams.protocol.telemetry.histogram import TIMES_S, HistogramFacts
from streams.protocol.telemetry.reports import (
    COLD_OPERATIONS,
    DAMAGE_KINDS,
    S2_BATCH_BYTES,
    S2_BATCH_RECORDS,
    S2_TIMES_S,
    BoxRow,
    BudgetReport,
    GatewayReport,
    GroupRow,
    PressureReport,
    ProcessReport,
    QueueRow,
    RouterRow,
    S2Report,
    ShardReport,
)
from streams.protocol.telemetry.top_rows import TopBoxes, top_of

Kind = Literal["counter", "gauge", "histogram"]


class Reports(NamedTuple):
    """All that is known of a server at one moment."""

    version: str
    #: Of shards that answer; one that is away is missing here and counted in `shards_total`.
    shards: list[ShardReport]
    gateways: list[GatewayReport]
    shards_total: int
    gateways_total: int
    #: Of the file system that the data is on.
    disk_bytes: int
    disk_free_bytes: int
    #: (shard, row) of what is shown one by one: the largest, by name.
    boxes: list[tuple[str, BoxRow]]
    routers: list[tuple[str, RouterRow]]
    groups: list[tuple[str, GroupRow]]
    is_truncated: bool
    #: Why processes are away and how often they were started again, as the supervisor says.
    processes: ProcessStates = ProcessStates()
    #: Of the last complete backup; None if none is known.
    backup_age_s: float | None = None


def reports_of(
    shards: list[ShardReport], gateways: list[GatewayReport], *, rows_max: int, **facts: Any
) -> Reports:
    shard_of = {row.box: str(shard.shard) for shard in shards for row in shard.boxes}
    boxes = TopBoxes(rows_max)
    for shard in shards:
        for row in shard.boxes:
            boxes.add(row)
    routers, has_more_routers = top_of(
        ((row.lag, row.router, (str(shard.shard), row)) for shard in shards for row in shard.routers),
        rows_max,
    )
    groups, has_more_groups = top_of(
        (
            (row.lag, f"{row.box}\0{row.group}", (str(shard.shard), row))
            for shard in shards
            for row in shard.groups
        ),
        rows_max // 2,
    )
    has_more = boxes.has_more or has_more_routers or has_more_groups
    return Reports(
        shards=shards,
        gateways=gateways,
        boxes=[(shard_of[row.box], row) for row in boxes.rows()],
        routers=routers,
        groups=groups,
        is_truncated=has_more or any(shard.has_more for shard in shards),
        **facts,
    )


#: Values of the labels, in the order of `Metric.labels`, and what was measured.
Sample = tuple[tuple[str, ...], int | float | HistogramFacts]


class Metric(NamedTuple):
    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    samples: Callable[[Reports], Iterable[Sample]]
    #: Of a histogram.
    bounds: tuple[float, ...] = TIMES_S


def _shards(value: Callable[[ShardReport], int | float | HistogramFacts]) -> Callable[[Reports], Any]:
    def samples(reports: Reports) -> Iterator[Sample]:
        for shard in reports.shards:
            yield (str(shard.shard),), value(shard)

    return samples


def _gateways(value: Callable[[GatewayReport], int | float]) -> Callable[[Reports], Any]:
    def samples(reports: Reports) -> Iterator[Sample]:
        for gateway in reports.gateways:
            yield (str(gateway.gateway),), value(gateway)

    return samples


def _named(reports: Reports) -> Iterator[tuple[str, ProcessReport, PressureReport]]:
    for shard in reports.shards:
        yield f"shard-{shard.shard:02d}", shard.process, shard.pressure
    for gateway in reports.gateways:
        yield f"gateway-{gateway.gateway}", gateway.process, gateway.pressure


def _processes(value: Callable[[ProcessReport], int | float]) -> Callable[[Reports], Any]:
    return lambda reports: (((name,), value(process)) for name, process, _ in _named(reports))


def _pressures(value: Callable[[PressureReport], int | float]) -> Callable[[Reports], Any]:
    return lambda reports: (((name,), value(pressure)) for name, _, pressure in _named(reports))


def _boxes(value: Callable[[BoxRow], int | float]) -> Callable[[Reports], Any]:
    return lambda reports: (((shard, row.box), value(row)) for shard, row in reports.boxes)


def _queues(value: Callable[[QueueRow], int | float]) -> Callable[[Reports], Any]:
    def samples(reports: Reports) -> Iterator[Sample]:
        for shard, row in reports.boxes:
            if row.queue is not None:
                yield (shard, row.box), value(row.queue)

    return samples


def _routers(value: Callable[[RouterRow], int | float]) -> Callable[[Reports], Any]:
    return lambda reports: (((shard, row.router), value(row)) for shard, row in reports.routers)


def _groups(value: Callable[[GroupRow], int | float]) -> Callable[[Reports], Any]:
    return lambda reports: (((shard, row.box, row.group), value(row)) for shard, row in reports.groups)


def _states(reports: Reports) -> Iterator[tuple[str, ProcessState]]:
    for index, state in sorted(reports.processes.shards.items()):
        yield f"shard-{index:02d}", state
    for index, state in sorted(reports.processes.gateways.items()):
        yield f"gateway-{index}", state


def _restarts(reports: Reports) -> Iterator[Sample]:
    for name, state in _states(reports):
        for reason in RESTART_REASONS:
            yield (name, reason), state.restarts.get(reason, 0)


def _down(reports: Reports) -> Iterator[Sample]:
    for name, state in _states(reports):
        if state.reason in REASONS:
            yield (name, state.reason), 1


def _damaged_files(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        kinds = [file.kind for file in shard.faults.damaged]
        for kind in DAMAGE_KINDS:
            yield (str(shard.shard), kind), kinds.count(kind)


def _damage_seen(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        for kind in DAMAGE_KINDS:
            yield (str(shard.shard), kind), shard.faults.damage_seen.get(kind, 0)


def _cold_failures(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        for operation in COLD_OPERATIONS:
            yield (str(shard.shard), operation), shard.faults.cold_failures.get(operation, 0)


def _routes(reports: Reports) -> Iterator[Sample]:
    """By route; the times of all gateways added up."""
    for route in sorted({route for gateway in reports.gateways for route in gateway.routes}):
        times = [gateway.routes[route] for gateway in reports.gateways if route in gateway.routes]
        yield (route,), _added_up(times)


def _gc_runs(reports: Reports) -> Iterator[Sample]:
    for name, process, _ in _named(reports):
        for generation, count in enumerate(process.gc_runs):
            yield (name, str(generation)), count


def _up(reports: Reports) -> Iterator[Sample]:
    ready = {shard.shard for shard in reports.shards if shard.ready}
    for shard in range(reports.shards_total):
        yield (str(shard),), int(shard in ready)


def _by_class(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        for durability, count in shard.totals.boxes.items():
            yield (str(shard.shard), durability), count


def _jobs(reports: Reports) -> Iterator[Sample]:
    for shard in reports.shards:
        jobs = shard.totals.jobs
        for state in ("ready", "in_flight", "delayed", "dead_lettered"):
            yield (str(shard.shard), state), getattr(jobs, state)


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


def _closed(reports: Reports) -> Iterator[Sample]:
    for gateway in reports.gateways:
        for reason, count in gateway.connections_closed.items():
            yield (str(gateway.gateway), reason), count


def _in_flight(reports: Reports) -> Iterator[Sample]:
    for gateway in reports.gateways:
        for shard, count in enumerate(gateway.in_flight):
            yield (str(gateway.gateway), str(shard)), count


def _delivery(reports: Reports) -> Iterator[Sample]:
    """By shard; what the gateways measured added up."""
    for shard in range(reports.shards_total):
        found = [gateway.delivery[shard] for gateway in reports.gateways if shard < len(gateway.delivery)]
        if found:
            yield (str(shard),), _added_up(found)


def _added_up(found: list[HistogramFacts]) -> HistogramFacts:
    counts = tuple(map(sum, zip(*(each.counts for each in found), strict=True)))
    return HistogramFacts(counts, sum(each.sum for each in found))


def _s2(value: Callable[[S2Report], HistogramFacts]) -> Callable[[Reports], Any]:
    """Of all gateways together: these names have no labels, as those who made them up have it."""
    return lambda reports: [((), _added_up([value(gateway.s2) for gateway in reports.gateways]))]


def _everyone(value: Callable[[ProcessReport], int | float]) -> Callable[[Reports], Any]:
    """Of all processes together."""
    return lambda reports: [((), sum(value(process) for _, process, _ in _named(reports)))]


def _first_start(reports: Reports) -> Any:
    """When the process that has run for the longest was started."""
    known = [process.started_s for _, process, _ in _named(reports) if process.started_s]
    return [((), min(known, default=0))]


_SHARD = ("shard",)
_GATEWAY = ("gateway",)
_PROCESS = ("process",)
_BOX = ("shard", "box")
_ROUTER = ("shard", "router")
_GROUP = ("shard", "box", "group")

METRICS: tuple[Metric, ...] = (
    Metric(
        "streams_info",
        "gauge",
        ("version",),
        "1; its label says which version runs.",
        lambda reports: [((reports.version,), 1)],
    ),
    Metric(
        "streams_shard_up", "gauge", _SHARD, "1 when the shard serves; 0 while it replays, or is away.", _up
    ),
    Metric(
        "streams_shard_replay_ratio",
        "gauge",
        _SHARD,
        "How much of its log a shard has replayed, 0 to 1.",
        _shards(lambda s: s.replay_progress),
    ),
    Metric(
        "streams_restarts_total",
        "counter",
        ("process", "reason"),
        "Times the supervisor started a process again, by reason.",
        _restarts,
    ),
    Metric(
        "streams_process_down",
        "gauge",
        ("process", "reason"),
        "1 for each process that does not serve, by reason; there is no series for one that serves.",
        _down,
    ),
    Metric(
        "streams_damaged_files",
        "gauge",
        ("shard", "kind"),
        "Damaged files that a shard has met since it started, by kind; it lists 20 at most.",
        _damaged_files,
    ),
    Metric(
        "streams_damage_total",
        "counter",
        ("shard", "kind"),
        "Times that a shard met damaged data, by kind of file.",
        _damage_seen,
    ),
    Metric(
        "streams_cold_store_failures_total",
        "counter",
        ("shard", "operation"),
        "Calls of the cold store that failed: read, write, delete. They are tried again.",
        _cold_failures,
    ),
    Metric(
        "streams_cold_store_failing_seconds",
        "gauge",
        _SHARD,
        "How long every call of the cold store has failed; 0 when the last one succeeded.",
        _shards(lambda s: s.faults.cold_failing_s),
    ),
    Metric(
        "streams_keys_file_readable",
        "gauge",
        (),
        "0 when the file of keys cannot be read: the server would not start again. 1 otherwise.",
        lambda reports: [((), int(not reports.processes.keys_problem))],
    ),
    Metric(
        "streams_backup_age_seconds",
        "gauge",
        (),
        "Age of the last complete backup; there is no series until one was taken.",
        lambda reports: [] if reports.backup_age_s is None else [((), round(reports.backup_age_s, 1))],
    ),
    Metric(
        "streams_snapshot_age_seconds",
        "gauge",
        _SHARD,
        "How long the log has had changes that no snapshot has; 0 when it has none.",
        _shards(lambda s: s.snapshot_age_s),
    ),
    Metric("streams_boxes", "gauge", ("shard", "durability"), "Boxes, by durability class.", _by_class),
    Metric("streams_queues", "gauge", _SHARD, "Boxes that are queues.", _shards(lambda s: s.totals.queues)),
    Metric(
        "streams_records", "gauge", _SHARD, "Live records of all boxes.", _shards(lambda s: s.totals.records)
    ),
    Metric(
        "streams_bytes",
        "gauge",
        _SHARD,
        "Bytes of live records of all boxes, as `GET` of a box counts them.",
        _shards(lambda s: s.totals.bytes),
    ),
    Metric(
        "streams_segments",
        "gauge",
        _SHARD,
        "Segment files, here and in the cold store.",
        _shards(lambda s: s.totals.segments),
    ),
    Metric(
        "streams_jobs",
        "gauge",
        ("shard", "state"),
        "Jobs of all queues: ready, in_flight, delayed; dead_lettered are those moved away so far.",
        _jobs,
    ),
    Metric(
        "streams_routers",
        "gauge",
        _SHARD,
        "Routers whose source is on this shard.",
        _shards(lambda s: s.totals.routers),
    ),
    Metric(
        "streams_routers_blocked",
        "gauge",
        _SHARD,
        "Those of them whose destination does not take copies.",
        _shards(lambda s: s.totals.routers_blocked),
    ),
    Metric(
        "streams_routers_lag_records",
        "gauge",
        _SHARD,
        "Records that all of them have yet to look at.",
        _shards(lambda s: s.totals.router_lag),
    ),
    Metric(
        "streams_routers_lag_seconds",
        "gauge",
        _SHARD,
        "Age of the oldest record that some router has yet to look at.",
        _shards(lambda s: s.totals.router_lag_s),
    ),
    Metric(
        "streams_jobs_oldest_seconds",
        "gauge",
        _SHARD,
        "Age of the oldest job of all queues that is not acked.",
        _shards(lambda s: s.totals.jobs.oldest_s),
    ),
    Metric("streams_groups", "gauge", _SHARD, "Groups of all boxes.", _shards(lambda s: s.totals.groups)),
    Metric(
        "streams_groups_lag_seconds",
        "gauge",
        _SHARD,
        "Age of the oldest record that some group has not committed.",
        _shards(lambda s: s.totals.group_lag_s),
    ),
    Metric(
        "streams_box_head_seq",
        "gauge",
        _BOX,
        "The seq of the newest record of a box.",
        _boxes(lambda row: row.head_seq),
    ),
    Metric(
        "streams_box_earliest_seq",
        "gauge",
        _BOX,
        "The seq of its first live record.",
        _boxes(lambda row: row.earliest_seq),
    ),
    Metric("streams_box_records", "gauge", _BOX, "Its live records.", _boxes(lambda row: row.records)),
    Metric("streams_box_bytes", "gauge", _BOX, "Their bytes.", _boxes(lambda row: row.bytes)),
    Metric(
        "streams_box_lag_records",
        "gauge",
        _BOX,
        "Records that its slowest reader has yet to get: ready jobs, or the lag of a router or group.",
        _boxes(lambda row: row.lag),
    ),
    Metric(
        "streams_box_append_rate",
        "gauge",
        _BOX,
        "Records appended to it a second, over the last 10 s or more.",
        _boxes(lambda row: row.rate),
    ),
    Metric(
        "streams_queue_oldest_seconds",
        "gauge",
        _BOX,
        "Age of the oldest job of a queue that is not acked.",
        _queues(lambda queue: queue.oldest_s),
    ),
    Metric(
        "streams_group_lag_records",
        "gauge",
        _GROUP,
        "Records behind the cursor of a group, for the groups that lag most.",
        _groups(lambda row: row.lag),
    ),
    Metric(
        "streams_group_lag_seconds",
        "gauge",
        _GROUP,
        "Age of the first record behind the cursor of a group.",
        _groups(lambda row: row.lag_s),
    ),
    Metric(
        "streams_queue_ready",
        "gauge",
        _BOX,
        "Jobs of a queue that can be claimed.",
        _queues(lambda queue: queue.ready),
    ),
    Metric(
        "streams_queue_in_flight",
        "gauge",
        _BOX,
        "Jobs that are leased.",
        _queues(lambda queue: queue.in_flight),
    ),
    Metric(
        "streams_queue_delayed",
        "gauge",
        _BOX,
        "Jobs given back with a delay, or on their way to the dead letter box.",
        _queues(lambda queue: queue.delayed),
    ),
    Metric(
        "streams_queue_dead_lettered",
        "gauge",
        _BOX,
        "Jobs that were moved to the dead letter box so far.",
        _queues(lambda queue: queue.dead_lettered),
    ),
    Metric(
        "streams_router_lag_records",
        "gauge",
        _ROUTER,
        "Records that a router has yet to look at.",
        _routers(lambda row: row.lag),
    ),
    Metric(
        "streams_router_lag_seconds",
        "gauge",
        _ROUTER,
        "Age of the first record that a router has yet to look at.",
        _routers(lambda row: row.lag_s),
    ),
    Metric(
        "streams_router_forwarded_total",
        "counter",
        _ROUTER,
        "Copies it has made.",
        _routers(lambda row: row.forwarded),
    ),
    Metric(
        "streams_router_blocked",
        "gauge",
        _ROUTER,
        "1 when its destination does not take copies.",
        _routers(lambda row: int(row.is_blocked)),
    ),
    Metric(
        "streams_box_series_truncated",
        "gauge",
        (),
        "1 when there are more boxes, routers or groups than are shown one by one (`STREAMS_METRICS_BOXES`).",
        lambda reports: [((), int(reports.is_truncated))],
    ),
    Metric(
        "streams_appends_total",
        "counter",
        _SHARD,
        "Writes of records: appends, and batches that routers brought.",
        _shards(lambda s: s.tally.appends),
    ),
    Metric(
        "streams_records_appended_total",
        "counter",
        _SHARD,
        "Records in them.",
        _shards(lambda s: s.tally.records_appended),
    ),
    Metric(
        "streams_reads_total",
        "counter",
        _SHARD,
        "Pages read: diffs, long polls, and pages for watchers.",
        _shards(lambda s: s.tally.reads),
    ),
    Metric(
        "streams_records_read_total",
        "counter",
        _SHARD,
        "Records examined for them.",
        _shards(lambda s: s.tally.records_read),
    ),
    Metric(
        "streams_records_evicted_total",
        "counter",
        _SHARD,
        "Records lost to a cap or to the TTL.",
        _shards(lambda s: s.tally.records_evicted),
    ),
    Metric(
        "streams_records_deleted_total",
        "counter",
        _SHARD,
        "Records deleted on request, acked jobs among them; not those of deleted boxes.",
        _shards(lambda s: s.tally.records_deleted),
    ),
    Metric(
        "streams_tombstones_total",
        "counter",
        _SHARD,
        "Times a reader was told of records it has missed.",
        _shards(lambda s: s.tally.tombstones),
    ),
    Metric(
        "streams_watch_sessions",
        "gauge",
        _SHARD,
        "Watch sessions, with an open stream or without.",
        _shards(lambda s: s.watch_sessions),
    ),
    Metric(
        "streams_waiting_reads",
        "gauge",
        _SHARD,
        "Long polls and feeds that wait for a record.",
        _shards(lambda s: s.waiting_reads),
    ),
    Metric(
        "streams_waiting_claims",
        "gauge",
        _SHARD,
        "Workers that wait for a job: claims with `wait_ms`, and streams of `/work`.",
        _shards(lambda s: s.waiting_claims),
    ),
    Metric(
        "streams_wal_frames_total",
        "counter",
        _SHARD,
        "Changes written to the log.",
        _shards(lambda s: s.wal.frames),
    ),
    Metric(
        "streams_wal_batches_total",
        "counter",
        _SHARD,
        "Groups that they were written in.",
        _shards(lambda s: s.wal.batches),
    ),
    Metric(
        "streams_wal_fsyncs_total",
        "counter",
        _SHARD,
        "Times the log was synced.",
        _shards(lambda s: s.wal.fsyncs),
    ),
    Metric(
        "streams_wal_bytes_total",
        "counter",
        _SHARD,
        "Bytes written to the log.",
        _shards(lambda s: s.wal.bytes),
    ),
    Metric(
        "streams_wal_rotations_total",
        "counter",
        _SHARD,
        "Log files begun.",
        _shards(lambda s: s.wal.rotations),
    ),
    Metric(
        "streams_wal_queue_bytes",
        "gauge",
        _SHARD,
        "Bytes handed to the log and not yet written.",
        _shards(lambda s: s.wal.queue_bytes),
    ),
    Metric(
        "streams_wal_unsynced_frames",
        "gauge",
        _SHARD,
        "Changes that are not on the disk yet.",
        _shards(lambda s: s.wal.unsynced_frames),
    ),
    Metric(
        "streams_object_puts_total",
        "counter",
        _SHARD,
        "Groups of changes to boxes of class object that were put into the object store.",
        _shards(lambda s: s.objects.objects),
    ),
    Metric(
        "streams_object_put_bytes_total",
        "counter",
        _SHARD,
        "Bytes of these groups.",
        _shards(lambda s: s.objects.bytes),
    ),
    Metric(
        "streams_object_bases_total",
        "counter",
        _SHARD,
        "Times all boxes of class object were put there anew, so that older groups could go.",
        _shards(lambda s: s.objects.bases),
    ),
    Metric(
        "streams_object_failures_total",
        "counter",
        _SHARD,
        "Times the object store did not take what it was given; it is tried again.",
        _shards(lambda s: s.objects.failures),
    ),
    Metric(
        "streams_object_backlog_bytes",
        "gauge",
        _SHARD,
        "Bytes that wait for the object store; nothing of them is acknowledged yet.",
        _shards(lambda s: s.objects.backlog_bytes),
    ),
    Metric(
        "streams_fsync_seconds",
        "histogram",
        _SHARD,
        "What a sync of the log took.",
        _shards(lambda s: s.fsync),
    ),
    Metric(
        "streams_append_ack_seconds",
        "histogram",
        _SHARD,
        "From the arrival of an append at its shard to its acknowledgement.",
        _shards(lambda s: s.ack),
    ),
    Metric(
        "streams_read_seconds",
        "histogram",
        _SHARD,
        "From the arrival of a read at its shard to its answer; without reads that waited for a record.",
        _shards(lambda s: s.read),
    ),
    Metric(
        "streams_claim_seconds",
        "histogram",
        _SHARD,
        "From the arrival of a claim at its shard to its answer; without claims that waited for a job.",
        _shards(lambda s: s.claim),
    ),
    Metric(
        "streams_delivery_seconds",
        "histogram",
        _SHARD,
        "From an append to its page being handed to the watchers of its box, to the millisecond; one "
        "observation a page.",
        _delivery,
    ),
    Metric(
        "streams_unsealed_bytes",
        "gauge",
        _SHARD,
        "Memory of records that are in the log and not yet in segments.",
        _shards(lambda s: s.unsealed_bytes),
    ),
    Metric(
        "streams_cache_bytes",
        "gauge",
        _SHARD,
        "Memory of records that were read from segments.",
        _shards(lambda s: s.cache_bytes),
    ),
    Metric(
        "streams_idempotency_keys",
        "gauge",
        _SHARD,
        "Idempotency keys that are remembered.",
        _shards(lambda s: s.idempotency_keys),
    ),
    Metric(
        "streams_clock_ahead_seconds",
        "gauge",
        _SHARD,
        "System clock minus the time of the shard, which follows it slowly when it is set.",
        _shards(lambda s: s.clock_ahead_s),
    ),
    Metric(
        "streams_clock_steps_total",
        "counter",
        _SHARD,
        "Times that a shard has seen the system clock being set.",
        _shards(lambda s: s.faults.clock_steps),
    ),
    Metric(
        "streams_sse_connections",
        "gauge",
        _GATEWAY,
        "Open event streams and WebSockets.",
        _gateways(lambda g: g.sse_connections),
    ),
    Metric(
        "streams_feeds",
        "gauge",
        _GATEWAY,
        "Boxes, and ways to show them, that are followed for watchers.",
        _gateways(lambda g: g.feeds),
    ),
    Metric(
        "streams_pages_delivered_total",
        "counter",
        _GATEWAY,
        "Pages handed to watchers, one each.",
        _gateways(lambda g: g.pages_delivered),
    ),
    Metric(
        "streams_http_connections",
        "gauge",
        _GATEWAY,
        "Open HTTP connections.",
        _gateways(lambda g: g.connections),
    ),
    Metric(
        "streams_http_connections_accepted_total",
        "counter",
        _GATEWAY,
        "HTTP connections so far.",
        _gateways(lambda g: g.connections_accepted),
    ),
    Metric(
        "streams_http_connections_closed_total",
        "counter",
        ("gateway", "reason"),
        "Connections that a gateway closed to protect others, by reason.",
        _closed,
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
    Metric(
        "streams_http_body_bytes",
        "gauge",
        _GATEWAY,
        "Bodies of requests that are in memory, decompressed ones included.",
        _gateways(lambda g: g.budgets["bodies"].bytes),
    ),
    Metric(
        "streams_http_answer_bytes",
        "gauge",
        _GATEWAY,
        "Answers of more than 16 KiB that are asked for or in memory, and not with the kernel yet.",
        _gateways(lambda g: g.budgets["answers"].bytes),
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
    Metric(
        "streams_pressure_level",
        "gauge",
        _PROCESS,
        "0: none; 1: low-priority delivery is paced; 2: appends are refused.",
        _pressures(lambda p: p.level),
    ),
    Metric(
        "streams_loop_lag_seconds",
        "gauge",
        _PROCESS,
        "How long what is ready waits for its turn.",
        _pressures(lambda p: p.lag_s),
    ),
    Metric(
        "streams_throttled_total",
        "counter",
        _PROCESS,
        "Appends refused because of pressure.",
        _pressures(lambda p: p.throttled),
    ),
    Metric(
        "streams_paced_total",
        "counter",
        _PROCESS,
        "Shards: deliveries held back because of pressure; gateways: appends that waited for their turn.",
        _pressures(lambda p: p.paced),
    ),
    Metric(
        "streams_disk_level",
        "gauge",
        _SHARD,
        "0: enough space; 1: commands that add data are refused; 2: all that write are.",
        _shards(lambda s: s.disk.level),
    ),
    Metric(
        "streams_disk_refused_total",
        "counter",
        _SHARD,
        "Commands refused because the disk is full (507).",
        _shards(lambda s: s.disk.refused),
    ),
    Metric(
        "streams_process_resident_bytes",
        "gauge",
        _PROCESS,
        "Memory of a process.",
        _processes(lambda p: p.resident_bytes),
    ),
    Metric(
        "streams_process_cpu_seconds_total",
        "counter",
        _PROCESS,
        "Processor time it has used.",
        _processes(lambda p: p.cpu_s),
    ),
    Metric(
        "streams_process_open_files",
        "gauge",
        _PROCESS,
        "Files and sockets it has open.",
        _processes(lambda p: p.open_files),
    ),
    Metric(
        "streams_process_open_files_max",
        "gauge",
        _PROCESS,
        "The most files and sockets that it may have open.",
        _processes(lambda p: p.open_files_max),
    ),
    Metric(
        "streams_process_memory_limit_bytes",
        "gauge",
        _PROCESS,
        "The memory that it may have together with the other processes; 0 is not known.",
        _processes(lambda p: p.memory_limit_bytes),
    ),
    Metric(
        "streams_process_gc_runs_total",
        "counter",
        ("process", "generation"),
        "Runs of Python's garbage collector, by generation.",
        _gc_runs,
    ),
    Metric(
        "streams_process_gc_seconds_total",
        "counter",
        _PROCESS,
        "Time that they took; nothing else of the process runs meanwhile.",
        _processes(lambda p: p.gc_s),
    ),
    Metric(
        "streams_process_uptime_seconds",
        "gauge",
        _PROCESS,
        "How long it has been running.",
        _processes(lambda p: p.uptime_s),
    ),
    Metric(
        "streams_disk_bytes",
        "gauge",
        (),
        "Size of the file system that the data is on.",
        lambda reports: [((), reports.disk_bytes)],
    ),
    Metric(
        "streams_disk_free_bytes",
        "gauge",
        (),
        "What is free of it.",
        lambda reports: [((), reports.disk_free_bytes)],
    ),
    # Names of `s2 lite`, so that charts and alerts made for it go on.
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
        "process_resident_memory_bytes",
        "gauge",
        (),
        "Their memory.",
        _everyone(lambda p: p.resident_bytes),
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
    Metric(
        "process_threads",
        "gauge",
        (),
        "Their threads.",
        _everyone(lambda p: p.threads),
    ),
    Metric(
        "process_start_time_seconds",
        "gauge",
        (),
        "When the first of them that runs was started, in seconds since 1970.",
        _first_start,
    ),
)
