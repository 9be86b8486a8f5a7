"""The page of the HTTP API names every address, error code and box setting there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.access.rules import RULES
from gateway.requests.errors import NOT_IN_V0, STATUS_OF
from streams.protocol.model.boxes import BoxConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "http.md").read_text()
#: Routers have a page of their own, which the page links to.
PAGES = PAGE + (DOCS / "reference" / "routers.md").read_text()


@pytest.mark.parametrize("route", sorted(route for route in RULES if "/console/" not in route))
def test_every_address_is_on_the_page(route: str) -> None:
    method, path = route.split(" ")
    if path.count("/") == 1:  # short forms stand beside the long one
        assert f"`{path}`" in PAGE or f"`{route}`" in PAGE
        return
    assert path in PAGES
    # `PUT` `GET` `DELETE /v0/...` share one mention of the path.
    assert any(f"`{method}" in line or f" {method}" in line for line in PAGES.splitlines() if path in line)


@pytest.mark.parametrize("code", sorted(set(STATUS_OF) - NOT_IN_V0))
def test_every_error_code_is_on_the_page_with_its_status(code: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and f"`{code}`" in line]
    assert any(str(STATUS_OF[code]) in row.split("|")[1] for row in rows)


@pytest.mark.parametrize("field", [field.encode_name for field in msgspec.structs.fields(BoxConfig)])
def test_every_setting_of_a_box_is_on_the_page(field: str) -> None:
    assert f"`{field}`" in PAGE
