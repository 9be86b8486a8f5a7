"""Goal: who watches sees every record once and in order, whatever process is killed under the stream (§7).

Method: real servers, `curl -N`, a real browser with its own `EventSource`, and a thousand watchers on plain
sockets. Kills are counted in acks of a writer, never in seconds.

The browser is Chromium. Where there is none the test installs it from Debian's packages; where that cannot be
done it fails, because nobody would notice that it had not run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trio

from gateway.api.routes import Api
from gateway.s2.endpoints import S2
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from gateway.shards.placement import Placement
from gateway.watch.service import Watch
from streams.testing import Server, running_server
from tests.gateway.edge_harness import running_front
from tests.support.browser import headless_chromium
from tests.support.crashing import PATIENCE_S, Client, Writer, at_work, box_on, eventually
from tests.support.sse import Parser

SHARDS = 2
NEW = {"records": [{"data": "new"}]}


class Account:
    """What one watcher has been told of each box: seqs in the order in which they came."""

    def __init__(self) -> None:
        self.seqs: dict[str, list[int]] = {}
        self.others: list[tuple[str, Any]] = []
        self._changed = threading.Condition()

    def take(self, name: str, said: Any) -> None:
        with self._changed:
            if name == "record":
                found = self.seqs.setdefault(said["box"], [])
                found += [record["$seq"] for record in said["records"]]
            elif name != "caught-up":
                self.others.append((name, said))
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 2 * PATIENCE_S), (self.seqs, self.others)

    def wait_for(self, box: str, seq: int) -> None:
        self.wait_until(lambda: self.seqs.get(box, [0])[-1] >= seq)

    def check(self, heads: dict[str, int]) -> None:
        for box, head in heads.items():
            self.wait_for(box, head)
            assert self.seqs[box] == list(range(1, head + 1)), f"{box}: missing, twice or out of order"
        assert self.others == []


@contextmanager
def curl(url: str, account: Account) -> Iterator[subprocess.Popen[bytes]]:
    """`curl -N` into an account."""
    process = subprocess.Popen(["curl", "-sN", url], stdout=subprocess.PIPE)

    def read() -> None:
        parser = Parser()
        assert process.stdout is not None
        while True:
            data = process.stdout.read1(65536)  # type: ignore[attr-defined]
            if not data:
                return
            for event in parser.feed(data):
                account.take(event.name, event.json)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        reader.join()


#: One report after the other, because two requests of a browser may overtake each other.
PAGE = """<script>
const source = new EventSource("%s");
let reports = Promise.resolve();
for (const name of ["record", "tombstone", "box-deleted", "error"])
  source.addEventListener(name, event => {
    if (event.data !== undefined)
      reports = reports.then(() => fetch("/told?" + name, {method: "POST", body: event.data}));
  });
