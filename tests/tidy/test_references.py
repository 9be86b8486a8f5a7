"""Every § in code, tests and docs names a heading of a contract page in docs/spec.

`v0 §4.3` and `s2 §13` name their page. A § without a name means the page that contains it. In other files it
means the S2 contract under an `s2` folder, and the `/v0` contract elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec"
PAGES = sorted(page.stem for page in SPEC.glob("*.md"))
_reference = re.compile(r"(?:(\w[\w.-]*?)(?:\.md)?,? )?§ ?(\d+(?:\.\d+)*)")
_heading = re.compile(r"^#{2,} (\d+(?:\.\d+)*) ", re.MULTILINE)
HEADINGS = {page: set(_heading.findall((SPEC / f"{page}.md").read_text())) for page in PAGES}


def own_texts() -> list[Path]:
    folders = ["streams", "shard", "gateway", "tests", "loadtests", "docs", "deploy"]
    nested = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return [
        path for path in [*ROOT.glob("*"), *nested] if path.suffix in {".py", ".md", ".js", ".toml", ".yaml"}
    ]


def default_page(path: Path) -> str:
    if path.parent == SPEC:
        return path.stem
    return "s2" if "s2" in path.relative_to(ROOT).parts else "v0"


def dangling_in(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        page = default_page(path)
        for named, section in _reference.findall(line):
            page = named if named in PAGES else page  # `s2 §9, §11` names its page once
            if section not in HEADINGS[page]:
                yield f"{path.relative_to(ROOT)}:{number}: docs/spec/{page}.md has no section {section}"


def test_each_reference_to_a_section_resolves() -> None:
    dangling = [each for path in own_texts() for each in dangling_in(path)]
    assert not dangling, "\n".join(dangling)


@pytest.mark.parametrize("page", PAGES)
def test_sections_of_a_contract_page_are_numbered_once_and_in_order(page: str) -> None:
    numbers = [
        tuple(map(int, each.split("."))) for each in _heading.findall((SPEC / f"{page}.md").read_text())
    ]
    assert numbers == sorted(set(numbers))
