"""Files that docstrings, comments and pages name exist where the reader looks for them.

A bare `name.py` is in the folder of the file that names it. Anything else has a path: from the root of the
project (`shard/core/kernel.py`), or from some folder of a package (`routers/outbox.py`).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tidy.measures import PACKAGES, ROOT

#: Names that are wrong today. The list may only shrink.
ALLOWED: frozenset[str] = frozenset()
_name = re.compile(r"(?<![\w/.*<>-])((?:[\w-]+/)*\w+\.py)(?!\w)")
_documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def pages() -> list[Path]:
    """Return the pages about the code. How-tos and the tutorial name files of users."""
    docs = ROOT / "docs"
    return sorted((*ROOT.glob("*.md"), *docs.glob("*.md"), *docs.glob("[!ht]*/*.md")))


def prose_of(path: Path) -> Iterator[str]:
    """Yield the docstrings and the comments of a file, or the text of a page."""
    text = path.read_text()
    if path.suffix == ".md":
        yield text
    if path.suffix == ".md" or ".py" not in text:  # to parse a file takes a while
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _documented) and (docstring := ast.get_docstring(node)):
            yield docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def folders() -> tuple[Path, ...]:
    return (ROOT, *sorted({path.parent for path in sources()}))


def exists(named: str, by: Path) -> bool:
    if "/" not in named:
        return (by.parent / named).is_file()
    return any((folder / named).is_file() for folder in folders())


def missing_in(paths: list[Path]) -> set[str]:
    return {
        f"{path.relative_to(ROOT)} names {named}"
        for path in paths
        for prose in prose_of(path)
        for named in _name.findall(prose)
        if not exists(named, path)
    }


def test_every_file_that_docstrings_and_comments_name_exists() -> None:
    missing = missing_in(sources())
    new, fixed = sorted(missing - ALLOWED), sorted(ALLOWED - missing)
    assert not new, "a bare name is in the same folder, others have a path:\n" + "\n".join(new)
    assert not fixed, "take off the list what is right now:\n" + "\n".join(fixed)


def test_every_file_that_a_page_names_exists() -> None:
    missing = sorted(missing_in(pages()))
    assert not missing, "name files by their path from the root:\n" + "\n".join(missing)
