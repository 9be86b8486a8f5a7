"""Goal: the register of access tokens finds what was issued, for as long as it is to be found (s2 §17)."""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.s2 import tokens as tokens_module
from streams.protocol.errors import AccessTokenNotFound, ResourceAlreadyExists, Throttled
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import AccessToken, NameSet
from tests.support.machines import Driver


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def issue(driver: Driver, id: str, **fields: Any) -> AccessToken:
    token = AccessToken(id=id, **{"digest": f"digest of {id}", **fields})
    driver.ask(s2.IssueToken(token))
    return token


def found(driver: Driver, id: str) -> s2.FindTokenReply:
    reply = driver.ask(s2.FindToken(f"digest of {id}"))
    assert isinstance(reply, s2.FindTokenReply)
    return reply


def listed(driver: Driver, *asked: Any) -> tuple[list[str], bool]:
    page = driver.ask(s2.ListTokens(*asked))
    return [token.id for token in page.tokens], page.more


def test_a_token_is_found_by_its_digest_until_it_is_revoked(driver: Driver) -> None:
    token = issue(driver, "a", ops=("read",), streams=NameSet(prefix="x"))
    with pytest.raises(ResourceAlreadyExists):
        issue(driver, "a", digest="another")
    for survivor in (
        driver,
        driver.reborn(),
        driver.reborn(state=driver.machine.snapshot()),
    ):
        assert found(survivor, "a").token == token
        assert survivor.ask(s2.RevokeToken("a")).token == token
        assert found(survivor, "a") == s2.FindTokenReply(None, False)
        with pytest.raises(AccessTokenNotFound):
            survivor.ask(s2.RevokeToken("a"))


def test_a_token_that_has_expired_is_not_there(driver: Driver) -> None:
    issue(driver, "a", expires_ms=2_000)
    driver.now_ms = 1_999
    assert found(driver, "a").token is not None
    driver.now_ms = 2_000
    assert found(driver, "a") == s2.FindTokenReply(None, True)
    assert listed(driver) == ([], False)
    with pytest.raises(AccessTokenNotFound):
        driver.ask(s2.RevokeToken("a"))
    issue(driver, "a", digest="another")
    assert listed(driver) == (["a"], False)
    assert found(driver, "a").is_known is False


def test_a_list_is_sorted_and_cut_where_it_is_told(driver: Driver) -> None:
    for id in ("b2", "a", "b1", "c", "b3"):
        issue(driver, id)
    assert listed(driver) == (["a", "b1", "b2", "b3", "c"], False)
    assert listed(driver, "b", "b1") == (["b2", "b3"], False)
    assert listed(driver, "", "", 2) == (["a", "b1"], True)


def test_there_is_a_limit_that_expired_tokens_do_not_count_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "TOKENS_MAX", 2)
    issue(driver, "a", expires_ms=2_000)
    issue(driver, "b")
    with pytest.raises(Throttled):
        issue(driver, "c")
    driver.now_ms = 2_000
    issue(driver, "c")
    assert listed(driver) == (["b", "c"], False)


def test_an_answer_waits_for_the_last_change_of_the_register(driver: Driver) -> None:
    token = AccessToken(id="a", digest="d")
    outcome = driver.do(s2.IssueToken(token))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn
    for command in (s2.FindToken("d"), s2.ListTokens(), s2.IssueToken(token)):
        assert driver.do(command).waits_for_lsn == outcome.waits_for_lsn


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (NameSet(exact="ab"), NameSet(prefix="a"), True),
        (NameSet(exact="ab"), NameSet(exact="ab"), True),
        (NameSet(exact="ab"), NameSet(exact="a"), False),
        (NameSet(prefix="ab"), NameSet(prefix="a"), True),
        (NameSet(prefix="a"), NameSet(prefix="ab"), False),
        (NameSet(prefix=""), NameSet(exact="a"), False),
        (NameSet(), NameSet(), True),
        (NameSet(exact=""), NameSet(), True),
        (NameSet(exact="a"), NameSet(), False),
    ],
)
def test_a_set_of_names_knows_what_lies_within_it(inner: NameSet, outer: NameSet, expected: bool) -> None:
    assert inner.within(outer) == expected
