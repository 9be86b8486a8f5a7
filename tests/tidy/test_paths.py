"""The walks of docs/explanation/paths.md name files that exist and functions that these files define."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.tidy.measures import ROOT

PAGE = ROOT / "docs" / "explanation" / "paths.md"
WALKS = 8
STEPS_MIN = 10
_function = re.compile(r"`([\w/]+\.py): ([\w., ]+)`")
_step = re.compile(rf"^\d+\. {_function.pattern} — \S", re.MULTILINE)
_file = re.compile(r"`([\w/.-]+\.(?:py|md|toml))[:`]")
#: `Class.member` inside a sentence, without its file.
_member = re.compile(r"`([A-Z]\w*\.\w+)`")
#: The class of `Outcome.needs`, whose file is no step.
_MORE_FILES = ("shard/core/outcome.py",)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def definitions(path: str) -> frozenset[str]:
    """Return the functions, classes and members that a file defines, members as `Class.member`."""
    defined: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for each in body:
            if isinstance(each, _Definition):
                defined.add(prefix + each.name)
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                defined.add(prefix + each.target.id)
            if isinstance(each, ast.ClassDef):
                collect(each.body, f"{prefix}{each.name}.")

    collect(ast.parse((ROOT / path).read_text()).body, "")
    return frozenset(defined)


def test_every_file_that_is_named_exists() -> None:
    named = _file.findall(PAGE.read_text())
    missing = sorted({each for each in named if not (ROOT / each).is_file()})
    assert len(named) > WALKS * STEPS_MIN
    assert not missing, f"{PAGE.name} names files that do not exist: {', '.join(missing)}"


def test_every_function_that_is_named_is_defined_there() -> None:
    gone = [
        f"{path}: {name}"
        for path, names in _function.findall(PAGE.read_text())
        for name in names.split(", ")
        if (ROOT / path).is_file() and name not in definitions(path)
    ]
    assert not gone, f"{PAGE.name} names what is not defined there:\n" + "\n".join(gone)


def test_every_member_that_a_sentence_names_is_defined() -> None:
    text = PAGE.read_text()
    files = {each for each in _file.findall(text) if each.endswith(".py")}.union(_MORE_FILES)
    known = frozenset().union(*(definitions(each) for each in files if (ROOT / each).is_file()))
    named = set(_member.findall(text))
    assert len(named) > STEPS_MIN
    assert not named - known, f"{PAGE.name} names what its files do not define: {sorted(named - known)}"


def test_each_line_of_a_walk_names_a_file_and_a_function() -> None:
    walks = PAGE.read_text().split("\n## ")[1:]
    assert [walk.split(".")[0] for walk in walks] == [str(number + 1) for number in range(WALKS)]
    for title, _, steps in (walk.partition("\n") for walk in walks):
        numbered = re.findall(r"^\d+\. ", steps, re.MULTILINE)
        assert len(_step.findall(steps)) == len(numbered) >= STEPS_MIN, title
        assert numbered == [f"{number + 1}. " for number in range(len(numbered))], title
