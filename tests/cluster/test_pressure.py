"""A server under pressure (v0 §9): refusals say when to come back, nothing acked is lost, and it ends.

Method: pressure is brought about, not waited for: by thresholds of zero, which are always met, and by
stopping a shard's process, which is as behind as a shard can be.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import streams
from gateway.shards.placement import even
from loadtests.generator import http_request
from streams.protocol.errors import Throttled
from streams.testing import Server, running_server
from tests.support.sse import Parser

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; httpx2 would build one a client
ONE = {"records": [{"data": 1}]}


@pytest.fixture(scope="module")
def throttling() -> Iterator[Server]:
    with running_server(shards=1, throttle_lag_ms=0) as found:
        yield found


def client_of(server: Server) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, trust_env=False, timeout=60, verify=NO_TLS)


def test_an_append_over_the_second_threshold_is_told_when_to_come_back(throttling: Server) -> None:
    with client_of(throttling) as client:
        answer = client.post("/v0/boxes/b", json=ONE)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "throttled"
        wait_ms = answer.json()["error"]["detail"]["retry_after_ms"]
        assert wait_ms >= 100 and int(answer.headers["retry-after"]) == -(-wait_ms // 1000)
        assert client.get("/v0/boxes/b").status_code == 404, "nothing was done"


def test_an_append_that_skips_the_throttle_is_taken_and_everything_else_is_served(throttling: Server) -> None:
    with client_of(throttling) as client:
        skipping = {**ONE, "disable_backpressure": True}
        assert client.post("/v0/boxes/s", json=skipping).status_code == 201
        lines = client.post(
            "/v0/boxes/s?disable_backpressure=true",
            content=b'{"data":2}\n',
            headers={"content-type": "application/x-ndjson"},
        )
        assert lines.status_code == 200, lines.text
        read = client.post("/v0/boxes/s/diff", json={}).json()
        assert [record["data"] for record in read["records"]] == [1, 2]
        assert client.post("/v0/boxes/s/delete", json={"before_seq": 2}).status_code == 200
        assert client.put("/v0/boxes/other", json={}).status_code == 201


def test_a_writer_that_goes_around_the_gateway_is_throttled_too(throttling: Server) -> None:
    writer = streams.ShardWriter(throttling.url, retry=streams.Retry(total_s=0))
    with writer, pytest.raises(Throttled) as refused:
        writer.append("direct", [{"n": 1}])
    assert refused.value.detail["retry_after_ms"] >= 100


def test_status_and_metrics_tell_of_the_pressure(throttling: Server) -> None:
    with client_of(throttling) as client:
        client.post("/v0/boxes/b", json=ONE)
        assert client.get("/v0/status").json()["pressure"] == "throttling"
        text = client.get("/v0/metrics").text
    counts = [line.split()[-1] for line in text.splitlines() if line.startswith("streams_throttled_total{")]
    assert sum(map(int, counts)) >= 1


def test_paced_watchers_get_everything_in_order() -> None:
    """Over the first threshold: a low-priority box is held back, and no record of it is lost."""
    with running_server(shards=1, pace_lag_ms=0) as server, client_of(server) as client:
        client.put("/v0/boxes/low", json={"priority": -1000})
        client.put("/v0/boxes/high", json={"priority": 1000})
        watched = {"boxes": {"low": {"from_seq": 0}, "high": {"from_seq": 0}}}
        wid = client.post("/v0/watch", json=watched).json()["wid"]
        got: dict[str, list[int]] = {"low": [], "high": []}
        parser = Parser()
        headers = {"accept": "text/event-stream"}
        with client.stream("GET", f"/v0/watch/{wid}", headers=headers) as stream:
            pieces = stream.iter_bytes()
            live: set[str] = set()
            while live != {"low", "high"}:
                live |= {
                    event.json["box"] for event in parser.feed(next(pieces)) if event.name == "caught-up"
                }
            for number in range(50):
                for box in got:
                    assert client.post(f"/v0/boxes/{box}", json={"records": [{"data": number}]}).is_success
            while min(map(len, got.values())) < 50:
                for event in parser.feed(next(pieces)):
                    if event.name == "record":
                        got[event.json["box"]] += [record["data"] for record in event.json["records"]]
        assert got == {"low": list(range(50)), "high": list(range(50))}
        status = client.get("/v0/status").json()
        assert status["pressure"] == "pacing"
        text = client.get("/v0/metrics").text
        [held] = [
            line for line in text.splitlines() if line.startswith('streams_paced_total{process="shard-00"}')
        ]
        assert int(held.split()[-1]) > 0


def test_a_shard_that_stands_still_for_a_moment_delays_its_writers_and_refuses_none() -> None:
    """Writers to the other shard notice nothing; when the shard goes on, all its writers are served.

    Less than five seconds, after which the shard counts as hanging.
    """
    writers = 200
    names = [f"box-{number}" for number in range(100)]
    still, other = (next(name for name in names if even(2).shard_of(name) == shard) for shard in (0, 1))
    with running_server(shards=2) as server, client_of(server) as client, contextlib.ExitStack() as stack:
        for box in (still, other):
            assert client.post(f"/v0/boxes/{box}", json={**ONE, "config": {"durability": "fsync"}}).is_success
        socks = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(writers)
        ]
        stopped = server.shard_pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            for sock in socks:
                sock.sendall(http_request(f"/v0/boxes/{still}", b'{"records":[{"data":1}]}'))
            for _ in range(3):
                assert client.post(f"/v0/boxes/{other}", json=ONE).status_code == 200
        finally:
            os.kill(stopped, signal.SIGCONT)
        seqs: list[int] = []
        for sock in socks:
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            seqs.append(json.loads(answer.partition(b"\r\n\r\n")[2])["first_seq"])
        assert sorted(seqs) == list(range(2, writers + 2)), "each ack is a record, and each record has one"


def test_an_urgent_append_is_taken_over_the_second_threshold(throttling: Server) -> None:
    """v0 §9: the header or the query; the body needs to say nothing."""
    with client_of(throttling) as client:
        by_header = client.post("/v0/boxes/u", json=ONE, headers={"X-Streams-Urgent": "1"})
        by_query = client.post("/v0/boxes/u?urgent=true", json=ONE)
        lines = {"content-type": "application/x-ndjson"}
        by_lines = client.post("/v0/boxes/u?urgent=true", content=b'{"data":2}\n', headers=lines)
        assert [each.status_code for each in (by_header, by_query, by_lines)] == [201, 200, 200]
        for headers, query in (({"X-Streams-Urgent": "0"}, ""), ({}, "?urgent=false")):
            assert client.post(f"/v0/boxes/u{query}", json=ONE, headers=headers).status_code == 429
        wrong = client.post("/v0/boxes/u", json=ONE, headers={"X-Streams-Urgent": "very"})
        assert wrong.status_code == 400 and "X-Streams-Urgent" in wrong.json()["error"]["message"]


def test_a_flood_of_slow_readers_costs_little_memory_and_none_of_them_a_record(throttling: Server) -> None:
    """§7.3: each is owed ten megabytes and takes nothing; a gateway holds one page for each."""
    readers, batches, records, page_bytes = 100, 20, 50, 256 << 10
    with client_of(throttling) as client, contextlib.ExitStack() as stack:
        batch = [{"data": "x" * 10_000}] * records
        for _ in range(batches):
            body = {"records": batch, "disable_backpressure": True}
            assert client.post("/v0/boxes/big", json=body).is_success
        before = gateway_of(client)["resident_bytes"]
        socks = [
            stack.enter_context(contextlib.closing(slow_reader(throttling, "big"))) for _ in range(readers)
        ]
        for sock in socks:
            assert select.select([sock], [], [], 60)[0], "it is being served"
        held = []
        while len(held) < 20:
            found = gateway_of(client)
            assert found["sse_connections"] == readers
            held.append(found["resident_bytes"] - before)
        # The page, once as it came and once as events, and what a connection costs by itself.
        assert max(held) < readers * (2 * page_bytes + (128 << 10)), [size >> 20 for size in held]
        seqs: list[int] = []
        parser, is_body = Parser(), False
        while len(seqs) < batches * records:
            data = socks[0].recv(1 << 20)
            assert data
            if not is_body:
                is_body, data = True, data.partition(b"\r\n\r\n")[2]
            for event in parser.feed(data):
                if event.name == "record":
                    seqs += [record["$seq"] for record in event.json["records"]]
        assert seqs == list(range(1, batches * records + 1))


def gateway_of(client: httpx2.Client) -> dict[str, Any]:
    [found] = client.get("/v0/status").json()["gateways"]
    return dict(found)


def slow_reader(server: Server, box: str) -> socket.socket:
    """HTTP/1.0: no chunks, so that what it reads in the end is the events and nothing else."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(f"GET /v0/boxes/{box}/watch?from_seq=0 HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    return sock


def test_an_append_to_a_stream_is_told_when_to_come_back_too(throttling: Server) -> None:
    """§9, s2 §5: there is no way around it."""
    with client_of(throttling) as client:
        client.headers["s2-basin"] = "pressed-basin"
        assert client.post("/v1/basins", json={"basin": "pressed-basin"}).status_code == 201
        assert client.post("/v1/streams", json={"stream": "s"}).status_code == 201
        answer = client.post("/v1/streams/s/records", json={"records": [{"body": "x"}]})
        assert answer.status_code == 429 and answer.json()["code"] == "rate_limited"
        assert int(answer.headers["retry-after-ms"]) >= 100 and int(answer.headers["retry-after"]) >= 1
        tail = client.get("/v1/streams/s/records/tail").json()
        assert tail["tail"]["seq_num"] == 0, "nothing was done"
