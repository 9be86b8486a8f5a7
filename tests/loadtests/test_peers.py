"""The comparison counts what peers answer, says what is missing, and shows what we lose.

Method: the bytes of each protocol as its server sends them, cut at every place; a stand-in for Redis that
counts what it is sent; the command itself on a machine without any peer; the page from figures made up here.
"""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from loadtests import bench
from loadtests.generator import LoadFailed, Step
from loadtests.peers import compare, install, jobs, page, servers
from loadtests.peers.load import PeerLoad
from loadtests.peers.measuring import CONTENDERS, WORKLOADS, cpu_figures
from loadtests.peers.wires import Amqp, Confirms, Count, Nats, Postgres, Redis, records


def fed(count: Any, data: bytes, size: int) -> int:
    for at in range(0, len(data), size):
        count.feed(data[at : at + size])
    missing: int = count.missing
    return missing


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_answers_are_counted_however_they_are_cut(size: int) -> None:
    for wire, answer in (
        (Redis(0, "always"), b"$15\r\n1700000000000-0\r\n"),
        (Nats(0), b'MSG _INBOX.a 1 30\r\n{"stream":"b","seq":7}\r\n'),
    ):
        count = wire.count(3)
        count.expect(3)
        assert fed(count, answer * 3, size) == 0
    rows = Postgres(0, "on").count(1000)
    rows.expect(1000)
    assert fed(rows, b"G\x00\x00\x00\x08" + b"C\x00\x00\x00\x0eCOPY 1000\x00" + Postgres.READY, size) == 0


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_confirms_come_one_by_one_or_many_at_once(size: int) -> None:
    def ack(tag: int, multiple: int) -> bytes:
        payload = struct.pack(">HHQB", 60, 80, tag, multiple)
        return struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"

    heartbeat = struct.pack(">BHI", 8, 0, 0) + b"\xce"
    count = Confirms()
    count.expect(5)
    assert fed(count, ack(2, 0) + heartbeat, size) == 4
    assert fed(count, ack(4, 1), size) == 1
    count.expect(1)
    assert fed(count, ack(6, 0) + ack(5, 0), size) == 0


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce"


def test_workers_know_the_end_of_an_answer_and_the_jobs_in_it() -> None:
    job = b"*2\r\n$3\r\n1-%d\r\n*4\r\n$3\r\ntag\r\n$1\r\na\r\n$4\r\ndata\r\n$2\r\n{}\r\n"
    redis = b"*1\r\n*2\r\n$1\r\nb\r\n*2\r\n" + job % 1 + job % 2
    message = b'MSG to.b 1 $JS.ACK.b.workers.1.%d.1.0.0 11\r\n{"tag":"a"}\r\n'
    row = b"D" + struct.pack(">IHI", 17, 1, 7) + b"100000%d"
    postgres = row % 1 + row % 2 + b"C\x00\x00\x00\x0dSELECT 2\x00" + Postgres.READY_IN_TRANSACTION
    deliver = frame(1, struct.pack(">HH", 60, 60) + b"\x01w" + struct.pack(">QB", 7, 0) + b"\x00\x01b")
    delivery = deliver + frame(2, b"\x00" * 14) + frame(3, b"{}")
    accepted = frame(1, struct.pack(">HH", 60, 21) + b"\x01w")
    for worker, answer in (
        (jobs.RedisWorker("b", 0, 2), redis),
        (jobs.NatsWorker("b", b"_INBOX.a", 2), message % 1 + message % 2),
        (jobs.PostgresWorker("b", 0, 2), postgres),
        (jobs.RabbitWorker(2), accepted + delivery * 2),
    ):
        cuts = [at for at in range(1, len(answer)) if worker.is_claimed(answer[:at])]
        assert cuts == [] and worker.is_claimed(answer), (worker, cuts)
        assert len(worker.jobs) == 2
    assert jobs.RabbitWorker(1).claim() == b"", "the first claim acks nothing"
    assert jobs.RedisWorker("b", 0, 2).is_acked(b":2\r\n:2\r\n")


def test_an_error_is_not_counted_as_an_answer() -> None:
    for wire, answer in (
        (Redis(0, "always"), b"-ERR unknown command\r\n"),
        (Nats(0), b'MSG _INBOX.a 1 9\r\n{"error":{"code":503}}\r\n'),
        (Postgres(0, "on"), b"E\x00\x00\x00\x10SERROR\x00VERROR\x00"),
    ):
        with pytest.raises(LoadFailed):
            wire.count(1).feed(answer)
    nack = struct.pack(">HHQB", 60, 120, 1, 0)
    with pytest.raises(LoadFailed):
        Confirms().feed(struct.pack(">BHI", 1, 1, len(nack)) + nack + b"\xce")


def test_a_marker_is_not_made_of_the_ends_of_two() -> None:
    count = Count(b"aa")
    count.expect(2)
    assert fed(count, b"aa" + b"aab", 2) == 0


