"""Property tests try new cases with every commit, and the same ones with the same commit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import hypothesis.core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import seeds


def test_the_seed_follows_from_the_contents_of_the_tree_and_needs_no_git(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "shard" / "core").mkdir(parents=True)
    (tree / "pyproject.toml").write_text("")
    (tree / "shard" / "core" / "log.py").write_text("a = 1\n")
    first = seeds.seed_of_tree(tree)
    copy = shutil.copytree(tree, tmp_path / "elsewhere")
    for left in ("shard/__pycache__", "shard/.cache", ".git", ".venv"):
        (copy / left).mkdir()
        (copy / left / "x.py").write_text("b")
    assert seeds.seed_of_tree(copy) == first, "it depends on where the tree is, or on what tools leave there"
    (copy / "shard" / "core" / "log.py").write_text("a = 2\n")
    second = seeds.seed_of_tree(copy)
    (copy / "shard" / "core" / "log.py").rename(copy / "shard" / "log.py")
    assert len({first, second, seeds.seed_of_tree(copy)}) == 3


def test_all_processes_of_a_run_have_the_seed_that_is_printed() -> None:
    """Also this one, which is a worker where tests run side by side."""
    assert hypothesis.core.global_force_seed == int(os.environ["STREAMS_FUZZ_SEED"]) < 2**32


def test_the_same_seed_tries_the_same_cases_and_another_one_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def cases(seed: int) -> list[int]:
        monkeypatch.setattr(hypothesis.core, "global_force_seed", seed)
        found: list[int] = []

        @settings(max_examples=20)
        @given(st.integers())
        def collect(number: int) -> None:
            found.append(number)

        collect()
        return found

    assert cases(1) == cases(1) != cases(2)
