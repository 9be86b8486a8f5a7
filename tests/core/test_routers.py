"""Goal: the register gives each router a number, keeps the limit and finds every cycle (v0 §6.1, §12).

Method: one machine; then random graphs against a naive search for cycles.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.core.machine import Machine
from streams.protocol.errors import RouterCycle, Throttled
from streams.protocol.messages import routers
from streams.protocol.messages.routers import RegisteredRouter, Route
from streams.protocol.model.matches import Match
from tests.support.machines import Driver, sampled


@pytest.fixture
def driver() -> Driver:
    found = Driver(Machine(routers_max=3))
    found.start("boot")
    return found


def put(driver: Driver, name: str, source: str, dest: str, **more: Any) -> routers.PutRouterResult:
    from_seq = more.pop("from_seq", None)
    route = Route(source=source, dest=dest, **more)
    reply = driver.ask(routers.PutRouter(name, route, from_seq))
    assert isinstance(reply, routers.PutRouterResult)
    return reply


def get(driver: Driver, name: str) -> RegisteredRouter | None:
    reply = driver.ask(routers.GetRouter(name))
    assert isinstance(reply, routers.GetRouterResult)
    return reply.router


def names(driver: Driver, **question: Any) -> list[str]:
    reply = driver.ask(routers.ListRouters(**question))
    assert isinstance(reply, routers.ListRoutersResult)
    return [router.name for router in reply.routers]


def test_a_router_keeps_its_number_until_its_ends_change(driver: Driver) -> None:
    first = put(driver, "r", "a", "b", from_seq=7)
    assert (first.created, first.router.origin, first.router.from_seq) == (True, "r#1", 7)
    same = put(driver, "r", "a", "b")
    assert (same.created, same.previous, same.router) == (False, None, first.router)
    filtered = put(driver, "r", "a", "b", filter=Match("x"))
    assert (filtered.created, filtered.router.number, filtered.router.from_seq) == (False, 1, 7)
    assert filtered.router.route.revision > first.router.route.revision
    moved = put(driver, "r", "a", "c")
    assert (moved.created, moved.router.number > 1, moved.previous) == (False, True, filtered.router)
    driver.ask(routers.DropRouter("r", moved.router.number))
    again = put(driver, "r", "a", "c")
    assert again.created and again.router.number > moved.router.number, "numbers are never given twice"


def test_only_the_latest_revision_is_settled(driver: Driver) -> None:
    old = put(driver, "r", "a", "b").router
    new = put(driver, "r", "a", "b", preserve_tag=False).router
    driver.ask(routers.SettleRouter("r", old.number, old.route.revision))
    found = get(driver, "r")
    assert found is not None and not found.is_tied
    for _ in range(2):
        driver.ask(routers.SettleRouter("r", new.number, new.route.revision))
        found = get(driver, "r")
        assert found is not None and found.is_tied
    assert driver.ask(routers.SettleRouter("r", 99, 1)) == routers.GetRouterResult(None)
    put(driver, "r", "a", "b")
    found = get(driver, "r")
    assert found is not None and not found.is_tied, "what has changed is to be tied again"


def test_only_the_router_of_that_number_is_dropped(driver: Driver) -> None:
    number = put(driver, "r", "a", "b").router.number
    assert driver.ask(routers.DropRouter("r", number + 1)) == routers.GetRouterResult(None)
    assert driver.ask(routers.DropRouter("gone", number)) == routers.GetRouterResult(None)
    dropped = driver.ask(routers.DropRouter("r", number))
    assert dropped.router is not None and get(driver, "r") is None


def test_the_limit_holds_for_new_names_only(driver: Driver) -> None:
    for number in range(3):
        put(driver, f"r{number}", "a", "b")
    with pytest.raises(Throttled) as refused:
        put(driver, "r3", "a", "b")
    assert refused.value.detail == {"limit": "routers"}
    assert put(driver, "r2", "a", "c").created is False


def test_a_cycle_is_shown_from_its_source_round_to_it(driver: Driver) -> None:
    put(driver, "1", "a", "b")
    put(driver, "2", "b", "c")
    with pytest.raises(RouterCycle) as refused:
        put(driver, "3", "c", "a")
    assert refused.value.detail == {"cycle": ["c", "a", "b", "c"]}
    put(driver, "3", "c", "a", allow_cycle=True)
    with pytest.raises(RouterCycle):
        put(driver, "3", "c", "a")
    with pytest.raises(RouterCycle):
        put(driver, "1", "a", "b", filter=Match("x"))
    assert put(driver, "1", "a", "b", filter=Match("x"), allow_cycle=True).router.number == 1


def test_a_router_does_not_stand_in_its_own_way(driver: Driver) -> None:
    put(driver, "1", "a", "b")
    put(driver, "1", "b", "a")
    put(driver, "2", "b", "a")
    with pytest.raises(RouterCycle):
        put(driver, "1", "a", "b")


def test_answers_wait_for_what_they_rest_on(driver: Driver) -> None:
    outcome = driver.do(routers.PutRouter("1", Route(source="a", dest="b")))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn
    refused = driver.do(routers.PutRouter("2", Route(source="b", dest="a")))
    assert isinstance(refused.reply, RouterCycle)
    assert refused.until_durable and refused.waits_for_lsn == driver.machine.lsn
    driver.sync()
    assert driver.do(routers.GetRouter("1")).waits_for_lsn == 0


def test_lists_are_sorted_filtered_and_paged(driver: Driver) -> None:
    put(driver, "b1", "a", "b")
    put(driver, "b2", "a", "c")
    put(driver, "a1", "b", "c")
    assert names(driver) == ["a1", "b1", "b2"]
    assert names(driver, prefix="b") == ["b1", "b2"]
    assert names(driver, prefix="a") == ["a1"]
    assert names(driver, source="a") == ["b1", "b2"]
    assert names(driver, dest="c") == ["a1", "b2"]
    assert names(driver, after="a1") == ["b1", "b2"]
    page = driver.ask(routers.ListRouters(limit=2))
    assert [router.name for router in page.routers] == ["a1", "b1"] and page.more
    assert driver.ask(routers.ListRouters(version=page.version)).is_same


def test_the_register_outlives_a_restart(driver: Driver) -> None:
    put(driver, "1", "a", "b", filter=Match("x"), from_seq=3)
    put(driver, "2", "b", "c")
    driver.ask(routers.DropRouter("2", 2))
    for again in (driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        again.start("boot")
        assert again.machine.routers.routers == driver.machine.routers.routers
        assert put(again, "3", "b", "c").router.number == 3, "numbers are never given twice"
        with pytest.raises(RouterCycle):
            put(again, "4", "c", "a")


def test_a_router_is_shown_as_its_definition() -> None:
    route = Route(source="a", dest="b", filter=Match("u-", is_prefix=True), revision=5)
    shown = RegisteredRouter(name="r", number=5, route=route).to_fields()
    assert shown == {
        "router": "r",
        "source": "a",
        "dest": "b",
        "preserve_node": True,
        "preserve_tag": True,
        "create_dest": True,
        "filter": ["tag", "Glob", "u-*"],
        "allow_cycle": False,
    }
    assert Route(source="a", dest="b", filter=Match("x")).to_fields()["filter"] == ["tag", "Eq", "x"]
    assert routers.router_of("r->s#7") == ("r->s", 7) and routers.router_of("jobs!") is None


EDGES = st.tuples(
    st.sampled_from("abcdef"), st.sampled_from("abcdef"), st.booleans(), st.sampled_from("12345678")
)


@sampled(200)
@given(st.lists(EDGES, max_size=25))
def test_cycles_are_refused_exactly_where_there_are_some(edges: list[tuple[str, str, bool, str]]) -> None:
    driver = Driver()
    driver.start("boot")
    graph: dict[str, tuple[str, str]] = {}
    for source, dest, allow_cycle, name in edges:
        if source == dest:
            driver.ask(routers.DropRouter(name, getattr(get(driver, name), "number", 0)))
            graph.pop(name, None)
            continue
        others = {edge for other, edge in graph.items() if other != name}
        closes = reaches(others, dest, source)
        try:
            put(driver, name, source, dest, allow_cycle=allow_cycle)
        except RouterCycle as refused:
            assert closes and not allow_cycle
            cycle = refused.detail["cycle"]
            assert cycle[0] == cycle[-1] == source and cycle[1] == dest
            assert set(pairwise(cycle[1:])) <= others
        else:
            assert allow_cycle or not closes
            graph[name] = (source, dest)
        driver.machine.check()
    assert {
        name: (r.route.source, r.route.dest) for name, r in driver.machine.routers.routers.items()
    } == graph


def reaches(edges: set[tuple[str, str]], start: str, end: str) -> bool:
    found = {start}
    while True:
        more = {dest for source, dest in edges if source in found} - found
        if not more:
            return end in found
        found |= more
