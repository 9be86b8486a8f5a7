"""Flags beat the environment, which beats defaults; what is wrong is said, all of it and by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.cli import run
from streams.config import (
    CHILD_CONFIG_VARIABLE,
    SETTINGS,
    ChildArgs,
    Config,
    ConfigError,
    check_may_serve,
    is_loopback,
    load,
    origins,
    unknown_variables,
)

BY_NAME = {setting.name: setting for setting in SETTINGS}


def test_a_flag_beats_the_environment_and_the_environment_the_default() -> None:
    environ = {"STREAMS_PORT": "5000", "STREAMS_LOG": "debug", "STREAMS_GATEWAYS": ""}
    config = load(environ, {"port": 6000, "log": None})
    assert (config.port, config.log, config.gateways) == (6000, "debug", 1)
    found = origins(environ, {"port": 6000})
    assert (found["port"], found["log"], found["gateways"]) == ("flag", "environment", "default")


def test_every_bad_value_is_named_with_what_is_legal() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"STREAMS_PORT": "web", "STREAMS_LOG": "loud"}, {"drain_ms": "soon"})
    assert caught.value.problems == (
        "STREAMS_PORT is 'web'; it must be a whole number from 0 to 65535",
        "STREAMS_LOG is 'loud'; it must be one of debug, info, warning, error",
        "--drain-ms is 'soon'; it must be a time from 0ms to 10m (ms, or s, m, h)",
    )


def test_a_setting_that_does_not_exist_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'shard' is not a setting; did you mean shards"):
        load({}, {"shard": 2})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("1MB", 10**6),
        ("1.5MiB", 3 << 19),
        ("1GiB", 1 << 30),
    ],
)
def test_sizes_take_units(text: str, size: int) -> None:
    assert load({"STREAMS_MAX_BODY_BYTES": text}).max_body_bytes == size


@pytest.mark.parametrize(("text", "time_ms"), [("250", 250), ("250ms", 250), ("5s", 5000), ("1.5m", 90_000)])
def test_times_take_units(text: str, time_ms: int) -> None:
    assert load({"STREAMS_DRAIN_MS": text}).drain_ms == time_ms


@pytest.mark.parametrize(
    "text",
    ["-1", "1.5", "64X", "KiB", "1.0000000001KiB", "٤٠٩٦", "1e6", "0x10", "2GiB", "9" * 30, "1_000_000"],
)
def test_what_is_no_size_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="STREAMS_MAX_BODY_BYTES"):
        load({"STREAMS_MAX_BODY_BYTES": text})


@pytest.mark.parametrize(
    ("name", "value"),
    [(s.name, edge) for s in SETTINGS if s.kind in ("count", "bytes", "ms") for edge in (s.least, s.most)],
)
def test_the_ends_of_each_range_are_legal_as_shown_and_beyond_is_not(name: str, value: int) -> None:
    setting = BY_NAME[name]
    assert setting.parse(setting.show(value)) == value
    beyond = value + 1 if value == setting.most else value - 1
    with pytest.raises(ValueError):
        setting.parse(str(beyond))


@given(st.integers(0, 600_000))
def test_any_time_can_be_typed_as_it_is_shown(time_ms: int) -> None:
    assert BY_NAME["drain_ms"].parse(BY_NAME["drain_ms"].show(time_ms)) == time_ms


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("0.0.0.0", None, ("0.0.0.0", 4000)),
        ("0.0.0.0:80", None, ("0.0.0.0", 80)),
        (":80", None, ("127.0.0.1", 80)),
        ("::1", None, ("::1", 4000)),
        ("[::1]", "5", ("::1", 5)),
        ("[::1]:80", None, ("::1", 80)),
        ("db.local:80", "80", ("db.local", 80)),
    ],
)
def test_a_host_may_carry_the_port(host: str, port: str | None, expected: tuple[str, int]) -> None:
    config = load({"STREAMS_HOST": host} | ({"STREAMS_PORT": port} if port else {}))
    assert (config.host, config.port) == expected


def test_two_different_ports_are_refused_but_a_flag_settles_it() -> None:
    environ = {"STREAMS_HOST": "127.0.0.1:80", "STREAMS_PORT": "81"}
    with pytest.raises(ConfigError, match="name different ports"):
        load(environ)
    assert load(environ, {"host": "127.0.0.1:82"}).port == 82
    assert load({"STREAMS_HOST": "127.0.0.1:80"}, {"port": 83}).port == 83


def test_a_misspelt_variable_is_warned_about() -> None:
    (warning,) = unknown_variables({"STREAMS_PROT": "1", "STREAMS_SWEEP": "full", "HOME": "/"})
    assert warning == "STREAMS_PROT is not a setting and has no effect; did you mean STREAMS_PORT?"


def test_a_child_reads_back_the_config_its_parent_had() -> None:
    config = load({}, {"data_dir": "/var/lib/streams", "probe_auth": True, "max_boxes": 7})
    assert Config.from_json(config.to_json()) == config
    args = ChildArgs.parse(
        [
            *("--index", "3", "--listen-fd", "5", "--listen-fd", "6", "--parent-fd", "7", "--ready-fd", "8"),
            *("--sockets", '["/a", "/b"]', "--directory", "shard-03-v2"),
        ],
        {CHILD_CONFIG_VARIABLE: config.to_json()},
    )
    assert args == ChildArgs(config, 3, (5, 6), 7, 8, "", ("/a", "/b"), "shard-03-v2")


@pytest.mark.parametrize("argv", [[], ["--index", "x"], ["--what"]])
def test_a_child_started_by_hand_says_who_should_start_it(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="run `streams serve`"):
        ChildArgs.parse(argv, {})


def test_secrets_are_in_no_text_of_the_config() -> None:
    config = load({"STREAMS_API_KEYS": "hunter2"})
    assert "hunter2" not in repr(config) + config.to_json() + BY_NAME["api_keys"].show(config.api_keys)
    with pytest.raises(ConfigError) as caught:
        load({"STREAMS_API_KEYS": "hunter2\0"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_only_an_address_of_this_machine_alone_may_be_open(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback
    if loopback:
        check_may_serve(load({}, {"host": address}))
    else:
        with pytest.raises(ConfigError, match="STREAMS_ALLOW_INSECURE_NO_AUTH"):
            check_may_serve(load({}, {"host": f"[{address}]"}))
        check_may_serve(load({"STREAMS_ALLOW_INSECURE_NO_AUTH": "1"}, {"host": f"[{address}]"}))


def test_hosts_and_origins_that_can_never_match_are_refused_at_start() -> None:
    good = {"STREAMS_ALLOWED_HOSTS": "a.b, [::1]:4000,10.0.0.1", "STREAMS_CORS_ORIGINS": "https://a.b:444"}
    check_may_serve(load(good))
    bad = {
        "STREAMS_ALLOWED_HOSTS": "http://a.b, *",
        "STREAMS_CORS_ORIGINS": "null,a.b, https://a.b/, https://A.b, *",
    }
    with pytest.raises(ConfigError) as refused:
        check_may_serve(load(bad))
    named = [problem.split("'")[1] for problem in refused.value.problems]
    assert named == ["http://a.b", "*", "null", "a.b", "https://a.b/", "https://A.b", "*"]


@pytest.mark.parametrize("variable", ["STREAMS_API_KEYS", "STREAMS_API_KEYS_FILE"])
def test_with_keys_any_address_may_be_served(variable: str) -> None:
    check_may_serve(load({variable: "a-secret-of-some-length"}, {"host": "0.0.0.0"}))


def test_a_malformed_key_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match=r"^STREAMS_API_KEYS: entry 2: ") as caught:
        check_may_serve(load({"STREAMS_API_KEYS": "a-secret-of-some-length,user:hunter2"}))
    assert "hunter2" not in str(caught.value)


def test_config_lists_each_setting_with_its_origin_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMS_API_KEYS", "hunter2")
    monkeypatch.setenv("STREAMS_PORT", "5000")
    assert run(["config", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == [setting.name for setting in SETTINGS]
    assert (rows["port"]["value"], rows["port"]["default"], rows["port"]["from"]) == (
        "5000",
        "4000",
        "environment",
    )
    assert rows["api_keys"]["value"] == "(set)"
    assert run(["config"]) == 0
    assert "hunter2" not in capsys.readouterr().out


def test_a_bad_setting_or_flag_ends_a_command_with_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["serve", "--port", "web", "--data-dir", str(tmp_path / "data")]) == 2
    assert capsys.readouterr().err == "streams: --port is 'web'; it must be a whole number from 0 to 65535\n"
    assert run(["serve", "--no-such-flag"]) == 2
    monkeypatch.setenv("STREAMS_PORT", "web")
    assert run(["config"]) == 2
    assert not (tmp_path / "data").exists()


def test_each_setting_is_a_flag_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for setting in SETTINGS:
        assert setting.flag in shown
        assert setting.variable in " ".join(shown.split())
