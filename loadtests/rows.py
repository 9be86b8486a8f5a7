"""The rows of the benchmark: floor and aim of each, and how it is measured.

A case is one load; it yields one or more figures, each a row of the table. Traffic cases share one server and
delete their boxes. Cases that measure writers beside background work have their own servers, with much of
that work. So has the last case, because it measures the memory of its processes and then kills them.
"""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from xxhash import xxh64_intdigest

from loadtests import machine
from loadtests.generator import append_body
from streams.testing import Server, running_server

ROOT: Final = Path(__file__).resolve().parents[1]

BOXES: Final = 8
RECORD_BYTES: Final = 110
#: Payload of the RAM row: `data` alone, so that everything else a record costs counts as overhead.
DATA_BYTES: Final = 119
DIFF_LIMIT: Final = 1000
WARM_UP_S_MAX: Final = 1.0
_LOAD_TRIES: Final = 6
_SLOTS, _SEED = 4096, 42  # of `GET /v0/placement`


class CaseFailed(Exception):
    """A case could not be measured. The run continues with the next one."""


class CaseSkipped(Exception):
    """A peer is not installed here. The message names it."""


@dataclass(frozen=True)
class Row:
    """One line of the table. A row without a floor is for information."""

    key: str
    title: str
    unit: str
    floor: float | None = None
    aim: float | None = None
    less_is_better: bool = False

    def meets(self, bound: float | None, figure: float) -> bool | None:
        if bound is None:
            return None
        return figure <= bound if self.less_is_better else figure >= bound


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases. `quick` tests the benchmark; its figures mean nothing."""

    seconds: float = 4.0
    diff_box_records: int = 50_000
    ram_records: int = 1_000_000
    #: About 180 bytes of log each: half a gigabyte.
    replay_records: int = 2_800_000
    #: Jobs in the queue of the worker rows, and of the deep claim row.
    queue_jobs: int = 400_000
    deep_jobs: int = 1_000_000
    #: Records of the deletion row: 170 MB.
    deleted_records: int = 1_000_000
    #: Records of a kilobyte that a reader catches up with.
    sealed_records: int = 200_000
    #: Sizes of the server that takes snapshots continuously.
    snapshot_boxes: int = 20_000
    snapshot_batches: int = 1_000_000
    #: Use one server for all cases, to save starts; its memory figures mean nothing.
    is_quick: bool = False

    @property
    def warm_up_s(self) -> float:
        return min(WARM_UP_S_MAX, self.seconds / 4)

    @classmethod
    def quick(cls, seconds: float) -> Sizes:
        return cls(
            seconds,
            diff_box_records=5_000,
            ram_records=20_000,
            replay_records=40_000,
            queue_jobs=40_000,
            deep_jobs=5_000,
            deleted_records=20_000,
            sealed_records=20_000,
            snapshot_boxes=100,
            snapshot_batches=1_000,
            is_quick=True,
        )


@dataclass
class Measurement:
    """The figures of a case by row, and details."""

    figures: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...]
    measure: Callable[[Bench, Case], Measurement]
    plan: dict[str, Any] = field(default_factory=dict)


class Bench:
    """The server under load, started when first needed."""

    def __init__(self, sizes: Sizes, settings: dict[str, str], folder: Path) -> None:
        self.sizes = sizes
        self.settings = settings
        self.folder = folder
        #: Duration of the last start, until ready.
        self.start_s = 0.0
        self._data_dir: Path | None = None
        self._running: Any = None
        self._server: Server | None = None

    def server(self) -> Server:
        if self._server is None:
            self._data_dir = self._data_dir or Path(tempfile.mkdtemp(dir=self.folder))
            began = monotonic()
            self._running = running_server(self._data_dir, **machine.USER_SETTINGS | self.settings)
            self._server = self._running.__enter__()
            self.start_s = monotonic() - began
        return self._server

    def kill(self) -> None:
        """Kill all processes with SIGKILL; the next `server()` starts on the same data."""
        if self._server is not None:
            server, self._server = self._server, None
            server.kill()
            self._running.__exit__(None, None, None)

    def close(self, *, well: bool = True) -> None:
        """Stop the server and delete its data; kill it unless `well`. The next `server()` is a new one."""
        if not well:
            self.kill()
        try:
            if self._server is not None:
                self._server = None
                self._running.__exit__(None, None, None)
        finally:
            if self._data_dir is not None:
                shutil.rmtree(self._data_dir, ignore_errors=True)
                self._data_dir = None

    def renew(self) -> None:
        """Close the server, except in a quick run."""
        if not self.sizes.is_quick:
            self.close()

    @contextmanager
    def boxes(self, server: Server, durability: str) -> Iterator[list[str]]:
        """Create boxes, and delete them at the end to free their memory for the next case."""
        names = [f"bench-{number}" for number in range(BOXES)]
        for name in names:
            call(server, "PUT", f"/v0/boxes/{name}", {"durability": durability})
        try:
            yield names
        finally:
            for name in names:
                call(server, "DELETE", f"/v0/boxes/{name}")

    def load(self, server: Server, **plan: Any) -> dict[str, Any]:
        """Run the load generator and return its result.

        If a busy machine answered no request, repeat with twice the time.
        """
        seconds = plan.pop("seconds", self.sizes.seconds)
        for attempt in range(_LOAD_TRIES):
            result = self._run_generator(server, plan | {"seconds": seconds * 2**attempt})
            if result["requests"]:
                return result
        raise CaseFailed(f"no request was answered in {seconds * 2**attempt:g} s; give it more --seconds")

    def _run_generator(self, server: Server, plan: dict[str, Any]) -> dict[str, Any]:
        """Run the load generator once. A failed request invalidates the figure."""
        full_plan = {
            "warm_up_s": self.sizes.warm_up_s,
            "record_bytes": RECORD_BYTES,
            # The records stay in the memory of the shards, at less than twice their size here.
            "bytes_max": min(6 * 2**30, machine.memory_available_bytes() // 4),
            "pids": {
                "gateway": list(server.gateway_pids().values()),
                "shard": list(server.shard_pids().values()),
            },
            **plan,
        }
        process = subprocess.run(
            [sys.executable, "-m", "loadtests.generator"],
            input=json.dumps(full_plan).encode(),
            capture_output=True,
            cwd=ROOT,
            timeout=full_plan["seconds"] + full_plan["warm_up_s"] + 120,
        )
        try:
            result = json.loads(process.stdout)
        except ValueError:
            raise CaseFailed(
                f"the generator ended with {process.returncode}: {process.stderr.decode()}"
            ) from None
        if "error" in result:
            raise CaseFailed(result["error"])
        if result["failures"]:
            raise CaseFailed(f"{result['failures']} requests failed; the first: {result['first_failure']}")
        return dict(result)


def call(server: Server, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status >= 300:
        raise CaseFailed(f"{method} {path} was answered {answer.status}: {content[:400]!r}")
    return json.loads(content)


def by_shard(server: Server, names: list[str]) -> list[tuple[str, list[str]]]:
    """Return (socket, boxes) of each shard that owns some of these boxes."""
    placement = call(server, "GET", "/v0/placement")
    boxes_by_shard: dict[int, list[str]] = {}
    for name in names:
        slot = xxh64_intdigest(name.encode(), _SEED) % _SLOTS
        shard = next(shard for start, end, shard in placement["slots"] if start <= slot < end)
        boxes_by_shard.setdefault(shard, []).append(name)
    return [(placement["sockets"][shard], boxes) for shard, boxes in sorted(boxes_by_shard.items())]


# ---------------------------------------------------------------------------------------------------
# Traffic


def appends(bench: Bench, case: Case) -> Measurement:
    server = bench.server()
    with bench.boxes(server, case.plan["durability"]) as names:
        result = bench.load(server, kind="http", send="append", port=server.port, boxes=names, **case.plan)
    figures: dict[str, float] = {}
    for row in case.rows:
        figures[row.key] = result["latency_ms"][row.key[-3:]] if row.unit == "ms" else result["records_per_s"]
    return Measurement(figures, result)


def diffs(bench: Bench, case: Case) -> Measurement:
    server, each = bench.server(), bench.sizes.diff_box_records
    with bench.boxes(server, "disk") as names:
        for shard, boxes in by_shard(server, names):
            fill(bench, server, [(shard, boxes)], requests=len(boxes) * each // 1000)
        result = bench.load(
            server,
            kind="http",
            send="diff",
            port=server.port,
            boxes=names,
            box_records=each,
            limit=DIFF_LIMIT,
            **case.plan,
        )
    return Measurement({case.rows[0].key: result["records_per_s"]}, result)


def direct(bench: Bench, case: Case) -> Measurement:
    """Measure appends to one shard, as one task of a job does."""
    server = bench.server()
    with bench.boxes(server, "disk") as names:
        shards = by_shard(server, names)[:1]
        result = bench.load(server, kind="wire", shards=shards, **case.plan)
    return Measurement({case.rows[0].key: result["records_per_s"]}, result)


# ---------------------------------------------------------------------------------------------------
# Queues

SHALLOW_JOBS: Final = 1000


@contextmanager
def filled_queue(bench: Bench, server: Server, jobs: int, durability: str) -> Iterator[str]:
    call(server, "PUT", "/v0/boxes/bench-queue", {"type": "queue", "durability": durability})
    try:
        if jobs > SHALLOW_JOBS:
            fill(bench, server, by_shard(server, ["bench-queue"]), requests=jobs // 1000)
        else:
            body = json.loads(append_body(0, jobs, data_bytes=DATA_BYTES))
            call(server, "POST", "/v0/boxes/bench-queue", body)
        yield "bench-queue"
    finally:
        call(server, "DELETE", "/v0/boxes/bench-queue")


def workers(bench: Bench, case: Case) -> Measurement:
    """Measure claims and acks of one queue: its shard is the limit."""
    server = bench.server()
    with filled_queue(bench, server, bench.sizes.queue_jobs, case.plan["durability"]) as box:
        result = bench.load(server, kind="workers", port=server.port, boxes=[box], **case.plan)
    return Measurement({case.rows[0].key: result["records_per_s"]}, result)


def deep_claims(bench: Bench, case: Case) -> Measurement:
    """Measure single claims from a queue with few jobs, and from one with very many."""
    server = bench.server()
    p50: list[float] = []
    for jobs in (SHALLOW_JOBS, bench.sizes.deep_jobs):
        with filled_queue(bench, server, jobs, "disk") as box:
            plan = {
                "boxes": [box],
                "batch": 1,
                "connections": 1,
                "requests_max": SHALLOW_JOBS,
                "warm_up_s": 0,
            }
            result = bench.load(server, kind="workers", port=server.port, **plan)
        p50.append(result["latency_ms"]["p50"])
    figures = {"claim-1k-p50": p50[0], "claim-1m-p50": p50[1], "claim-1m-ratio": round(p50[1] / p50[0], 2)}
    return Measurement(figures, {"jobs": [SHALLOW_JOBS, bench.sizes.deep_jobs]})


def watching(bench: Bench, case: Case) -> Measurement:
    """Measure the latency from an append to the event at each watcher of the box."""
    server = bench.server()
    result = _run_watchers(bench, server, case.plan)
    figures: dict[str, float] = {}
    for row in case.rows:
        figures[row.key] = result["latency_ms"][row.key[-3:]] if row.unit == "ms" else result["records_per_s"]
    return Measurement(figures, result)


def slow_watcher(bench: Bench, case: Case) -> Measurement:
    """Measure what a watcher that never reads costs the others at p99.

    Runs without and with it alternate, because the speed of the machine changes.
    """
    server = bench.server()
    plan = {**case.plan, "watchers": 50} if bench.sizes.is_quick else case.plan
    alone: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for _ in range(3):
        alone.append(_run_watchers(bench, server, plan))
        beside.append(_run_watchers(bench, server, {**plan, "stalled": 1}))
    p99 = [statistics.median(each["latency_ms"]["p99"] for each in turns) for turns in (alone, beside)]
    detail = {
        "cores": beside[-1]["cores"],
        "alone": [each["latency_ms"] for each in alone],
        "beside": [each["latency_ms"] for each in beside],
    }
    return Measurement({case.rows[0].key: round(p99[1] / p99[0], 2)}, detail)


def _run_watchers(bench: Bench, server: Server, plan: dict[str, Any]) -> dict[str, Any]:
    box = "bench-watched"
    call(server, "PUT", f"/v0/boxes/{box}", {"durability": "disk"})
    try:
        for _ in range(plan.get("first_seq", 0)):
            call(server, "POST", f"/v0/boxes/{box}", {"records": [{"data": "x" * 500_000}]})
        return bench.load(server, kind="watch", port=server.port, box=box, **plan)
    finally:
        call(server, "DELETE", f"/v0/boxes/{box}")


def fill(
    bench: Bench, server: Server, shards: list[tuple[str, list[str]]], *, requests: int
) -> dict[str, Any]:
    """Append batches of 1000 to the boxes of these shards, as fast as possible."""
    return bench.load(
        server,
        kind="wire",
        shards=shards,
        batch=1000,
        data_bytes=DATA_BYTES,
        in_flight=8,
        requests_max=requests,
        seconds=120,
        warm_up_s=0,
    )


# ---------------------------------------------------------------------------------------------------
# Writers beside background work


def beside(bench: Bench, case: Case) -> Measurement:
    """Measure the p99 of single appends beside background work, as a multiple of the p99 on an idle server.

    The idle server has the same data, and is measured before and after, because the speed of the machine
    changes.
    """
    bench.renew()
    prepare = case.plan.get("prepare")
    idle = bench
    if prepare is not None and not bench.sizes.is_quick:
        idle = Bench(bench.sizes, bench.settings | case.plan.get("idle_settings", {}), bench.folder)
    busy = Bench(bench.sizes, bench.settings | _busy_settings(bench, case), bench.folder)
    detail: dict[str, Any] = {}
    try:
        if prepare is not None:
            prepare(idle)
        idle_ms = [_single_p99(idle)]
        bench.renew()
        if prepare is not None:
            detail["prepared"] = prepare(busy)
        for attempt in range(_BUSY_TRIES):
            with case.plan.get("during", _nothing)(busy):
                busy_ms = _single_p99(busy, seconds=bench.sizes.seconds * 2**attempt)
            detail["done"] = case.plan["proof"](busy.server())
            if detail["done"]:
                break
        else:
            raise CaseFailed(f"no {case.plan['what']}; give it more --seconds")
        busy.close()
        idle_ms.append(_single_p99(idle))
    finally:
        busy.close(well=False)
        if idle is not bench:
            idle.close(well=False)
    ratio = round(2 * busy_ms / sum(idle_ms), 2)
    return Measurement({case.rows[0].key: ratio}, detail | {"idle_p99_ms": idle_ms, "busy_p99_ms": busy_ms})


#: Attempts: a short load may end before its background work starts; each attempt is twice as long.
_BUSY_TRIES = 8


def _single_p99(bench: Bench, seconds: float = 0) -> float:
    server = bench.server()
    with bench.boxes(server, "disk") as names:
        plan = {"kind": "http", "send": "append", "batch": 1, "connections": 4, "query": ""}
        plan |= {"seconds": seconds or bench.sizes.seconds}
        result = bench.load(server, port=server.port, boxes=names, **plan)
    return float(result["latency_ms"]["p99"])


def _busy_settings(bench: Bench, case: Case) -> dict[str, str]:
    cold = {"cold_dir": tempfile.mkdtemp(dir=bench.folder)} if case.plan.get("cold") else {}
    return {**case.plan["settings"], **cold}


def many_batches(bench: Bench) -> dict[str, Any]:
    """Fill boxes with as many batches as a large shard has."""
    sizes, server = bench.sizes, bench.server()
    names = [f"many-{number}" for number in range(sizes.snapshot_boxes)]
    return bench.load(
        server,
        kind="wire",
        shards=by_shard(server, names),
        batch=1,
        in_flight=64,
        requests_max=sizes.snapshot_batches,
        seconds=300,
        warm_up_s=0,
    )


@contextmanager
def _nothing(bench: Bench) -> Iterator[None]:
    yield


@contextmanager
def backups(bench: Bench) -> Iterator[None]:
    """Run one backup after the other, each into a new folder, so that each copies everything."""
    server, is_over = bench.server(), threading.Event()

    def back_up() -> None:
        while not is_over.is_set():
            target = tempfile.mkdtemp(dir=server.data_dir.parent, prefix="backup-")
            command = [sys.executable, "-m", "streams", "backup", target, "--data-dir", str(server.data_dir)]
            process = subprocess.run(command, capture_output=True, check=False, timeout=300)
            shutil.rmtree(target)
            if process.returncode == 0:
                (server.data_dir.parent / "backed-up").touch()
            else:
                print(process.stderr.decode(), file=sys.stderr)

    thread = threading.Thread(target=back_up)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def backups_taken(server: Server) -> int:
    return int((server.data_dir.parent / "backed-up").exists())


def segments_on_disk(server: Server) -> int:
    """Return the number of segments, as proof that the server sealed."""
    return len(list(server.data_dir.glob("shard-*/segments/*/*.seg")))


def segments_gone_cold(server: Server) -> int:
    return len(list(server.data_dir.glob("shard-*/segments/*/*.stub")))


def snapshots_taken(server: Server) -> int:
    """Return the lsn of the newest snapshot."""
    lsns = [int(path.stem) for path in server.data_dir.glob("shard-*/snapshot/*.snap")]
    return max(lsns, default=0)


# ---------------------------------------------------------------------------------------------------
# Space


#: Tags are `user-0` to `user-999`: 888 of a thousand records are deleted, spread evenly.
_DELETED_TAGS: Final = [f"user-{digit}*" for digit in range(1, 9)]
#: Disk use is stable if it has not changed for `_STILL_S`; the limit of the wait is `_CONVERGED_S_MAX`.
_STILL_S, _STILL_S_QUICK, _CONVERGED_S_MAX = 6.0, 1.0, 300.0


def space_after_deletes(bench: Bench, case: Case) -> Measurement:
    """Measure disk use over live bytes, after most records of filled boxes were deleted by tag.

    Disk use is read when it is stable. This is the worst case: about a hundred scattered records of each
    batch of a thousand remain, and each becomes its own batch, with a hundred bytes of overhead.
    """
    own = Bench(bench.sizes, bench.settings | case.plan["settings"], bench.folder)
    try:
        server = own.server()
        with own.boxes(server, "disk") as names:
            fill(own, server, by_shard(server, names), requests=max(8, own.sizes.deleted_records // 1000))
            full_bytes = stored_bytes(server)
            began = monotonic()
            for name in names:
                for tag in _DELETED_TAGS:
                    call(server, "POST", f"/v0/boxes/{name}/delete", {"match": ["tag", "Glob", tag]})
            deleted_s = monotonic() - began
            kept_bytes = wait_until_stable(server, _STILL_S_QUICK if own.sizes.is_quick else _STILL_S)
            states = [call(server, "GET", f"/v0/boxes/{name}") for name in names]
            live_bytes = sum(state["bytes"] for state in states)
            if sum(state["count"] for state in states) > 0.2 * sum(state["head_seq"] for state in states):
                raise CaseFailed("deleted records are still stored")
            detail = {
                "full_bytes": full_bytes,
                "kept_bytes": kept_bytes,
                "live_bytes": live_bytes,
                "segment_bytes": stored_bytes(server, "segments"),
                "deleted_s": round(deleted_s, 2),
                "converged_s": round(monotonic() - began, 2),
            }
        own.close()
    finally:
        own.close(well=False)
    return Measurement({case.rows[0].key: round(kept_bytes / live_bytes, 2)}, detail)


def wait_until_stable(server: Server, still_s: float) -> int:
    """Wait until disk use has not changed for `still_s`, and return it."""
    began = since = monotonic()
    size = stored_bytes(server)
    while monotonic() - since < still_s:
        if monotonic() - began > _CONVERGED_S_MAX:
            raise CaseFailed(f"disk use still changes after {_CONVERGED_S_MAX:g} s; it is {size} bytes")
        sleep(0.2)
        new_size = stored_bytes(server)
        if new_size != size:
            size, since = new_size, monotonic()
    return size


def stored_bytes(server: Server, folder: str = "*") -> int:
    """Return the disk use of all shards: log, snapshots and segments, or one of these folders."""
    total = 0
    for path in server.data_dir.glob(f"shard-*/{folder}/**/*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # deleted in the meantime
            continue
    return total


# ---------------------------------------------------------------------------------------------------
# Memory and restart


def ram_and_replay(bench: Bench, case: Case) -> Measurement:
    sizes = bench.sizes
    bench.renew()
    server = bench.server()
    empty_start_s = bench.start_s
    names = [f"bench-{number}" for number in range(BOXES)]
    for name in names:
        call(server, "PUT", f"/v0/boxes/{name}", {"durability": "disk"})
    shards = by_shard(server, names)
    pids = list(server.shard_pids().values())
    before = sum(map(machine.resident_bytes, pids))
    fill(bench, server, shards, requests=sizes.ram_records // 1000)
    sleep(0.5)  # until the last group is written and its buffers are freed
    growth = sum(map(machine.resident_bytes, pids)) - before
    fill(bench, server, shards, requests=(sizes.replay_records - sizes.ram_records) // 1000)
    bench.kill()
    replay = replay_figures(bench.server())
    replay |= {"start_s": round(bench.start_s, 3), "empty_start_s": round(empty_start_s, 3)}
    bench.close(well=False)  # a clean stop would take a snapshot
    return Measurement(
        {
            "ram-per-record": round(growth / sizes.ram_records - DATA_BYTES, 1),
            "replay": round(replay["mb"] / replay["seconds"], 1),
        },
        {"ram": {"records": sizes.ram_records, "data_bytes": DATA_BYTES, "grown_bytes": growth}, **replay},
    )


def replay_figures(server: Server) -> dict[str, Any]:
    """Return the replay figures of the shards, which replay in parallel: total bytes, time of the slowest."""
    lines = (json.loads(text) for text in server.log_text().splitlines() if text.startswith("{"))
    events = [line for line in lines if line.get("event") == "shard recovered"]
    if not events:
        raise CaseFailed("no shard has logged a `recovered` event")
    megabytes = [line["mebibytes"] * 1.048576 for line in events]
    seconds = [max(line["seconds"], 0.001) for line in events]
    return {
        "mb": round(sum(megabytes), 1),
        "seconds": max(seconds),
        "mb_per_s_each": [round(mb / time_s, 1) for mb, time_s in zip(megabytes, seconds, strict=True)],
        "frames": sum(line["frames"] for line in events),
    }


# ---------------------------------------------------------------------------------------------------
# The table


def _append(row: Row, *more: Row, durability: str, batch: int, connections: int, query: str = "") -> Case:
    plan = {"durability": durability, "batch": batch, "connections": connections, "query": query}
    return Case((row, *more), appends, plan)


def _workers(durability: str, batch: int) -> Case:
    bounds = _WORK_BOUNDS.get((durability, batch), (None, None))
    title = f"claim and ack, batch {batch}, 16 workers, {durability}"
    row = Row(f"work-{batch}-{durability}", title, "records/s", *bounds)
    return Case((row,), workers, {"durability": durability, "batch": batch, "connections": 16})


#: Floor and aim of rows of workers.
_WORK_BOUNDS: Final = {("disk", 1): (8_000, 15_000), ("disk", 16): (80_000, 150_000)}


def _watch(
    watchers: int, *, p50: tuple[float, float] | None = None, p99: tuple[float, float] | None = None
) -> Case:
    many = f"{watchers} watchers" if watchers > 1 else "1 watcher"
    return Case(
        (
            Row(f"watch-{watchers}-p50", f"append to event, {many}, p50", "ms", *(p50 or (None, None)), True),
            Row(f"watch-{watchers}-p99", f"append to event, {many}, p99", "ms", *(p99 or (None, None)), True),
            Row(f"watch-{watchers}-rate", f"append to event, {many}", "deliveries/s"),
        ),
        watching,
        {"watchers": watchers},
    )


CASES: Final[tuple[Case, ...]] = (
    _append(
        Row(
            "append-1000-disk", "append, batch 1000, 16 connections, disk", "records/s", 1_300_000, 2_000_000
        ),
        durability="disk",
        batch=1000,
        connections=16,
    ),
    _append(
        Row(
            "append-1000-fsync",
            "append, batch 1000, 16 connections, fsync",
            "records/s",
            1_200_000,
            1_600_000,
        ),
        durability="fsync",
        batch=1000,
        connections=16,
    ),
    _append(
        Row("append-1000-memory", "append, batch 1000, 16 connections, memory", "records/s"),
        durability="memory",
        batch=1000,
        connections=16,
    ),
    _append(
        Row("append-1000-disk-terse", "append, batch 1000, disk, return_seqs=false", "records/s"),
        durability="disk",
        batch=1000,
        connections=16,
        query="return_seqs=false",
    ),
    _append(
        Row("append-100-disk", "append, batch 100, 16 connections, disk", "records/s", 650_000, 1_000_000),
        durability="disk",
        batch=100,
        connections=16,
    ),
    _append(
        Row("append-5000-disk", "append, batch 5000, 8 connections, disk", "records/s"),
        durability="disk",
        batch=5000,
        connections=8,
    ),
    _append(
        Row("single-64-disk", "single appends, 64 connections, disk", "requests/s", 25_000, 40_000),
        durability="disk",
        batch=1,
        connections=64,
    ),
    _append(
        Row("single-64-fsync", "single appends, 64 connections, fsync", "requests/s", 18_000, 28_000),
        durability="fsync",
        batch=1,
        connections=64,
    ),
    _append(
        Row("single-1-disk-p50", "single append, 1 connection, disk, p50", "ms", 0.25, 0.15, True),
        Row("single-1-disk-p99", "single append, 1 connection, disk, p99", "ms", 0.6, 0.4, True),
        durability="disk",
        batch=1,
        connections=1,
    ),
    _append(
        Row("single-1-fsync-p50", "single append, 1 connection, fsync, p50", "ms", 0.5, 0.35, True),
        durability="fsync",
        batch=1,
        connections=1,
    ),
    Case(
        (Row("diff-1000", "diff, limit 1000, warm, 4 connections", "records/s", 800_000, 2_000_000),),
        diffs,
        {"connections": 4},
    ),
    Case(
        (Row("direct-1000", "direct to a shard, batch 1000, 8 in flight", "records/s", 900_000, 1_500_000),),
        direct,
        {"batch": 1000, "in_flight": 8},
    ),
    Case(
        (
            Row(
                "direct-columns-5000",
                "direct to a shard, columns, batch 5000, 8 in flight",
                "records/s",
                1_200_000,
                4_000_000,
            ),
        ),
        direct,
        {"batch": 5000, "in_flight": 8, "encoding": "columns"},
    ),
    Case(
        (Row("direct-1", "direct to a shard, 1 record, 64 in flight", "records/s"),),
        direct,
        {"batch": 1, "in_flight": 64},
    ),
    *[_workers(durability, batch) for durability in ("disk", "fsync") for batch in (1, 16, 100)],
    Case(
        (
            Row("claim-1k-p50", "claim, 1 worker, a thousand jobs waiting, p50", "ms", less_is_better=True),
            Row("claim-1m-p50", "claim, 1 worker, a million jobs waiting, p50", "ms", less_is_better=True),
            Row("claim-1m-ratio", "the latter over the former", "x", 2.0, 1.2, True),
        ),
        deep_claims,
        {},
    ),
    _watch(1, p50=(0.35, 0.25), p99=(0.8, 0.5)),
    _watch(10),
    _watch(100, p50=(1.0, 0.6)),
    _watch(1000),
    Case(
        (
            Row(
                "watch-slow-ratio",
                "1000 watchers beside one that never reads, p99 against without",
                "x",
                2.0,
                1.2,
                True,
            ),
        ),
        slow_watcher,
        {"watchers": 1000, "first_seq": 20},
    ),
    Case(
        (Row("p99-sealing", "single appends, p99 while sealing, against idle", "times", 2.0, 1.3, True),),
        beside,
        {
            "settings": {"segment_max_events": "100", "upkeep_bytes_per_s": "0"},
            "proof": segments_on_disk,
            "what": "segment was written",
        },
    ),
    Case(
        (Row("p99-snapshot", "the same while taking snapshots", "times", 2.0, 1.3, True),),
        beside,
        {
            "settings": {"snapshot_interval_ms": "100"},
            "idle_settings": {"snapshot_interval_ms": "3600000"},
            "prepare": many_batches,
            "proof": snapshots_taken,
            "what": "snapshot was taken",
        },
    ),
    Case(
        (Row("p99-moving", "the same while moving to a cold folder", "times", 2.0, 1.3, True),),
        beside,
        {
            "settings": {
                "segment_max_events": "100",
                "hot_retain_segments": "0",
                "upkeep_bytes_per_s": "0",
            },
            "cold": True,
            "proof": segments_gone_cold,
            "what": "segment was moved",
        },
    ),
    Case(
        (Row("p99-backup", "the same while backups are taken", "times", 2.0, 1.3, True),),
        beside,
        {
            "settings": {"segment_max_events": "10000"},
            "prepare": many_batches,
            "during": backups,
            "proof": backups_taken,
            "what": "backup was taken",
        },
    ),
    Case(
        (
            Row(
                "space-after-deletes",
                "disk in use after 9 of 10 records were deleted, against what is live",
                "times",
                3.0,
                2.0,
                True,
            ),
        ),
        space_after_deletes,
        {
            # The log is kept short, so that it is segments that count.
            "settings": {
                "segment_max_events": "20000",
                "upkeep_bytes_per_s": "0",
                "wal_file_bytes": "1MiB",
                "snapshot_wal_bytes": "1MiB",
                "snapshot_interval_ms": "500",
            }
        },
    ),
    Case(
        (
            Row("ram-per-record", "RAM per cached record over its payload", "B", 70, 60, True),
            Row("replay", "restart: replay of the log", "MB/s", 100, 400),
        ),
        ram_and_replay,
    ),
)
