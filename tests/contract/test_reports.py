"""Metrics and status, over every front (§13)."""

import pytest

from streams.config import SETTINGS


@pytest.mark.parametrize("path", ["/v0/metrics", "/metrics"])
def test_metrics_are_the_text_of_prometheus(api, box, path):
    """§13"""
    api.append(box, 1)
    response = api.send("GET", path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE streams_append_ack_seconds histogram\n" in response.text


def test_metrics_are_json_for_those_who_ask(api):
    """§13"""
    answer = api.ok(api.send("GET", "/v0/metrics", headers={"Accept": "application/json"}))
    families = {metric["name"].partition("_")[0] for metric in answer["metrics"]}
    assert families == {"streams", "s2", "process"}


def test_metrics_in_another_form_are_not_to_be_had(api):
    """§0.6"""
    api.refused(
        api.send("GET", "/v0/metrics", headers={"Accept": "image/png"}), 406, "not_acceptable", "accept"
    )


def test_status_says_that_all_is_well(api):
    """§13"""
    answer = api.ok(api.send("GET", "/v0/status"))
    assert answer["status"] == "ready"
    assert [shard["status"] for shard in answer["shards"]] == ["ready", "ready"]
    assert [gateway["status"] for gateway in answer["gateways"]] == ["ready"]


@pytest.mark.parametrize("path", ["/v0/metrics", "/v0/status"])
def test_reports_are_only_for_reading(api, path):
    """§0.6, §0.9"""
    api.refused(api.send("POST", path), 405, "method_not_allowed")
    api.refused(api.send("GET", path, params={"colour": "red"}), 400, "invalid_request", "colour")
    head = api.send("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")


def test_every_setting_is_listed_with_its_origin(api):
    """§31"""
    settings = {each["name"]: each for each in api.ok(api.send("GET", "/v0/settings"))["settings"]}
    assert settings.keys() == {setting.name for setting in SETTINGS}
    assert settings["shards"]["value"] == "2" and settings["shards"]["from"] != "default"
    assert settings["api_keys"]["value"] in ("", "(set)")
    api.refused(api.send("GET", "/v0/settings", params={"x": 1}), 400, "invalid_request", "x")
