"""Goal: kill -9 of any process, or of all, at any moment, loses nothing that was acked and doubles nothing.

Method: real servers; writers on keep-alive connections that repeat what was not acked with the same key;
kills in an order and at moments that a printed seed chooses, counted in acks and never in seconds; then every
box is read from its start. The machine stays up all the time, so a disk box may lose no more than an fsync
box.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.shards.links import Link
from shard.core.boxes.box import RESERVE_SEQS
from shard.core.machine import Machine
from shard.recovery.recovery import recover
from shard.storage import frames
from shard.storage.files import Disk
from shard.storage.segments.store import SegmentStore
from shard.storage.snapshot import Snapshots
from shard.storage.wal import Wal
from streams.protocol import wire
from streams.protocol.errors import OutcomeUnknown, ShardUnavailable
from streams.protocol.messages.commands import Append
from streams.protocol.payloads.appends import RecordLimits, parse_append
from streams.testing import Server, running_server
from tests.support.crashing import Client, Writer, box_on, check_box, eventually

SHARDS = 3


@contextmanager
def writing(server: Server, boxes: dict[str, int]) -> Iterator[list[Writer]]:
    """Writers at work, so many for each box. They are stopped at the end, and must not have failed."""
    writers = [Writer(f"{box}.{at}", server.port, box) for box, count in boxes.items() for at in range(count)]
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stop()


def boxes_of_both_classes(server: Server) -> dict[str, int]:
    """Two boxes a shard, one of each class; two writers share the first."""
    client = Client(server.port)
    found: dict[str, int] = {}
    for shard in range(SHARDS):
        for durability in ("fsync", "disk"):
            box = box_on(shard, SHARDS, durability)
            client.put(box, durability=durability)
            found[box] = 1 if found else 2
    client.close()
    return found


def check(server: Server, writers: list[Writer]) -> None:
    client = Client(server.port)
    for box in {writer.box for writer in writers}:
        check_box(client, box, [writer for writer in writers if writer.box == box])
    client.close()


def wait_for_acks(writers: list[Writer], more: int) -> None:
    for writer in writers:
        writer.wait_for_acks(more)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)


def log_lines(server: Server, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"].startswith(event)]


# -- kills under load


def test_shards_and_gateways_killed_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    rng = random.Random(31)
    print("kills: seed 31")
    with running_server(tmp_path, shards=SHARDS) as server:
        with writing(server, boxes_of_both_classes(server)) as writers:
            for victim in ("shard", "gateway", "shard", "both"):
                wait_for_acks([rng.choice(writers)], rng.randrange(1, 60))
                if victim != "gateway":
                    kill(server.shard_pids()[rng.randrange(SHARDS)])
                if victim != "shard":
                    kill(server.gateway_pids()[0])
                wait_for_acks(writers, 5)
        assert sum(writer.repeated for writer in writers) > 0
        check(server, writers)
        # And once more from the log alone.
        server.terminate()
    with running_server(tmp_path) as server:
        check(server, writers)


def test_everything_killed_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    rng = random.Random(32)
    print("kills: seed 32")
    with running_server(tmp_path, shards=SHARDS) as server:
        port = server.port
        boxes = boxes_of_both_classes(server)
        writers = [Writer(f"{box}.{at}", port, box) for box, count in boxes.items() for at in range(count)]
        for writer in writers:
            writer.start()
        wait_for_acks(writers, 10)
        wait_for_acks([rng.choice(writers)], rng.randrange(1, 60))
        server.kill()
    with running_server(tmp_path, port=port) as server:
        wait_for_acks(writers, 10)
        # The supervisor alone: the others notice, end in order, and let go of the directory.
        server.process.kill()
        server.wait_until_gone()
        server.process.wait()
    with running_server(tmp_path, port=port) as server:
        wait_for_acks(writers, 10)
        for writer in writers:
            writer.stop()
        assert all(writer.repeated for writer in writers)
        check(server, writers)


def test_a_restart_right_after_the_supervisor_was_killed_waits_for_its_children(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=2) as server:
        client = Client(server.port)
        client.put("box", durability="fsync")
        client.append("box", *range(10))
        server.process.kill()
        server.process.wait()
        with running_server(tmp_path) as successor:
            records, tombstones, _ = Client(successor.port).read_all("box")
            assert (list(records.values()), tombstones) == (list(range(10)), [])


# -- while a shard is away


def test_only_the_boxes_of_a_shard_that_is_down_are_unavailable(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=2) as server:
        client = Client(server.port)
        away, here = box_on(0, 2, "box"), box_on(1, 2, "box")
        client.append(away, 1)
        client.append(here, 1)
        kill(server.pid, signal.SIGSTOP)  # so that it does not start the shard again yet
        try:
            kill(server.shard_pids()[0])
            eventually(lambda: client.send("GET", f"/v0/boxes/{away}").status == 503)
            for method, path, body in (
                ("GET", f"/v0/boxes/{away}", None),
                ("POST", f"/v0/boxes/{away}", {"records": [{"data": 2}]}),
                ("POST", f"/v0/boxes/{away}/diff", {}),
                ("GET", "/v0/boxes", None),
            ):
                refused = client.send(method, path, body)
                assert (refused.status, refused.code) == (503, "shard_unavailable")
                assert int(refused.headers["retry-after"]) >= 1
            assert client.send("GET", "/v0/ready").code == "not_ready"
            assert client.send("GET", "/v0/health").status == 200
            assert client.append(here, 2)["last_seq"] == 2
            assert list(client.read_all(here)[0].values()) == [1, 2]
        finally:
            kill(server.pid, signal.SIGCONT)
        eventually(lambda: client.send("GET", "/v0/ready").status == 200)
        assert client.append(away, 2)["last_seq"] == 2
        assert list(client.read_all(away)[0].values()) == [1, 2]


def test_a_process_that_is_killed_takes_no_other_with_it(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=2) as server:
        client = Client(server.port)
        here = box_on(1, 2, "box")
        client.append(here, 1)
        before = server.shard_pids()
        gateways = server.gateway_pids()
        kill(before[0])
        # A connection that was open before is served as if nothing had happened.
        eventually(lambda: client.append(here, 2) and server.shard_pids().get(0, before[0]) != before[0])
        eventually(lambda: client.send("GET", "/v0/ready").status == 200)
        assert server.gateway_pids() == gateways
        kill(gateways[0])
        eventually(lambda: server.gateway_pids().get(0, gateways[0]) != gateways[0])
        assert server.shard_pids()[1] == before[1]
        ends = [(line["child"], line["cause"]) for line in log_lines(server, "process ended unexpectedly")]
        assert ends == [("shard-00", "SIGKILL"), ("gateway-0", "SIGKILL")]


def test_a_write_whose_shard_dies_under_it_is_told_so_and_can_be_repeated(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        Client(server.port).put("box", durability="fsync")
        shard = server.shard_pids()[0]
        kill(shard, signal.SIGSTOP)  # so that the write is under way when the shard dies
        sock = socket.create_connection(("127.0.0.1", server.port))
        body = b'{"records": [{"data": 1}], "idempotency_key": "once"}'
        sock.sendall(
            b"POST /v0/boxes/box HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        # The gateway reads connections in turn: once it has answered here, it has read what came before.
        assert Client(server.port).send("GET", "/v0/health").status == 200
        kill(shard)
        status, answer = answer_of(sock)
        assert (status, answer["error"]["code"]) == (503, "shard_unavailable")
        client = Client(server.port)
        eventually(lambda: client.send("GET", "/v0/ready").status == 200)
        assert client.append("box", 1, idempotency_key="once")["first_seq"] == 1
        assert client.append("box", 1, idempotency_key="once")["deduped"] is True
        assert client.read_all("box")[0] == {1: 1}


@pytest.mark.timeout(10)  # what it tests for is a loop without an end
async def test_a_link_whose_shard_goes_away_while_it_sends_tells_its_callers(tmp_path: Path) -> None:
    """A shard that dies under load is noticed first by a send that fails."""
    path = f"{tmp_path}/shard.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        link = Link(0, path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            shard, _ = await trio.to_thread.run_sync(listener.accept)
            await trio.to_thread.run_sync(shard.recv, 4096)
            shard.sendall(wire.frame(wire.REPLY, 0, wire.OP_HELLO, 0, b"", 0))
            while not link.is_up:
                await trio.lowlevel.checkpoint()
            shard.close()
            with pytest.raises((ShardUnavailable, OutcomeUnknown)):
                await link.call(wire.OP_STATS, b"", b"")
            nursery.cancel_scope.cancel()


# -- ends in order


def test_sigterm_finishes_what_is_under_way_and_leaves_nothing_to_replay(tmp_path: Path) -> None:
    boxes = {box_on(0, 2, "box"): 1, box_on(1, 2, "box"): 1}
    with running_server(tmp_path, shards=2) as server, writing(server, boxes) as writers:
        wait_for_acks(writers, 20)
        under_way = begin_append(server.port, b'{"records": [{"data": "under way"}], "create": true}')
        server.process.terminate()
        eventually(lambda: not accepts(server.port))
        status, answer = finish_append(under_way)
        assert (status, answer["first_seq"], answer["count"]) == (201, 1, 1)
        assert server.wait() == 0
    with running_server(tmp_path) as server:
        recovered = log_lines(server, "shard recovered")
        assert [line["frames"] for line in recovered] == [0, 0], "the last snapshot says it all"
        assert all(line["snapshot_lsn"] == line["lsn"] > 0 for line in recovered)
        check(server, writers)
        assert list(Client(server.port).read_all("late")[0].values()) == ["under way"]


def begin_append(port: int, body: bytes) -> tuple[socket.socket, bytes]:
    """A request of which the server has read the head and waits for the rest: it has said so itself."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(
        b"POST /v0/boxes/late HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    assert sock.recv(1000).startswith(b"HTTP/1.1 100")
    return sock, body