</script>"""


@contextmanager
def browser(server: Server, stream_url: str, account: Account, folder: Path) -> Iterator[None]:
    """A page with an `EventSource` in headless Chromium, which tells us what it is told.

    The page and the server must be of one origin for a plain `EventSource`, so what serves the page passes
    the stream through, byte for byte, and reconnections with their `Last-Event-ID`.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["content-length"])))
            account.take(self.path.partition("?")[2], said)
            self.send_response(204)
            self.end_headers()

        def do_GET(self) -> None:
            if self.path == stream_url:
                self._pass_through()
                return
            page = (PAGE % stream_url).encode() if self.path == "/" else b""
            self.send_response(200 if page else 404)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def _pass_through(self) -> None:
            self.close_connection = True
            with socket.create_connection(("127.0.0.1", server.port)) as upstream:
                last = self.headers.get("last-event-id")
                resume = f"Last-Event-ID: {last}\r\n" if last else ""
                upstream.sendall(
                    f"GET {stream_url} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n{resume}"
                    "Connection: close\r\n\r\n".encode()
                )
                try:
                    while data := upstream.recv(65536):
                        self.connection.sendall(data)
                except OSError:
                    pass

    pages = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    process = subprocess.Popen(
        [
            *headless_chromium(folder),
            "--remote-debugging-port=0",
            f"http://127.0.0.1:{pages.server_port}/",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        pages.shutdown()
        pages.server_close()


def watch(client: Client, boxes: list[str]) -> str:
    made = client.ok("POST", "/v0/watch", {"boxes": {box: {} for box in boxes}, "heartbeat_ms": 1000})
    return str(made["stream_url"])


def written_to(server: Server, boxes: list[str]) -> AbstractContextManager[list[Writer]]:
    return at_work(Writer(box, server.port, box) for box in boxes)


def heads(client: Client, boxes: list[str]) -> dict[str, int]:
    return {box: client.ok("GET", f"/v0/boxes/{box}")["head_seq"] for box in boxes}


# -- a browser and curl, and a shard killed under them


def test_a_browser_and_curl_go_on_when_a_shard_is_killed(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=SHARDS) as server:
        client = Client(server.port)
        boxes = [box_on(shard, SHARDS, f"watched{shard}") for shard in range(SHARDS)]
        for at, box in enumerate(boxes):
            client.put(box, durability=("fsync", "disk")[at % 2])
        one, two, three = Account(), Account(), Account()
        step = f"{server.url}/v0/boxes/{boxes[0]}/watch"
        with (
            browser(server, watch(client, boxes), one, tmp_path / "chromium"),
            curl(f"{server.url}{watch(client, boxes)}", two),
            curl(step, three),
        ):
            with written_to(server, boxes) as writers:
                for box in boxes:
                    one.wait_for(box, 3)
                for victim in (0, 1, 0):
                    for writer in writers:
                        writer.wait_for_acks(5)
                    os.kill(server.shard_pids()[victim], signal.SIGKILL)
                for writer in writers:
                    writer.wait_for_acks(5)
            found = heads(client, boxes)
            for account in (one, two):
                account.check(found)
            three.check({boxes[0]: found[boxes[0]]})


def test_a_browser_goes_on_when_its_gateway_is_killed_or_another_takes_over(tmp_path: Path) -> None:
    """Two gateways share the port: a session works on both, and outlives each."""
    with running_server(tmp_path / "data", shards=SHARDS, gateways=2) as server:
        client = Client(server.port)
        boxes = [box_on(shard, SHARDS, f"watched{shard}") for shard in range(SHARDS)]
        for box in boxes:
            client.put(box)
        account = Account()
        with browser(server, watch(client, boxes), account, tmp_path / "chromium"):
            with written_to(server, boxes) as writers:
                for box in boxes:
                    account.wait_for(box, 3)
                for victim in (0, 1):
                    os.kill(server.gateway_pids()[victim], signal.SIGKILL)
                    for writer in writers:
                        writer.wait_for_acks(5)
            last = Client(server.port)
            account.check(heads(last, boxes))


def test_a_memory_box_comes_back_in_another_life(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        client = Client(server.port)
        client.put("volatile", durability="memory")
        client.append("volatile", 1, 2, 3)
        account = Account()
        with curl(f"{server.url}{watch(client, ['volatile'])}", account):
            account.wait_for("volatile", 3)
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            eventually(lambda: client.send("POST", "/v0/boxes/volatile", NEW).status == 200 or None)
            account.wait_until(lambda: len(account.seqs["volatile"]) >= 4)
            [(name, said)] = account.others
            assert (name, said["reason"]) == ("tombstone", "recreated")
            assert account.seqs["volatile"] == [1, 2, 3, 1]


# -- the end of a stream


def test_a_stopping_server_ends_its_streams_in_order(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server:
        client = Client(server.port)
        client.append("box", 1)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as sock:
            sock.sendall(f"GET {watch(client, ['box'])} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            raw = b""
            while b"caught-up" not in raw:
                raw += sock.recv(65536)
            server.process.terminate()
            while data := sock.recv(65536):
                raw += data
        assert raw.endswith(b"\r\n0\r\n\r\n")
        assert server.wait() == 0


# -- a thousand watchers, and one serialisation


async def test_a_thousand_watchers_share_one_serialisation_of_each_append(tmp_path: Path) -> None:
    """§7.2. The gateway runs in this process, so that its counter can be read; the shards are real."""
    watchers, appends = 1000, 20
    with running_server(tmp_path, shards=SHARDS) as server:
        client = Client(server.port)
        client.append("popular", 0)
        placement = client.ok("GET", "/v0/placement")
        links = [Link(at, path) for at, path in enumerate(placement["sockets"])]
        dispatch = Dispatch(Placement.from_dict(placement), links)
        service = Watch(dispatch, connections_max=0, node_bytes_max=128)
        draining = trio.Event()
        api = Api(
            dispatch,
            body_bytes_max=1 << 20,
            version="test",
            sockets=(),
            draining=draining,
            watch=service,
            s2=S2(dispatch, draining, drain_s=1.0, watch=service),
        )
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(link.run)
            await nursery.start(service.run, draining)
            async with running_front(api.handle, patience_s=4 * PATIENCE_S) as running:
                for link in links:
                    await link.wait_up()
                done = trio.Event()
                accounts: list[list[int]] = []
                ready: list[None] = []
                all_ready = trio.Event()

                async def follow() -> None:
                    seqs: list[int] = []
                    parser = Parser()
                    async with await running.connect() as stream:
                        await stream.send_all(
                            b"GET /v0/boxes/popular/watch?tail=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
                        )
                        raw = b""
                        while b"\r\n\r\n" not in raw:
                            raw += await stream.receive_some(4096)
                        begun = raw.partition(b"\r\n\r\n")[2]
                        async for event in events_of(stream, parser, begun):
                            if event.name == "caught-up":
                                ready.append(None)
                                if len(ready) == watchers:
                                    all_ready.set()
                            else:
                                seqs += [record["$seq"] for record in event.json["records"]]
                                if seqs[-1] == appends + 1:
                                    break
                    accounts.append(seqs)
                    if len(accounts) == watchers:
                        done.set()

                for _ in range(watchers):
                    nursery.start_soon(follow)
                await all_ready.wait()
                before = service.feeds.statistics()
                assert before.feeds == 1
                for number in range(appends):
                    await trio.to_thread.run_sync(client.append, "popular", number)
                await done.wait()
                after = service.feeds.statistics()
                encoded = after.pages_encoded - before.pages_encoded
                assert encoded <= appends, "an append is encoded once, or together with the next"
                assert all(seqs == list(range(2, appends + 2)) for seqs in accounts)
            nursery.cancel_scope.cancel()


async def events_of(stream: trio.SocketStream, parser: Parser, begun: bytes) -> Any:
    """Events of a chunked body, of which some may have come already."""
    raw = begun
    while True:
        size_line, found, rest = raw.partition(b"\r\n")
        if found and len(rest) >= int(size_line, 16) + 2:
            size = int(size_line, 16)
            raw = rest[size + 2 :]
            for event in parser.feed(rest[:size]):
                yield event
            continue
        data = await stream.receive_some(65536)
        assert data, "the stream ended"
        raw += data
