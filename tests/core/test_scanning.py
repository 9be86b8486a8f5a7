"""Goal: a scan brings exactly what a reader of the box gets, in pages of any size, as buffers (wire.md);
states and times of many boxes are those of each.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from streams.direct.runs import Run, ScanPage, read_page
from streams.protocol.errors import BoxNotFound
from streams.protocol.messages import bulk, commands, s2
from streams.protocol.model import binary_records
from streams.protocol.payloads import scans
from streams.protocol.payloads.scans import ScanReply
from tests.support.machines import SWEEP_FACTOR, Driver, random_history, records_of


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.start("boot")
    return driver


def scan(driver: Driver, box: str = "b", **options: Any) -> ScanPage:
    reply = driver.ask(commands.Scan(box=box, **options))
    assert isinstance(reply, ScanReply)
    return read_page(box, msgspec.msgpack.encode(reply.head), b"".join(reply.parts))


def records_in(run: Run) -> list[dict[str, Any]]:
    """The records as a reader without a filter gets them."""
    found: list[dict[str, Any]] = []
    for seq, ts, node, tag, meta, data in zip(
        run.seq_list(), run.time_list(), run.node_list(), run.tag_list(), run.meta_list(), run.datas(),
        strict=True,
    ):  # fmt: skip
        record: dict[str, Any] = {"$seq": seq, "$ts": ts}
        record |= {"$node": node} if node else {}
        record |= {"$tag": tag} if tag else {}
        record |= {"meta": msgspec.json.decode(meta)} if meta else {}
        found.append({**record, "data": msgspec.json.decode(data)})
    return found


JOB_FIELDS = {"$ordering_key", "$job_priority", "$deliver_at"}


def read_all(driver: Driver, box: str) -> tuple[list[dict[str, Any]], list[tuple[int, int, str, int]]]:
    """Records and gaps, as diffs tell them. Without job fields, which scans do not have."""
    found: list[dict[str, Any]] = []
    gaps = []
    at = 0
    while True:
        reply = driver.read(at, box=box, include_tags=True, limit=1000)
        if reply.tombstone is not None:
            gap = reply.tombstone
            gaps.append((gap.gap_from, gap.gap_to, gap.reason, gap.missed_estimate))
        found += [
            {name: value for name, value in record.items() if name not in JOB_FIELDS}
            for record in records_of(reply)
        ]
        at = reply.next_from_seq
        if at == reply.head_seq:
            return found, gaps


def scan_all(driver: Driver, box: str, max_bytes: int) -> tuple[list[dict[str, Any]], list[Any]]:
    found: list[dict[str, Any]] = []
    gaps = []
    at = 0
    while True:
        page = scan(driver, box, from_seq=at, max_bytes=max_bytes)
        if page.tombstone is not None:
            gap = page.tombstone
            gaps.append((gap.gap_from, gap.gap_to, gap.reason, gap.missed_estimate))
        for run in page.runs:
            assert sum(map(len, run.datas())) <= max(max_bytes, len(run.datas()[0]))
            found += records_in(run)
        assert page.next_from_seq > at or page.next_from_seq == page.head_seq
        at = page.next_from_seq
        if at == page.head_seq:
            return found, gaps


@pytest.mark.parametrize("seed", range(8 * SWEEP_FACTOR))
def test_scans_of_any_box_bring_what_reads_bring(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "_SHORT_RECORDS", random.Random(seed).choice((1, 2, 4, 32)))
    monkeypatch.setattr(scans, "_TOGETHER_MAX", 5)
    driver = random_history(seed, 150)
    for box in list(driver.machine.boxes):
        expected = read_all(driver, box)
        for max_bytes in (1, 150, 1 << 20):
            assert scan_all(driver, box, max_bytes) == expected


def test_a_long_regular_batch_is_sent_as_it_is_stored(driver: Driver) -> None:
    driver.append(*({"data": {"n": n}, "tag": f"t{n}", "node": "n"} for n in range(120)))
    page = scan(driver)
    assert [(run.count, run.first_seq) for run in page.runs] == [(9, 1), (90, 10), (21, 100)]
    assert all(run.prefix for run in page.runs)
    assert [record["data"]["n"] for run in page.runs for record in records_in(run)] == list(range(120))
    assert page.runs[1].node == "n" and len(page.runs[1].nodes) == 0
    middle = scan(driver, from_seq=20, to_seq=70)
    assert middle.next_from_seq == 70
    assert [record["$seq"] for run in middle.runs for record in records_in(run)] == list(range(21, 71))


def test_only_the_columns_that_are_wanted_are_sent(driver: Driver) -> None:
    driver.append(*({"data": "x" * 50, "tag": "t", "node": "n", "meta": {"m": n}} for n in range(40)))
    driver.append(*({"data": "x" * 50, "tag": "t", "node": "n"} for n in range(40)))
    for wanted in range(scans.ALL + 1):
        page = scan(driver, columns=wanted)
        for run in page.runs:
            assert bool(len(run.values)) == bool(wanted & scans.DATA)
            assert bool(len(run.tags)) == bool(wanted & scans.TAGS)
            assert (run.node == "n") == bool(wanted & scans.NODES)
            assert run.seq_list()[0] == run.first_seq
        assert any(len(run.metas) for run in page.runs) == bool(wanted & scans.META)


def test_payloads_that_say_meta_are_not_taken_for_metas(driver: Driver) -> None:
    """Nine seqs of one digit and more of two: a batch whose ends are explicit."""
    driver.append(*({"data": {"meta": {"m": n}}} for n in range(40)))
    assert [record["data"]["meta"]["m"] for run in scan(driver).runs for record in records_in(run)] == list(
        range(40)
    )


def test_a_scan_tells_of_loss_like_a_diff_and_of_another_life(driver: Driver) -> None:
    driver.put(cap_records=2)
    driver.append(1)
    driver.append(2)
    driver.append(3)
    page = scan(driver)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (1, 1, "cap")
    again = scan(driver, from_seq=3, generation=page.generation + 1)
    assert again.tombstone is not None and again.tombstone.reason == "recreated"
    with pytest.raises(BoxNotFound):
        scan(driver, "absent")


def test_a_scan_does_not_show_what_may_vanish(driver: Driver) -> None:
    driver.put(durability="fsync")
    driver.do(driver.write(1))
    reply: Any = driver.do(commands.Scan(box="b")).reply
    assert reply.head.head_seq == 0 and reply.parts == []


# -- many boxes


def test_states_are_paged_by_prefix_or_asked_by_name(driver: Driver) -> None:
    for box in ("a1", "a2", "a3", "b1"):
        driver.put(box, cap_records=2)
        driver.append(1, box=box)
    names = [each.box for each in driver.ask(bulk.States("a")).boxes]
    assert names == ["a1", "a2", "a3"]
    first = driver.ask(bulk.States("a", "", 2))
    assert [each.box for each in first.boxes] == ["a1", "a2"] and first.more
    second = driver.ask(bulk.States("a", "a2", 2))
    assert [each.box for each in second.boxes] == ["a3"] and not second.more
    assert driver.ask(bulk.States(boxes=["b1", "never", "a1", "a1"])).boxes[0].box == "a1"
    assert [each.box for each in driver.ask(bulk.States()).boxes] == ["a1", "a2", "a3", "b1"]


def test_a_state_is_what_the_box_says_of_itself(driver: Driver) -> None:
    driver.put(cap_records=2, type="queue", durability="fsync")
    driver.append(1)
    driver.append(2)
    driver.append(3)
    state = driver.state()
    (position,) = driver.ask(bulk.States()).boxes
    assert position == bulk.BoxPosition(
        "b", state.generation, state.earliest_seq, state.head_seq, 2, state.count, state.bytes, "queue",
        "fsync", 1000,
    )  # fmt: skip
    driver.do(driver.write(4, 5))
    (staged,) = driver.do(bulk.States()).reply.boxes  # type: ignore[union-attr]
    assert (staged.head_seq, staged.evict_floor) == (3, 4)


def test_what_a_state_tells_of_waits_until_it_cannot_vanish(driver: Driver) -> None:
    driver.put(durability="fsync")
    driver.append(1)
    outcome = driver.do(commands.DeleteRecords("b", before_seq=2))
    for command in (bulk.States(), bulk.Locate([("b", 0)])):
        assert driver.do(command).waits_for_lsn == outcome.waits_for_lsn > 0


def test_states_of_boxes_with_something_to_expire_do_not_wait_for_payloads(driver: Driver) -> None:
    driver.put(ttl_ms=100, timestamping={"mode": "client-prefer", "uncapped": True})
    driver.append({"data": 1, "ts": 900}, {"data": 2, "ts": 2_000})
    driver.seal()
    driver.forget()
    driver.now_ms = 1_500
    outcome = driver.machine.handle(bulk.States(), driver.now_ms)
    assert not outcome.needs and isinstance(outcome.reply, bulk.Positions)


def test_times_are_found_in_segments_and_behind_them(driver: Driver) -> None:
    driver.put(timestamping={"mode": "client-prefer", "uncapped": True})
    for ts in (100, 200, 300):
        driver.append({"data": 1, "ts": ts}, {"data": 2, "ts": ts + 50})
    driver.seal(batches=2)
    driver.forget()
    generation = driver.state().generation
    wanted = [0, 100, 101, 150, 151, 250, 300, 350, 351]
    located = driver.ask(bulk.Locate([("b", ts) for ts in wanted] + [("never", 0)]))
    assert located.seqs == [*((generation, seq) for seq in (1, 1, 2, 2, 3, 4, 5, 6, 7)), None]
    driver.delete(before_seq=3)
    assert driver.ask(bulk.Locate([("b", 0)])).seqs == [(generation, 3)]


def test_a_page_of_a_scan_has_one_record_at_least(driver: Driver) -> None:
    driver.append("x" * 100, "y" * 100)
    page = scan(driver, max_bytes=1)
    assert page.next_from_seq == 1 and len(page.runs) == 1


@pytest.mark.parametrize("max_bytes", [100, 2**20])
def test_records_of_a_stream_are_scanned_as_diffs_show_them(driver: Driver, max_bytes: int) -> None:
    """Whatever their bytes look like: one batch says `"meta":`, and is long and regular otherwise."""
    box = "the-basin/a/stream"
    driver.ask(s2.PutStream(box=box, basin_number=1, asked=s2.Spec(), defaults=s2.Spec(), cipher=None))
    tails = [binary_records.tail_of([], b'{"$seq":1,"meta":%d}' % number) for number in range(40)]
    tails[7] = binary_records.tail_of([(b"h", b"\xff")], b"\0")
    for given in (tails, tails[:1], [b""]):
        driver.ask(s2.AppendStream(box=box, tails=given))
    scanned, gaps = scan_all(driver, box, max_bytes)
    assert (scanned, gaps) == read_all(driver, box)
    assert len(scanned) == 42
    assert scanned[7]["meta"] == {"headers": [["aA==", "/w=="]]} and scanned[7]["data"] == "AA=="
