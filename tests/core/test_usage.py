"""Goal: a key has no more than its limits allow, counted exactly in one shard (v0 §12).

Method: commands to a machine whose accounts are those of a few keys; after each history the sums are held
against the boxes (`Machine.check`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from shard.core.limits.usage import Usage
from shard.core.machine import Machine
from streams.protocol.access.grants import ALL, Grant
from streams.protocol.access.key_limits import ExchangeUse, Limits, Use
from streams.protocol.access.keys import Key
from streams.protocol.errors import Throttled
from streams.protocol.messages import bulk, commands, forwards, queues, routers, s2
from streams.protocol.payloads.packed import pack
from tests.support.machines import Driver, columns, patch, put_of, random_command, random_history


def key_of(id: str, *prefixes: str, **limits: int) -> Key:
    return Key(id * 3, Grant(ALL, prefixes), id, Limits(**limits))


def started(machine: Machine | None = None) -> Driver:
    driver = Driver(machine)
    driver.start("boot")
    return driver


def with_keys(*keys: Key, driver: Driver | None = None) -> Driver:
    driver = driver or started()
    count(driver.machine.usage, *keys)
    return driver


def count(usage: Usage, *keys: Key, step: int = 3) -> None:
    usage.set_accounts(keys)
    while usage.step(step):
        pass


def append(driver: Driver, box: str, account: str = "a", **options: Any) -> Any:
    return driver.ask(commands.Append(box=box, columns=columns("x" * 100), account=account, **options))


def refused(driver: Driver, limit: str, command: Any) -> Throttled:
    lsn = driver.machine.lsn
    with pytest.raises(Throttled) as caught:
        driver.ask(command)
    assert caught.value.detail["limit"] == limit and driver.machine.lsn == lsn
    return caught.value


def use(driver: Driver, id: str = "a") -> Use:
    found: Use = driver.ask(ExchangeUse([id])).use[id]
    return found


# -- each limit


def test_boxes_of_a_key_are_limited_however_they_come_to_be() -> None:
    driver = with_keys(key_of("a", "a.", boxes=2))
    append(driver, "a.1")
    append(driver, "b.1", "")
    driver.ask(commands.PutBox("a.2", patch(), "a"))
    one_more = commands.Append(box="a.3", columns=columns(1), account="a")
    error = refused(driver, "boxes_per_key", one_more)
    assert "2 of 2 boxes; delete some boxes" in error.message
    refused(driver, "boxes_per_key", commands.PutBox("a.3", patch(), "a"))
    driver.ask(commands.PutBox("a.2", patch(cap_records=9), "a"))  # one that is there
    append(driver, "a.1")
    append(driver, "a.4", "")  # of a key without limits, or another one
    assert use(driver).boxes == 3
    for name in ("a.4", "a.1"):
        driver.ask(commands.DeleteBox(name))
    driver.ask(one_more)
    assert use(driver).boxes == 2


def test_streams_and_basins_of_the_s2_api_count_as_boxes() -> None:
    driver = with_keys(key_of("a", "tenant-a", boxes=2), key_of("b", "tenant-b/", boxes=2))

    def basin(name: str, account: str) -> Any:
        return s2.PutBasin(name=name, config=s2.BasinConfig(), account=account)

    def stream(box: str, account: str) -> Any:
        spec = s2.Spec()
        return s2.PutStream(box=box, basin_number=1, asked=spec, defaults=spec, account=account)

    driver.ask(basin("tenant-a1", "a"))
    driver.ask(stream("tenant-a1/s", "a"))
    refused(driver, "boxes_per_key", stream("tenant-a1/t", "a"))
    refused(driver, "boxes_per_key", basin("tenant-a2", "a"))
    driver.ask(basin("tenant-b", "b"))
    driver.ask(stream("tenant-b/s", "b"))
    assert (use(driver).boxes, use(driver, "b").boxes) == (2, 2)
    driver.machine.check()


def test_bytes_of_a_key_are_limited_and_come_back_with_what_is_deleted() -> None:
    driver = with_keys(key_of("a", "a.", stored_bytes=300))
    append(driver, "a.1")
    append(driver, "a.2")
    one_more = commands.Append(box="a.1", columns=columns("x" * 100), account="a")
    refused(driver, "stored_bytes_per_key", one_more)
    assert use(driver).stored_bytes == driver.state("a.1").bytes + driver.state("a.2").bytes
    driver.delete(before_seq=2, box="a.1")
    driver.ask(one_more)
    driver.ask(commands.DeleteBox("a.2"))
    append(driver, "a.3")
    driver.machine.check()


def test_appends_to_streams_are_held_to_the_bytes_of_the_key_and_of_the_server() -> None:
    spec = s2.Spec()
    put = s2.PutStream(box="tenant-a/s", basin_number=1, asked=spec, defaults=spec)
    tail = b"\x22\x64" + b"x" * 100

    driver = with_keys(key_of("a", "tenant-a/", stored_bytes=300))
    driver.ask(put)
    for _ in range(2):
        driver.ask(s2.AppendStream(box="tenant-a/s", tails=[tail], account="a"))
    refused(driver, "stored_bytes_per_key", s2.AppendStream(box="tenant-a/s", tails=[tail], account="a"))

    driver = with_keys(driver=started(Machine(bytes_max=300)))
    driver.ask(put)
    for _ in range(2):
        driver.ask(s2.AppendStream(box="tenant-a/s", tails=[tail]))
    refused(driver, "total_bytes", s2.AppendStream(box="tenant-a/s", tails=[tail]))


def test_a_commit_is_held_to_the_bytes_of_the_server_and_asking_first_does_not_count() -> None:
    driver = started(Machine(bytes_max=500))
    for epoch in (1, 2):
        driver.ask(put_of(bulk.Txn("w", epoch), "p", 0, pack(["b"], [1], [b"1" * 300])))
    for _ in range(3):
        driver.ask(bulk.TxnCommit(bulk.Txn("w", 1), [("p", 1)], True))
    driver.ask(bulk.TxnCommit(bulk.Txn("w", 1), [("p", 1)]))
    refused(driver, "total_bytes", bulk.TxnCommit(bulk.Txn("w", 2), [("p", 1)]))


def test_idempotency_keys_of_a_key_are_limited_until_they_lapse() -> None:
    driver = with_keys(key_of("a", "a.", idempotency_keys=2))
    append(driver, "a.1", idempotency_key="k1")
    append(driver, "a.2", idempotency_key="k2")
    assert append(driver, "a.2", idempotency_key="k2").deduped
    third = commands.Append(box="a.1", columns=columns(1), account="a", idempotency_key="k3")
    refused(driver, "idempotency_keys_per_key", third)
    append(driver, "a.1")
    driver.now_ms += driver.state("a.1").config.idempotency_window_ms + 1
    driver.ask(third)
    driver.now_ms += 1_000_000
    driver.tick()
    assert use(driver).idempotency_keys == 0
    driver.machine.check()


def test_groups_of_a_key_are_limited() -> None:
    driver = with_keys(key_of("a", "a.", groups=1))
    append(driver, "a.1")
    append(driver, "a.2")
    driver.ask(queues.CommitGroup("a.1", "g", 1, None, "a"))
    driver.ask(queues.CommitGroup("a.1", "g", 0, None, "a"))
    refused(driver, "groups_per_key", queues.CommitGroup("a.2", "g", 1, None, "a"))
    driver.ask(queues.DeleteGroup("a.1", "g"))
    driver.ask(queues.CommitGroup("a.2", "g", 1, None, "a"))
    driver.machine.check()


def test_routers_of_a_key_are_limited() -> None:
    driver = with_keys(key_of("a", "a.", routers=1))
    route = routers.Route(source="a.1", dest="a.2")
    driver.ask(routers.PutRouter("a.r1", route, None, "a"))
    driver.ask(routers.PutRouter("a.r1", route, None, "a"))
    driver.ask(routers.PutRouter("b.r", route, None))
    refused(driver, "routers_per_key", routers.PutRouter("a.r2", route, None, "a"))


def test_watch_sessions_of_a_key_are_limited_until_they_lapse() -> None:
    driver = with_keys(key_of("a", "a.", sessions=1))
    driver.ask(commands.PutSession("wid_1", b"{}", 1000, 0, "a"))
    driver.ask(commands.PutSession("wid_2", b"{}", 1000, 0, "b"))
    refused(driver, "sessions_per_key", commands.PutSession("wid_3", b"{}", 1000, 0, "a"))
    driver.ask(commands.PutSession("wid_1", b"{}", 1000, 1, "a"))  # put back by its stream
    assert use(driver).sessions == 1
    driver.now_ms += 1001
    driver.ask(commands.PutSession("wid_3", b"{}", 1000, 0, "a"))
    assert use(driver).sessions == 1


def test_transactions_of_a_key_are_limited_in_what_they_hold_and_in_what_they_make() -> None:
    size = put_of(bulk.Txn("w", 1), "p", 0, pack(["a.1"], [1], [b"1" * 200]))
    driver = with_keys(key_of("a", "a.", boxes=1, txn_bytes=3000, stored_bytes=500))
    caller = bulk.Caller("a", Grant(ALL, ("a.",)))

    def put(epoch: int, box: str = "a.1", data: bytes = b"1" * 200) -> bulk.TxnPut:
        command = put_of(bulk.Txn("w", epoch), "p", 0, pack([box], [1], [data]))
        return bulk.TxnPut(
            command.txn, command.parcel, command.chunk, command.rows_head, command.body, None, caller
        )

    driver.ask(put(1))
    driver.ask(put(2))
    refused(driver, "txn_bytes_per_key", put(3))
    assert use(driver).txn_bytes == driver.machine.txns.bytes > 2 * len(size.body)
    driver.ask(bulk.TxnCommit(bulk.Txn("w", 1), [("p", 1)], False, caller))
    driver.ask(bulk.TxnAbort(bulk.Txn("w", 2), [], caller))
    assert use(driver).txn_bytes == 0 and use(driver).stored_bytes > 200
    refused(driver, "stored_bytes_per_key", put(4, data=b"1" * 400))
    driver.ask(put(5, "a.2", b"1"))
    refused(driver, "boxes_per_key", bulk.TxnCommit(bulk.Txn("w", 5), [("p", 1)], False, caller))
    driver.machine.check()


def test_copies_and_dead_letters_make_no_box_beyond_the_limit_of_those_who_would_have_it() -> None:
    driver = with_keys(key_of("a", "a.", boxes=1, stored_bytes=300), key_of("whole", boxes=1))
    append(driver, "a.1")

    def forward(box: str, origin: str, after: int = 0) -> forwards.Forward:
        head = forwards.ForwardHead(
            box=box, origin=origin, life=1, after=after, upto=after + 1, count=1, bind=True, create=True
        )
        return forwards.Forward(head, b'{"$seq":1,"$ts":1,"data":"' + b"x" * 100 + b'"}')

    for origin in ("r#1", "a.queue"):
        refused(driver, "boxes_per_key", forward("a.2", origin))
    driver.ask(forward("b.1", "r#1"))
    append(driver, "a.1")
    refused(driver, "stored_bytes_per_key", forward("a.1", "r#2"))
    driver.machine.check()


# -- what counts


def test_what_is_used_elsewhere_counts_and_one_shard_alone_is_exact() -> None:
    driver = with_keys(key_of("a", "a.", boxes=3))
    driver.ask(ExchangeUse([], {"a": Use(boxes=2), "unknown": Use(boxes=9)}))
    append(driver, "a.1")
    refused(driver, "boxes_per_key", commands.PutBox("a.2", patch(), "a"))
    assert driver.ask(ExchangeUse(["a", "unknown"], {"a": Use(boxes=1)})).use == {"a": use(driver)}
    driver.ask(commands.PutBox("a.2", patch(), "a"))


def test_a_key_without_prefixes_is_counted_against_everything() -> None:
    driver = with_keys(key_of("a", boxes=2, stored_bytes=1000))
    append(driver, "b.1", "")
    append(driver, "c.1", "a")
    refused(driver, "boxes_per_key", commands.PutBox("d.1", patch(), "a"))
    assert use(driver).stored_bytes == driver.state("b.1").bytes + driver.state("c.1").bytes


def test_prefixes_that_cover_each_other_count_once_and_keys_may_share_names() -> None:
    keys = (key_of("a", "a.x", "a.", boxes=9, stored_bytes=9000), key_of("b", "a.x", stored_bytes=9000))
    driver = with_keys(*keys)
    for box in ("a.x1", "a.y1", "a.", "a", "a/", "b"):
        append(driver, box, "")
    assert use(driver).boxes == 3 and use(driver, "b").boxes == 1
    driver.machine.check()


def test_an_account_that_nobody_knows_here_has_no_limits_yet() -> None:
    driver = with_keys()
    append(driver, "a.1", "not-read-yet")
    assert not driver.machine.usage.is_on


def test_other_limits_count_at_once_and_other_prefixes_after_counting() -> None:
    driver = with_keys(key_of("a", "a.", stored_bytes=9000, boxes=9))
    append(driver, "a.1")
    append(driver, "b.1", "")
    append(driver, "c.1", "")
    driver.ask(ExchangeUse([], {"a": Use(boxes=1)}))
    usage = driver.machine.usage
    before = use(driver)
    usage.set_accounts([key_of("a", "a.", stored_bytes=10)])
    assert usage.is_counted and use(driver) == before
    refused(driver, "stored_bytes_per_key", commands.Append(box="a.1", columns=columns(1), account="a"))
    usage.set_accounts([key_of("a", "a.", "b.", stored_bytes=9000, boxes=9)])
    assert not usage.is_counted and "a.1" in driver.machine.boxes
    append(driver, "b.1", "")  # noted before it is counted, and not twice
    driver.ask(commands.DeleteBox("c.1"))  # never counted
    while usage.step(1):
        pass
    assert use(driver).boxes == 2 and usage.accounts["a"].elsewhere == Use(boxes=1)
    driver.machine.check()
    usage.set_accounts([])
    assert not usage.is_on and usage.step(1) is False
    assert "accounts" in repr(usage)


@pytest.mark.parametrize("seed", range(3))
def test_the_sums_are_those_of_the_boxes_after_any_history(seed: int) -> None:
    driver = random_history(seed, 60)
    keys = [key_of("a", "b", stored_bytes=1 << 40), key_of("c", groups=1 << 40)]
    driver.machine.usage.set_accounts(keys)
    rng = random.Random(seed)
    for number in range(120):
        driver.do(random_command(rng, driver, 1000 + number))
        driver.machine.usage.step(1)
        driver.now_ms += rng.randrange(2000)
        driver.tick()
    while driver.machine.usage.step(1):
        pass
    driver.machine.check()
    assert repr(driver.machine.usage.accounts["a"]).startswith("<Account a")
