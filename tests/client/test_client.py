"""The client against a real server: boxes, records, readers, groups, routers, queues and workers."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import msgspec
import pytest

import streams
from streams import Entry, Record, Tombstone
from streams.client.errors import NotAnAnswer, Unreachable
from streams.client.retry import NEVER
from streams.protocol.errors import (
    BoxNotEmpty,
    BoxNotFound,
    FencingTokenMismatch,
    InvalidRequest,
    NotFound,
    RouterNotFound,
    SeqMismatch,
)
from streams.testing import Server, running_server


def data(items: Any) -> list[Any]:
    return [item.data for item in items]


# -- appending and reading


def test_what_is_appended_is_read_back_with_all_its_fields(client: streams.Client, name: str) -> None:
    box = client.box(name)
    one = box.append({"item": "tea"}, tag="kitchen", node="n1", meta={"by": "me"})
    assert (one.first_seq, one.last_seq, one.created, one.deduped) == (1, 1, True, False)
    many = box.append_batch([1, Entry(2, tag="t"), [3], None, msgspec.Raw(b"4.50")])
    assert (many.first_seq, many.last_seq, many.count) == (2, 6, 5)
    first, *rest = box.read()
    assert isinstance(first, Record)
    assert (first.seq, first.data, first.tag, first.node, first.meta) == (
        1,
        {"item": "tea"},
        "kitchen",
        "n1",
        {"by": "me"},
    )
    assert data(rest) == [1, 2, [3], None, 4.5]
    assert box.record(1) == first
    assert box.position().head_seq == 6
    with pytest.raises(NotFound):
        box.record(99)


def test_a_key_makes_a_write_happen_once(client: streams.Client, name: str) -> None:
    box = client.box(name)
    first = box.append(1, idempotency_key="k")
    again = box.append(1, idempotency_key="k")
    assert again.deduped and again.first_seq == first.first_seq
    assert data(box.read()) == [1]


def test_a_write_can_depend_on_the_place_and_on_the_fence(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append(1, match_seq=1)
    with pytest.raises(SeqMismatch) as refused:
        box.append(2, match_seq=1)
    assert refused.value.detail["next_seq"] == 2
    box.fence("mine")
    with pytest.raises(FencingTokenMismatch):
        box.append(2)
    box.append(2, fencing_token="mine", trim_before_seq=2)
    assert data(box.read()) == [2]


def test_reading_ends_at_the_head_and_can_begin_anywhere(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append_batch([Entry(n, tag=f"t{n % 2}") for n in range(10)])
    assert data(box.read(7)) == [7, 8, 9]
    assert data(box.read(match="t1")) == [1, 3, 5, 7, 9]
    assert data(box.read(page_records=3)) == list(range(10))
    assert data(box.read(from_ts=0)) == list(range(10))
    reader = box.read(page_records=4)
    assert [next(reader).data for _ in range(5)] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    assert reader.cursor == 5
    assert data(box.read(reader.cursor)) == [5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="pass only one"):
        box.read(1, group="g")


def test_the_tail_is_the_last_records_that_are_there(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append_batch([Entry(n, tag="gone" if n % 10 else "kept") for n in range(100)])
    assert data(box.tail(3)) == [97, 98, 99]
    box.delete("gone")
    assert data(box.tail(3)) == [70, 80, 90]
    assert len(box.tail(1000)) == 10
    assert box.tail(0) == []
    box.append_batch([streams.Entry("odd", tag="odd"), 1, 2])
    assert data(box.tail(1, match="odd")) == ["odd"]


def test_a_reader_is_told_of_what_was_lost(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.create(cap_records=3)
    box.append_batch(list(range(3)))
    reader = box.follow(0)
    assert next(reader).data == 0  # type: ignore[union-attr]
    for n in range(3, 9):
        box.append(n)
    gap = next(box.read(1))
    assert isinstance(gap, Tombstone) and (gap.gap_from, gap.gap_to, gap.reason) == (2, 6, "cap")


def test_a_box_made_anew_is_noticed_by_a_reader_that_knew_the_old_one(
    client: streams.Client, name: str
) -> None:
    box = client.box(name)
    box.append_batch([1, 2])
    reader = box.follow()
    assert [next(reader).data, next(reader).data] == [1, 2]  # type: ignore[union-attr]
    box.drop()
    box.append_batch(["a", "b", "c"])
    gap = next(reader)
    assert isinstance(gap, Tombstone) and gap.reason == "recreated"
    assert [next(reader).data for _ in range(3)] == ["a", "b", "c"]  # type: ignore[union-attr]


def test_a_follower_gets_what_comes_after_it_began(client: streams.Client, server: Server, name: str) -> None:
    box = client.box(name)
    box.append(0)
    found: list[Any] = []

    def follow() -> None:
        with streams.Client(server.url) as other:
            for item in other.box(name).follow():
                found.append(item.data)  # type: ignore[union-attr]
                if item.data == 3:  # type: ignore[union-attr]
                    return

    follower = threading.Thread(target=follow)
    follower.start()
    for n in (1, 2, 3):
        box.append(n)
    follower.join(60)
    assert found == [0, 1, 2, 3]


def test_a_group_remembers_how_far_its_reader_got(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append_batch(list(range(5)))
    reader = box.read(group="billing")
    for item in reader:
        if item.data == 2:  # type: ignore[union-attr]
            reader.commit()
            break
    assert data(box.read(group="billing")) == [3, 4]
    group = box.group("billing")
    assert (group.state().cursor, group.state().lag) == (3, 2)
    with pytest.raises(SeqMismatch):
        group.commit(5, if_cursor=4)
    assert [found.group for found in box.groups()] == ["billing"]
    assert group.drop() and not group.drop()
    with pytest.raises(ValueError, match="group"):
        box.read().commit()


# -- boxes and routers


def test_a_box_is_made_changed_looked_at_listed_and_deleted(client: streams.Client, name: str) -> None:
    box = client.box(name)
    assert not box.exists()
    assert box.create(ttl_ms=1000, durability="fsync").created
    assert not box.configure(ttl_ms=2000).created
    assert (box.config().ttl_ms, box.config().durability) == (2000, "fsync")
    box.append(1)
    assert (box.state().count, box.state().head_seq) == (1, 1)
    assert [found.box for found in client.boxes(name)] == [name]
    with pytest.raises(BoxNotEmpty):
        box.drop(if_empty=True)
    assert box.drop().deleted and not box.exists()
    with pytest.raises(BoxNotFound):
        list(box.read())


def test_a_list_goes_on_over_pages(client: streams.Client, name: str) -> None:
    names = [f"{name}.{n}" for n in range(5)]
    for each in names:
        client.box(each).create()
    assert [found.box for found in client.boxes(name, page_size=2)] == names


def test_schedules_are_put_run_paused_listed_and_deleted(client: streams.Client, name: str) -> None:
    client.box(name).create()
    put = client.schedules.put(name, name, {"a": 1}, cron="@monthly", tag="t", meta={"k": "v"}, end_ts=2**45)
    assert put.created and put.record == {"data": {"a": 1}, "tag": "t", "meta": {"k": "v"}}
    assert client.schedules.pause(name).state == "paused"
    assert client.schedules.resume(name).next_due == put.next_due
    first = client.schedules.run(name, idempotency_key="k")
    assert (first.seq, client.schedules.run(name, idempotency_key="k").deduped) == (1, True)
    assert client.schedules.run(name).seq == 2
    state = client.schedules.get(name)
    assert (state.fired_total, state.end_ts, state.cron) == (2, 2**45, "@monthly")
    assert [each.schedule for each in client.schedules.list(box=name)] == [name]
    assert client.schedules.delete(name) and not client.schedules.delete(name)


def test_routers_copy_and_are_listed(client: streams.Client, name: str) -> None:
    made = client.put_router(f"{name}>", name, f"{name}.copy", match="kept", from_seq=0)
    assert made.created and made.filter is not None
    client.box(name).append_batch([Entry(1, tag="kept"), 2])
    copy = next(client.box(f"{name}.copy").follow())
    assert isinstance(copy, Record) and copy.data == 1
    assert client.router(f"{name}>").state == "ok"
    assert [found.router for found in client.routers(name)] == [f"{name}>"]
    assert client.drop_router(f"{name}>")
    with pytest.raises(RouterNotFound):
        client.router(f"{name}>")


# -- queues


def test_jobs_are_claimed_acked_given_back_and_extended(client: streams.Client, name: str) -> None:
    queue = client.queue(name)
    queue.create(lease_ms=60_000)
    queue.append_batch(["a", "b", "c"])
    jobs = queue.claim("w", max=3)
    assert [(job.data, job.deliveries) for job in jobs] == [("a", 1), ("b", 1), ("c", 1)]
    assert queue.ack("w", jobs[:1]).acked == 1
    assert queue.extend("w", jobs[1:2], lease_ms=90_000).extended == 1
    assert queue.nack("w", jobs[2:]).nacked == 1
    (again,) = queue.claim("w2", wait_ms=1000)
    assert (again.data, again.deliveries) == ("c", 2)
    assert queue.ack("w", jobs[2:]).skipped == [jobs[2].seq]


def test_a_node_is_set_once_on_the_client_or_the_queue(server: Server, name: str) -> None:
    with streams.Client(server.url, node="n1") as client:
        queue = client.queue(name)
        queue.create(lease_ms=60_000)
        queue.append("a")
        queue.append_batch(["b", Entry("c", node="other")])
        with client.box(name, node="n2").producer() as producer:
            producer.submit("d")
            producer.submit(Entry("e", tag="t"))
        nodes = [item.node for item in client.box(name).read()]  # type: ignore[union-attr]
        assert nodes == ["n1", "n1", "other", "n2", "n2"]
        jobs = queue.claim(max=5)
        assert queue.ack(jobs[:1]).acked == 1
        assert client.queue(name, node="n2").ack(jobs[1:2]).skipped == [2], "n1 holds it"
        assert queue.extend(jobs[1:], lease_ms=1000).extended == 4
        assert queue.nack(jobs[1:]).nacked == 4
    with streams.Client(server.url) as client:
        anyone = client.queue(name)
        assert client.queue(name).ack(anyone.claim(max=4)).acked == 4, "one made-up name for all its queues"
        anyone.append("f")
        assert client.box(name).tail(1)[0].node is None  # type: ignore[union-attr]


def test_settling_no_jobs_sends_nothing() -> None:
    with streams.Client("http://127.0.0.1:1", retry=streams.Retry(total_s=0)) as client:
        queue = client.queue("jobs")
        assert (queue.ack([]).acked, queue.nack([]).nacked, queue.extend([], lease_ms=1).extended) == (
            0,
            0,
            0,
        )
        assert queue.ack("w", []).skipped == []


def test_dead_letters_are_requeued(client: streams.Client, name: str) -> None:
    queue = client.queue(name)
    client.box(f"{name}.dead").create()
    queue.create(max_deliveries=1, dead_letter=f"{name}.dead")
    queue.append("bad")
    queue.nack("w", queue.claim("w"))
    assert queue.claim("w") == []
    letter = next(client.box(f"{name}.dead").follow())
    assert isinstance(letter, Record) and letter.data == "bad"
    assert queue.requeue(f"{name}.dead") == 1
    assert data(queue.claim("w", wait_ms=30_000)) == ["bad"]


def test_a_worker_does_every_job_and_stops_when_told(client: streams.Client, name: str) -> None:
    queue = client.queue(name)
    queue.create()
    queue.append_batch(list(range(50)))
    done: list[int] = []

    def handle(job: streams.Job) -> None:
        done.append(job.data)
        if len(done) == 50:
            worker.stop()

    worker = queue.worker(handle, concurrency=8)
    worker.run()
    assert sorted(done) == list(range(50))
    assert worker.statistics().done == 50 and worker.statistics().held == 0
    counts = queue.state().queue
    assert counts is not None and (counts.ready, counts.in_flight) == (0, 0)


def test_a_handler_that_raises_gives_its_job_back(
    client: streams.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.client._sync.worker.delay_ms", lambda deliveries: 0)
    queue = client.queue(name)
    queue.create()
    queue.append_batch(["nack", "raise", "fine"])
    seen: list[tuple[str, int]] = []

    def handle(job: streams.Job) -> None:
        seen.append((job.data, job.deliveries))
        if len(seen) == 5:
            worker.stop()
        if job.deliveries == 1 and job.data == "nack":
            raise streams.Nack
        if job.deliveries == 1 and job.data == "raise":
            raise RuntimeError("no such luck")

    worker = queue.worker(handle)
    worker.run()
    assert sorted(seen) == [("fine", 1), ("nack", 1), ("nack", 2), ("raise", 1), ("raise", 2)]
    found = worker.statistics()
    assert (found.done, found.given_back, found.failed, found.lost) == (3, 1, 1, 0)


def test_a_lease_is_kept_while_the_handler_works(client: streams.Client, server: Server, name: str) -> None:
    queue = client.queue(name)
    queue.create(lease_ms=400)
    queue.append("slow")
    begun, may_end = threading.Event(), threading.Event()

    def handle(job: streams.Job) -> None:
        begun.set()
        assert may_end.wait(60)
        worker.stop()

    worker = queue.worker(handle)
    running = threading.Thread(target=worker.run)
    running.start()
    assert begun.wait(60)
    with streams.Client(server.url) as other:
        # Three leases long: without the extensions the job would be given to this one.
        assert other.queue(name).claim("rival", wait_ms=1200) == []
    may_end.set()
    running.join(60)
    assert worker.statistics().done == 1


def test_a_worker_drains_a_queue_also_of_what_others_give_back(client: streams.Client, name: str) -> None:
    queue = client.queue(name)
    queue.create(lease_ms=600_000)
    queue.append_batch([0, 1, 2, 3])
    others = queue.claim("other", max=1)
    done: list[int] = []
    both = threading.Barrier(2)

    def handle(job: streams.Job) -> None:
        if job.data in (1, 2):
            both.wait(60)  # both are at work when either is done
        done.append(job.data)
        if len(done) == 3:
            queue.nack("other", others)

    worker = queue.worker(handle, concurrency=2)
    worker.run(drain=True)
    with pytest.raises(streams.Closed, match="create another one"):
        worker.run(drain=True)
    assert sorted(done) == [0, 1, 2, 3] and done[-1] == 0


def test_a_drain_waits_for_outputs(client: streams.Client, name: str) -> None:
    """They may be jobs of this queue. Here they wait for room in another box."""
    queue, results = client.queue(name), client.box(f"{name}.results")
    queue.create()
    results.create(cap_records=1, discard="reject")
    results.append("old")
    queue.append(1)
    pending_at_end: list[int] = []

    def drain() -> None:
        queue.worker(lambda job: streams.JobOutputs({results.name: ["new"]})).run(drain=True)
        pending_at_end.append(queue.state().queue.outputs_pending)

    thread = threading.Thread(target=drain)
    thread.start()
    while not queue.state().queue.outputs_error:
        pass
    results.delete(before_seq=2)
    thread.join()
    assert pending_at_end == [0] and [record.data for record in results.read()] == ["new"]


def test_data_can_be_had_as_it_was_written(client: streams.Client, name: str) -> None:
    text = b"[4.50,1e400]"
    queue = client.queue(name)
    queue.create()
    queue.append(msgspec.Raw(text))
    watch = client.watch({name: 0}, raw_data=True)
    _, record = next(iter(watch))
    watch.close()
    assert isinstance(record, Record) and bytes(record.data) == text
    (job,) = queue.claim("w", raw_data=True)
    assert bytes(job.data) == text


@pytest.mark.parametrize("concurrency", [0, 1001])
def test_a_worker_has_bounds(client: streams.Client, name: str, concurrency: int) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        client.queue(name).worker(lambda job: None, concurrency=concurrency)


# -- what goes wrong


def test_bad_names_and_addresses_are_refused_before_anything_is_sent(client: streams.Client) -> None:
    with pytest.raises(InvalidRequest, match="box"):
        client.box("no/slash")
    with pytest.raises(InvalidRequest, match="url"):
        streams.Client("127.0.0.1:4000")


def test_nobody_there_is_busy_and_names_the_address() -> None:
    with streams.Client("http://127.0.0.1:9", retry=NEVER) as client, pytest.raises(Unreachable, match=":9"):
        client.health()


def test_a_server_that_is_not_ours_is_told_so(server: Server) -> None:
    with streams.Client(f"{server.url}/elsewhere", retry=NEVER) as client, pytest.raises(NotFound):
        client.health()
    with pytest.raises(NotAnAnswer), streams.Client(server.url, retry=NEVER) as client:
        client.get("/v0/health", streams.client.answers.Page)  # type: ignore[attr-defined]


def test_a_follower_goes_on_after_everything_was_killed_and_started_again(tmp_path: Any) -> None:
    with running_server(tmp_path, shards=2) as server:
        port = server.port
        with streams.Client(server.url) as client:
            box = client.box("b")
            box.create(durability="fsync")
            box.append_batch([1, 2])
            reader = box.follow()
            assert [next(reader).data for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
            server.kill()
            found: list[Any] = []
            waiting = threading.Thread(target=lambda: found.append(next(reader)))
            waiting.start()
            with running_server(tmp_path, port=port), streams.Client(server.url) as other:
                other.box("b").append(3)
                waiting.join(60)
            assert data(found) == [3]


def test_a_client_gives_up_an_answer_after_its_timeout_but_not_during_a_long_poll(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with streams.Client(url, timeout=0.2, retry=NEVER) as client:
            with pytest.raises(streams.AnswerLost):
                client.health()
            began_s = time.monotonic()
            with pytest.raises(streams.AnswerLost):
                client.box(name).page(wait_ms=300)
            assert time.monotonic() - began_s >= 0.5, "an attempt waits for the poll and then for its timeout"
