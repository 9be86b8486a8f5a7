"""Goal: every claim that waits is asked when it should be, once a window, in order, and never lost (§8).

Method: the book of waiting claims alone, with the clock in the test's hand.
"""

from __future__ import annotations

import pytest

from shard.engine import waiting_claims
from shard.engine.waiting_claims import WaitingClaim, WaitingClaims
from streams.protocol.messages.queues import Claim


def claim(node: str, box: str = "q", wait_ms: int = 0, holder: int = 0) -> Claim:
    return Claim(box=box, node=node, wait_ms=wait_ms, holder=holder)


def names(found: list[WaitingClaim[str]]) -> list[str]:
    return [each.ticket for each in found]


def add(book: WaitingClaims[str], node: str, now_ms: int = 0, window_ms: int = 0, **options: int) -> None:
    asked = claim(node, **options)  # type: ignore[arg-type]
    book.add(asked, node, now_ms=now_ms, window_ms=window_ms)


def test_nobody_waits_at_first() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    assert not book and book.next_ms() is None and book.due(99) is None and book.ready_claims("q", 0) == []
    book.drop("q", 1)
    assert repr(book) == "<WaitingClaims 0>"


def test_claims_are_asked_in_their_order_when_a_job_comes() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "a", wait_ms=100)
    add(book, "b", wait_ms=50)
    found = book.ready_claims("q", 10)
    assert names(found) == ["a", "b"] and repr(found[0]) == "<WaitingClaim 1 of a until 100>"
    book.remove("q", found[:1])
    assert names(book.ready_claims("q", 10)) == ["b"] and book.next_ms() == 50
    book.remove("q", found[1:])
    assert not book and book.next_ms() is None


def test_a_claim_that_was_taken_back_is_not_asked() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "a", wait_ms=100)
    add(book, "b", wait_ms=100)
    assert book.forget("a") and not book.forget("a") and not book.forget("never")
    assert names(book.ready_claims("q", 10)) == ["b"] and len(book) == 1
    assert book.forget("b") and not book and book.next_ms() is None


def test_what_is_left_of_answered_claims_is_bounded() -> None:
    """They are answered at once, while their time would be over in half a minute."""
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "last", wait_ms=30_000)
    add(book, "gathered", box="window", window_ms=50)  # type: ignore[arg-type]
    for number in range(10_000):
        add(book, str(number), wait_ms=20_000)
        assert book.forget(str(number))
        assert len(book._times) < 200
    due = book.due(50)
    assert due is not None and (due[0], names(due[1])) == ("window", ["gathered"])
    book.remove("window", due[1])
    assert names(book.ready_claims("q", 60)) == ["last"] and book.next_ms() == 30_000


def test_only_the_first_few_of_many_are_asked() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    for number in range(100):
        add(book, str(number), wait_ms=100)
    assert names(book.ready_claims("q", 0)) == [str(number) for number in range(waiting_claims.IN_ORDER_MAX)]


def test_a_claim_whose_time_is_over_is_asked_for_the_last_time() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "a", wait_ms=100)
    assert book.due(99) is None
    due = book.due(100)
    assert due is not None and (due[0], names(due[1]), due[2]) == ("q", ["a"], True)
    book.remove("q", due[1])
    assert book.due(1000) is None


def test_a_window_gathers_claims_and_asks_all_of_them_when_it_closes() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "a", 0, 50)
    add(book, "b", 30, 50)
    add(book, "c", 40, 50, wait_ms=500)
    assert book.ready_claims("q", 45) == [] and book.next_ms() == 50
    due = book.due(50)
    assert due is not None and (names(due[1]), due[2]) == (["a", "b", "c"], False)
    book.remove("q", due[1][:2])
    assert book.due(60) is None, "the one that waits on is left alone"
    assert book.ready_claims("q", 60) == [] and book.next_ms() == 110, "a job that comes opens a window"
    due = book.due(110)
    assert due is not None and (names(due[1]), due[2]) == (["c"], False)
    assert book.next_ms() == 540


def test_a_claim_that_ends_with_its_window_is_asked_once() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "a", 0, 50)
    add(book, "b", 0, 50, wait_ms=50)
    due = book.due(50)
    assert due is not None and (names(due[1]), due[2]) == (["a", "b"], False)
    book.remove("q", due[1][:1])
    due = book.due(50)
    assert due is not None and (names(due[1]), due[2]) == (["b"], True)
    book.remove("q", due[1])
    assert book.next_ms() is None


def test_a_window_that_is_full_closes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_claims, "COHORT_MAX", 3)
    book: WaitingClaims[str] = WaitingClaims()
    for number in range(3):
        add(book, str(number), 10 + number, 50)
    assert book.next_ms() == 12
    due = book.due(12)
    assert due is not None and names(due[1]) == ["0", "1", "2"]


def test_boxes_do_not_wait_for_each_other() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    book.add(claim("a", "q1", 10), "a", now_ms=0, window_ms=0)
    book.add(claim("b", "q2", 5), "b", now_ms=0, window_ms=0)
    assert names(book.ready_claims("q1", 0)) == ["a"] and book.next_ms() == 5


def test_a_connection_that_is_gone_waits_no_longer() -> None:
    book: WaitingClaims[str] = WaitingClaims()
    add(book, "a", wait_ms=10, holder=1)
    add(book, "b", wait_ms=20, holder=2)
    add(book, "c", wait_ms=30)
    book.drop("q", 1)
    assert names(book.ready_claims("q", 0)) == ["b", "c"] and book.next_ms() == 20
    book.drop("q", 2)
    book.drop("q", 3)
    assert names(book.ready_claims("q", 0)) == ["c"]
