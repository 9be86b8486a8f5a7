"""Measures many small logs that are trimmed often (`actors-1000`), as actors or workflows write them.

Each connection owns its boxes. It appends a chain of a few records to one box after the other, and after
every `TRIM_EVERY` chains it deletes all of the box but its last chain. A record counts when its chain is
acked; trims cost time and count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

from loadtests.generator import HttpLoad, Step, append_body, http_request
from loadtests.rows import Bench, Case, CaseFailed, Measurement, Row, call

ACTORS, ACTORS_QUICK = 1000, 50
CHAIN_RECORDS: Final = 4
TRIM_EVERY: Final = 4


def actor_steps(boxes: list[str], record_bytes: int) -> Iterator[Step]:
    """Yield the requests of one connection without end. Its boxes must be empty."""
    appends = [
        http_request(f"/v0/boxes/{box}", append_body(seed, CHAIN_RECORDS, record_bytes=record_bytes))
        for seed, box in enumerate(boxes)
    ]
    chains = 0
    while True:
        chains += 1
        last_chain_seq = (chains - 1) * CHAIN_RECORDS + 1
        trim = b'{"before_seq":%d}' % last_chain_seq if chains % TRIM_EVERY == 0 else b""
        for box, append in zip(boxes, appends, strict=True):
            yield Step(append, CHAIN_RECORDS, b'"last_seq":%d,' % (chains * CHAIN_RECORDS))
            if trim:
                marker = b'"earliest_seq":%d,' % last_chain_seq
                yield Step(http_request(f"/v0/boxes/{box}/delete", trim), 0, marker)


class ActorLoad(HttpLoad):
    """Keep-alive connections, each with its own boxes."""

    def _steps_of(self, plan: dict[str, Any], index: int, count: int) -> Iterator[Step]:
        return actor_steps(plan["boxes"][index::count], plan["record_bytes"])

    def _check(self, connection: Any, size: int) -> None:
        buffer = connection.buffer
        connection.answers += 1
        if not buffer.startswith(b"HTTP/1.1 2") or buffer.find(connection.marker, 0, size) < 0:
            connection.records = 0
            self._tally.add_failure(bytes(buffer[:size]))


def actors(bench: Bench, case: Case) -> Measurement:
    server = bench.server()
    names = [f"actor-{number}" for number in range(ACTORS_QUICK if bench.sizes.is_quick else ACTORS)]
    with ExitStack() as stack:
        for name in names:
            call(server, "PUT", f"/v0/boxes/{name}", {"durability": case.plan["durability"]})
            stack.callback(call, server, "DELETE", f"/v0/boxes/{name}")
        result = bench.load(server, kind="actors", port=server.port, boxes=names, **case.plan)
    if not result["records"]:
        raise CaseFailed("no chain was acked")
    return Measurement({case.rows[0].key: result["records_per_s"]}, result)


ACTOR_CASES: Final = (
    Case(
        (
            Row(
                "actors-1000",
                "chains of 4 into 1,000 boxes, trimmed after each fourth, 16 connections, disk",
                "records/s",
            ),
        ),
        actors,
        {"durability": "disk", "connections": 16},
    ),
)
