"""Watching through the client (v0 §7): in order, each record once, through everything that ends a
connection."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

import streams
from streams import BoxDeleted, CaughtUp, Record, Tombstone
from streams.client._sync.watch import BoxWatch
from streams.protocol.errors import BoxNotFound
from streams.testing import Server, running_server
from tests.support.crashing import eventually


def take(watch: Any, count: int) -> list[Any]:
    found = []
    for item in watch:
        found.append(item)
        if len(found) == count:
            break
    return found


def data(items: list[Any]) -> list[Any]:
    return [item.data for item in items]


def test_what_is_there_and_what_comes(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append_batch([streams.Entry(1, tag="t"), 2])
    watch = box.watch(0)
    first, second = take(watch, 2)
    assert (first.seq, first.data, first.tag, second.data) == (1, 1, "t", 2)
    assert watch.cursor == 2
    box.append(3)
    assert data(take(watch, 1)) == [3]
    watch.close()


def test_without_a_place_only_what_comes_is_shown(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append(1)
    watch = client.watch({name: None})
    items = iter(watch)
    assert next(items) == (name, CaughtUp(name, 1))
    box.append(2)
    _, record = next(items)
    assert isinstance(record, Record) and record.data == 2


def test_many_boxes_over_one_connection(client: streams.Client, name: str) -> None:
    names = [f"{name}.{n}" for n in range(4)]  # on both shards
    for each in names:
        client.box(each).append_batch([f"{each}-{n}" for n in range(3)])
    found: dict[str, list[Any]] = {}
    for box, item in client.watch(dict.fromkeys(names, 0)):
        if isinstance(item, Record):
            found.setdefault(box, []).append(item.data)
        if sum(map(len, found.values())) == 12:
            break
    assert found == {each: [f"{each}-{n}" for n in range(3)] for each in names}


def test_loss_and_the_end_of_a_box_are_told(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.create(cap_records=1)
    box.append(1)
    box.append(2)
    watch = client.watch({name: 0})
    items = iter(watch)
    _, gap = next(items)
    assert isinstance(gap, Tombstone) and (gap.gap_from, gap.gap_to) == (1, 1)
    _, record = next(items)
    assert isinstance(record, Record) and record.data == 2
    box.drop()
    rest = [item for _, item in items]
    assert isinstance(rest[-1], BoxDeleted), "a watch of nothing ends"
    with pytest.raises(BoxNotFound):
        box.watch(0).__next__()


def test_a_box_that_is_deleted_ends_its_own_watch(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append(1)
    watch = box.watch(0)
    assert data(take(watch, 1)) == [1]
    box.drop()
    with pytest.raises(BoxNotFound):
        next(watch)


def test_a_watch_goes_on_through_kills_without_gap_or_repeat(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=2) as server, streams.Client(server.url) as client:
        boxes = [f"b{n}" for n in range(4)]
        for box in boxes:
            client.box(box).create(durability="fsync")
        found: dict[str, list[int]] = {box: [] for box in boxes}
        done = threading.Event()

        def watching() -> None:
            with streams.Client(server.url) as other:
                for box, item in other.watch(dict.fromkeys(boxes, 0)):
                    if isinstance(item, Record):
                        found[box].append(item.data)
                        if all(len(seen) == 40 for seen in found.values()):
                            done.set()
                            return

        threading.Thread(target=watching, daemon=True).start()
        for round in range(4):
            for box in boxes:
                client.box(box).append_batch(list(range(round * 10, round * 10 + 10)))
            eventually(lambda round=round: all(len(seen) >= round * 10 + 1 for seen in found.values()))
            _kill(server, ("shard", "gateway", "shard", "none")[round])
        assert done.wait(90), found
        assert found == {box: list(range(40)) for box in boxes}


def _kill(server: Server, kind: str) -> None:
    if kind == "shard":
        os.kill(eventually(lambda: server.shard_pids().get(0)), signal.SIGKILL)
    elif kind == "gateway":
        os.kill(eventually(lambda: server.gateway_pids().get(0)), signal.SIGKILL)


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_tasks_watch_too(loop: str, server: Server, name: str) -> None:
    async def walk() -> None:
        async with streams.AsyncClient(server.url) as client:
            box = client.box(name)
            await box.append_batch([1, 2])
            watch = box.watch(0)
            found = []
            async for item in watch:
                found.append(item.data)  # type: ignore[union-attr]
                if len(found) == 2:
                    await box.append(3)
                if len(found) == 3:
                    break
            await watch.aclose()
            assert found == [1, 2, 3]

    if loop == "trio":
        trio.run(walk)
    else:
        asyncio.run(walk())


def test_a_watch_is_shown_by_where_it_is(client: streams.Client, name: str) -> None:
    client.box(name).append(1)
    watch = client.box(name).watch(0)
    assert isinstance(watch, BoxWatch) and name in repr(watch)
