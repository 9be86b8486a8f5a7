"""Alerts fire for the incidents that they are for, and for nothing else.

Method: Prometheus's own `promtool` runs our rules over the metrics of a server that is well and then is not.
What a real server shows in each incident is in `tests/cluster/test_incidents.py`.
"""

from __future__ import annotations

import subprocess

import pytest
import yaml

from tests.support.promtool import RULES, firing, promtool

WELL: dict[str, float] = {
    "up": 1,
    'streams_shard_up{shard="0"}': 1,
    'streams_restarts_total{process="shard-00",reason="crashed"}': 0,
    'streams_restarts_total{process="shard-00",reason="hung"}': 0,
    'streams_damaged_files{shard="0",kind="segment"}': 0,
    'streams_cold_store_failing_seconds{shard="0"}': 0,
    'streams_object_failures_total{shard="0"}': 0,
    'streams_disk_level{shard="0"}': 0,
    "streams_disk_bytes": 100,
    "streams_disk_free_bytes": 50,
    'streams_throttled_total{process="shard-00"}': 5,
    'streams_process_open_files{process="shard-00"}': 10,
    'streams_process_open_files_max{process="shard-00"}': 1000,
    'streams_process_resident_bytes{process="shard-00"}': 10,
    'streams_process_memory_limit_bytes{process="shard-00"}': 1000,
    "streams_keys_file_readable": 1,
    'streams_clock_ahead_seconds{shard="0"}': 0.001,
    'streams_clock_steps_total{shard="0"}': 0,
    'streams_pressure_level{process="shard-00"}': 0,
    'streams_routers_blocked{shard="0"}': 0,
    'streams_routers_lag_seconds{shard="0"}': 1,
    'streams_jobs_oldest_seconds{shard="0"}': 10,
    'streams_groups_lag_seconds{shard="0"}': 10,
    'streams_jobs{shard="0",state="dead_lettered"}': 3,
    'streams_http_requests_total{gateway="0",status="500"}': 0,
    'streams_snapshot_age_seconds{shard="0"}': 60,
    "streams_backup_age_seconds": 3600,
}

#: What changes in an incident (None: the series is gone), and the alerts that fire.
INCIDENTS: dict[str, tuple[dict[str, float | None], set[str]]] = {
    "nothing": ({}, set()),
    "crash loop": (
        {'streams_restarts_total{process="shard-00",reason="crashed"}': 40},
        {"StreamsCrashLoop", "StreamsRestarts"},
    ),
    "one restart": (
        {'streams_restarts_total{process="shard-00",reason="crashed"}': 1},
        {"StreamsRestarts"},
    ),
    "hang that is over": (
        {'streams_restarts_total{process="shard-00",reason="hung"}': 1},
        {"StreamsHung", "StreamsRestarts"},
    ),
    "hang": (
        {'streams_shard_up{shard="0"}': 0, 'streams_process_down{process="shard-00",reason="silent"}': 1},
        {"StreamsHung", "StreamsShardAway"},
    ),
    "full disk": ({'streams_disk_level{shard="0"}': 1}, {"StreamsDiskFull"}),
    "disk that fills up": ({"streams_disk_free_bytes": 9}, {"StreamsDiskFillsUp"}),
    "cold store down": ({'streams_cold_store_failing_seconds{shard="0"}': 90}, {"StreamsColdStoreAway"}),
    "cold folder missing": (
        {'streams_process_down{process="shard-00",reason="cold_store"}': 1, 'streams_shard_up{shard="0"}': 0},
        {"StreamsColdStoreAway", "StreamsShardAway"},
    ),
    "object store down": ({'streams_object_failures_total{shard="0"}': 4}, {"StreamsObjectStoreFails"}),
    "damaged segment": ({'streams_damaged_files{shard="0",kind="segment"}': 1}, {"StreamsDamage"}),
    "damaged log": (
        {'streams_process_down{process="shard-00",reason="damaged"}': 1, 'streams_shard_up{shard="0"}': 0},
        {"StreamsDamage", "StreamsShardAway"},
    ),
    "lag": (
        {
            'streams_routers_lag_seconds{shard="0"}': 700,
            'streams_jobs_oldest_seconds{shard="0"}': 4000,
            'streams_groups_lag_seconds{shard="0"}': 22_000,
        },
        {"StreamsRouterLag", "StreamsJobsWait", "StreamsGroupLag"},
    ),
    "keys unreadable": ({"streams_keys_file_readable": 0}, {"StreamsKeysUnreadable"}),
    "clock set back": (
        {'streams_clock_ahead_seconds{shard="0"}': -30, 'streams_clock_steps_total{shard="0"}': 1},
        {"StreamsClockSet"},
    ),
    "descriptors": ({'streams_process_open_files{process="shard-00"}': 950}, {"StreamsDescriptors"}),
    "memory": ({'streams_process_resident_bytes{process="shard-00"}': 950}, {"StreamsMemory"}),
    "old backup": ({"streams_backup_age_seconds": 9 * 86_400}, {"StreamsBackupOld"}),
    "no snapshots": ({'streams_snapshot_age_seconds{shard="0"}': 4000}, {"StreamsSnapshotOld"}),
    "dead letters": ({'streams_jobs{shard="0",state="dead_lettered"}': 5}, {"StreamsDeadLetters"}),
    "bug": ({'streams_http_requests_total{gateway="0",status="500"}': 2}, {"StreamsErrors"}),
    "blocked router": ({'streams_routers_blocked{shard="0"}': 1}, {"StreamsRouterBlocked"}),
    "pressure": ({'streams_pressure_level{process="shard-00"}': 1}, {"StreamsUnderPressure"}),
    "server down": ({name: None for name in WELL if name != "up"} | {"up": 0}, {"StreamsAway"}),
}


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The alerts of all incidents, each of a server of its own."""
    courses = {}
    for incident, (changed, _) in INCIDENTS.items():
        after = {name: value for name, value in (WELL | changed).items() if value is not None}
        courses[incident] = (WELL, after)
    return firing(courses, tmp_path_factory.mktemp("alerts"))


@pytest.mark.parametrize("incident", INCIDENTS)
def test_an_incident_fires_its_alerts_and_no_others(incident: str, fired: dict[str, set[str]]) -> None:
    assert fired[incident] == INCIDENTS[incident][1]


def test_the_rules_and_the_configuration_are_ones_that_prometheus_takes() -> None:
    for words in (["check", "rules", str(RULES)], ["check", "config", str(RULES.parent / "prometheus.yaml")]):
        ran = subprocess.run([promtool(), *words], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_an_incident_here_or_a_histogram() -> None:
    fired = set().union(*(alerts for _, alerts in INCIDENTS.values()))
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    missing = {rule["alert"] for rule in rules if "histogram_quantile" not in rule["expr"]} - fired
    assert missing == {"StreamsThrottles"}, "a rate that lasts; a step does not"
