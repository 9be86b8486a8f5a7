"""Reads that wait, in their order and with their deadlines (`shard/engine/waiting_reads.py`)."""

from __future__ import annotations

from shard.engine.waiting_reads import WaitingRead, WaitingReads
from streams.protocol.messages.commands import ReadBox


def read(ticket: str, box: str = "b", deadline_s: float = 30.0) -> WaitingRead[str]:
    return WaitingRead(ReadBox(box=box, wait_ms=1), ticket, deadline_s)


def test_reads_of_a_box_are_taken_in_the_order_in_which_they_came() -> None:
    reads: WaitingReads[str] = WaitingReads()
    for ticket in ("one", "two"):
        reads.add(read(ticket))
    reads.add(read("elsewhere", box="c"))
    assert [each.ticket for each in reads.take("b")] == ["one", "two"]
    assert not reads.has("b") and reads.has("c")
    assert "one" in reads and len(reads) == 3, "they wait until they end"


def test_a_read_that_was_put_back_is_found_again() -> None:
    reads: WaitingReads[str] = WaitingReads()
    reads.add(read("one"))
    reads.put_back("b", reads.take("b"))
    assert reads.has("b") and reads.find("one") is not None


def test_reads_come_due_by_their_deadlines_and_not_after_they_ended() -> None:
    reads: WaitingReads[str] = WaitingReads()
    entries = [read(f"at {at}", deadline_s=at) for at in (3.0, 1.0, 2.0, 9.0)]
    for entry in entries:
        reads.add(entry)
    reads.end(entries[2])
    assert reads.next_s == 1.0
    assert [each.ticket for each in reads.due(5.0)] == ["at 1.0", "at 3.0"]
    assert reads.next_s == 9.0


def test_reads_that_ended_do_not_pile_up_until_their_deadlines() -> None:
    reads: WaitingReads[str] = WaitingReads()
    for number in range(10_000):
        entry = read(f"{number}")
        reads.add(entry)
        reads.end(entry)
    assert len(reads._deadlines) < 200 and sum(map(len, reads._by_box.values())) < 200
