"""Measures of the source tree that may only improve: long functions, long files, wording, names.

`allowed.toml` lists what is over a limit today. `python -m tests.tidy.measures` prints the list for the tree
as it is; commit it when it has become shorter.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.tidy.language import Place, places

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("allowed.toml")
NAMES_THAT_STAY = Path(__file__).with_name("names_that_stay.toml")
PACKAGES = ("streams", "shard", "gateway")
FUNCTION_LINES_MAX, FILE_LINES_MAX = 70, 500


def sources() -> list[Path]:
    """Product files, without the client for threads, which is generated from the one for tasks."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if "_sync" not in path.parts]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions() -> dict[str, int]:
    return {
        f"{name_of(path)}:{name}": lines
        for path in sources()
        for name, lines in _functions(ast.parse(path.read_text()))
        if lines > FUNCTION_LINES_MAX
    }


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", (child.end_lineno or child.lineno) - child.lineno + 1
            yield from _functions(child, f"{prefix}{child.name}.")


def long_files() -> dict[str, int]:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in sources()}
    return {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}


def wording() -> dict[str, int]:
    """How many sentences of each file have words or clauses that make a reader stop (`language.py`)."""
    return _counts(lambda name, place: place.kind != "participle")


def participle_names() -> dict[str, int]:
    """How many names of each file are one past participle, without those that stay."""
    return _counts(lambda name, place: place.kind == "participle" and not stays(name, place))


def stays(name: str, place: Place) -> bool:
    """Return True if a name of a file is listed as one that users or files know."""
    exception = names_that_stay().get(place.text.split()[-1])
    return exception is not None and name in exception["files"]


@cache
def names_that_stay() -> dict[str, dict[str, Any]]:
    return tomllib.loads(NAMES_THAT_STAY.read_text())


def _counts(is_counted: Callable[[str, Place], bool]) -> dict[str, int]:
    counts = {
        name_of(path): sum(is_counted(name_of(path), place) for place in places(path.read_text()))
        for path in sources()
    }
    return {name: count for name, count in counts.items() if count}


MEASURES = {
    "function_lines": long_functions,
    "file_lines": long_files,
    "wording": wording,
    "participle_names": participle_names,
}


if __name__ == "__main__":
    for title, measure in MEASURES.items():
        print(f"[{title}]")
        for name, value in sorted(measure().items()):
            print(f'"{name}" = {value}')
        print()
