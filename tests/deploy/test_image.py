"""The container image: its own steps make a server that runs as it is told to.

Method: there may be no container engine, so the steps of the Dockerfile are run in throw-away roots
(`tests/support/imagefile.py`), and the server is started from the last of them: root read-only, its user,
its volume.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.support import imagefile
from tests.support.imagefile import Stage

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return imagefile.build(DOCKERFILE, ROOT, tmp_path_factory.mktemp("image"))


@contextmanager
def container(image: Stage, **environ: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    given = {"STREAMS_PORT": port, "STREAMS_SHARDS": "1", **environ}
    command = [*image.entrypoint, *image.command]
    process = subprocess.Popen(
        **imagefile.arguments(image, command, environ=given), stderr=subprocess.STDOUT, stdout=subprocess.PIPE
    )
    try:
        probe = imagefile.arguments(image, image.health, environ=given)
        while process.poll() is None and subprocess.run(**probe, stderr=subprocess.DEVNULL).returncode:
            pass  # as an engine does, only without the pauses
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def ready_client(url: str) -> Iterator[httpx2.Client]:
    """A server is healthy before its shards have read their logs."""
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
        while client.get("/v0/ready").status_code == 503:
            pass
        yield client


def test_the_image_serves_from_a_read_only_root_and_keeps_its_data_in_the_volume(image: Stage) -> None:
    assert image.volumes == ["/data"] and image.ports == [4000] and image.user != "0:0"
    with container(image, STREAMS_ALLOW_INSECURE_NO_AUTH="1") as (process, url):
        with ready_client(url) as client:
            assert client.post("/v0/boxes/b", json={"records": [{"data": "kept"}]}).status_code == 201
            [shard] = client.get("/v0/status").json()["shards"]
        if os.geteuid() == 0:
            status = Path(f"/proc/{shard['pid']}/status").read_text().splitlines()
            [uids] = [line.split()[1:] for line in status if line.startswith("Uid:")]
            assert set(uids) == {image.user.split(":")[0]}
        process.send_signal(getattr(signal, image.stop_signal))
        assert process.wait(90) == 0
    with container(image, STREAMS_ALLOW_INSECURE_NO_AUTH="1") as (process, url):
        with ready_client(url) as client:
            read = client.post("/v0/boxes/b/diff", json={}).json()
        assert [record["data"] for record in read["records"]] == ["kept"]
        process.terminate()
        assert process.wait(90) == 0


def test_the_root_of_the_image_cannot_be_written(image: Stage) -> None:
    """Not even by root: the volume takes writes, the rest does not."""
    for place, is_writable in (("/data", True), ("/opt/streams", False), ("/", False)):
        tried = imagefile.started(image, ["touch", f"{place}/x"], as_root=True)
        assert (tried.returncode == 0) == is_writable, tried.stderr
        assert is_writable or "Read-only" in tried.stderr


def test_the_image_is_healthy_also_where_probes_take_a_key(image: Stage) -> None:
    keyed = {"STREAMS_API_KEYS": "a-secret-of-the-test-0123456789", "STREAMS_PROBE_AUTH": "true"}
    with container(image, **keyed) as (process, url):
        assert process.poll() is None
        assert httpx2.get(f"{url}/v0/health", trust_env=False, timeout=60).status_code == 401


def test_the_image_refuses_to_be_open_to_all_without_being_told_to(image: Stage) -> None:
    with container(image) as (process, _):
        assert process.poll() is not None
        assert process.stdout is not None and b"STREAMS_ALLOW_INSECURE_NO_AUTH" in process.stdout.read()


def test_only_what_the_image_needs_is_sent_to_its_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    copied = {
        word.removeprefix("./").rstrip("/")
        for file in (DOCKERFILE, ROOT / "deploy" / "spark" / "Dockerfile")
        for step, rest in imagefile.instructions(file.read_text())
        if step == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    }
    assert sorted(copied) == sorted(line[1:] for line in ignored if line.startswith("!"))
