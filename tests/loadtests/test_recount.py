"""The recount of `make torture` finds every kind of difference. Without Spark: tables and one real server."""

from __future__ import annotations

import pyarrow as pa

import streams
from loadtests.recount import SCHEMA, Recount, compare, read_boxes
from streams.testing import running_server


def table(*rows: tuple[int, int, str]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA)


def test_rows_that_are_lost_doubled_or_different_are_counted() -> None:
    sent = table((0, 0, "a"), (1, 1, "b"), (0, 2, "c"))
    assert compare(sent, sent) == Recount(3, 3, 0, 0, 0, 0) and compare(sent, sent).agrees
    assert compare(sent, table((0, 0, "a"), (1, 1, "b"))) == Recount(3, 2, 1, 0, 0, 0)
    doubled = table((0, 0, "a"), (0, 0, "a"), (0, 0, "a"), (1, 1, "b"), (0, 2, "c"))
    assert compare(sent, doubled) == Recount(3, 5, 0, 2, 0, 0)
    # One in another box and one with another text, though the number of rows is right.
    moved = table((1, 0, "a"), (1, 1, "b"), (0, 2, "other"))
    assert compare(sent, moved) == Recount(3, 3, 2, 0, 2, 0) and not compare(sent, moved).agrees
    assert not compare(sent, sent, gaps=1).agrees


def test_boxes_are_read_to_their_end_and_gaps_are_reported() -> None:
    rows = [{"n": n, "text": str(n)} for n in range(2500)]
    with running_server(shards=1) as server, streams.Client(server.url) as client:
        client.box("a").append_batch(rows)
        client.box("b").create(cap_records=10)
        for first in range(0, 30, 10):
            client.box("b").append_batch(rows[first : first + 10])
        whole, gaps = read_boxes(server.url, ["a"])
        assert gaps == 0 and compare(table(*((0, n, str(n)) for n in range(2500))), whole).agrees
        capped, gaps = read_boxes(server.url, ["a", "b"])
        assert (capped.num_rows, gaps) == (2510, 1)
