"""The documentation site builds without a warning, and a server serves it under a strict policy.

Method: `sphinx-build` as `make site` calls it, then a real server with the archive, and a page in headless
Chromium: it must not complain, switch its theme, and find a word.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing import running_server
from tests.support.browser import page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    (command,) = re.findall(r"sphinx-build (-q -W --keep-going) ", (ROOT / "Makefile").read_text())
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            *command.split(),
            "-d",
            folder / "trees",
            ROOT / "docs",
            folder / "site",
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert built.returncode == 0, built.stderr
    yield folder / "site"


def test_every_page_is_built_and_has_nothing_inline(site: Path) -> None:
    pages = [each.relative_to(ROOT / "docs") for each in (ROOT / "docs").rglob("*.md")]
    for each in pages:
        text = (site / each.with_suffix(".html")).read_text()
        assert not re.search(r"<script>|<style>| style=\"| on\w+=\"", text), each
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//[^\"]+\.(?:js|css|woff2?)", text), each


def test_a_server_serves_it_and_its_search_finds_a_word(site: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "site"), "zip", site)
    with running_server(shards=1, guide=archive) as server, page(tmp_path / "browser") as browser:
        browser.go(f"{server.url}/docs/guide/howto/keys.html")
        browser.wait_for("Give each service its own key", "Contributing")
        browser.until("document.readyState === 'complete'")  # the scripts have run
        before = browser.run("document.body.dataset.theme")
        browser.click(".theme-toggle")
        assert browser.run("document.body.dataset.theme") != before
        browser.go(f"{server.url}/docs/guide/search.html?q=tombstone")
        browser.until("document.querySelectorAll('#search-results li a').length > 3")
        assert browser.complaints == []
