"""The generated pages about the client, the errors and the routes are what the code says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.requests.errors import STATUS_OF
from tests.support import client_page, errors_page, routes_page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "client": client_page.page,
    "errors": errors_page.page,
    "routes": routes_page.page,
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_not_stale(name: str) -> None:
    assert (REFERENCE / f"{name}.md").read_text() == PAGES[name](), "run `make docs`"


def test_every_method_on_the_page_of_the_client_is_explained() -> None:
    lines = [line for line in (REFERENCE / "client.md").read_text().splitlines() if line]
    titles = [index for index, line in enumerate(lines) if line.startswith("**`") and line.endswith("`**")]
    bare = [lines[index] for index in titles if lines[index + 1].startswith(("**`", "#"))]
    assert len(titles) > 60
    #: A store of snapshots has the four methods of its protocol.
    assert [
        title for title in bare if not title.startswith(("**`put(", "**`get(", "**`names(", "**`drop("))
    ] == []


def test_every_code_with_a_status_is_on_the_page_of_errors() -> None:
    rows = [line.split("|") for line in (REFERENCE / "errors.md").read_text().splitlines() if "| `" in line]
    assert {row[1].strip(" `"): row[2].strip() for row in rows if row[2].strip().isdigit()} == {
        code: str(status) for code, status in STATUS_OF.items()
    }
