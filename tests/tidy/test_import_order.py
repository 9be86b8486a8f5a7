"""Goal: the modules of the core have an order. No import leads back to where it began, not even one that is
for type checkers alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _imports(path: Path, modules: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                full = f"{node.module}.{name.name}"
                found.add(full if full in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & modules


def _graph(package: str) -> dict[str, set[str]]:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    return {module: _imports(path, set(paths)) for module, path in paths.items()}


def test_the_core_has_no_import_cycle() -> None:
    graph = _graph("shard/core")
    assert graph["shard.core.machine"] > {"shard.core.context", "shard.core.routers.forwarding"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise AssertionError(f"these modules import one another: {cycle}") from None
