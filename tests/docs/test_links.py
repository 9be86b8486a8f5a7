"""Links between pages lead somewhere, and decisions have numbers of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
_link = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
_heading = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_fence = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As forges make them of headings: lower case, words joined with hyphens, the rest dropped."""
    headings = _heading.findall(_fence.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in _link.findall(_fence.sub("", page.read_text())):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{target}#{anchor}"


def test_decisions_are_numbered_without_a_gap_and_listed() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    listed = re.findall(r"\[(\d+)\]\(decisions/([^)]*)\)", (ROOT / "docs" / "index.md").read_text())
    assert listed == [(str(int(page.name[:4])), page.name) for page in pages]


def test_each_page_can_be_reached_from_the_index() -> None:
    waiting, reached = [ROOT / "docs" / "index.md"], set()
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [
            (page.parent / target).resolve() for target, _ in _link.findall(page.read_text()) if target
        ]
    pages = {page for page in PAGES if (ROOT / "docs") in page.parents}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - reached) == []
