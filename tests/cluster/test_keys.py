"""Keys of a running server: read from variable and file, read again on SIGHUP, gone when they are taken out.

Method: a real server with two gateways on one keys file. A reload is awaited by asking until the answer
changes, through each gateway; nothing sleeps.
"""

from __future__ import annotations

import http.client
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.supervise.data_dir import CannotServe
from gateway.supervise.key_file import read_keys
from streams import Client
from streams.config import load
from streams.direct import ShardWriter
from streams.testing import Server, running_server
from tests.support.commands import in_process
from tests.support.crashing import eventually
from tests.support.sse import Parser

OLD, NEW, FIXED = "the-old-secret-0123456789", "the-new-secret-0123456789", "the-fixed-secret-0123456789"
EVENTS = {"Accept": "text/event-stream"}


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# services\n{OLD}\n")
    keys.chmod(0o600)
    with running_server(
        gateways=2,
        shards=1,
        api_keys=f"{FIXED}:rw:kept.",
        api_keys_file=keys,
        shard_host="127.0.0.1",
        shard_port=0,
    ) as found:
        yield found, keys


def statuses(server: Server, secret: str) -> set[int]:
    """Of fresh connections, so that every gateway is met sooner or later."""
    found = set()
    for _ in range(12):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/v0/boxes", headers=bearer(secret))
        found.add(connection.getresponse().status)
        connection.close()
    return found


def reload(server: Server) -> None:
    os.kill(server.pid, signal.SIGHUP)


def test_keys_of_variable_and_file_are_good_and_nothing_of_them_is_on_disk(
    server: tuple[Server, Path],
) -> None:
    running, _ = server
    assert statuses(running, OLD) == statuses(running, FIXED) == {200}
    assert statuses(running, NEW) == {401}
    shared = running.data_dir / "run" / "keys.json"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o600
    for path in [path for path in running.data_dir.rglob("*") if path.is_file()]:
        assert OLD.encode() not in path.read_bytes() and FIXED.encode() not in path.read_bytes()
    for pid in [*running.gateway_pids().values(), *running.shard_pids().values()]:
        for what in ("environ", "cmdline"):
            told = Path(f"/proc/{pid}/{what}").read_bytes()
            assert OLD.encode() not in told and FIXED.encode() not in told


def test_rotation_ends_the_old_key_its_streams_included_and_no_other(server: tuple[Server, Path]) -> None:
    running, keys = server
    keys.write_text(f"{OLD}\n{NEW}\n")
    reload(running)
    eventually(lambda: statuses(running, NEW) == {200})
    assert statuses(running, OLD) == {200}
    with httpx2.Client(base_url=running.url, timeout=60, trust_env=False) as client:
        client.post("/v0/boxes/kept.a", json={"records": [{"data": 1}]}, headers=bearer(NEW))
        url = "/v0/boxes/kept.a/watch"
        with (
            client.stream("GET", url, headers={**EVENTS, **bearer(OLD)}) as old,
            client.stream("GET", url, headers={**EVENTS, **bearer(NEW)}) as new,
            client.stream("GET", url, params={"token": FIXED}, headers=EVENTS) as fixed,
        ):
            assert {old.status_code, new.status_code, fixed.status_code} == {200}
            keys.write_text(f"{NEW}\n")
            reload(running)
            parser, last = Parser(), None
            for chunk in old.iter_raw():  # until the server ends it
                for event in parser.feed(chunk):
                    last = event
            assert last is not None and last.name == "error" and last.json["code"] == 410
            eventually(lambda: statuses(running, OLD) == {401})
            client.post("/v0/boxes/kept.a", json={"records": [{"data": "after"}]}, headers=bearer(NEW))
            for stream in (new, fixed):
                assert_gets(stream, "after")


