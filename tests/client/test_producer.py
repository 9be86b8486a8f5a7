"""The producer: batches, bounds, tickets, and each record exactly once and in order under kill -9.

The number of kills is small by default; STREAMS_SWEEP=full makes it one a second for twenty seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import streams
from streams.client._sync.producer import Producer, Ticket
from streams.client.batching import Bounds
from streams.client.errors import AnswerLost, Closed
from streams.client.retry import Retry
from streams.protocol.errors import BoxFull, RecordTooLarge
from streams.protocol.messages.replies import AppendReply
from streams.testing import Server, running_server
from tests.support.crashing import eventually

KILLS = 20 if os.environ.get("STREAMS_SWEEP") == "full" else 4


def numbers(client: streams.Client, name: str) -> list[Any]:
    return [item.data for item in client.box(name).read()]  # type: ignore[union-attr]


def test_records_arrive_in_order_and_tickets_know_their_seqs(client: streams.Client, name: str) -> None:
    with client.box(name).producer(batch_records=70) as producer:
        tickets = [producer.submit(n, tag="t") for n in range(1000)]
        assert [ticket.wait(60) for ticket in tickets] == list(range(1, 1001))
    assert numbers(client, name) == list(range(1000))
    found = producer.statistics()
    assert (found.acked, found.failed, found.held) == (1000, 0, 0)


def test_what_is_alone_goes_when_it_has_lingered_and_flush_does_not_wait_for_that(
    client: streams.Client, name: str
) -> None:
    with client.box(name).producer(linger_ms=20) as producer:
        assert producer.submit(1).wait(60) == 1
    with client.box(name).producer(linger_ms=3_600_000) as producer:
        ticket = producer.submit(2)
        assert not ticket.is_settled
        producer.flush()
        assert ticket.is_settled and ticket.wait() == 2
        producer.submit(3)  # leaving the block flushes too
    assert numbers(client, name) == [1, 2, 3]


def test_only_the_record_that_is_at_fault_is_refused(client: streams.Client, name: str) -> None:
    with client.box(name).producer() as producer:
        tickets = [producer.submit("x" * (2 << 20) if n == 5 else n) for n in range(10)]
        with pytest.raises(RecordTooLarge):
            tickets[5].wait(60)
        assert [ticket.wait(60) for n, ticket in enumerate(tickets) if n != 5] == list(range(1, 10))
    assert numbers(client, name) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_a_failure_that_nobody_saw_is_raised_at_the_end(client: streams.Client, name: str) -> None:
    client.box(name).create(cap_records=1, discard="reject")
    client.box(name).append(0)
    with pytest.raises(BoxFull), client.box(name).producer() as producer:
        producer.submit(1)
    with client.box(name).producer() as producer:
        ticket = producer.submit(1)
        with pytest.raises(BoxFull):
            producer.flush()
        with pytest.raises(BoxFull):
            ticket.wait()
        producer.flush()


def test_what_is_not_json_is_refused_where_it_is_submitted(client: streams.Client, name: str) -> None:
    with client.box(name).producer() as producer, pytest.raises(TypeError):
        producer.submit(object())


class Slow:
    """A box whose answers come when the test says so."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.keys: list[str] = []
        self.seen: list[int] = []

    def append_encoded(self, records: list[bytes], *, key: str, retry: Retry | None = None) -> AppendReply:
        self.keys.append(key)
        self.seen.append(len(records))
        assert self.may_answer.wait(60)
        return AppendReply("b", 1, len(records), len(records), len(records), False, False)

    def idempotency_window_ms(self) -> int | None:
        return None


def test_submit_waits_when_too_much_is_held() -> None:
    box = Slow()
    with Producer(box, Bounds(batch_records=10, held_records=30), settle_s=60) as producer:
        submitted: list[Ticket] = []

        def submit() -> None:
            for n in range(40):
                submitted.append(producer.submit(n))

        submitting = threading.Thread(target=submit)
        submitting.start()
        eventually(lambda: len(submitted) == 30)
        submitting.join(0.05)
        assert submitting.is_alive() and len(submitted) == 30
        box.may_answer.set()
        submitting.join(60)
        assert len(submitted) == 40
    assert sum(box.seen) == 40 and max(box.seen) <= 10
    assert len(set(box.keys)) == len(box.keys)


