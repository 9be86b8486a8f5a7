"""Every promise of the security page names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "security.md").read_text()


def test_each_promise_names_a_test_that_exists() -> None:
    promised, _, _ = PAGE.partition("## Not guaranteed")
    promises = re.findall(r"^\*\*.*?(?=^\*\*|\Z)", promised.partition("## Guarantees")[2], re.S | re.M)
    assert len(promises) >= 10
    file = ""
    for promise in promises:
        named = re.findall(r"`((?:tests/[\w/]+\.py|…)(?:::\w+)?)`", promise)
        assert named, promise
        for each in named:
            path, _, test = each.partition("::")
            file = file if path == "…" else path
            text = (ROOT / file).read_text()
            assert not test or f"def {test}(" in text, each
