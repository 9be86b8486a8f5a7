"""`make monitor`: checks that every expression of the Grafana board returns data from a real Prometheus.

    .venv/bin/python -m loadtests.monitor --seconds 30

Prometheus comes from Debian's package (installed, or unpacked into `build/prometheus`). It scrapes the server
every two seconds with our rules. A script uses every feature that the board shows:
appends, reads, watches, jobs, a router, a group, an S2 append, a cap that is reached, a backup's note.

Exit code 1 when an expression is refused or returns nothing, unless `EMPTY` says why it may be empty.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from gateway.supervise.backup_note import BackupNote, write_note
from streams.client._sync.client import Client
from streams.testing import Server, running_server
from tests.support import promtool

ROOT: Final = Path(__file__).parents[1]
BOARD: Final = ROOT / "deploy" / "grafana" / "boards" / "streams.json"
SCRAPE_S: Final = 2
START_S: Final = 60.0

#: Panel, number and text of an expression, and its number of series or the error.
ExpressionResult = tuple[str, int, str, int | str]

#: Expressions that are empty on a healthy server, by panel and number.
EMPTY: Final = {
    ("Restarts", 0): "no process was restarted",
    ("Restarts", 1): "every process serves",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtests.monitor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the server is under load")
    seconds = parser.parse_args().seconds
    try:
        program = promtool.program("prometheus")
    except promtool.debian.NotInstalled as error:
        print(f"Prometheus is not available: {error}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="streams-monitor-") as folder,
        running_server(shards=2) as server,
        prometheus(program, server, Path(folder)) as url,
    ):
        is_over = threading.Event()
        loading = threading.Thread(target=load, args=(server, is_over))
        loading.start()
        try:
            is_over.wait(seconds)
            answers, rules = look(url)
        finally:
            is_over.set()
            loading.join()
    return show(answers, rules)


def look(url: str) -> tuple[list[ExpressionResult], list[dict[str, Any]]]:
    """Ask for every expression of the board and for the state of the rules."""
    answers = [(title, at, expr, ask(url, expr)) for title, at, expr in expressions()]
    return answers, fetch(f"{url}/api/v1/rules")["data"]["groups"][0]["rules"]


def show(answers: list[ExpressionResult], rules: list[dict[str, Any]]) -> int:
    """Print the results and return the exit code."""
    failures = 0
    for title, at, expr, result in answers:
        excuse = EMPTY.get((title, at))
        note = f"{result} series" if isinstance(result, int) else result
        is_ok = isinstance(result, int) and (result > 0 or excuse is not None)
        failures += not is_ok
        why = f" ({excuse})" if not result and excuse else ""
        print(f"{'ok' if is_ok else 'WRONG':<6} {title}: {note}{why}" + ("" if is_ok else f"\n       {expr}"))
    unhealthy = [rule["name"] for rule in rules if rule["health"] != "ok"]
    firing_rules = [rule["name"] for rule in rules if rule["state"] == "firing"]
    print(f"{len(rules)} rules, not evaluated: {unhealthy or 'none'}; firing: {firing_rules or 'none'}")
    return 1 if failures or unhealthy else 0


def expressions() -> Iterator[tuple[str, int, str]]:
    """Panel, number and text of every expression, with the variables as Grafana fills them in."""
    for panel in json.loads(BOARD.read_text())["panels"]:
        for at, target in enumerate(panel["targets"]):
            yield (
                panel["title"],
                at,
                target["expr"]
                .replace("$__rate_interval", f"{5 * SCRAPE_S}s")
                .replace("$instance", ".*")
                .replace("$shard", ".*")
                .replace("$box", ".*"),
            )


@contextmanager
def prometheus(program: str, server: Server, folder: Path) -> Iterator[str]:
    config = yaml.safe_load((promtool.RULES.parent / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(promtool.RULES)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Prometheus did not start:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def fetch(url: str) -> Any:
    with urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def query(url: str, expr: str) -> list[Any]:
    series: list[Any] = fetch(f"{url}/api/v1/query?{urlencode({'query': expr})}")["data"]["result"]
    return series


def ask(url: str, expr: str) -> int | str:
    """Return how many series of an expression are numbers now, or the error of Prometheus."""
    try:
        return sum(row["value"][1] != "NaN" for row in query(url, expr))
    except URLError as error:
        return f"refused: {error}"


def load(server: Server, is_over: threading.Event) -> None:
    """Use every feature of the board until `is_over` is set."""
    write_note(server.data_dir, BackupNote("monitor", time.time_ns() // 1_000_000))
    batch = [{"n": at} for at in range(20)]
    with Client(server.url) as client:
        orders, capped_box, jobs = client.box("orders"), client.box("capped"), client.queue("jobs")
        orders.append_batch(batch)
        capped_box.create(cap_records=30)
        jobs.create()
        client.put_router("copies", source="orders", dest="copied")
        orders.group("reader").commit(0)
        threading.Thread(target=watch, args=(server, is_over), daemon=True).start()
        while not is_over.wait(0.02):
            orders.append_batch(batch)
            capped_box.append_batch(batch)
            capped_box.page()  # reports the records that the cap evicted
            jobs.append_batch(batch[:4])
            jobs.ack("worker", jobs.claim("worker", max=2))
            orders.page(limit=100)


def watch(server: Server, is_over: threading.Event) -> None:
    """Follow a box as a browser would."""
    with urlopen(f"{server.url}/v0/boxes/orders/watch?tail=true", timeout=30) as stream:
        while not is_over.is_set() and stream.readline():
            pass


if __name__ == "__main__":
    sys.exit(main())
