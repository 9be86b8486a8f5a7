"""Recipes of the cookbook and our side of the pages "coming from …" work as typed and print what they show.

Method: the blocks of a page run in order against one server for all pages. Its ```python blocks are one
program, each followed by its output (```text). Its ```sh blocks are run by bash, and each `curl` succeeds.
Only the address of the server is replaced. The recipe for Spark runs in `tests/spark/test_pipeline.py`; the
page of the chat runs in a browser.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.client._sync.client import Client
from streams.testing import Server, running_server
from tests.docs.test_howtos import run, statuses
from tests.support.browser import page

DOCS = Path(__file__).parents[2] / "docs"
COOKBOOK = DOCS / "cookbook"
RECIPES = sorted(path.stem for path in COOKBOOK.glob("*.md") if path.stem != "index")
#: Pages that are run as recipes are; their blocks of other products have a second word.
OTHER_PAGES = [*sorted((DOCS / "coming-from").glob("*.md")), DOCS / "reference" / "errors.md"]
BLOCK = re.compile(r"```(python|sh)\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
SPARK, CHAT = "cdc-to-iceberg", "chat"


def text_of(recipe: str) -> str:
    return (COOKBOOK / f"{recipe}.md").read_text()


@pytest.fixture(scope="module")
def chat_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A web server of its own, as the recipe starts one: (origin, its folder)."""
    folder = tmp_path_factory.mktemp("chat")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{pages.server_port}", folder
        pages.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(chat_pages: tuple[str, Path]) -> Iterator[Server]:
    with running_server(shards=1, cors_origins=chat_pages[0]) as shared:
        yield shared


@pytest.mark.parametrize(
    "path",
    [*(COOKBOOK / f"{each}.md" for each in RECIPES if each != SPARK), *OTHER_PAGES],
    ids=lambda path: path.stem,
)
def test_a_page_works_as_typed(
    path: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMS_URL", server.url)
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(path.read_text())
    assert blocks, path
    names: dict[str, Any] = {"__name__": path.stem}
    for kind, typed, shown in blocks:
        if kind == "sh":
            found = statuses(run(typed, server, tmp_path))
            assert len(found) == typed.count("curl ") and set(found) <= {"200", "201"}, typed
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(typed, path.name, "exec"), names)
        assert printed.getvalue() == shown, typed


def test_two_pages_of_the_chat_see_each_other(
    server: Server, chat_pages: tuple[str, Path], tmp_path: Path
) -> None:
    origin, folder = chat_pages
    (html,) = re.findall(r"```html chat.html\n(.*?)```", text_of(CHAT), re.DOTALL)
    (folder / "chat.html").write_text(html.replace("http://localhost:4000", server.url))
    with Client(server.url) as client, page(tmp_path / "browser") as browser:
        client.box("room").append({"text": "<b>from elsewhere</b>"}, node="ada")
        browser.go(f"{origin}/chat.html")
        browser.wait_for("ada: <b>from elsewhere</b>")
        browser.type("#text", "hello")
        browser.run("form.requestSubmit(); null")
        browser.wait_for("me: hello")
        assert [record.data["text"] for record in client.box("room").tail(1)] == ["hello"]


def test_keys_of_the_audit_log_are_keys(tmp_path: Path) -> None:
    (keys,) = re.findall(r"```text keys\n(.*?)```", text_of("audit-log"), re.DOTALL)
    (tmp_path / "keys").write_text(keys)
    with running_server(shards=1, api_keys_file=tmp_path / "keys") as guarded:
        secrets = re.findall(r"^[^:\s]+", keys, re.MULTILINE)
        scopes = [Client(guarded.url, key=secret).whoami().scopes for secret in secrets]
        assert [len(each) for each in scopes] == [1, 1, 4]


def test_the_index_lists_every_recipe() -> None:
    text = (COOKBOOK / "index.md").read_text()
    assert sorted(re.findall(r"\]\(([\w-]+)\.md\)", text)) == RECIPES
    assert len(RECIPES) >= 20
