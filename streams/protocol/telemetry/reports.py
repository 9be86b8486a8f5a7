"""Reports of processes about themselves: the content of metrics and of the status (v0 §13).

A shard answers `OP_REPORT` with a `ShardReport`. A gateway builds its own `GatewayReport` and asks the other
gateways for theirs. Reports contain numbers and names of boxes, routers, groups and damaged files, but no
payload and no key. Gateways show the names of damaged files only to operators.
"""

from __future__ import annotations

import msgspec

from streams.protocol.access.key_limits import Use
from streams.protocol.telemetry.histogram import HistogramFacts


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    pid: int = 0
    uptime_s: float = 0.0
    resident_bytes: int = 0
    cpu_s: float = 0.0
    open_files: int = 0
    #: Limit of open files, and memory limit of all processes together; 0 if unknown.
    open_files_max: int = 0
    memory_limit_bytes: int = 0
    virtual_bytes: int = 0
    threads: int = 0
    #: Seconds since 1970.
    started_s: float = 0.0
    #: Runs of the garbage collector by generation, and the time that all of them took.
    gc_runs: tuple[int, ...] = (0, 0, 0)
    gc_s: float = 0.0


class PressureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pressure on a process (v0 §9)."""

    #: 0 none, 1 low-priority delivery is paced, 2 appends are refused.
    level: int = 0
    lag_s: float = 0.0
    throttled: int = 0
    paced: int = 0


class QueueRow(msgspec.Struct, frozen=True, array_like=True):
    ready: int = 0
    in_flight: int = 0
    delayed: int = 0
    dead_lettered: int = 0
    #: Age of the oldest job that is not acked.
    oldest_s: float = 0.0
    #: For how long the job that the next claim gets has been ready.
    ready_s: float = 0.0
    deliveries: int = 0
    outputs_pending: int = 0


class BoxRow(msgspec.Struct, frozen=True, array_like=True):
    box: str
    head_seq: int
    earliest_seq: int
    records: int
    bytes: int
    queue: QueueRow | None = None
    #: Lag of the slowest reader, in records: ready jobs, or the lag of a router or of a group.
    lag: int = 0
    #: Records appended a second.
    rate: float = 0.0


class GroupRow(msgspec.Struct, frozen=True, array_like=True):
    box: str
    group: str
    lag: int
    #: Age of the first record behind the cursor.
    lag_s: float = 0.0


class RouterRow(msgspec.Struct, frozen=True, array_like=True):
    router: str
    lag: int
    forwarded_count: int
    is_blocked: bool
    #: Age of the first record that it has not examined yet.
    lag_s: float = 0.0


class BoxTotals(msgspec.Struct, kw_only=True):
    """Totals of all boxes of a shard."""

    #: By durability class.
    boxes: dict[str, int] = {}
    queues: int = 0
    records: int = 0
    bytes: int = 0
    segments: int = 0
    jobs: QueueRow = QueueRow()
    #: Routers whose source is in this shard, and the sum of their lags.
    routers: int = 0
    routers_blocked: int = 0
    router_lag: int = 0
    router_lag_s: float = 0.0
    #: Groups of all boxes, and the age of the first record that some group has not committed.
    groups: int = 0
    group_lag_s: float = 0.0


class TallyReport(msgspec.Struct, kw_only=True):
    """Counters of a shard since its start."""

    appends: int = 0
    records_appended: int = 0
    reads: int = 0
    records_read: int = 0
    records_evicted: int = 0
    records_deleted: int = 0
    tombstones: int = 0


class WalReport(msgspec.Struct, frozen=True, kw_only=True):
    frames: int = 0
    batches: int = 0
    fsyncs: int = 0
    bytes: int = 0
    rotations: int = 0
    queue_bytes: int = 0
    #: How far the disk is behind the log, in lsns.
    unsynced_frames: int = 0


class DiskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The space of a shard's disk, and the number of requests refused for lack of it."""

    #: 0 ok, 1 commands that add data are refused, 2 all that write are.
    level: int = 0
    free_bytes: int = 0
    low_bytes: int = 0
    full_bytes: int = 0
    refused: int = 0


class ObjectsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Uploads of a shard to the object store, for its boxes of class object."""

    objects: int = 0
    bytes: int = 0
    bases: int = 0
    failures: int = 0
    backlog_bytes: int = 0


#: Kinds of files that can be damaged while their shard serves, and operations of the cold store.
DAMAGE_KINDS = ("segment", "snapshot")
COLD_OPERATIONS = ("read", "write", "delete")


class DamagedFile(msgspec.Struct, frozen=True, array_like=True):
    #: One of `DAMAGE_KINDS`.
    kind: str
    path: str
    #: Empty for a file of the whole shard.
    box: str
    reason: str


class FaultsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Faults since the start of the shard that did not stop it (`shard/storage/faults.py`)."""

    #: The first files that were found damaged.
    damaged: list[DamagedFile] = []
    #: Times that damage was met, by kind.
    damage_seen: dict[str, int] = {}
    #: Failed calls of the cold store, by operation.
    cold_failures: dict[str, int] = {}
    #: How long every call of the cold store has failed; 0 if the last one succeeded, or none was made.
    cold_failing_s: float = 0.0
    cold_error: str = ""
    #: Times the system clock was set.
    clock_steps: int = 0


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    shard: int
    ready: bool = False
    replay_progress: float = 0.0
    process: ProcessReport = ProcessReport()
    pressure: PressureReport = PressureReport()
    totals: BoxTotals = msgspec.field(default_factory=BoxTotals)
    tally: TallyReport = msgspec.field(default_factory=TallyReport)
    wal: WalReport = WalReport()
    disk: DiskReport = DiskReport()
    objects: ObjectsReport = ObjectsReport()
    faults: FaultsReport = FaultsReport()
    fsync: HistogramFacts = HistogramFacts()
    ack: HistogramFacts = HistogramFacts()
    #: Reads and claims that were answered without waiting for a record or a job.
    read: HistogramFacts = HistogramFacts()
    claim: HistogramFacts = HistogramFacts()
    watch_sessions: int = 0
    waiting_reads: int = 0
    waiting_claims: int = 0
    unsealed_bytes: int = 0
    cache_bytes: int = 0
    idempotency_keys: int = 0
    schedules: int = 0
    schedules_blocked: int = 0
    schedule_lag_s: float = 0.0
    #: The system clock minus the time of the shard.
    clock_ahead_s: float = 0.0
    #: Usage of keys with limits on this shard, by id.
    key_use: dict[str, Use] = {}
    #: How long the log has had changes that no snapshot has; 0 if it has none.
    snapshot_age_s: float = 0.0
    #: The largest boxes, routers and groups (`top_rows.py`); `has_more` says that there are others.
    boxes: list[BoxRow] = []
    routers: list[RouterRow] = []
    groups: list[GroupRow] = []
    has_more: bool = False


#: Bounds of the S2 histograms: those of `s2 lite`, so that its charts can be used.
S2_TIMES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
S2_BATCH_RECORDS = (1, 10, 50, 100, 250, 500, 1000)
S2_BATCH_BYTES = (512, 1024, 4096, 16384, 65536, 262144, 524288, 1048576)


def _nothing(bounds: tuple[float, ...]) -> HistogramFacts:
    return HistogramFacts((0,) * (len(bounds) + 1))


class S2Report(msgspec.Struct, frozen=True, kw_only=True):
    """Appends of the S2 API: times until the permit and until the ack, and sizes."""

    permit: HistogramFacts = _nothing(S2_TIMES_S)
    ack: HistogramFacts = _nothing(S2_TIMES_S)
    records: HistogramFacts = _nothing(S2_BATCH_RECORDS)
    bytes: HistogramFacts = _nothing(S2_BATCH_BYTES)


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A memory budget of a gateway (`gateway/admission/memory.py`)."""

    bytes: int = 0
    #: By kind of owner: key, stranger or everyone.
    refused: dict[str, int] = {}
    stalled: dict[str, int] = {}


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    gateway: int
    ready: bool = True
    process: ProcessReport = ProcessReport()
    pressure: PressureReport = PressureReport()
    connections: int = 0
    connections_accepted: int = 0
    #: Connections that the gateway closed to protect others, by reason.
    connections_closed: dict[str, int] = {}
    sse_connections: int = 0
    feeds: int = 0
    pages_delivered: int = 0
    #: By name: bodies, answers.
    budgets: dict[str, BudgetReport] = {}
    #: By status code.
    requests: dict[int, int] = {}
    #: By route; routes that were never asked for are left out.
    routes: dict[str, HistogramFacts] = {}
    #: By shard.
    in_flight: list[int] = []
    delivery: list[HistogramFacts] = []
    s2: S2Report = S2Report()
    #: S2 sessions of each key that has some, by id.
    s2_sessions: dict[str, int] = {}


encode = msgspec.json.encode
decode_shard = msgspec.json.Decoder(ShardReport).decode
decode_gateway = msgspec.json.Decoder(GatewayReport).decode
