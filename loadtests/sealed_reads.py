"""Measures catch-up reads of sealed records by one reader: cold and warm page cache, and from a cold folder.

The box is several times as large as the cache of the shard, so no page of a pass is in memory. The reader
is a blocking socket with prebuilt requests for pages of a thousand records, one after another, as a client
that catches up sends them.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from loadtests.generator import http_request
from loadtests.rows import Bench, Case, CaseFailed, Measurement, Row, by_shard, call
from streams.testing import Server

_BOX: Final = "catch-up"
_DATA_BYTES: Final = 950
_LIMIT: Final = 1000
_CACHE_BYTES: Final = 32 << 20
#: Records that do not fill a segment are sealed when they are old: the last ones, and most of a quick run.
_SETTINGS: Final = {
    "cache_bytes": str(_CACHE_BYTES),
    "upkeep_bytes_per_s": "0",
    "segment_max_age_ms": "5000",
}
_SEALED_S_MAX: Final = 60.0
_REPLY_BYTES_MAX: Final = 8 << 20


def sealed_reads(bench: Bench, case: Case) -> Measurement:
    """Fill a box, wait until it is sealed, read all of it from a cold and from a warm page cache."""
    bench.renew()
    settings = dict(_SETTINGS)
    if case.plan.get("cold_folder"):
        settings |= {"cold_dir": tempfile.mkdtemp(dir=bench.folder), "hot_retain_segments": "0"}
    own = Bench(bench.sizes, bench.settings | settings, bench.folder)
    records = bench.sizes.sealed_records
    try:
        server = own.server()
        call(server, "PUT", f"/v0/boxes/{_BOX}", {"durability": "disk"})
        _fill(own, server, records)
        files = _wait_sealed(server, records, settings.get("cold_dir"))
        figures: dict[str, float] = {}
        for row in case.rows:
            if row.key.endswith("-cold-cache"):
                _drop_page_cache(files)
            figures[row.key] = round(_read(server, records) / 1e6, 1)
    finally:
        own.close(well=False)
    return Measurement(figures, {"records": records, "data_bytes": _DATA_BYTES, "files": len(files)})


def _fill(bench: Bench, server: Server, records: int) -> dict[str, Any]:
    return bench.load(
        server,
        kind="wire",
        shards=by_shard(server, [_BOX]),
        batch=100,
        data_bytes=_DATA_BYTES,
        in_flight=8,
        requests_max=-(-records // 100),
        seconds=120,
        warm_up_s=0,
    )


def _wait_sealed(server: Server, records: int, cold_dir: str | None) -> list[Path]:
    """Wait until files hold nearly all records, and return the files."""
    folder = Path(cold_dir) if cold_dir else server.data_dir
    until = monotonic() + _SEALED_S_MAX
    while monotonic() < until:
        files = list(folder.glob("**/*.seg"))
        if sum(path.stat().st_size for path in files) >= 0.9 * records * _DATA_BYTES:
            return files
        sleep(0.2)
    raise CaseFailed(f"the records were not sealed within {_SEALED_S_MAX:g} s")


def _drop_page_cache(files: list[Path]) -> None:
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _read(server: Server, records: int) -> float:
    """Read the box from its start, 90 % of it, and return the bytes a second."""
    buffer = bytearray(_REPLY_BYTES_MAX)
    total = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = monotonic()
        for from_seq in range(0, records * 9 // 10, _LIMIT):
            body = b'{"from_seq":%d,"limit":%d}' % (from_seq, _LIMIT)
            connection.sendall(http_request(f"/v0/boxes/{_BOX}/diff", body))
            size = _receive(connection, buffer)
            if buffer.find(b'"next_from_seq":%d,' % (from_seq + _LIMIT), 0, size) < 0:
                raise CaseFailed(f"a page was answered {bytes(buffer[:400])!r}")
            total += size
        return total / (monotonic() - began)


def _receive(connection: socket.socket, buffer: bytearray) -> int:
    """Read one response into the buffer, and return its size."""
    view = memoryview(buffer)
    size = end = 0
    while not end or size < end:
        count = connection.recv_into(view[size:])
        if not count:
            raise CaseFailed("the server closed a connection")
        size += count
        if not end and (head_end := buffer.find(b"\r\n\r\n", 0, size)) >= 0:
            head = bytes(buffer[:head_end]).lower()
            end = head_end + 4 + int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return size


SEALED_READ_CASES = (
    Case(
        (
            Row("sealed-read-cold-cache", "catch-up of sealed records, cold page cache", "MB/s", 150, 400),
            Row("sealed-read-warm", "the same, warm page cache", "MB/s", 400, 800),
        ),
        sealed_reads,
    ),
    Case(
        (
            Row("cold-store-read-cold-cache", "catch-up from a cold folder, cold page cache", "MB/s"),
            Row("cold-store-read-warm", "the same, warm page cache", "MB/s", 150, 400),
        ),
        sealed_reads,
        {"cold_folder": True},
    ),
)
