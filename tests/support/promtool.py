"""Prometheus's own tools, and the alerts that fire for a course of metrics.

The programs come from Debian's package `prometheus`: installed, or unpacked into `build/prometheus` once.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support import debian

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
FOLDER = ROOT / "build" / "prometheus"
ALERTS = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
#: Minutes before an incident, and after it begins: longer than any alert waits or looks back.
BEFORE, AFTER = 20, 40


def program(name: str) -> str:
    """Return the path of `promtool` or `prometheus`. Raises `debian.NotInstalled`."""
    found = shutil.which(name)
    if found is not None:
        return found
    unpacked = FOLDER / "usr" / "bin" / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.exists():
            debian.download("prometheus", folder=FOLDER)
            for package in FOLDER.glob("*.deb"):
                subprocess.run(["dpkg", "-x", package.name, "."], cwd=FOLDER, check=True)
                package.unlink()
    return str(unpacked)


def promtool() -> str:
    """Skip the test where the package cannot be had."""
    try:
        return program("promtool")
    except debian.NotInstalled as error:
        pytest.skip(f"promtool cannot be had: {error}")


#: Values by series, written as Prometheus does: `name{label="value"}`.
Series = Mapping[str, float]


def series_of(page: str) -> Series:
    """Return the values of a page of metrics, and that Prometheus could get it."""
    found = {"up": 1.0}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def firing(courses: Mapping[str, tuple[Series, Series]], folder: Path) -> dict[str, set[str]]:
    """Return the alerts that fire at some time, by server.

    `courses` has, by server, the metrics for `BEFORE` minutes in which nothing is wrong, and then for `AFTER`
    minutes.
    """
    courses = {server: _on_a_roomy_disk(*course) for server, course in courses.items()}
    used = set(re.findall(r"\b(?:streams_\w+|up)\b", RULES.read_text()))
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _of(server, name), "values": _values(before.get(name), after.get(name))}
                    for server, (before, after) in courses.items()
                    for name in sorted({*before, *after})
                    if name.partition("{")[0] in used
                ],
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}
                    for minute in (BEFORE - 1, *range(BEFORE + 1, BEFORE + AFTER, 3))
                    for alert in ALERTS
                ],
            }
        ],
    }
    path = folder / "alerts-test.yaml"
    path.write_text(yaml.safe_dump(test))
    ran = subprocess.run([promtool(), "test", "rules", str(path)], capture_output=True, text=True)
    output = ran.stdout + ran.stderr
    assert "alertname: " in output if ran.returncode else "SUCCESS" in output, output
    found: dict[str, set[str]] = {server: set() for server in courses}
    # Each alert that fires is not expected, and is listed with its labels below the time.
    for part in output.split("alertname: ")[1:]:
        alert, minute = re.match(r"(\w+), time: (\w+)", part).groups()  # type: ignore[union-attr]
        servers = set(re.findall(r'instance="([^"]*)"', part))
        assert servers and minute != f"{BEFORE - 1}m", f"{alert} fires while nothing is wrong: {part}"
        for server in servers:
            found[server].add(alert)
    return found


def _on_a_roomy_disk(before: Series, after: Series) -> tuple[Series, Series]:
    """Return the course with free space on a disk that was nearly full before anything went wrong: that is
    the disk of the machine that runs the tests, and no part of the incident."""
    free, size = "streams_disk_free_bytes", "streams_disk_bytes"
    if size not in before or before[free] / before[size] >= 0.2:
        return before, after
    return {**before, free: before[size]}, {**after, free: after.get(size, before[size])}


def _of(server: str, name: str) -> str:
    labels = f'instance="{server}",job="streams"'
    return f"{name[:-1]},{labels}}}" if name.endswith("}") else f"{name}{{{labels}}}"


def _values(before: float | None, after: float | None) -> str:
    def times(value: float | None, count: int) -> str:
        return f"_x{count}" if value is None else f"{value!r}x{count}"

    return f"{times(before, BEFORE)} {times(after, AFTER)}"
