"""A shard in this process behind real sockets: machine, log, engine and server, without a supervisor."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from shard.core.machine import Machine
from shard.engine.engine import Engine
from shard.server.peers import Peers
from shard.server.server import ShardServer
from shard.storage.files import Disk
from shard.storage.segments.store import SegmentStore
from streams.protocol import wire
from streams.protocol.access.keys import entries_of_list, parse_ring
from streams.protocol.payloads.appends import RecordLimits
from tests.support.engine_desk import PATIENCE_S, recovered_engine, until

SECRET = "a-secret-of-some-length"
OTHER_SECRET = "another-secret-of-some-length"
PLACEMENT = json.dumps({"slots": [[0, 4096, 0]]})


class WireClient:
    """A client of the wire that reads its answers only when it is asked to."""

    def __init__(self, sock: socket.socket, receive_bytes: int = 0) -> None:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._receiver = wire.Receiver()
        self._answers: dict[int, wire.Message] = {}
        self._ids = 0

    async def send(self, op: int, head: object = None, body: bytes = b"", *, times: int = 1) -> int:
        """Sends a request, as many times as it says; the id of the last one."""
        text = b"" if head is None else wire.head_encoder.encode(head)
        requests = b""
        for _ in range(times):
            self._ids += 1
            requests += wire.frame(wire.REQUEST, 0, op, self._ids, text, len(body)) + body
        with trio.fail_after(PATIENCE_S):
            await self.stream.send_all(requests)
        return self._ids

    async def answer(self, id: int) -> wire.Message:
        """The answer to a request; all that come before it are read and kept."""
        with trio.fail_after(PATIENCE_S):
            while id not in self._answers:
                data = await self.stream.receive_some(1 << 16)
                if not data:
                    raise ConnectionResetError("the shard closed the connection")
                at = 0
                while at < len(data):
                    space = self._receiver.space()
                    count = min(len(space), len(data) - at)
                    space[:count] = data[at : at + count]
                    at += count
                    self._answers |= {each.id: each for each in self._receiver.parse(count)}
        return self._answers.pop(id)

    async def ask(self, op: int, head: object = None, body: bytes = b"") -> wire.Message:
        return await self.answer(await self.send(op, head, body))

    async def append(self, box: str, *records: object) -> None:
        body = json.dumps({"records": [{"data": record} for record in records]}).encode()
        assert not (await self.ask(wire.OP_APPEND, wire.RequestHead(box), body)).flags & wire.FAILED

    async def is_closed(self) -> bool:
        """Reads to the end of what was sent. True if there is an end."""
        try:
            with trio.fail_after(PATIENCE_S):
                while await self.stream.receive_some(1 << 16):
                    pass
        except trio.BrokenResourceError:
            pass
        return True


@dataclass
class ServedShard:
    server: ShardServer
    engine: Engine
    folder: Path
    tcp: tuple[str, int]

    def local(self, receive_bytes: int = 0) -> WireClient:
        """A client on the Unix socket, as a gateway is."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self.folder / "shard.sock"))
        return WireClient(sock, receive_bytes)

    async def remote(self, secret: str = SECRET, receive_bytes: int = 1 << 14) -> WireClient:
        """A client over TCP that has said hello."""
        client = self.stranger(receive_bytes)
        answer = await client.ask(wire.OP_HELLO, body=secret.encode())
        assert not answer.flags & wire.FAILED, answer.body
        return client

    def stranger(self, receive_bytes: int = 1 << 14) -> WireClient:
        sock = socket.socket()
        sock.connect(self.tcp)
        return WireClient(sock, receive_bytes)

    async def until(self, is_so: Callable[[], bool]) -> None:
        await until(is_so)


@asynccontextmanager
async def served_shard(folder: Path, **settings: object) -> AsyncIterator[ServedShard]:
    disk = Disk()
    keys = folder / "keys.json"
    keys.write_bytes(parse_ring(entries_of_list(f"{SECRET},{OTHER_SECRET}"))[0].to_json())
    store = SegmentStore(disk, f"{folder}/segments", None)
    machine = Machine()
    engine = recovered_engine(
        folder, disk, machine, store, settings=settings, now_ms=lambda: time.time_ns() // 1_000_000
    )
    peers = Peers(shard=0, keys_file=str(keys), placement=PLACEMENT, body_bytes_max=1 << 24)
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(folder / "shard.sock"))
        unix.listen()
        server = ShardServer(unix, RecordLimits(), None, [tcp], peers)
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: engine.run(boot_id="boot", task_status=task_status))
            server.begin(engine)
            nursery.start_soon(server.run)
            yield ServedShard(server, engine, folder, tcp.getsockname())
            nursery.cancel_scope.cancel()
        assert engine.failure is None, engine.failure
        await engine.stop()
