"""Each file begins with a docstring, and the docstring of a folder names every file and folder in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.measures import PACKAGES, ROOT

#: A folder with fewer files needs no table.
TABLE_FROM = 3


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def unnamed_in(folder: Path) -> list[str]:
    """Return what the docstring of a folder does not name."""
    inside = [path for path in folder.glob("*.py") if not path.name.startswith("__")]
    inside += [path.parent for path in folder.glob("*/__init__.py")]
    if len(inside) < TABLE_FROM:
        return []
    words = set(re.findall(r"\w+", docstring_of(folder / "__init__.py")))
    return sorted(path.stem for path in inside if path.stem not in words)


def test_each_file_begins_with_a_docstring() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    bare = [str(path.relative_to(ROOT)) for path in files if not docstring_of(path)]
    assert not bare, "say in the first line what the file does: " + ", ".join(bare)


def test_the_docstring_of_a_folder_names_each_of_its_files() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    unnamed = [
        f"{folder.relative_to(ROOT)}: {', '.join(names)}"
        for folder in sorted(folders)
        if (names := unnamed_in(folder))
    ]
    assert not unnamed, "a line for each, in the docstring of its folder:\n" + "\n".join(unnamed)


#: Where a reader starts: the head of each explains how its part works.
THEORIES = ("shard/core/kernel.py", "shard/engine/engine.py", "shard/core/routers/forwarding.py")


def test_the_kernel_the_engine_forwarding_and_the_edge_begin_with_their_theory_of_operation() -> None:
    without = [
        name
        for name in (*THEORIES, "gateway/http/__init__.py")
        if "Theory of operation\n---" not in docstring_of(ROOT / name)
    ]
    assert not without
