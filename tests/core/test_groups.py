"""Goal: a group is as durable as a write, and no client sees a commit that may still be lost (§10)."""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.boxes import group_handlers as groups_module
from streams.protocol.errors import GroupNotFound, InvalidRequest, SeqMismatch, Throttled
from streams.protocol.messages import commands, queues
from tests.support.machines import Driver, seqs_of


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    driver.put(durability="fsync")
    driver.append(1, 2, 3)
    return driver


def commit(driver: Driver, cursor: int, group: str = "g", **options: Any) -> queues.CommitGroupReply:
    reply = driver.ask(queues.CommitGroup("b", group, cursor, **options))
    assert isinstance(reply, queues.CommitGroupReply)
    return reply


def test_a_commit_and_whatever_tells_of_it_wait_for_the_disk(driver: Driver) -> None:
    outcome = driver.do(queues.CommitGroup("b", "g", 1))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn
    tellers: list[commands.Command] = [
        queues.CommitGroup("b", "g", 1),
        queues.GetGroup("b", "g"),
        queues.ListGroups("b"),
        commands.ReadBox(box="b", group="g"),
    ]
    for command in tellers:
        assert driver.do(command).waits_for_lsn == outcome.waits_for_lsn
    driver.sync()
    gone = driver.do(queues.DeleteGroup("b", "g"))
    for command in (queues.DeleteGroup("b", "g"), queues.ListGroups("b"), queues.GetGroup("b", "g")):
        assert driver.do(command).waits_for_lsn == gone.waits_for_lsn > 0


def test_a_repeated_commit_logs_nothing(driver: Driver) -> None:
    first = commit(driver, 2)
    driver.now_ms += 10
    assert driver.do(queues.CommitGroup("b", "g", 2)).changes == []
    assert commit(driver, 2).updated_ts == first.updated_ts


def test_a_cursor_is_something_that_can_have_been_read(driver: Driver) -> None:
    driver.do(driver.write(4))
    with pytest.raises(InvalidRequest, match="cursor"):
        commit(driver, 4)
    driver.sync()
    assert commit(driver, 4).lag == 0


def test_conditions(driver: Driver) -> None:
    commit(driver, 1, if_cursor=0)
    with pytest.raises(SeqMismatch) as refused:
        commit(driver, 2, if_cursor=0)
    assert refused.value.detail == {"cursor": 1}
    commit(driver, 2, if_cursor=1)


def test_reading_needs_a_group(driver: Driver) -> None:
    with pytest.raises(GroupNotFound):
        driver.read(group="g")
    commit(driver, 2)
    assert seqs_of(driver.read(group="g")) == [3]


def test_a_box_has_so_many_groups(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "GROUPS_MAX", 2)
    commit(driver, 1, "a")
    commit(driver, 1, "b")
    with pytest.raises(Throttled):
        commit(driver, 1, "c")
    assert commit(driver, 2, "a").cursor == 2


def test_groups_outlive_a_crash_and_a_snapshot_but_not_a_memory_box(driver: Driver) -> None:
    commit(driver, 1, "a")
    commit(driver, 2, "b")
    driver.ask(queues.DeleteGroup("b", "a"))
    driver.put("m", durability="memory")
    driver.ask(queues.CommitGroup("m", "g", 0))
    for state in (None, driver.machine.snapshot()):
        survivor = driver.reborn(state=state)
        survivor.start("boot")
        assert survivor.machine.boxes["b"].groups.facts() == [("b", 2, driver.now_ms)]
        assert len(survivor.machine.boxes["m"].groups) == 0
        assert repr(survivor.machine.boxes["b"].groups).startswith("<Groups [('b'")


def test_a_box_that_leaves_the_memory_takes_its_groups_along(driver: Driver) -> None:
    driver.put("m", durability="memory")
    driver.ask(queues.CommitGroup("m", "g", 0))
    driver.put("m", durability="fsync")
    assert driver.reborn().machine.boxes["m"].groups.facts() == [("g", 0, driver.now_ms)]


def test_pages_of_groups(driver: Driver) -> None:
    for name in ("a", "ab", "b", "c"):
        commit(driver, 0, name)
    page = driver.ask(queues.ListGroups("b", "", "a", 2))
    assert ([group.group for group in page.groups], page.more) == (["ab", "b"], True)
    page = driver.ask(queues.ListGroups("b", "a", "", 2))
    assert ([group.group for group in page.groups], page.more) == (["a", "ab"], False)
