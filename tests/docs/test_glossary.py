"""Every term of the glossary has one entry, and the other pages use it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = DOCS / "glossary.md"
TERMS = re.findall(r"^- \*\*(.+?)\*\*: ", GLOSSARY.read_text(), re.MULTILINE)


def test_each_term_has_one_entry() -> None:
    assert len(TERMS) == GLOSSARY.read_text().count("\n- ") > 60
    assert [term for term, times in Counter(map(str.lower, TERMS)).items() if times > 1] == []


def test_each_term_is_used_in_the_documentation() -> None:
    text = " ".join(page.read_text() for page in DOCS.rglob("*.md") if page != GLOSSARY)
    words = " ".join(text.split()).lower()
    unused = [term for term in TERMS if not re.search(rf"\b{re.escape(term.lower())}(s|es)?\b", words)]
    assert unused == []


def test_readme_index_and_contributing_link_to_the_glossary() -> None:
    pages = [DOCS.parent / "README.md", DOCS / "index.md", DOCS / "contributing.md"]
    assert [page.name for page in pages if "glossary.md)" not in page.read_text()] == []
