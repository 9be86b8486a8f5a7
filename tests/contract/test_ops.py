"""Health and readiness (§13)."""

import pytest


@pytest.mark.parametrize("path", ["/v0/health", "/healthz", "/health"])
def test_health_says_ok_and_how_long(api, path):
    """§13"""
    answer = api.ok(api.send("GET", path))
    assert answer["status"] == "ok"
    assert isinstance(answer["version"], str) and answer["version"]
    assert isinstance(answer["uptime_ms"], int) and answer["uptime_ms"] >= 0


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready_says_what_is_served(api, path):
    """§13"""
    answer = api.ok(api.send("GET", path))
    assert answer["status"] == "ready"
    assert answer["wal_replay_complete"] is True
    assert answer["shards"] == 2
    assert isinstance(answer["boxes"], int) and answer["boxes"] >= 0


def test_ready_counts_boxes(api, box):
    """§13 (nobody else writes while this test does)"""
    before = api.ok(api.send("GET", "/v0/ready"))["boxes"]
    api.put(f"{box}.a")
    api.put(f"{box}.b")
    assert api.ok(api.send("GET", "/v0/ready"))["boxes"] == before + 2
    api.drop(f"{box}.a")
    assert api.ok(api.send("GET", "/v0/ready"))["boxes"] == before + 1


def test_uptime_grows(api, box):
    """§13"""
    first = api.ok(api.send("GET", "/v0/health"))["uptime_ms"]
    api.let_time_pass(5, box)
    assert api.ok(api.send("GET", "/v0/health"))["uptime_ms"] > first


@pytest.mark.parametrize("path", ["/v0/health", "/v0/ready"])
def test_probes_answer_head_without_a_body(api, path):
    """§13"""
    response = api.send("HEAD", path)
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/v0/health", "/v0/ready"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_probes_are_only_for_reading(api, path, method):
    """§0.6"""
    response = api.send(method, path)
    api.refused(response, 405, "method_not_allowed")
    assert "GET" in response.headers["allow"]
