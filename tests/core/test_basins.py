"""Goal: the register of basins says what S2 promises (s2 §8), and tells nobody what may yet vanish."""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.s2 import basins as basins_module
from streams.protocol.errors import (
    BasinDeletionPending,
    BasinNotFound,
    Forbidden,
    ResourceAlreadyExists,
    Throttled,
)
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import BasinConfig, BasinPatch, Spec, SpecPatch
from tests.support.machines import Driver

NAME = "the-basin"


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def put(driver: Driver, name: str = NAME, **options: Any) -> s2.PutBasinReply:
    fields: dict[str, Any] = {"config": BasinConfig(), **options}
    reply = driver.ask(s2.PutBasin(name=name, **fields))
    assert isinstance(reply, s2.PutBasinReply)
    return reply


def restarted(driver: Driver) -> list[Driver]:
    survivors = [driver.reborn(), driver.reborn(state=driver.machine.snapshot())]
    for survivor in survivors:
        survivor.start("boot")
    return survivors


def test_a_basin_is_made_once_and_a_repeat_is_recognised(driver: Driver) -> None:
    config = BasinConfig(create_on_read=True)
    assert put(driver, config=config, token="t").result == "created"
    driver.ask(s2.PatchBasin(NAME, BasinPatch(create_on_append=True)))
    for survivor in (driver, *restarted(driver)):
        assert put(survivor, config=config, token="t").result == "noop"
        for other in ({"token": "t"}, {"config": config, "token": "u"}, {"config": config}):
            with pytest.raises(ResourceAlreadyExists):
                put(survivor, **other)


def test_ensuring_replaces_the_config(driver: Driver) -> None:
    assert put(driver, ensures=True).result == "created"
    assert put(driver, ensures=True).result == "noop"
    assert put(driver, ensures=True, config=BasinConfig(cipher="aegis-256")).result == "updated"
    with pytest.raises(Forbidden):
        put(driver, ensures=True, may_update=False)
    assert (
        put(driver, ensures=True, may_update=False, config=BasinConfig(cipher="aegis-256")).result == "noop"
    )
    found = driver.ask(s2.GetBasin(NAME)).basin
    assert (found.config.cipher, found.number) == ("aegis-256", 1)


def test_a_patch_changes_what_it_names(driver: Driver) -> None:
    put(driver, config=BasinConfig(defaults=Spec(age_secs=5, mode="arrival"), cipher="aegis-256"))
    patch = BasinPatch(defaults=SpecPatch(mode=None, uncapped=True), create_on_append=True)
    changed = driver.ask(s2.PatchBasin(NAME, patch)).basin.config
    assert changed == BasinConfig(
        defaults=Spec(age_secs=5, uncapped=True), cipher="aegis-256", create_on_append=True
    )
    bare = driver.ask(s2.PatchBasin(NAME, BasinPatch(defaults=None, cipher=None))).basin.config
    assert bare == BasinConfig(create_on_append=True)
    assert driver.do(s2.PatchBasin(NAME, BasinPatch())).changes == []
    with pytest.raises(BasinNotFound):
        driver.ask(s2.PatchBasin("no-basin", BasinPatch()))


def test_a_basin_is_there_until_it_is_dropped_and_never_again_with_its_number(driver: Driver) -> None:
    put(driver)
    drop = s2.DropBasin(NAME, 1)
    assert driver.ask(drop).basin is None  # not one that is in use
    driver.now_ms = 7_000
    for _ in range(2):
        assert driver.ask(s2.DeleteBasin(NAME)).basin.deleted_ms == 7_000
    with pytest.raises(BasinDeletionPending):
        put(driver, ensures=True)
    with pytest.raises(BasinDeletionPending):
        driver.ask(s2.PatchBasin(NAME, BasinPatch()))
    for survivor in restarted(driver):
        assert survivor.ask(s2.DropBasin(NAME, 2)).basin is None
        assert survivor.ask(drop).basin is not None
        assert survivor.ask(drop).basin is None
        assert survivor.ask(s2.GetBasin(NAME)).basin is None
        with pytest.raises(BasinNotFound):
            survivor.ask(s2.DeleteBasin(NAME))
        for again in restarted(survivor):
            assert put(again).basin.number == 2


def test_a_list_is_sorted_and_cut_where_it_is_told(driver: Driver) -> None:
    names = [f"basin-{letter}{letter}" for letter in "abcd"]
    for name in reversed(names):
        put(driver, name)
    put(driver, "other-basin")

    def listed(*asked: Any) -> tuple[list[str], bool]:
        page = driver.ask(s2.ListBasins(*asked))
        return [basin.name for basin in page.basins], page.more

    assert listed("basin-") == (names, False)
    assert listed("basin-", "basin-bb") == (names[2:], False)
    assert listed("", "", 2) == (names[:2], True)
    driver.ask(s2.DeleteBasin(names[1]))
    assert listed("", "", 9, True) == ([names[1]], False)


def test_every_answer_waits_for_the_last_change_of_the_register(driver: Driver) -> None:
    outcome = driver.do(s2.PutBasin(name=NAME, config=BasinConfig()))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn
    for command in (
        s2.GetBasin(NAME),
        s2.ListBasins(),
        s2.PutBasin(name=NAME, config=BasinConfig()),
        s2.PatchBasin("no-basin", BasinPatch()),
    ):
        assert driver.do(command).waits_for_lsn == outcome.waits_for_lsn
    driver.sync()
    assert driver.do(s2.GetBasin(NAME)).waits_for_lsn == 0


def test_there_is_a_limit_of_basins(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basins_module, "BASINS_MAX", 1)
    put(driver)
    with pytest.raises(Throttled):
        put(driver, "basin-two")
    assert put(driver, ensures=True).result == "noop"
