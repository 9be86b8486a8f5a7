"""Files that docstrings and comments of the product name exist where the reader looks for them.

A bare `name.py` is in the folder of the file that names it. Anything else has a path: from the root of the
project (`shard/core/kernel.py`), or from a folder above it in one of the packages (`routers/outbox.py`).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "shard", "streams")
#: Names that are wrong today. The list may only shrink.
ALLOWED: frozenset[str] = frozenset()
_name = re.compile(r"(?<![\w/.*<>-])((?:[\w-]+/)*\w+\.py)(?!\w)")
_documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def prose_of(path: Path) -> Iterator[str]:
    """Yield the docstrings and the comments of a file."""
    text = path.read_text()
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


def test_every_file_that_prose_names_exists() -> None:
    missing = {
        f"{path.relative_to(ROOT)} names {named}"
        for path in sources()
        for prose in prose_of(path)
        for named in _name.findall(prose)
        if not exists(named, path)
    }
    new, fixed = sorted(missing - ALLOWED), sorted(ALLOWED - missing)
    assert not new, "a bare name is in the same folder, others have a path:\n" + "\n".join(new)
    assert not fixed, "take off the list what is right now:\n" + "\n".join(fixed)