class Picky(Slow):
    """A box that has no room for the second batch, and would have for those that come after it."""

    def append_encoded(self, records: list[bytes], *, key: str, retry: Retry | None = None) -> AppendReply:
        if len(self.seen) == 1:
            self.seen.append(0)
            raise BoxFull("full")
        return super().append_encoded(records, key=key, retry=retry)


def test_nothing_is_written_after_a_failure_when_that_is_asked_for() -> None:
    box = Picky()
    bounds = Bounds(batch_records=10)
    with (
        pytest.raises(BoxFull),
        Producer(box, bounds, settle_s=60, stop_at_failure=True) as producer,
    ):
        tickets = [producer.submit(n) for n in range(40)]
        box.may_answer.set()
        assert [ticket.wait(60) for ticket in tickets[:10]] == list(range(1, 11))
        with pytest.raises(Closed):
            tickets[30].wait(60)
        with pytest.raises(Closed, match="stopped at a failure"):
            producer.submit(40)
    assert box.seen == [10, 0]
    found = producer.statistics()
    assert (found.acked, found.failed, found.held) == (10, 30, 0)


def test_nothing_is_written_after_the_one_record_that_is_at_fault(client: streams.Client, name: str) -> None:
    with pytest.raises(RecordTooLarge), client.box(name).producer(stop_at_failure=True) as producer:
        for n in range(10):
            producer.submit("x" * (2 << 20) if n == 5 else n)
    assert numbers(client, name) == [0, 1, 2, 3, 4]


def test_a_closed_producer_takes_nothing(client: streams.Client, name: str) -> None:
    with client.box(name).producer() as producer:
        pass
    with pytest.raises(Closed):
        producer.submit(1)


def test_attempts_end_before_the_box_forgets_the_key(client: streams.Client, name: str) -> None:
    client.box(name).create(idempotency_window_ms=1000)
    with client.box(name).producer(settle_s=60) as producer:
        assert producer._retry.total_s <= 0.8  # what makes a repeat harmless; not to be seen from outside


def test_an_attempt_without_an_answer_is_never_told_as_nothing_happened() -> None:
    """The first attempt is read and not answered; from then on nobody is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def take_one() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                listener.close()

        taking = threading.Thread(target=take_one)
        taking.start()
        with streams.Client(f"http://127.0.0.1:{port}") as client, pytest.raises(AnswerLost, match="reached"):
            client.box("b").append(1, retry=Retry(total_s=0.5))
        taking.join(60)


# -- kill -9


@contextmanager
def producers(server: Server, how: str, box: str) -> Iterator[Producer]:
    if how == "http":
        with streams.Client(server.url) as client, client.box(box).producer(settle_s=60) as producer:
            yield producer
    else:
        with streams.ShardWriter(server.url) as writer, writer.producer(box, settle_s=60) as producer:
            yield producer


@pytest.mark.parametrize(("how", "durability"), [("http", "fsync"), ("direct", "disk")])
def test_every_record_is_there_once_and_in_order_whatever_is_killed(
    tmp_path: Any, how: str, durability: str
) -> None:
    tickets: list[Ticket] = []
    with running_server(tmp_path, shards=1) as server, streams.Client(server.url) as client:
        client.box("b").create(durability=durability)
        with producers(server, how, "b") as producer:
            for _ in range(KILLS):
                began_s, aim = time.monotonic(), producer.statistics().acked + 500
                while producer.statistics().acked < aim or (KILLS == 20 and time.monotonic() < began_s + 1):
                    tickets.append(producer.submit(len(tickets)))
                os.kill(eventually(lambda: server.shard_pids().get(0)), signal.SIGKILL)
                tickets.append(producer.submit(len(tickets)))
        seqs = [ticket.wait(0) for ticket in tickets]
        assert seqs == sorted(set(seqs)), "each has a place of its own, in the order of submission"
        found = {item.seq: item.data for item in client.box("b").read()}  # type: ignore[union-attr]
        assert [found[seq] for seq in seqs] == list(range(len(tickets)))
        assert len(found) == len(tickets)
