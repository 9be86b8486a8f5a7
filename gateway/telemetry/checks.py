"""Checks a server for problems, from the reports of its processes. Pure.

`/v0/status`, `streams status`, `streams doctor` and the console show the same list. Each check returns one
row: its finding and, if that is a problem, the operator's next step. A finding names files of the server only
for clients that may see them.

Bounds: one row for each check; a row has at most `PARTS_MAX` parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from gateway.shards.process_states import REASONS, ProcessState
from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.reports import ProcessReport

#: The disk row is wrong below this share of free space, even before a watermark is reached.
DISK_FREE_SHARE: Final = 0.05
#: Limit of the used share of open files, and of the memory limit.
USED_SHARE_MAX: Final = 0.9
#: The restarts row is wrong for this long after a restart.
RESTART_LATELY_S: Final = 15 * 60.0
#: The system clock and the time of a shard may differ by this much.
CLOCK_AHEAD_MAX_S: Final = 1.0
#: A week and a day: what a weekly backup allows.
BACKUP_AGE_MAX_S: Final = 8 * 86_400.0
#: As the alert: a shard writes a snapshot long before.
SNAPSHOT_AGE_MAX_S: Final = 3_600.0
#: Damaged files and processes that one row lists.
PARTS_MAX: Final = 5


class Check(NamedTuple):
    check: str
    is_ok: bool
    finding: str
    next_step: str = ""

    def facts(self) -> dict[str, Any]:
        facts = {"check": self.check, "result": "ok" if self.is_ok else "wrong", "found": self.finding}
        return facts if self.is_ok else {**facts, "next_step": self.next_step}


def checks_of(reports: Reports, *, shows_detail: bool) -> list[Check]:
    """Run all checks. With `shows_detail`, findings contain errors and names of files."""
    return [check(reports, shows_detail) for check in _CHECKS]


def _processes(reports: Reports, shows_detail: bool) -> Check:
    """Check that every shard and gateway serves. If not, add the reason that the supervisor reports."""
    serving = {f"shard-{shard.shard:02d}" for shard in reports.shards if shard.ready}
    serving |= {f"gateway-{gateway.gateway}" for gateway in reports.gateways}
    states = dict(_states(reports))
    names = [f"shard-{at:02d}" for at in range(reports.shards_total)]
    names += [f"gateway-{at}" for at in range(reports.gateways_total)]
    away = [name for name in names if name not in serving]
    if not away:
        finding = f"{reports.shards_total} shards and {reports.gateways_total} gateways serve"
        return Check("processes", True, finding)
    replaying = {f"shard-{shard.shard:02d}" for shard in reports.shards if not shard.ready}
    finding = _join_parts(
        f"{name} is {'replaying' if name in replaying else 'away'}{_why(states.get(name), shows_detail)}"
        for name in away
    )
    reasons = [states[name].reason for name in away if name in states]
    steps = dict.fromkeys(REASONS[reason][1] for reason in reasons if reason in REASONS)
    return Check("processes", False, finding, "; ".join(steps) or REASONS["starting"][1])


def _restarts(reports: Reports, shows_detail: bool) -> Check:
    """Check for recent restarts. A process in a crash loop may be ready at the moment of a check."""
    uptimes = {name: process.uptime_s for name, process in _processes_by_name(reports)}
    restarts = [(name, state) for name, state in _states(reports) if state.restarts]
    finding = _join_parts(
        f"{name} was restarted: "
        + ", ".join(f"{reason} {_times(count)}" for reason, count in sorted(state.restarts.items()))
        for name, state in restarts
    )
    lately = [name for name, _ in restarts if uptimes.get(name, 0.0) < RESTART_LATELY_S]
    step = "look at the server's log for `ended unexpectedly` and `hangs`: they have the cause of each"
    return Check("restarts", not lately, finding or "no process was restarted", step)


def _disk(reports: Reports, shows_detail: bool) -> Check:
    level = max((shard.disk.level for shard in reports.shards), default=0)
    share = reports.disk_free_bytes / reports.disk_bytes if reports.disk_bytes else 1.0
    free = f"{reports.disk_free_bytes / 2**30:.1f} GiB free"
    finding = f"{free}, {share:.0%} of the data directory's file system"
    if level:
        subject = "requests that add data are" if level == 1 else "all writes are"
        finding = f"{finding}; {subject} refused with 507"
    is_ok = not level and share >= DISK_FREE_SHARE
    step = "free space, delete or trim boxes, or move old segments away with STREAMS_COLD_DIR"
    return Check("disk", is_ok, finding, step)


def _cold_store(reports: Reports, shows_detail: bool) -> Check:
    failing = [shard for shard in reports.shards if shard.faults.cold_failing_s]
    failures = sum(sum(shard.faults.cold_failures.values()) for shard in reports.shards)
    if not failing:
        finding = f"{_times(failures)} failed since the start, and answers again"
        return Check("cold store", True, finding if failures else "no failed call")
    finding = _join_parts(
        f"shard-{shard.shard:02d} has had no success for {shard.faults.cold_failing_s:.0f} s"
        + (f": {shard.faults.cold_error}" if shows_detail and shard.faults.cold_error else "")
        for shard in failing
    )
    step = (
        "make the store that STREAMS_COLD_DIR names available again: its network, keys or mount. Shards "
        "retry by themselves, and nothing is lost; this row is ok after the next successful call"
    )
    return Check("cold store", False, finding, step)


def _damage(reports: Reports, shows_detail: bool) -> Check:
    files = [file for shard in reports.shards for file in shard.faults.damaged]
    if not files:
        return Check(
            "damage", True, "no damaged file was met since the start; `streams verify` reads them all"
        )
    finding = _join_parts(
        f"a {file.kind} is damaged"
        + (f" (box {file.box})" if file.box and shows_detail else "")
        + (f": {file.path}: {file.reason}" if shows_detail else "")
        for file in files
    )
    segments = any(file.kind == "segment" for file in files)
    step = REASONS["damaged"][1] + "; the damaged records cannot be read until then, all others can"
    other = (
        "no data is lost: an older snapshot was used, and the next ones replace it; check the disk (`dmesg`)"
    )
    return Check("damage", False, finding, step if segments else other)


def _clock(reports: Reports, shows_detail: bool) -> Check:
    ahead = max((shard.clock_ahead_s for shard in reports.shards), key=abs, default=0.0)
    steps = max((shard.faults.clock_steps for shard in reports.shards), default=0)
    is_ok = abs(ahead) < CLOCK_AHEAD_MAX_S
    finding = f"the system clock was set {_times(steps)}" if steps else "the system clock runs evenly"
    if not is_ok:
        way = "ahead of" if ahead > 0 else "behind"
        finding = f"{finding}; it is {abs(ahead):.1f} s {way} the time of the shards, which follows slowly"
    step = (
        "check the time service of this machine (`timedatectl`). If the new time is right, restart the "
        "server to take it over at once, or wait: leases, delays and TTLs stay in order meanwhile"
    )
    return Check("clock", is_ok, finding, step)


def _keys(reports: Reports, shows_detail: bool) -> Check:
    problem = reports.processes.keys_problem
    if not problem:
        return Check("keys", True, "the keys of this server can be read, or it asks for none")
    finding = "the key file cannot be read; the previous keys stay valid until the server is restarted"
    step = (
        "make the file that STREAMS_API_KEYS_FILE names readable and valid for the server's user, then send "
        "the server SIGHUP (`systemctl reload streams`); do not restart the server before that"
    )
    return Check("keys", False, f"{finding}: {problem}" if shows_detail else finding, step)


def _memory(reports: Reports, shows_detail: bool) -> Check:
    everyone = [process for _, process in _processes_by_name(reports)]
    used_bytes = sum(process.resident_bytes for process in everyone)
    limit = max((process.memory_limit_bytes for process in everyone), default=0)
    finding = f"{used_bytes / 2**20:.0f} MiB used"
    if limit:
        finding = f"{finding} of {limit / 2**20:.0f} MiB allowed"
    step = "give the server more memory, or lower STREAMS_CACHE_BYTES"
    return Check("memory", not limit or used_bytes < USED_SHARE_MAX * limit, finding, step)


def _descriptors(reports: Reports, shows_detail: bool) -> Check:
    processes = [(name, process) for name, process in _processes_by_name(reports) if process.open_files_max]
    if not processes:
        return Check("descriptors", True, "unknown")
    name, worst = max(processes, key=lambda each: each[1].open_files / each[1].open_files_max)
    is_ok = worst.open_files < USED_SHARE_MAX * worst.open_files_max
    step = "raise the limit of open files (LimitNOFILE of the unit, `ulimit -n`)"
    finding = f"{name} has {worst.open_files} of {worst.open_files_max} open files"
    return Check("descriptors", is_ok, finding, step)


def _backup(reports: Reports, shows_detail: bool) -> Check:
    if reports.backup_age_s is None:
        return Check("backup", True, "`streams backup` has not completed one yet")
    hours = reports.backup_age_s / 3600
    age = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    step = "run `streams backup TARGET`, and check why its timer did not run"
    return Check("backup", reports.backup_age_s <= BACKUP_AGE_MAX_S, f"the last one is {age} old", step)


def _routers(reports: Reports, shows_detail: bool) -> Check:
    blocked_count = sum(shard.totals.routers_blocked for shard in reports.shards)
    lag = sum(shard.totals.router_lag for shard in reports.shards)
    routers = sum(shard.totals.routers for shard in reports.shards)
    if not blocked_count:
        return Check("routers", True, f"{routers} routers, {lag} records behind, none is blocked")
    rows = [row.router for shard in reports.shards for row in shard.routers if row.is_blocked]
    names = f": {_join_parts(sorted(rows))}" if shows_detail and rows else ""
    step = (
        "`GET /v0/routers/NAME` has the last error of each: make room in its destination, create it again, "
        "or delete the router. A blocked router retries by itself and loses nothing"
    )
    return Check("routers", False, f"{blocked_count} of {routers} routers are blocked{names}", step)


def _snapshots(reports: Reports, shows_detail: bool) -> Check:
    ages = [(shard.snapshot_age_s, shard.shard) for shard in reports.shards]
    age_s, shard = max(ages, default=(0.0, 0))
    finding = f"the oldest log without a snapshot has changes of {age_s / 60:.0f} minutes (shard {shard})"
    step = "look at the server's log for `snapshot`; until one is written, a restart replays these changes"
    return Check("snapshots", age_s <= SNAPSHOT_AGE_MAX_S, finding, step)


_CHECKS: Final[tuple[Callable[[Reports, bool], Check], ...]] = (
    _processes,
    _restarts,
    _disk,
    _cold_store,
    _damage,
    _clock,
    _keys,
    _memory,
    _descriptors,
    _backup,
    _routers,
    _snapshots,
)


def _states(reports: Reports) -> list[tuple[str, ProcessState]]:
    shards, gateways = reports.processes.shards, reports.processes.gateways
    return [(f"shard-{at:02d}", shards[at]) for at in sorted(shards)] + [
        (f"gateway-{at}", gateways[at]) for at in sorted(gateways)
    ]


def _processes_by_name(reports: Reports) -> list[tuple[str, ProcessReport]]:
    return [(f"shard-{shard.shard:02d}", shard.process) for shard in reports.shards] + [
        (f"gateway-{gateway.gateway}", gateway.process) for gateway in reports.gateways
    ]


def _why(state: ProcessState | None, shows_detail: bool) -> str:
    if state is None or not state.reason:
        return ""
    detail = f", {state.detail}" if shows_detail and state.detail else ""
    return f" ({state.reason}{detail})"


def _join_parts(parts: Iterable[str]) -> str:
    texts = list(parts)
    more = f"; and {len(texts) - PARTS_MAX} more" if len(texts) > PARTS_MAX else ""
    return "; ".join(texts[:PARTS_MAX]) + more


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
