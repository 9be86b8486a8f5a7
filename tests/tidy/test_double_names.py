"""A class name or a module name means one thing in the whole tree.

A feature has the same module name in each layer (`LAYERS`): command, client, messages, routes and core. Other
layers may share the name of one concept too: `double_names.toml` lists these names with the reason. Modules
count by their file name, packages by their folder. The generated twin of the client is left out.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.tidy.measures import ROOT, sources

ALLOWED: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "double_names.toml").read_text())
#: A module name may occur once in each: it is the name of a feature.
LAYERS = (
    r"streams/cli/\w+\.py",
    r"streams/client/_async/\w+\.py",
    r"streams/protocol/messages/\w+\.py",
    r"gateway/api/\w+\.py",
    r"shard/core/\w+/__init__\.py",
)
#: The lists may only shrink.
COUNTS_MAX = {"classes": 9, "modules": 47}


def double_names(kind: str) -> dict[str, list[str]]:
    """Return the names that occur more than once, each with the files that have it."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        shown = str(path.relative_to(ROOT))
        if kind == "modules":
            files[path.parent.name if path.stem == "__init__" else path.stem].append(shown)
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(shown)
    return {name: paths for name, paths in files.items() if len(paths) > 1 and not _is_feature(paths)}


def _is_feature(paths: list[str]) -> bool:
    """Return True if each path is in another layer of one feature."""
    layers = [next((layer for layer in LAYERS if re.fullmatch(layer, path)), None) for path in paths]
    return None not in layers and len(set(layers)) == len(layers)


@pytest.mark.parametrize("kind", COUNTS_MAX)
def test_no_name_means_two_things(kind: str) -> None:
    new = [
        f"{name}: {', '.join(paths)}"
        for name, paths in sorted(double_names(kind).items())
        if name not in ALLOWED[kind]
    ]
    assert not new, f"rename one of each, or argue in double_names.toml ({kind}):\n" + "\n".join(new)


@pytest.mark.parametrize("kind", COUNTS_MAX)
def test_the_list_of_shared_names_is_argued_and_only_shrinks(kind: str) -> None:
    assert len(ALLOWED[kind]) <= COUNTS_MAX[kind]
    assert all(ALLOWED[kind].values())
    gone = sorted(ALLOWED[kind].keys() - double_names(kind).keys())
    assert not gone, f"take these off the list and lower COUNTS_MAX: {gone}"
