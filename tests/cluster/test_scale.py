"""Goal: a box of any length costs memory by the batch, comes back byte for byte, and restarts at once.

Method: one box on a real server, many times the cache in bytes, written over the shard's own socket with many
batches in flight, read back over HTTP, before and after a restart. The memory of the shard is looked at all
along. By default twenty thousand batches, so large that what must not stay in memory would show;
`STREAMS_SCALE=full` (`make scale`) has five million records in half a million small batches.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from loadtests.generator import connect_unix
from loadtests.machine import resident_bytes
from streams.protocol import wire
from streams.testing import Server, running_server
from tests.cluster.test_damage import log_lines
from tests.support.crashing import Client, eventually

MIB = 1 << 20
RECORDS_PER_BATCH = 10


class Size(NamedTuple):
    batches: int
    data_bytes: int
    cache_bytes: int


FULL = os.environ.get("STREAMS_SCALE") == "full"
SIZE = Size(500_000, 100, 16 * MIB) if FULL else Size(20_000, 600, 2 * MIB)

#: What is kept in memory of a sealed batch: five numbers in the machine (32 bytes); and its place, its
#: checksum and more in the indexes of segments that were read lately (52 bytes, of 250,000 batches at most).
BYTES_PER_BATCH = 32
INDEX_BYTES = 52 * min(SIZE.batches, 250_000)
#: Payloads in the cache, unsealed ones up to twice as much (then writers wait), and half as much again for
#: the allocator, which does not give back every page.
CACHES = 4.5
#: Whatever the length of the box: the buffers of the log (its next file's zeros, a group that is written, a
#: segment that is), of replies, and the allocator's arenas of nine threads.
CONSTANT_BYTES = 24 * MIB

#: Of the budget: what a restart may take beside the replay, and how fast that has to be.
RESTART_S, REPLAY_BYTES_PER_S = 3.0, 100e6

IN_FLIGHT = 128


def record(number: int) -> dict[str, Any]:
    """Unlike any other, so that a record in another's place would be seen."""
    text = f"{number:x}-" * (SIZE.data_bytes // (len(f"{number:x}") + 1))
    return {"n": number, "text": text}


def body(batch: int) -> bytes:
    first = batch * RECORDS_PER_BATCH
    records = [{"data": record(number)} for number in range(first, first + RECORDS_PER_BATCH)]
    return orjson.dumps({"records": records})


def write_all(server: Server, box: str) -> None:
    """Every batch in order, many in flight; each is acked with the seqs it must have."""
    placement = Client(server.port).ok("GET", "/v0/placement")
    sock = connect_unix(placement["sockets"][0])
    sock.setblocking(True)
    receiver = wire.Receiver()
    head = wire.head_encoder.encode(wire.RequestHead(box, "return_seqs=false"))
    waiting: deque[int] = deque()
    sent = 0
    try:
        while sent < SIZE.batches or waiting:
            parts: list[bytes] = []
            while sent < SIZE.batches and len(waiting) < IN_FLIGHT:
                content = body(sent)
                parts += [wire.frame(wire.REQUEST, 0, wire.OP_APPEND, sent, head, len(content)), content]
                waiting.append(sent)
                sent += 1
            sock.sendall(b"".join(parts))
            for message in receiver.parse(sock.recv_into(receiver.space())):
                assert not message.flags & wire.FAILED, bytes(message.body)
                assert message.id == waiting.popleft(), "acks come in the order of the writes"
                assert json.loads(message.body)["first_seq"] == message.id * RECORDS_PER_BATCH + 1
    finally:
        sock.close()


def read_all(server: Server, box: str) -> int:
    """Everything, in order, compared; how many records there are."""
    client = Client(server.port)
    seq = 0
    while True:
        page = client.ok("POST", f"/v0/boxes/{box}/diff", {"from_seq": seq, "limit": 1000})
        assert page["tombstone"] is None
        for found in page["records"]:
            seq += 1
            assert found["$seq"] == seq and found["data"] == record(seq - 1)
        if page["caught_up"]:
            return seq
        assert page["next_from_seq"] == seq


@contextmanager
def watched(server: Server) -> Iterator[list[int]]:
    """The most memory that the shard has taken meanwhile, as the only element."""
    (pid,) = server.shard_pids().values()
    most = [resident_bytes(pid)]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], resident_bytes(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def serving(data_dir: Path) -> Any:
    # The log is kept short, so that most of the box is not in it.
    return running_server(
        data_dir,
        shards=1,
        cache_bytes=SIZE.cache_bytes,
        wal_file_bytes="4MiB",
        snapshot_wal_bytes="16MiB",
        upkeep_bytes_per_s=0,
    )


def allowed_bytes(empty_bytes: int) -> float:
    per_batch = BYTES_PER_BATCH * SIZE.batches + INDEX_BYTES
    return empty_bytes + CACHES * SIZE.cache_bytes + per_batch + CONSTANT_BYTES


@pytest.mark.slow
@pytest.mark.timeout(3600 if FULL else 300)
def test_a_box_many_times_the_cache_is_written_read_and_restarted_in_bounded_memory(tmp_path: Path) -> None:
    records = SIZE.batches * RECORDS_PER_BATCH
    with serving(tmp_path) as server:
        client = Client(server.port)
        client.put("long", durability="disk")
        (pid,) = server.shard_pids().values()
        empty_bytes = resident_bytes(pid)
        began = time.monotonic()
        with watched(server) as writing:
            write_all(server, "long")
        wrote_s = time.monotonic() - began
        # On a connection of its own: the one before has been idle for longer than the server may allow.
        stored_bytes = Client(server.port).ok("GET", "/v0/boxes/long")["bytes"]
        assert stored_bytes > 10 * SIZE.cache_bytes
        began = time.monotonic()
        with watched(server) as reading:
            assert read_all(server, "long") == records
        read_s = time.monotonic() - began
        assert max(writing[0], reading[0]) <= allowed_bytes(empty_bytes)
        eventually(lambda: len(list(tmp_path.glob("shard-00/wal/*.wal"))) <= 16)
        server.kill()
    with serving(tmp_path) as server:
        (recovered,) = log_lines(server.log_text(), "shard recovered")
        replayed_bytes = recovered["mebibytes"] * MIB
        with watched(server) as again:
            assert read_all(server, "long") == records
        print(
            f"{records:,} records in {SIZE.batches:,} batches, {stored_bytes / MIB:,.0f} MiB, "
            f"cache {SIZE.cache_bytes / MIB:.0f} MiB: written in {wrote_s:.1f} s, read in {read_s:.1f} s; "
            f"memory {empty_bytes / MIB:.0f} MiB empty, {writing[0] / MIB:.0f} writing, "
            f"{reading[0] / MIB:.0f} reading, {again[0] / MIB:.0f} after a restart, "
            f"{allowed_bytes(empty_bytes) / MIB:.0f} allowed; "
            f"recovered in {recovered['seconds']:.2f} s with {replayed_bytes / MIB:.0f} MiB of log"
        )
        assert again[0] <= allowed_bytes(empty_bytes)
        if FULL:  # of five million records; of few it would say how busy the machine is
            assert recovered["seconds"] <= RESTART_S + replayed_bytes / REPLAY_BYTES_PER_S
