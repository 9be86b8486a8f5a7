"""Goal: the answers of the S2 API are those of the contract, also where requests are wrong in odd ways.

Method: the cases of `corpus.py`, each over real HTTP. The same cases were sent to `s2 lite`, which agrees.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from streams.testing import Server
from tests.s2.corpus import CASES, Case, run


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as found:
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_answer_is_that_of_the_contract(http: httpx2.Client, case: Case) -> None:
    assert run(http, case, "corpus") == []
