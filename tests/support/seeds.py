"""The seed of property tests and fuzzing: a digest of the source tree.

A new commit tries new cases; the same commit repeats its own, so that a failure is a property of the commit.
The digest is of names and contents of the files below, read from disk: it is the same in a clone, in a tree
without git, and in every process of a run. It takes about 50 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("gateway", "loadtests", "shard", "streams", "tests")
FILES = ("Makefile", "pyproject.toml")
#: What tools and editors leave behind.
_LEFT_BEHIND = (".pyc", ".pyo", ".orig", ".rej", "~")


def seed_of_tree(root: Path = ROOT) -> int:
    """A number below 2**32 that follows from the contents of the source tree."""
    digest = hashlib.sha256()
    for path in sorted(_files(root)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return int.from_bytes(digest.digest()[:4], "big")


def _files(root: Path) -> Iterator[Path]:
    yield from (root / name for name in FILES if (root / name).is_file())
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root).parts
            if any(part.startswith(".") or part == "__pycache__" for part in parts):
                continue
            if path.is_file() and not path.name.endswith(_LEFT_BEHIND):
                yield path
