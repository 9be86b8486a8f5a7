"""Functions, files and wording stay within their limits; what is over one today may only shrink.

After making something shorter, write the list again: python -m tests.tidy.measures > tests/tidy/allowed.toml
"""

from __future__ import annotations

import tomllib

import pytest

from tests.tidy.language import places
from tests.tidy.measures import ALLOWED, MEASURES, ROOT, names_that_stay

_allowed: dict[str, dict[str, int]] = tomllib.loads(ALLOWED.read_text())


@pytest.mark.parametrize("title", MEASURES)
def test_nothing_grows_beyond_its_limit(title: str) -> None:
    grown = [
        f"{name} has {value} ({title}); at most {_allowed[title].get(name, 'the general limit')} is allowed"
        for name, value in MEASURES[title]().items()
        if value > _allowed[title].get(name, 0)
    ]
    assert not grown, "\n".join(grown)


@pytest.mark.parametrize("title", MEASURES)
def test_the_list_of_exceptions_is_as_short_as_the_tree_allows(title: str) -> None:
    measured = MEASURES[title]()
    stale = [name for name, value in _allowed[title].items() if measured.get(name, 0) < value]
    assert not stale, f"{title}: shorter than listed, write the list again: {', '.join(stale)}"


#: The list of names that stay may only shrink.
NAMES_MAX = 42


def test_names_that_stay_are_few_argued_and_still_there() -> None:
    names = names_that_stay()
    assert len(names) <= NAMES_MAX, "give the new name a noun or a verb instead"
    assert all(entry["reason"] for entry in names.values())
    gone = [
        f"{file}: {name}"
        for name, entry in names.items()
        for file in entry["files"]
        if not any(place.text.split()[-1] == name for place in places((ROOT / file).read_text()))
    ]
    assert not gone, f"take these off the list, they are not there any more: {gone}"
