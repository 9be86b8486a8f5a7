"""A server is restarted in order under writers and watchers (v0 §7.2, §1.1), and none loses anything.

Method: real servers, one after the other, on one port and one directory. Writers use the client, which tries
again; the watcher is a bare HTTP connection without `Last-Event-ID`, so that what it gets after a restart
rests on its session alone.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from pathlib import Path

import httpx2
import pytest

import streams
from streams.testing import Server, running_server
from tests.support.machines import SWEEP_FACTOR
from tests.support.sse import Parser

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; httpx2 would build one a client
#: Each but the last is ended under way. `STREAMS_SWEEP=full` has more of them.
LIVES = 2 if SWEEP_FACTOR == 1 else 6
BOXES = ("disk-box", "fsync-box")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def client_of(url: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, trust_env=False, timeout=60, verify=NO_TLS)


class Writer(threading.Thread):
    """Appends numbers, one at a time, until told to stop."""

    def __init__(self, url: str, box: str, name: str) -> None:
        super().__init__()
        self._url, self._box, self.name = url, box, name
        self.acked: list[str] = []
        self.is_over = threading.Event()
        self.has_written = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with streams.Client(self._url, retry=streams.Retry(total_s=60)) as client:
                box = client.box(self._box)
                while not self.is_over.is_set():
                    value = f"{self.name}-{len(self.acked)}"
                    box.append(value)
                    self.acked.append(value)
                    self.has_written.set()
        except BaseException as error:
            self.error = error


class Watcher(threading.Thread):
    """Reads one session to the end of each stream and opens it again, until it has reached `heads`."""

    def __init__(self, url: str, wid: str) -> None:
        super().__init__()
        self._url, self._wid = url, wid
        self.seqs: dict[str, list[int]] = {box: [] for box in BOXES}
        self.heads: dict[str, int] = {}
        self.streams = 0
        self.statuses: list[int] = []

    @property
    def is_done(self) -> bool:
        return bool(self.heads) and all(self.seqs[box][-1:] == [head] for box, head in self.heads.items())

    def run(self) -> None:
        headers = {"accept": "text/event-stream"}
        # The heartbeat of a second makes sure that it looks up from its stream.
        with client_of(self._url) as client:
            while not self.is_done:
                try:
                    with client.stream("GET", f"/v0/watch/{self._wid}", headers=headers) as stream:
                        self.statuses.append(stream.status_code)
                        self.streams += 1
                        self._read(stream)
                except httpx2.TransportError:
                    continue  # between two servers nobody listens

    def _read(self, stream: httpx2.Response) -> None:
        parser = Parser()
        for piece in stream.iter_bytes():
            for event in parser.feed(piece):
                assert event.name in ("record", "caught-up"), event
                if event.name == "record":
                    self.seqs[event.json["box"]] += [each["$seq"] for each in event.json["records"]]
            if self.is_done:
                return


@pytest.mark.slow
def test_restarts_under_load_drop_no_acked_write_and_no_watch_session(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"shards": 2, "gateways": 2, "port": port, "drain_ms": 100_000}
    writers: list[Writer] = []
    watcher: Watcher | None = None
    for life in range(LIVES):
        with running_server(tmp_path / "data", **settings) as server:
            if watcher is None:
                with client_of(url) as client:
                    for box in BOXES:
                        client.put(f"/v0/boxes/{box}", json={"durability": box.partition("-")[0]})
                    asked = {"boxes": {box: {"from_seq": 0} for box in BOXES}, "heartbeat_ms": 1000}
                    watcher = Watcher(url, client.post("/v0/watch", json=asked).json()["wid"])
                watcher.start()
                writers = [Writer(url, box, f"{box}-{number}") for box in BOXES for number in range(2)]
                for writer in writers:
                    writer.start()
            for writer in writers:
                writer.has_written.clear()
            for writer in writers:  # each has had an answer from this server
                assert writer.has_written.wait(60), writer.error
            if life == LIVES - 1:
                finish(server, writers, watcher)
            else:
                assert (
                    server.terminate() == 0
                )  # which waits less than the drain may take: streams do not hold it up
            told = [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]
            assert not [line for line in told if line["level"] == "error"]
            assert not [line for line in told if "request_id" in line], (
                "requests are logged for those who ask"
            )
    assert watcher is not None
    assert set(watcher.statuses) <= {200, 503} and watcher.streams >= LIVES
    for box in BOXES:
        assert watcher.seqs[box] == list(range(1, watcher.heads[box] + 1)), "each record once, in order"


def finish(server: Server, writers: list[Writer], watcher: Watcher) -> None:
    """Ends everyone and looks at what is stored."""
    for writer in writers:
        writer.is_over.set()
    for writer in writers:
        writer.join(60)
        assert writer.error is None
    with streams.Client(server.url) as client:
        for box in BOXES:
            stored = [str(record.data) for record in client.box(box).read()]  # type: ignore[union-attr]
            acked = [value for writer in writers if writer.name.startswith(box) for value in writer.acked]
            assert sorted(stored) == sorted(acked), "every ack is a record, and no other is there"
        client.box(BOXES[0]).append("the end")  # wakes the watcher, if it has everything already
        watcher.heads = {box: client.box(box).state().head_seq for box in BOXES}
    watcher.join(60)
    assert watcher.is_done, {box: len(seqs) for box, seqs in watcher.seqs.items()}


def test_a_long_poll_does_not_hold_up_the_end_and_is_told_to_come_back() -> None:
    with running_server(shards=1, drain_ms=60_000) as server, client_of(server.url) as client:
        client.put("/v0/boxes/b", json={"type": "queue"})
        answers: list[httpx2.Response] = []

        def poll(question: str) -> None:
            with client_of(server.url) as own:
                body = {"wait_ms": 30_000} | ({"node": "w"} if question == "claim" else {})
                answers.append(own.post(f"/v0/boxes/b/{question}", json=body))

        threads = [threading.Thread(target=poll, args=(question,)) for question in ("diff", "claim")]
        for thread in threads:
            thread.start()
        while True:
            shard = client.get("/v0/status").json()["shards"][0]
            if (shard["waiting_reads"], shard["waiting_claims"]) == (2, 1):
                break  # one of the reads is the carrier's, which waits for routers' records
        assert server.terminate() == 0
        for thread in threads:
            thread.join(60)
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert answer.headers["retry-after"]
        assert len(answers) == 2
        assert "waiting_for" in server.log_text()


def test_a_request_that_never_ends_is_cut_off_when_the_drain_is_over() -> None:
    """Bounded: a client that sends half a body holds nobody up for longer than `drain_ms`."""
    with running_server(shards=1, drain_ms=300) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(
                b"POST /v0/boxes/b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            )
            sock.sendall(b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 100")  # it is being read
            assert server.terminate() == 0
        assert "drain time is over: open connections were closed" in server.log_text()
