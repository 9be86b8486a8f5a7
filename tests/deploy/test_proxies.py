"""The examples for nginx and Caddy work as they are: TLS, bodies, and events that arrive when they come.

Method: the programs themselves, from Debian's packages (unpacked into a folder, nothing is installed), with
our files; only names, ports and certificates are this test's own.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streams.config import load
from streams.testing import Server, running_server
from tests.support import debian

PROXIES = Path(__file__).parents[2] / "deploy" / "proxies"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1) as found:
        yield found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the packages are unpacked that are not installed."""
    folder = tmp_path_factory.mktemp("programs")
    missing = [name for name in ("nginx", "caddy") if shutil.which(name) is None]
    if missing:
        debian.download(*missing, folder=folder)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
    return folder


def program(folder: Path, name: str) -> str:
    found = shutil.which(name, path=f"{folder}/usr/sbin:{folder}/usr/bin:{os.environ['PATH']}")
    assert found is not None, f"{name} is not to be had"
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def certificate(folder: Path) -> None:
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    named = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", "privkey.pem", "-out", "fullchain.pem"]
    subprocess.run([*made, *named, *files], cwd=folder, check=True, capture_output=True)


@contextmanager
def running(command: list[str], port: int, folder: Path) -> Iterator[None]:
    environ = {
        **os.environ,
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)
        try:
            while True:
                assert process.poll() is None, (folder / "output").read_text()
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield
        finally:
            process.kill()
            process.wait()


def append(connection: http.client.HTTPConnection, box: str, *datas: str) -> None:
    body = json.dumps({"records": [{"data": data} for data in datas]})
    connection.request("POST", f"/v0/boxes/{box}", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read().startswith(b'{"box"')


def use(watching: http.client.HTTPConnection, writing: http.client.HTTPConnection, box: str) -> None:
    """A watcher through one connection sees at once what is appended through the other."""
    append(writing, box, *["x" * 500_000] * 8)  # more than a proxy takes by default
    watching.request("GET", f"/v0/boxes/{box}/watch?tail=true", headers={"Accept": "text/event-stream"})
    with watching.getresponse() as answer:
        assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
        lines = iter(answer.readline, b"")
        assert any(line == b"event: caught-up\n" for line in lines)
        for number in range(3):
            append(writing, box, f"event {number}")
            assert any(b"event %d" % number in line for line in lines), "it came while the stream was open"
    watching.close()
    writing.close()


def opens_a_socket(connection: http.client.HTTPConnection, origin: str) -> bool:
    """As a page does that came through the same proxy."""
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Origin": origin, **key}
    connection.request("GET", "/v0/ws", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status == 101


def tunnels_http_2(connection: http.client.HTTPConnection) -> bool:
    """Whether an upgrade to HTTP/2 goes through: what follows it would pass the proxy's rules unseen."""
    for connection_header in ("Upgrade, HTTP2-Settings", "Upgrade"):
        headers = {"Connection": connection_header, "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
        connection.request("GET", "/v0/health", headers=headers)
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            return True
    return False


def test_nginx_carries_bodies_and_events_over_tls(server: Server, programs: Path, tmp_path: Path) -> None:
    certificate(tmp_path)
    port = free_port()
    text = (PROXIES / "nginx.conf").read_text()
    for ours, here in (
        ("127.0.0.1:4000", f"127.0.0.1:{server.port}"),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/streams/", f"{tmp_path}/"),
    ):
        assert ours in text
        text = text.replace(ours, here)
    (tmp_path / "streams.conf").write_text(text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors; events {{}}\n"
        f"http {{ access_log off; {folders} include {tmp_path}/streams.conf; }}\n"
    )
    nginx = [program(programs, "nginx"), "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    checked = subprocess.run([*nginx, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0 and "warn" not in checked.stderr, checked.stderr
    trusted = ssl.create_default_context(cafile=str(tmp_path / "fullchain.pem"))
    with running(nginx, port, tmp_path):
        made = [http.client.HTTPSConnection("localhost", port, context=trusted, timeout=60) for _ in range(2)]
        use(made[0], made[1], "through-nginx")
        assert opens_a_socket(made[0], f"https://localhost:{port}")
        assert not tunnels_http_2(made[0])
        assert not opens_a_socket(made[0], "https://elsewhere.example")


def test_caddy_carries_bodies_and_events(server: Server, programs: Path, tmp_path: Path) -> None:
    """Its certificate comes from outside, so here it speaks plain HTTP; the file as it is must be valid."""
    caddy = program(programs, "caddy")
    port = free_port()
    text = (PROXIES / "Caddyfile").read_text()
    (tmp_path / "Caddyfile").write_text(
        "{\n\tadmin off\n}\n"
        + text.replace("streams.example.com {", f"http://127.0.0.1:{port} {{").replace(
            "127.0.0.1:4000", f"127.0.0.1:{server.port}"
        )
    )
    as_it_is = [caddy, "adapt", "--adapter", "caddyfile", "--config", str(PROXIES / "Caddyfile")]
    adapted = subprocess.run(as_it_is, capture_output=True, text=True)
    assert adapted.returncode == 0 and '"streams.example.com"' in adapted.stdout, adapted.stderr
    assert f'"max_size":{load({}).max_body_bytes}' in adapted.stdout, "it takes what the server takes"
    command = [caddy, "run", "--adapter", "caddyfile", "--config", str(tmp_path / "Caddyfile")]
    with running(command, port, tmp_path):
        made = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2)]
        use(made[0], made[1], "through-caddy")
        assert opens_a_socket(made[0], f"http://127.0.0.1:{port}")
        assert not tunnels_http_2(made[0])
        assert not opens_a_socket(made[0], "https://elsewhere.example")
