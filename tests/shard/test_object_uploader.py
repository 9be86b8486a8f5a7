"""Goal: a write to an object box is answered and shown when it is in the store and not before, whatever the
store does; and what is in the store stays little, and belongs to one server.

Method: a real engine, log and folder; a store of files that fails when it is told to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shard.offline.reshard import ReshardPlan, reshard
from shard.storage.cold import FolderCold
from shard.storage.files import Disk
from shard.transfer import object_chains
from streams.protocol.errors import BoxNotFound, ColdStoreUnavailable, InvalidRequest, Throttled
from streams.protocol.messages import commands
from streams.protocol.model.slots import SLOTS, slot_of
from tests.support.machines import records_of
from tests.support.objects import FaultyStore, Life, living, put_back


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    (tmp_path / "store").mkdir()
    return FaultyStore(FolderCold(str(tmp_path / "store"), Disk()))


async def datas(life: Life, box: str = "b") -> list[Any]:
    return [record["data"] for record in records_of(await life.ask(commands.ReadBox(box=box)))]


def restored(machine: Any, box: str = "b") -> list[int]:
    log = machine.boxes[box].log
    return [seq for seq in range(1, log.head_seq + 1) if log.is_live(seq)]


async def test_nothing_is_answered_or_shown_while_the_store_is_away(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "shard", store) as life:
        await life.put()
        await life.put("here", durability="fsync")
        await life.append("before")
        store.is_away.set()
        waiting = life.write("while away", idempotency_key="k")
        fence = life.send(commands.SetFence("b", "mine"))
        await life.append("others go on", box="here")
        assert waiting.found is None and fence.found is None
        assert life.machine.boxes["b"].log.visible_seq == 1
        repeated = life.write("while away", idempotency_key="k", fencing_token="mine")
        assert repeated.found is None, "it rests on a write that may yet vanish"
        store.is_away.clear()
        assert (await waiting.reply()).first_seq == (await repeated.reply()).first_seq == 2
        await fence.reply()
        assert await datas(life) == ["before", "while away"]


async def test_a_put_that_fails_is_repeated_until_it_is_there(tmp_path: Path, store: FaultyStore) -> None:
    async with living(tmp_path / "shard", store) as life:
        await life.put()
        failing = {store.writes + 1: False, store.writes + 2: True, store.writes + 4: True}
        store.failing = dict(failing)
        for number in range(5):
            await life.append(number)
        assert max(failing) < store.writes
    machine, found = put_back(store, tmp_path / "back")
    assert restored(machine) == [1, 2, 3, 4, 5] and found.left_out == 0


async def test_writes_are_told_to_wait_when_too_much_is_on_its_way(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "shard", store, machine={"backlog_bytes_max": 10_000}) as life:
        await life.put()
        await life.put("here", durability="disk")
        store.is_away.set()
        waiting = [life.write("x" * 3_000) for _ in range(4)]
        with pytest.raises(Throttled):
            await life.append("one too many")
        await life.append("others go on", box="here")
        store.is_away.clear()
        assert [(await each.reply()).first_seq for each in waiting] == [1, 2, 3, 4]
        assert (await life.append("again")).first_seq == 5


async def test_what_was_not_told_to_have_arrived_is_put_again_and_shown_after_that(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "shard", store, stops=False) as life:
        await life.put()
        await life.append("acked")
        store.is_away.set()
        life.write("not acked")
        await life.until(lambda: life.machine.durable_lsn == life.machine.lsn)
    async with living(tmp_path / "shard", store, stops=False) as life:
        assert await datas(life) == ["acked"], "what was told before can be read while the store is away"
        store.is_away.clear()
        await life.until(lambda: life.machine.boxes["b"].log.visible_seq == 2)
        assert await datas(life) == ["acked", "not acked"]
    machine, _ = put_back(store, tmp_path / "back")
    assert restored(machine) == [1, 2]


async def test_after_an_orderly_end_nothing_has_to_be_caught_up_with(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "shard", store) as life:
        await life.put()
        await life.append("x")
        await life.ask(commands.DeleteRecords("b", 1))
    store.is_away.set()
    async with living(tmp_path / "shard", store) as life:
        assert not life.machine.uploading.needs_base_lsn and await datas(life) == ["x"]
        store.is_away.clear()
        assert (await life.append("y")).first_seq == 2


async def test_a_deletion_is_told_when_it_cannot_be_undone(tmp_path: Path, store: FaultyStore) -> None:
    async with living(tmp_path / "shard", store) as life:
        await life.put()
        await life.append("x")
        store.is_away.set()
        gone = life.send(commands.DeleteBox("b", False))
        missing = life.send(commands.GetState("b", False))
        other = life.send(commands.GetState("never-there", False))
        assert isinstance(await other.reply(), BoxNotFound)
        assert gone.found is None and missing.found is None
        store.is_away.clear()
        assert (await gone.reply()).deleted and isinstance(await missing.reply(), BoxNotFound)
    machine, _ = put_back(store, tmp_path / "back")
    assert not machine.boxes


@pytest.mark.parametrize("before", ["memory", "disk", "fsync"])
async def test_a_box_comes_into_the_class_and_leaves_it(
    tmp_path: Path, store: FaultyStore, before: str
) -> None:
    async with living(tmp_path / "shard", store) as life:
        await life.put("other")
        await life.put(durability=before)
        await life.append("older")
        store.is_away.set()
        asked = life.send(commands.PutBox("b", commands.BoxPatch(durability="object")))  # type: ignore[attr-defined]
        assert asked.found is None
        store.is_away.clear()
        await asked.reply()
        await life.append("newer")
        machine, _ = put_back(store, tmp_path / "back")
        assert restored(machine) == [1, 2] and "other" in machine.boxes
        await life.put(durability=before)
        await life.append("elsewhere")
        assert await datas(life) == ["older", "newer", "elsewhere"]
    machine, _ = put_back(store, tmp_path / "back-again")
    assert list(machine.boxes) == ["other"], "the store does not know what it is now"


async def test_the_log_in_the_store_is_folded_up(tmp_path: Path, store: FaultyStore) -> None:
    async with living(tmp_path / "shard", store, compact_objects=5) as life:
        await life.put()
        for number in range(40):
            await life.append(number)
        await life.ask(commands.DeleteRecords("b", 11))
        await life.until(lambda: len(list(store.names("object/"))) < 20)
    machine, _ = put_back(store, tmp_path / "back")
    assert restored(machine) == list(range(11, 41))


async def test_without_a_store_the_class_is_refused_by_name(tmp_path: Path, store: FaultyStore) -> None:
    async with living(tmp_path / "shard", None) as life:
        with pytest.raises(InvalidRequest, match="STREAMS_COLD_DIR") as refused:
            await life.put()
        assert refused.value.detail == {"field": "durability"}
    async with living(tmp_path / "shard", store) as life:
        await life.put()
        await life.append("x")
    async with living(tmp_path / "shard", None) as life:
        assert await datas(life) == ["x"], "what is here can be read"
        with pytest.raises(ColdStoreUnavailable, match="STREAMS_COLD_DIR"):
            await life.append("y")
    async with living(tmp_path / "shard", store) as life:
        assert (await life.append("y")).first_seq == 2


async def test_a_store_that_holds_what_another_server_put_there_is_not_written_to(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "one", store, server="1") as life:
        await life.put()
        await life.append("mine")
    before = list(store.names())
    async with living(tmp_path / "two", store, server="2") as life:
        asked = life.send(commands.PutBox("b", commands.BoxPatch(durability="object")))  # type: ignore[attr-defined]
        await life.until(lambda: bool(life.machine.uploading.refusal))
        assert asked.found is None
        for command in (life.write("yours"), life.send(commands.GetState("b", False))):
            told = await command.reply()
            assert isinstance(told, ColdStoreUnavailable) and "streams restore" in str(told)
    assert list(store.names()) == before


async def test_a_server_that_was_restored_goes_on_in_a_chain_of_its_own(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "one", store, server="1") as life:
        await life.put()
        await life.append("first", idempotency_key="k")
        await life.put("gone")
    put_back(store, tmp_path / "back")
    async with living(tmp_path / "back" / "shard-00", store, server="2") as life:
        assert (await life.append("again", idempotency_key="k")).first_seq == 1
        assert (await life.append("second")).first_seq == 2
        await life.ask(commands.DeleteBox("gone", False))
        await life.until(lambda: len(object_chains.list_chains(store)) == 1)
        assert object_chains.list_chains(store)[0].name.server == "2"
    machine, _ = put_back(store, tmp_path / "back-again")
    assert list(machine.boxes) == ["b"] and restored(machine) == [1, 2]


async def test_after_resharding_each_slot_is_told_by_one_chain_at_any_time(
    tmp_path: Path, store: FaultyStore
) -> None:
    names = [f"box-{number}" for number in range(8)]
    slots = [(0, SLOTS // 2, 0), (SLOTS // 2, SLOTS, 1)]
    mine = {at: [name for name in names if (slot_of(name) >= SLOTS // 2) == bool(at)] for at in (0, 1)}
    assert len(mine[0]) >= 2 and len(mine[1]) >= 2
    async with living(tmp_path / "shard-00", store) as life:
        for name in names:
            await life.put(name)
            await life.append(name, box=name)
    plan = ReshardPlan(
        data_dir=str(tmp_path),
        sources=["shard-00"],
        targets=["shard-00-v2", "shard-01-v2"],
        slots=slots,
        old_slots=[(0, SLOTS, 0)],
    )
    reshard(Disk(), plan, boot_id="boot", now_ms=1_000_000)
    async with living(tmp_path / "shard-01-v2", store, shard=1, slots=slots) as life:
        gone, kept = mine[1][0], mine[1][1]
        await life.ask(commands.DeleteBox(gone, False))
        await life.append("newer", box=kept)
    assert len(object_chains.list_chains(store)) == 2, "the other half is told by the old chain alone"
    machine, _ = put_back(store, tmp_path / "back")
    assert set(machine.boxes) == set(names) - {gone} and restored(machine, kept) == [1, 2]
    async with living(tmp_path / "shard-00-v2", store, shard=0, slots=slots) as life:
        await life.append("newer", box=mine[0][0])
        await life.until(lambda: {chain.name.number for chain in object_chains.list_chains(store)} == {2, 3})
    machine, _ = put_back(store, tmp_path / "back-again")
    assert set(machine.boxes) == set(names) - {gone}
    assert restored(machine, kept) == restored(machine, mine[0][0]) == [1, 2]


async def test_in_another_store_everything_is_put_before_anything_is_answered(
    tmp_path: Path, store: FaultyStore
) -> None:
    async with living(tmp_path / "shard", store) as life:
        await life.put()
        await life.append("there")
    (tmp_path / "other").mkdir()
    other = FaultyStore(FolderCold(str(tmp_path / "other"), Disk()))
    other.is_away.set()
    async with living(tmp_path / "shard", other) as life:
        waiting = life.write("here")
        assert await datas(life) == ["there"]
        other.is_away.clear()
        assert (await waiting.reply()).first_seq == 2
    machine, _ = put_back(other, tmp_path / "back")
    assert restored(machine) == [1, 2]
