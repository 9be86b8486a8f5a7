"""Every metric says what it claims to say (v0 §13).

Goal: each name of the table is on the page of a real server and has the value that what was done before calls
for. Method: one server of two shards and two gateways is put through one scenario; `EXPECTED` holds, by name,
what must be true afterwards. A metric without a line there fails.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.reports import wants_json
from gateway.supervise.backup_note import BackupNote, write_note
from gateway.telemetry.metrics import METRICS
from gateway.telemetry.metrics.metric import Metric
from gateway.telemetry.server_reports import reports_of
from streams.protocol.errors import NotAcceptable
from streams.protocol.telemetry.reports import BoxRow, GroupRow, RouterRow, ShardReport
from streams.testing import Server, running_server

#: One box fewer than there are.
ROWS_MAX = 8


@dataclass(frozen=True)
class Page:
    """A page of metrics as Prometheus reads it: (name, labels) -> value."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    kinds: dict[str, str]

    def values(self, name: str, **labels: str) -> list[float]:
        wanted = set(labels.items())
        return [value for (each, has), value in self.samples.items() if each == name and wanted <= has]

    def total(self, name: str, **labels: str) -> float:
        found = self.values(name, **labels)
        assert found, f"{name} has no sample {labels}"
        return sum(found)


def read_page(text: str) -> Page:
    samples, kinds = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
            kinds[sample.name] = family.type
    return Page(samples, kinds)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=2, gateways=2, metrics_boxes=ROWS_MAX, sync_interval_ms=5) as found:
        yield found


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    """The page after the scenario, while its watcher and its long poll still wait."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=server.url, trust_env=False, timeout=40))

        def call(method: str, path: str, body: Any = None, status: int | None = None) -> Any:
            answer = client.request(method, path, json=body)
            assert answer.status_code in ((status,) if status else (200, 201)), answer.text
            return answer.json()

        for box, durability in (("a-memory", "memory"), ("b-disk", "disk"), ("c-fsync", "fsync")):
            call("PUT", f"/v0/boxes/{box}", {"durability": durability})
        records = [{"data": n, "tag": f"t{n}"} for n in range(10)]
        call("POST", "/v0/boxes/a-memory", {"records": records})
        call("POST", "/v0/boxes/b-disk", {"records": [{"data": "large" * 20}] * 10})
        call("POST", "/v0/boxes/c-fsync", {"records": records, "idempotency_key": "k"})
        call("PUT", "/v0/boxes/d-capped", {"cap_records": 4})
        call("POST", "/v0/boxes/d-capped", {"records": records[:4]})
        call("POST", "/v0/boxes/d-capped", {"records": records[:3]})
        assert call("POST", "/v0/boxes/d-capped/diff", {})["tombstone"]["reason"] == "cap"
        assert call("POST", "/v0/boxes/b-disk/delete", {"before_seq": 3})["deleted"] == 2
        call("PUT", "/v0/boxes/f-dead", {})
        call("PUT", "/v0/boxes/g-copies", {})
        call("PUT", "/v0/boxes/e-queue", {"type": "queue", "max_deliveries": 1, "dead_letter": "f-dead"})
        call("POST", "/v0/boxes/e-queue", {"records": records[:5]})
        claimed = call("POST", "/v0/boxes/e-queue/claim", {"node": "w", "max": 3})["claimed"]
        seqs = [job["$seq"] for job in claimed]
        call("POST", "/v0/boxes/e-queue/nack", {"node": "w", "seqs": seqs[:1], "delay_ms": 86_400_000})
        call("POST", "/v0/boxes/e-queue/nack", {"node": "w", "seqs": seqs[1:2]})
        call("POST", "/v0/boxes/e-queue/claim", {"node": "w", "max": 1})
        dead = call("POST", "/v0/boxes/f-dead/diff", {"wait_ms": 30_000})["records"]
        assert [record["data"] for record in dead] == [1]
        call("PUT", "/v0/routers/r", {"source": "b-disk", "dest": "g-copies", "from_seq": 0})
        copies = call("POST", "/v0/boxes/g-copies/diff", {"wait_ms": 30_000})
        assert copies["records"]
        call("PUT", "/v0/boxes/h-full", {"cap_records": 1, "discard": "reject"})
        call("POST", "/v0/boxes/h-full", {"records": records[:1]})
        call("PUT", "/v0/routers/stuck", {"source": "c-fsync", "dest": "h-full", "from_seq": 0})
        call("GET", "/v0/boxes/nowhere", status=404)
        call("PUT", "/v0/boxes/c-fsync/groups/g", {"cursor": 4})
        write_note(server.data_dir, BackupNote("a-backup", time.time_ns() // 1_000_000 - 60_000))
        call("PUT", "/v1/basins/metrics-basin", {"config": {"create_stream_on_append": True}})
        appended = client.post(
            "/v1/streams/z/records",
            json={"records": [{"body": "x"}] * 60},
            headers={"s2-basin": "metrics-basin"},
        )
        assert appended.status_code == 200
        wid = call("POST", "/v0/watch", {"boxes": {"c-fsync": {"tail": True}}})["wid"]
        lines = stack.enter_context(
            client.stream("GET", f"/v0/watch/{wid}", headers={"accept": "text/event-stream"})
        ).iter_lines()
        assert "caught-up" in next(line for line in lines if line.startswith("event:"))
        call("POST", "/v0/boxes/c-fsync", {"records": [{"data": "live"}]})
        assert "record" in next(line for line in lines if line.startswith("event:"))
        while True:  # what the copies and the blocked router come to takes its time
            found = read_page(client.get("/v0/metrics").text)
            settled = found.values("streams_router_blocked", router="stuck") == [1.0]
            if settled and found.values("streams_queue_dead_lettered", box="e-queue") == [1.0]:
                break
        yield found


def moved(name: str, **labels: str) -> Callable[[Page], bool]:
    return lambda page: page.total(name, **labels) > 0


def equal(value: float, name: str, **labels: str) -> Callable[[Page], bool]:
    return lambda page: page.total(name, **labels) == value


def of_everyone(name: str) -> Callable[[Page], bool]:
    """One value above 0 for each of the four processes."""
    return lambda page: len(page.values(name)) == 4 and all(value > 0 for value in page.values(name))


def counted(name: str) -> Callable[[Page], bool]:
    def check(page: Page) -> bool:
        count, total = page.total(f"{name}_count"), page.total(f"{name}_sum")
        return count > 0 and total > 0 and page.total(f"{name}_bucket", le="+Inf") == count

    return check


def there(name: str, count: int) -> Callable[[Page], bool]:
    """A gauge that is at rest: it is on the page for everyone whom it is about."""
    return lambda page: len(page.values(name)) == count and all(value >= 0 for value in page.values(name))


#: The boxes a-memory, b-disk, c-fsync, d-capped, e-queue, f-dead, g-copies, h-full, and a stream; routers r
#: and stuck.
EXPECTED: dict[str, Callable[[Page], bool]] = {
    "streams_info": equal(1, "streams_info"),
    "streams_shard_up": lambda page: page.values("streams_shard_up") == [1.0, 1.0],
    "streams_shard_replay_ratio": lambda page: page.values("streams_shard_replay_ratio") == [1.0, 1.0],
    "streams_restarts_total": lambda page: page.values("streams_restarts_total") == [0.0] * (5 * 4),
    "streams_process_down": lambda page: page.values("streams_process_down") == [],
    "streams_damaged_files": lambda page: page.values("streams_damaged_files") == [0.0] * 4,
    "streams_damage_total": lambda page: page.values("streams_damage_total") == [0.0] * 4,
    "streams_cold_store_failures_total": lambda page: (
        page.values("streams_cold_store_failures_total") == [0.0] * 6
    ),
    "streams_cold_store_failing_seconds": equal(0, "streams_cold_store_failing_seconds"),
    "streams_keys_file_readable": equal(1, "streams_keys_file_readable"),
    "streams_backup_age_seconds": lambda page: 60 <= page.total("streams_backup_age_seconds") < 600,
    "streams_snapshot_age_seconds": moved("streams_snapshot_age_seconds"),
    "streams_boxes": lambda page: (
        [page.total("streams_boxes", durability=each) for each in ("memory", "disk", "fsync")] == [1, 6, 2]
    ),
    "streams_queues": equal(1, "streams_queues"),
    "streams_records": lambda page: page.total("streams_records") >= 10 + 8 + 11 + 4 + 4 + 1 + 8 + 1,
    "streams_bytes": moved("streams_bytes"),
    "streams_segments": there("streams_segments", 2),
    "streams_jobs": lambda page: (
        [page.total("streams_jobs", state=each) for each in ("ready", "in_flight", "delayed")] == [1, 2, 1]
    ),
    "streams_routers": equal(2, "streams_routers"),
    "streams_routers_blocked": equal(1, "streams_routers_blocked"),
    "streams_routers_lag_records": equal(11, "streams_routers_lag_records"),
    "streams_routers_lag_seconds": moved("streams_routers_lag_seconds"),
    "streams_jobs_oldest_seconds": moved("streams_jobs_oldest_seconds"),
    "streams_groups": equal(1, "streams_groups"),
    "streams_groups_lag_seconds": moved("streams_groups_lag_seconds"),
    "streams_box_head_seq": equal(11, "streams_box_head_seq", box="c-fsync"),
    "streams_box_earliest_seq": equal(3, "streams_box_earliest_seq", box="b-disk"),
    "streams_box_records": equal(8, "streams_box_records", box="b-disk"),
    "streams_box_bytes": moved("streams_box_bytes", box="b-disk"),
    "streams_box_lag_records": equal(11, "streams_box_lag_records", box="c-fsync"),
    "streams_box_append_rate": lambda page: len(page.values("streams_box_append_rate")) >= 4,
    "streams_queue_oldest_seconds": moved("streams_queue_oldest_seconds", box="e-queue"),
    "streams_group_lag_records": equal(7, "streams_group_lag_records", box="c-fsync", group="g"),
    "streams_group_lag_seconds": moved("streams_group_lag_seconds", box="c-fsync", group="g"),
    "streams_queue_ready": equal(1, "streams_queue_ready", box="e-queue"),
    "streams_queue_in_flight": equal(2, "streams_queue_in_flight", box="e-queue"),
    "streams_queue_delayed": equal(1, "streams_queue_delayed", box="e-queue"),
    "streams_queue_dead_lettered": equal(1, "streams_queue_dead_lettered", box="e-queue"),
    "streams_queue_ready_seconds": moved("streams_queue_ready_seconds", box="e-queue"),
    "streams_queue_delivered_total": moved("streams_queue_delivered_total", box="e-queue"),
    "streams_queue_outputs_pending": equal(0, "streams_queue_outputs_pending", box="e-queue"),
    "streams_router_lag_records": equal(11, "streams_router_lag_records", router="stuck"),
    "streams_router_lag_seconds": moved("streams_router_lag_seconds", router="stuck"),
    "streams_router_forwarded_total": equal(8, "streams_router_forwarded_total", router="r"),
    "streams_router_blocked": equal(1, "streams_router_blocked", router="stuck"),
    "streams_box_series_truncated": equal(1, "streams_box_series_truncated"),
    "streams_appends_total": lambda page: page.total("streams_appends_total") >= 10,
    "streams_records_appended_total": lambda page: page.total("streams_records_appended_total") >= 52,
    "streams_reads_total": lambda page: page.total("streams_reads_total") >= 3,
    "streams_records_read_total": lambda page: page.total("streams_records_read_total") >= 4 + 8 + 1,
    "streams_records_evicted_total": equal(3, "streams_records_evicted_total"),
    "streams_records_deleted_total": lambda page: page.total("streams_records_deleted_total") >= 2,
    "streams_tombstones_total": equal(1, "streams_tombstones_total"),
    "streams_watch_sessions": equal(1, "streams_watch_sessions"),
    "streams_waiting_reads": moved("streams_waiting_reads"),
    "streams_waiting_claims": equal(0, "streams_waiting_claims"),
    "streams_wal_frames_total": moved("streams_wal_frames_total"),
    "streams_wal_batches_total": moved("streams_wal_batches_total"),
    "streams_wal_fsyncs_total": moved("streams_wal_fsyncs_total"),
    "streams_wal_bytes_total": moved("streams_wal_bytes_total"),
    "streams_wal_rotations_total": there("streams_wal_rotations_total", 2),
    "streams_wal_queue_bytes": there("streams_wal_queue_bytes", 2),
    "streams_wal_unsynced_frames": there("streams_wal_unsynced_frames", 2),
    "streams_object_puts_total": there("streams_object_puts_total", 2),
    "streams_object_put_bytes_total": there("streams_object_put_bytes_total", 2),
    "streams_object_bases_total": there("streams_object_bases_total", 2),
    "streams_object_failures_total": there("streams_object_failures_total", 2),
    "streams_object_backlog_bytes": there("streams_object_backlog_bytes", 2),
    "streams_fsync_seconds": counted("streams_fsync_seconds"),
    "streams_append_ack_seconds": counted("streams_append_ack_seconds"),
    "streams_read_seconds": counted("streams_read_seconds"),
    "streams_claim_seconds": lambda page: page.total("streams_claim_seconds_count") == 2,
    "streams_delivery_seconds": counted("streams_delivery_seconds"),
    "streams_unsealed_bytes": moved("streams_unsealed_bytes"),
    "streams_cache_bytes": there("streams_cache_bytes", 2),
    "streams_idempotency_keys": equal(1, "streams_idempotency_keys"),
    "streams_schedules": there("streams_schedules", 2),
    "streams_schedules_blocked": there("streams_schedules_blocked", 2),
    "streams_schedule_lag_seconds": there("streams_schedule_lag_seconds", 2),
    "streams_clock_ahead_seconds": there("streams_clock_ahead_seconds", 2),
    "streams_clock_steps_total": equal(0, "streams_clock_steps_total"),
    "streams_sse_connections": equal(1, "streams_sse_connections"),
    "streams_feeds": equal(1, "streams_feeds"),
    "streams_pages_delivered_total": equal(1, "streams_pages_delivered_total"),
    "streams_http_connections": moved("streams_http_connections"),
    "streams_http_connections_accepted_total": moved("streams_http_connections_accepted_total"),
    "streams_http_connections_closed_total": equal(0, "streams_http_connections_closed_total"),
    "streams_http_requests_total": lambda page: (
        page.total("streams_http_requests_total", status="404") == 1
        and page.total("streams_http_requests_total", status="200") > 10
    ),
    "streams_http_request_seconds": lambda page: (
        page.total("streams_http_request_seconds_count", route="POST /v0/boxes/{box}/claim") == 2
        and page.total("streams_http_request_seconds_sum", route="POST /v0/boxes/{box}/claim") > 0
        and page.total("streams_http_request_seconds_count", route="/v1") == 2
    ),
    "streams_http_body_bytes": there("streams_http_body_bytes", 2),
    "streams_http_answer_bytes": there("streams_http_answer_bytes", 2),
    "streams_memory_refused_total": equal(0, "streams_memory_refused_total"),
    "streams_memory_stalled_total": equal(0, "streams_memory_stalled_total"),
    "streams_requests_in_flight": moved("streams_requests_in_flight"),
    "streams_pressure_level": there("streams_pressure_level", 4),
    "streams_loop_lag_seconds": there("streams_loop_lag_seconds", 4),
    "streams_throttled_total": equal(0, "streams_throttled_total"),
    "streams_paced_total": there("streams_paced_total", 4),
    "streams_disk_level": there("streams_disk_level", 2),
    "streams_disk_refused_total": equal(0, "streams_disk_refused_total"),
    "streams_process_resident_bytes": of_everyone("streams_process_resident_bytes"),
    "streams_process_cpu_seconds_total": of_everyone("streams_process_cpu_seconds_total"),
    "streams_process_open_files": of_everyone("streams_process_open_files"),
    "streams_process_open_files_max": of_everyone("streams_process_open_files_max"),
    "streams_process_memory_limit_bytes": of_everyone("streams_process_memory_limit_bytes"),
    "streams_process_gc_runs_total": there("streams_process_gc_runs_total", 4 * 3),
    "streams_process_gc_seconds_total": of_everyone("streams_process_gc_seconds_total"),
    "streams_process_uptime_seconds": of_everyone("streams_process_uptime_seconds"),
    "streams_disk_bytes": moved("streams_disk_bytes"),
    "streams_disk_free_bytes": moved("streams_disk_free_bytes"),
    "s2_append_permit_latency_seconds": lambda page: (
        page.total("s2_append_permit_latency_seconds_count") >= 1
        and page.values("s2_append_permit_latency_seconds_bucket", le="2.5") != []
    ),
    "s2_append_ack_latency_seconds": counted("s2_append_ack_latency_seconds"),
    "s2_append_batch_records": lambda page: (
        [page.total("s2_append_batch_records_bucket", le=each) for each in ("50", "100")] == [0, 1]
        and page.total("s2_append_batch_records_sum") == 60
    ),
    "s2_append_batch_bytes": equal(60 * 9, "s2_append_batch_bytes_sum"),
    "process_cpu_seconds_total": moved("process_cpu_seconds_total"),
    "process_resident_memory_bytes": lambda page: (
        page.total("process_resident_memory_bytes") == page.total("streams_process_resident_bytes")
    ),
    "process_open_fds": lambda page: (
        page.total("process_open_fds") == page.total("streams_process_open_files")
    ),
    "process_max_fds": lambda page: page.total("process_max_fds") > page.total("process_open_fds"),
    "process_virtual_memory_bytes": lambda page: (
        page.total("process_virtual_memory_bytes") > page.total("process_resident_memory_bytes")
    ),
    "process_threads": lambda page: page.total("process_threads") >= 3,  # a gateway and two shards
    "process_start_time_seconds": lambda page: (
        0 < time.time() - page.total("process_start_time_seconds") < 3600
    ),
}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_has_the_value_that_was_brought_about(metric: Metric, page: Page) -> None:
    """§13"""
    found = {key: value for key, value in page.samples.items() if key[0].startswith(metric.name)}
    assert EXPECTED[metric.name](page), found
    sampled = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
    assert page.kinds.get(sampled, metric.kind) == metric.kind  # there is no sample where nothing is wrong
    assert metric.help.endswith(".") and (metric.kind != "counter" or metric.name.endswith("_total"))


def test_series_by_box_are_bounded_and_those_of_the_largest_boxes(page: Page) -> None:
    """§13: bounded, with a truncation flag."""
    boxes = {dict(labels)["box"] for name, labels in page.samples if name == "streams_box_head_seq"}
    assert len(boxes) <= ROWS_MAX and {"b-disk", "g-copies", "c-fsync", "e-queue"} <= boxes
    assert "h-full" not in boxes, "one record, and nobody waits for it"


def test_rows_of_many_shards_are_chosen_as_those_of_one_shard_are() -> None:
    def shard(at: int, *rows: tuple[str, int, int, float]) -> ShardReport:
        boxes = [BoxRow(name, 1, 1, 1, size, None, lag, rate) for name, size, lag, rate in rows]
        routers = [RouterRow(f"router-{name}", lag, 0, False) for name, _, lag, _ in rows]
        groups = [GroupRow(name, "g", lag) for name, _, lag, _ in rows]
        return ShardReport(shard=at, boxes=boxes, routers=routers, groups=groups)

    shards = [
        shard(0, ("a", 9, 0, 0.0), ("b", 1, 5, 0.0), ("c", 1, 0, 0.0)),
        shard(1, ("d", 1, 9, 0.0), ("e", 1, 0, 7.0), ("f", 3, 0, 0.0)),
    ]
    facts = {"version": "", "shards_total": 2, "gateways_total": 0, "disk_bytes": 0, "disk_free_bytes": 0}
    found = reports_of(shards, [], rows_max=3, **facts)
    assert [(at, row.box) for at, row in found.boxes] == [("0", "a"), ("1", "d"), ("1", "e")]
    assert [row.router for _, row in found.routers] == ["router-a", "router-b", "router-d"]
    assert [(row.box, row.lag) for _, row in found.groups] == [("d", 9)]
    assert found.is_truncated
    whole = reports_of(shards, [], rows_max=100, **facts)
    assert [row.box for _, row in whole.boxes] == ["a", "b", "c", "d", "e", "f"] and not whole.is_truncated


def test_any_gateway_tells_of_all_of_them(server: Server, page: Page) -> None:
    answered_by = set()
    while len(answered_by) < 2:  # the kernel gives each connection to one of them
        with httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as client:
            answer = client.get("/v0/status")
            served = read_page(client.get("/metrics").text)
        answered_by.add(answer.headers["x-request-id"].partition("-")[0])  # begins anew in each process
        assert [each["status"] for each in answer.json()["gateways"]] == ["ready", "ready"]
        assert len(served.values("streams_http_connections")) == 2


def test_status_shows_every_process_and_what_it_holds(server: Server, page: Page) -> None:
    status = httpx2.get(f"{server.url}/v0/status", trust_env=False, timeout=60).json()
    assert status["status"] == "ready" and status["pressure"] in ("none", "pacing", "throttling")
    assert {each["pid"] for each in status["shards"]} == set(server.shard_pids().values())
    assert {each["pid"] for each in status["gateways"]} == set(server.gateway_pids().values())
    assert status["boxes"] == sum(each["boxes"] for each in status["shards"]) == 9
    assert status["sse_connections"] == 1 and status["watch_sessions"] == 1
    assert 0 < status["disk"]["free_bytes"] <= status["disk"]["bytes"]
    for each in (*status["shards"], *status["gateways"]):
        assert each["uptime_ms"] > 0 and each["resident_bytes"] > 0 and each["lag_ms"] >= 0


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", False),
        ("text/plain", False),
        ("application/json", True),
        ("application/json;q=0.5, text/plain;q=0.9", False),
        ("application/json, */*;q=0.1", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2", False),
        ("text/html, application/*;q=0.8", True),
        ("application/json;q=nonsense, text/*", False),
    ],
)
def test_accept_chooses_between_text_and_json(accept: str, expected: bool) -> None:
    """§13"""
    assert wants_json(accept) is expected


@pytest.mark.parametrize("accept", ["image/png", "text/plain;q=0", "application/json;q=0, text/*;q=0.0"])
def test_who_wants_neither_text_nor_json_is_told(accept: str) -> None:
    """§0.6: 406"""
    with pytest.raises(NotAcceptable):
        wants_json(accept)


def test_json_says_the_same_as_the_text(server: Server, page: Page) -> None:
    headers = {"accept": "application/json"}
    answer = httpx2.get(f"{server.url}/v0/metrics", headers=headers, trust_env=False, timeout=60)
    assert answer.headers["content-type"] == "application/json"
    told = {each["name"]: each for each in json.loads(answer.text)["metrics"]}
    assert list(told) == [metric.name for metric in METRICS]
    [head] = [
        sample["value"]
        for sample in told["streams_box_head_seq"]["samples"]
        if sample["labels"]["box"] == "c-fsync"
    ]
    assert head == 11
    ack = told["streams_append_ack_seconds"]["samples"][0]
    assert ack["buckets"][-1]["count"] <= ack["count"] and ack["sum"] > 0