def test_a_key_that_is_taken_out_loses_its_sessions_of_the_s2_api_too(server: tuple[Server, Path]) -> None:
    running, keys = server
    keys.write_text(f"{OLD}\n{NEW}\n")
    reload(running)
    eventually(lambda: statuses(running, OLD) == statuses(running, NEW) == {200})
    with httpx2.Client(base_url=f"{running.url}/v1", timeout=60, trust_env=False) as client:
        client.headers["s2-basin"] = "kept-basin"
        assert client.post("/basins", json={"basin": "kept-basin"}, headers=bearer(NEW)).status_code == 201
        assert client.post("/streams", json={"stream": "s"}, headers=bearer(NEW)).status_code == 201
        url = "/streams/s/records?seq_num=0&clamp=true"
        with (
            client.stream("GET", url, headers={**EVENTS, **bearer(OLD)}) as old,
            client.stream("GET", url, headers={**EVENTS, **bearer(NEW)}) as new,
        ):
            assert {old.status_code, new.status_code} == {200}
            keys.write_text(f"{NEW}\n")
            reload(running)
            assert b"no longer valid" in b"".join(old.iter_raw()), "it ends, and says why"
            said = {"records": [{"body": "after"}]}
            assert client.post("/streams/s/records", json=said, headers=bearer(NEW)).status_code == 200
            told = b""
            for chunk in new.iter_raw():
                told += chunk
                if b"after" in told:
                    break
            assert b"after" in told, "the stream ended"


def assert_gets(stream: Any, data: str) -> None:
    parser = Parser()
    for chunk in stream.iter_raw():
        for event in parser.feed(chunk):
            if event.name == "record" and event.json["records"][-1]["data"] == data:
                return
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("text", [f"{NEW}\nuser:hunter2\n", f"{NEW}\n{NEW}\n"])
def test_keys_that_cannot_be_read_leave_those_before_in_place(server: tuple[Server, Path], text: str) -> None:
    running, keys = server
    keys.write_text(f"{NEW}\n")
    reload(running)
    eventually(lambda: statuses(running, NEW) == {200})
    told = running.log_text().count("keys not reloaded")
    keys.write_text(text)
    reload(running)
    eventually(lambda: running.log_text().count("keys not reloaded") == told + 1)
    assert statuses(running, NEW) == statuses(running, FIXED) == {200}
    assert statuses(running, OLD) == {401}
    assert "hunter2" not in running.log_text()


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_a_file_without_keys_opens_nothing(tmp_path: Path, text: str) -> None:
    """At the start or on a reload: it is refused, because a server without keys would serve everyone."""
    keys = tmp_path / "keys"
    keys.write_text(text)
    keys.chmod(0o600)
    with pytest.raises(CannotServe, match="contains no keys"):
        read_keys(load({"STREAMS_API_KEYS_FILE": str(keys)}))
    ring = read_keys(load({"STREAMS_API_KEYS_FILE": str(keys), "STREAMS_API_KEYS": FIXED}))
    assert ring is not None and len(ring.keys) == 1
    assert read_keys(load({})) is None


@pytest.mark.parametrize("raw", [None, b"\xff"])
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, raw: bytes | None) -> None:
    keys = tmp_path / "keys"
    if raw is not None:
        keys.write_bytes(raw)
    with pytest.raises(CannotServe, match=str(keys)):
        read_keys(load({"STREAMS_API_KEYS_FILE": str(keys)}))


def test_a_gateway_that_is_started_again_has_the_keys_of_now(server: tuple[Server, Path]) -> None:
    running, keys = server
    keys.write_text(f"{NEW}\n")
    reload(running)
    eventually(lambda: statuses(running, NEW) == {200})
    before = running.gateway_pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: (
            len(running.gateway_pids()) == 2
            and not set(before.values()) & set(running.gateway_pids().values())
        )
    )
    eventually(lambda: statuses(running, NEW) == {200})
    assert statuses(running, OLD) == {401}


def test_client_and_direct_writer_carry_a_key(server: tuple[Server, Path]) -> None:
    running, _ = server
    with Client(running.url, key=FIXED) as client:
        assert client.box("kept.client").append({"n": 1}).last_seq == 1
    with ShardWriter(running.url, key=FIXED) as writer:
        assert writer.append("kept.direct", [{"n": 1}]).last_seq == 1


@pytest.mark.parametrize("option", ["--key", "--token"])
def test_the_command_line_carries_a_key(server: tuple[Server, Path], tmp_path: Path, option: str) -> None:
    running, _ = server
    environ = {**os.environ, "STREAMS_URL": running.url, "XDG_CONFIG_HOME": str(tmp_path)}
    environ.pop("STREAMS_KEY", None)
    words = ("append", "kept.cli", "1")
    assert in_process((*words, option, FIXED), environ, tmp_path).returncode == 0
    assert in_process(words, {**environ, "STREAMS_KEY": FIXED}, tmp_path).returncode == 0
    refused = in_process(words, environ, tmp_path)
    assert refused.returncode != 0 and b"key" in refused.stderr and FIXED.encode() not in refused.stderr
