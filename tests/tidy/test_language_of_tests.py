"""Docstrings and comments of tests avoid the words that product code must not use (`language.py`).

Names in tests and sentences that begin with "What …" are not counted.
"""

from __future__ import annotations

from pathlib import Path

from tests.tidy.language import places

TESTS = Path(__file__).parents[1]
#: The number of such words in all tests. It may only shrink.
WORDS_MAX = 60


def test_docstrings_and_comments_of_tests_use_plain_words() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{place.line} {place.text}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != "language.py"
        for place in places(path.read_text())
        if place.kind == "dialect"
    ]
    assert len(found) <= WORDS_MAX, "use plain words (docs/contributing.md):\n" + "\n".join(found)