def finish_append(under_way: tuple[socket.socket, bytes]) -> tuple[int, dict[str, Any]]:
    sock, body = under_way
    sock.sendall(body)
    return answer_of(sock)


def answer_of(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """All that comes until the server closes."""
    with sock:
        text = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, rest = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


# -- replay


def test_a_shard_that_replays_says_how_far_it_is_and_then_serves(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        Client(server.port).put("box", durability="fsync")
    lengthen_the_log(tmp_path / "shard-00", box="box", appends=60_000)
    with running_server(tmp_path) as server:
        client = Client(server.port)
        assert client.ok("GET", "/v0/boxes/box")["head_seq"] == 60_000
        kill(server.shard_pids()[0])
        seen: list[float] = []

        def ready() -> bool:
            probe, write = client.send("GET", "/v0/ready"), client.send("GET", "/v0/boxes/box")
            if probe.status == 200:
                return True
            assert (probe.status, probe.code) == (503, "not_ready")
            assert int(probe.headers["retry-after"]) >= 1
            seen.append(probe.body["error"]["detail"]["replay_progress"])
            if write.code == "not_ready":
                assert write.status == 503 and 0 <= write.body["error"]["detail"]["replay_progress"] <= 1
            return False

        eventually(ready)
        assert any(0 < progress < 1 for progress in seen), seen
        assert seen == sorted(seen), "progress never goes back"
        assert client.ok("GET", "/v0/boxes/box")["head_seq"] == 60_000


def lengthen_the_log(directory: Path, *, box: str, appends: int) -> None:
    """What a shard that was killed after so many writes would have left, made without a server."""
    disk = Disk()
    machine = Machine()
    wal = Wal(disk, f"{directory}/wal")
    store = SegmentStore(disk, f"{directory}/segments")
    list(recover(machine, wal, Snapshots(disk, f"{directory}/snapshot"), store.open))
    group = [frames.encode(*made) for made in machine.start(boot_id="this", now_ms=1).changes]
    for number in range(appends):
        write = parse_append(b'{"records": [{"data": %d}]}' % number, RecordLimits())
        command = Append(box=box, columns=write.columns)
        group += [frames.encode(*made) for made in machine.handle(command, 1).changes]
    wal.append(group)
    wal.close()


def test_acked_seqs_are_not_given_again_after_a_write_that_failed(tmp_path: Path) -> None:
    """What the page cache holds after that is not known, and the boot id is the same."""
    with running_server(tmp_path, shards=1, gateways=1) as server:
        client = Client(server.port)
        client.put("box", durability="disk")
        assert client.append("box", "acked")["first_seq"] == 1
        pid = server.shard_pids()[0]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))  # each write of it fails from now on
        client.send("POST", "/v0/boxes/box", {"records": [{"data": "lost"}]})
        eventually(lambda: server.shard_pids().get(0, pid) != pid)
        eventually(lambda: client.send("GET", "/v0/ready").status == 200)
        assert client.append("box", "new")["first_seq"] == RESERVE_SEQS + 1
        records, tombstones, _ = client.read_all("box")
        assert records[1] == "acked" and [each["reason"] for each in tombstones] == ["crash"]
        assert not (tmp_path / "shard-00" / "failed").exists()
