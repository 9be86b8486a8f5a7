"""The programs of docs/examples work as their first lines say, and pass the type checker.

Method: each is run as a user runs it, against one real server; the page of the chat runs in Chromium.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from streams import Client
from streams.testing import Server, running_server
from tests.support.browser import page

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=1) as found:
        yield found


def run(server: Server, folder: Path, program: str, *words: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-P", EXAMPLES / program, *words],
        env={**os.environ, "STREAMS_URL": server.url},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_jobs_are_done_or_become_dead_letters(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, "job_queue.py", "add", "a.png", "b.gif", "broken.png")
    run(server, tmp_path, "job_queue.py", "add", "a.png")
    worked = run(server, tmp_path, "job_queue.py", "work")
    assert sorted(worked) == ["2 jobs are done", "resized a.png", "resized b.gif"]
    reason = ["broken.png: ValueError: broken.png is not a picture"]
    assert run(server, tmp_path, "job_queue.py", "dead") == reason
    assert run(server, tmp_path, "job_queue.py", "retry") == ["1 jobs are back in the queue"]
    assert run(server, tmp_path, "job_queue.py", "dead") == []


def test_a_ledger_is_never_overdrawn_and_starts_from_its_snapshot(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(server, tmp_path, "ledger.py", "deposit", "ada", "500") == ["ada: 500"]
    assert run(server, tmp_path, "ledger.py", "transfer", "ada", "bob", "200") == ["ada: 300", "bob: 200"]
    ledger = load("ledger.py")
    monkeypatch.setattr(ledger, "SNAPSHOT_EVERY", 5)
    with Client(server.url) as client:
        first, second = (ledger.Ledger(client, tmp_path / "states") for _ in range(2))
        first.transfer("ada", "bob", 250)
        with pytest.raises(ledger.Overdrawn, match="ada has 50 cents, not 100"):
            second.transfer("ada", "bob", 100)  # it saw 300: `match_seq` made it look again

        def spend(writer: object) -> None:
            for _ in range(100):
                try:
                    writer.transfer("bob", "eve", 10)  # type: ignore[attr-defined]
                except ledger.Overdrawn:
                    return

        threads = [threading.Thread(target=spend, args=(each,)) for each in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        third = ledger.Ledger(client, tmp_path / "states")
        assert third.balances == {"ada": 50, "bob": 0, "eve": 450}
        assert len(list((tmp_path / "states").iterdir())) == 3, "the newest snapshots"


def test_two_people_chat_in_their_browsers(tmp_path: Path) -> None:
    chat = load("chat/app.py")
    with chat.page_server("", 0) as reserved:
        port = reserved.server_port
    origin = f"http://127.0.0.1:{port}"
    with running_server(shards=1, cors_origins=origin) as server, Client(server.url, node="bob") as client:
        chat.create_room(server.url)
        client.box(chat.ROOM).append({"text": "<b>from elsewhere</b>"})
        with chat.page_server(server.url, port) as pages, page(tmp_path) as browser:
            thread = threading.Thread(target=pages.serve_forever)
            thread.start()
            browser.go(f"{origin}/?name=ada")
            browser.wait_for("bob: <b>from elsewhere</b>", "connected as ada")
            browser.type("#text", "hello bob")
            browser.click("button")
            browser.wait_for("ada: hello bob")
            client.box(chat.ROOM).append({"text": "hello ada"})
            browser.wait_for("bob: hello ada")
            pages.shutdown()
            thread.join()
        assert [record.node for record in client.box(chat.ROOM).read()] == ["bob", "ada", "bob"]  # type: ignore[union-attr]


def test_the_examples_pass_the_type_checker_with_public_names_alone(tmp_path: Path) -> None:
    programs = sorted(EXAMPLES.rglob("*.py"))
    for program in programs:
        imported = re.findall(r"^\s*(?:import|from) (streams[\w.]*)", program.read_text(), re.MULTILINE)
        assert imported == ["streams"], program
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    ran = subprocess.run([*command, *programs], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