def test_cpu_that_is_too_little_to_count_is_no_figure() -> None:
    cores = {"gateway": 0.5, "shard": 0.25, "generator": 0.0, "others": 1.0}
    assert cpu_figures({"cores": cores, "records_per_s": 1000.0}) == {"server_cpu": 750.0}
    assert cpu_figures({"cores": {}, "records_per_s": 0.0}) == {}


def test_every_peer_is_sent_the_same_records() -> None:
    [(tag, data)] = records(0, 1, 110)
    nats = Nats(0)
    nats.inbox = b"_INBOX.x"
    for wire in (Redis(0, "always"), nats, Amqp(0, "quorum"), Postgres(0, "on")):
        steps: list[Step] = wire.appends(["b"], 1, 110)
        assert [step.records for step in steps] == [1]
        assert tag.encode() in steps[0].request and data.encode() in steps[0].request
    assert Postgres(0, "on").appends(["b"], 3, 110)[0].request.count(b"\n") == 3
    assert len(f'{{"data":{data},"tag":"{tag}"}}') == 110


def stand_in_for_redis(listener: socket.socket, seen: list[int]) -> None:
    """Answers each XADD, a few bytes at a time."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            rest = b""
            while data := connection.recv(65536):
                whole, _, rest = (rest + data).rpartition(b"}\r\n")
                count = whole.count(b"XADD")
                seen.append(count)
                answer = b"$3\r\n1-1\r\n" * count
                for at in range(0, len(answer), 1001):
                    connection.sendall(answer[at : at + 1001])


def test_what_is_counted_is_what_the_server_has_answered() -> None:
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=stand_in_for_redis, args=(listener, seen))
        thread.start()
        plan = {
            "peer": "redis",
            "setting": "always",
            "send": "append",
            "port": listener.getsockname()[1],
            "boxes": ["a", "b"],
            "batch": 50,
            "connections": 1,
            "record_bytes": 110,
            "seconds": 60,
            "requests_max": 21,
        }
        load = PeerLoad(plan)
        result = load.run()
        for connection in load._connections.values():
            connection.sock.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    # The first answer starts the clock.
    assert sum(seen) == 21 * 50 and result["records"] == 20 * 50 and result["failures"] == 0


def test_without_any_peer_each_is_skipped_with_one_line_and_we_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "find", lambda program: None)
    monkeypatch.setattr(servers, "find_kafka", lambda: None)
    words = ["--quick", "--rounds", "2", "--seconds", "0.1", "--workloads", "append-1000"]
    assert compare.main([*words, "--out", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data")]) == 0
    told = capsys.readouterr().err.splitlines()
    skipped = [line for line in told if line.startswith("skipped: ")]
    assert len(skipped) == len(servers.SERVERS) and all("is not installed" in line for line in skipped)
    text = (tmp_path / "out" / "benchmarks.md").read_text()
    assert "redis was left out" in text and "| streams, fsync | fsync | " in text
    assert (tmp_path / "out" / "benchmarks" / "append-1000.png").read_bytes().startswith(b"\x89PNG")
    assert "benchmarks/append-1000.png" in text
    assert [each.name for each in (tmp_path / "data").iterdir()] == ["compare.json"], "data is left behind"


def test_ratios_are_of_the_same_promise_and_above_one_is_better_for_us() -> None:
    found: compare.Figures = {each.key: {} for each in WORKLOADS}
    found["append-1000"] = {
        "streams-disk": [100.0, 300.0, 200.0],
        "redis-everysec": [50.0, 100.0, 100.0],
        "streams-fsync": [10.0, 10.0, 10.0],
        "redis-always": [20.0, 20.0, 20.0],
        "nats-file": [400.0, None, 200.0],
        "rabbitmq-stream": [None, None, None],
    }
    found["append-p50"] = {"streams-disk": [2.0], "redis-everysec": [1.0]}
    summary = compare.summary(found)
    assert summary["append-1000"]["redis-everysec"]["ratio"] == 2.0
    assert summary["append-1000"]["redis-everysec"]["ratio_spread"] == pytest.approx(
        [2.0 / 1.5**1.5, 2.0 * 1.5**1.5]
    )
    assert summary["append-1000"]["nats-file"]["ratio"] == 0.625, "of the rounds in which both were measured"
    assert "rabbitmq-stream" not in summary["append-1000"]
    assert summary["append-1000"]["redis-always"]["ratio"] == 0.5
    assert summary["append-p50"]["redis-everysec"]["ratio"] == 0.5
    assert summary["append-1000"]["streams-disk"]["ratio"] is None
    assert summary["append-1000"]["streams-disk"]["median"] == 200.0


def test_a_spread_goes_farther_than_the_farthest_round_and_is_never_small() -> None:
    assert compare.spread_of([1.0]) == []
    assert compare.spread_of([100.0, 100.0, 101.0]) == pytest.approx([80.0, 125.0])
    assert compare.spread_of([100.0, 64.0, 110.0]) == pytest.approx([51.2, 195.3125])


def test_a_run_says_which_ratios_are_not_where_the_run_before_expected_them() -> None:
    def run(theirs: float, **more: object) -> dict[str, Any]:
        found: compare.Figures = {each.key: {} for each in WORKLOADS}
        found["append-1000"] = {"streams-disk": [10.0, 10.0], "redis-everysec": [theirs, theirs]}
        found["append-1"] = {"streams-disk": [10.0, 10.0], "redis-everysec": [5.0, 5.0]}
        machine = {"cores": 2, "cpu": "a", "kernel": "6", "python": "3.11"}
        same = {"rounds": 2, "seconds": 1.0, "quick": False, "versions": {}, "machine": machine}
        return {**same, "summary": compare.summary(found), **more}

    assert compare.agreement(run(10.0), run(11.0)) == {"compared": 2, "outside": []}
    agreed = compare.agreement(run(10.0), run(13.0))
    assert agreed is not None and agreed["compared"] == 2
    [outside] = agreed["outside"]
    assert (outside["contender"], outside["ratio"]) == ("Redis Streams, everysec", 1.0)
    for other in (
        None,
        run(10.0, seconds=2.0),
        run(10.0, machine={"cores": 4, "cpu": "a", "kernel": "6", "python": "3.11"}),
    ):
        assert compare.agreement(run(10.0), other) is None


def test_the_page_says_where_we_lose_and_why(tmp_path: Path) -> None:
    found: compare.Figures = {
        each.key: {
            contender.key: [2.0, 2.0] if contender.peer == "streams" else [20.0, 40.0]
            for contender in CONTENDERS
            if each.is_for(contender)
        }
        for each in WORKLOADS
    }
    row = {
        "key": "append-100-disk",
        "title": "t",
        "unit": "records/s",
        "better": "more",
        "figure": 5.0,
        "spread": None,
        "floor": 4.0,
        "aim": 8.0,
        "meets_floor": True,
        "meets_aim": False,
        "error": "",
        "skipped": "",
        "speed": 1.0,
    }
    result = {
        "at": "2020-01-01",
        "rounds": 2,
        "seconds": 1.0,
        "stretch": 1.5,
        "factor_min": 1.25,
        "agreement": {
            "compared": 43,
            "outside": [
                {"workload": "A (ms)", "contender": "B", "expected": [1.0, 2.0], "ratio": 2.5},
            ],
        },
        "quick": True,
        "machine": {
            "cores": 2,
            "cpu": "a cpu",
            "memory_gib": 1,
            "kernel": "6",
            "python": "3.11",
            "filesystem": "ext4",
            "cores_used_by_others": 0.5,
            "speed": 0.9,
        },
        "versions": dict.fromkeys(servers.SERVERS, "1.2.3"),
        "skipped": {},
        "summary": compare.summary(found),
        "aims": [row],
    }
    text = page.text(result)
    lost = text[text.index("## Where we lose") : text.index("## Figures")]
    for workload in WORKLOADS:  # all rates are a tenth, all times ten times better
        assert (workload.title in lost) is (page.LOSS_REASONS[workload.key] in lost) is not workload.is_time
    assert "NATS JetStream, file (0.08×)" in lost
    assert page.LIMITS["append-100-disk"] in text and "quick run" in text
    assert "busy with other work: 0.5 of its 2 cores" in text
    assert "its C tool, disk | 0.08× | 0.04×–0.14× | 3× | 4× | | BELOW FLOOR |" in text
    assert "42 of 43 are where the run before it expected them (B, A: 2.5×, not 1.0×–2.0×)" in text
    page.plots(result, tmp_path)
    assert (tmp_path / "ratios.png").exists()


def test_every_workload_has_a_reason_and_every_aim_something_in_its_way() -> None:
    assert page.LOSS_REASONS.keys() == {each.key for each in WORKLOADS}
    assert page.LIMITS.keys() == {*compare.AIMS, "redis"}
    aimed = {row.key for case in bench.CASES for row in case.rows if row.aim is not None}
    assert set(compare.AIMS) <= aimed


def test_a_peer_that_cannot_be_had_is_told_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "find", lambda program: "/bin/x" if program == "postgres" else None)
    monkeypatch.setattr(install, "find_kafka", lambda: None)
    monkeypatch.setattr(install, "unpack", lambda names: "no such package")
    monkeypatch.setattr(install, "OTHERS", dict.fromkeys(install.OTHERS, lambda: "no such module"))
    assert install.main() == 1
    told = capsys.readouterr().out
    assert "postgres: /bin/x" in told and "apt-get install nats-server" in told
    assert "kafka: no such module" in told
