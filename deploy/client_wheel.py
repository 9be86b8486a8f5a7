"""Builds the wheel of the client alone: `make client-wheel`.

The one `pyproject.toml` of the tree says in `[tool.streams.client]` which files belong to the client and what
they need. The files are copied to an empty folder with a `pyproject.toml` of their own, and hatchling builds
the wheel there. Version, license and classifiers are those of the main distribution.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: What both distributions say in the same words.
_SHARED = ("version", "license", "license-files", "requires-python", "classifiers")

#: The page of the client on a package index.
_README = """# {name}

{description}

    import streams

    with streams.Client("http://127.0.0.1:4000") as client:
        client.box("orders").append({{"item": "tea"}})

`{main}` is the server, with the same client inside. Install one of the two in an environment, not both.
"""


def metadata(pyproject: dict[str, Any]) -> dict[str, Any]:
    """Return the `[project]` table of the client."""
    project, client = pyproject["project"], pyproject["tool"]["streams"]["client"]
    own = {name: client[name] for name in ("name", "description", "keywords", "dependencies")}
    required = {_name_of(requirement) for requirement in project["dependencies"]}
    missing = {_name_of(requirement) for requirement in client["dependencies"]} - required
    if missing:
        raise SystemExit(
            f"[tool.streams.client] needs {', '.join(sorted(missing))}; add it to [project] dependencies too"
        )
    return own | {name: project[name] for name in _SHARED} | {"readme": "README.md"}


def _name_of(requirement: str) -> str:
    return requirement.partition(">")[0].partition("[")[0].strip()


def stage(root: Path, folder: Path) -> None:
    """Write everything that the client's wheel is built from to `folder`."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    client = pyproject["tool"]["streams"]["client"]
    for path in client["files"]:
        source = root / path
        if source.is_dir():
            shutil.copytree(source, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / path)
    shutil.copyfile(root / "LICENSE", folder / "LICENSE")
    main = pyproject["project"]["name"]
    (folder / "README.md").write_text(_README.format(main=main, **client))
    lines = [
        "[build-system]",
        *_toml(pyproject["build-system"]),
        "",
        "[project]",
        *_toml(metadata(pyproject)),
        "",
    ]
    lines += ["[project.optional-dependencies]", *_toml(client["optional-dependencies"]), ""]
    lines += ["[tool.hatch.build.targets.wheel]", 'packages = ["streams"]', ""]
    (folder / "pyproject.toml").write_text("\n".join(lines))


def _toml(table: dict[str, Any]) -> list[str]:
    """Lines of a table whose values are texts and lists of texts: JSON and TOML write those alike."""
    return [f"{name} = {json.dumps(value)}" for name, value in table.items()]


def build(root: Path, out: Path) -> Path:
    """Build the wheel into `out`, and return its path."""
    from hatchling.build import build_wheel

    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        stage(root, Path(folder))
        os.chdir(folder)
        try:
            return out / build_wheel(str(out))
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheel of the client alone.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: dist)")
    print(build(ROOT, parser.parse_args().out))


if __name__ == "__main__":
    main()
