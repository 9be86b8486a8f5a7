"""Archives to open tables: each record once, snapshots name their seqs, one read of table and box."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.table import StaticTable

import streams
from streams.client.answers import Record
from streams.spark import jobs
from streams.spark.jobs.job_context import JobRefused, Ledger
from streams.spark.jobs.table_archive import LEDGER, open_table
from streams.testing import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def _append(client: streams.Client, box: str, numbers: range) -> None:
    client.box(box).append_batch([streams.Entry({"n": n, "user": f"u{n % 3}"}) for n in numbers])


def test_a_delta_table_has_the_same_snapshots_columns_and_merges(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")

    def run(**more: Any) -> jobs.TableArchive:
        options: dict[str, Any] = {"name": name, "format": "delta", "url": server.url, **more}
        return jobs.archive_table(spark, [name], path, **options)

    _append(client, name, range(5))
    first = run(columns="n bigint")
    _append(client, name, range(5, 8))
    assert run(columns="n bigint, user string").columns == ["user"]
    _append(client, name, range(8, 10))
    assert _seqs(jobs.read_table(spark, name, url=server.url)) == list(range(1, 11))
    old = jobs.read_table(spark, name, snapshot=first.snapshot, with_boxes=False, url=server.url)
    assert _seqs(old) == [1, 2, 3, 4, 5]

    # Another engine, which knows the folder alone.
    other = DeltaTable(path)
    rows = pa.table(other.scan().read_all()).select(["seq", "n", "user", "box", "date"]).to_pylist()
    assert sorted(row["seq"] for row in rows) == list(range(1, 9))
    assert {row["n"]: row["user"] for row in rows} == {n: f"u{n % 3}" if n > 4 else None for n in range(8)}
    assert {row["box"] for row in rows} == {name} and all(row["date"] is not None for row in rows)
    assert DeltaTable(path, version=first.snapshot).count() == 5

    slow = open_table(Ledger(client, LEDGER + name), name)
    files = [each.path for each in slow.files()]
    assert run().records == 2
    with pytest.raises(JobRefused, match="another run of this job"):
        slow.commit(files, {})
    assert _seqs(jobs.read_table(spark, name, url=server.url)) == list(range(1, 11))

    box = client.box(f"{name}.m")
    box.append_batch([streams.Entry({"n": n}, tag=tag) for n, tag in enumerate("aab")])
    merge: dict[str, Any] = {"columns": "n int", "merge": True, "url": server.url}
    merged = f"{path}-merged"
    jobs.archive_table(spark, [box.name], merged, name=box.name, format="delta", **merge)
    box.append_batch([streams.Entry(None, tag="b"), streams.Entry({"n": 5}, tag="c")])
    jobs.archive_table(spark, [box.name], merged, name=box.name, format="delta", **merge)
    kept = jobs.read_table(spark, box.name, with_boxes=False, url=server.url).select("tag", "n").collect()
    assert {row["tag"]: row["n"] for row in kept} == {"a": 1, "c": 5}


def _seqs(rows: DataFrame) -> list[int]:
    return sorted(row["seq"] for row in rows.select("seq").collect())


def test_runs_add_each_record_once_and_a_snapshot_names_its_seqs(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")

    def run() -> jobs.TableArchive:
        return jobs.archive_table(spark, [name], path, name=name, columns="n bigint", url=server.url)

    _append(client, name, range(5))
    first = run()
    assert (first.records, first.ranges[name].first, first.ranges[name].last) == (5, 1, 5)
    _append(client, name, range(5, 8))
    second = run()
    assert (second.records, second.ranges[name].first, second.ranges[name].last) == (3, 6, 8)
    assert run().snapshot is None
    _append(client, name, range(8, 10))

    both = jobs.read_table(spark, name, url=server.url)
    assert _seqs(both) == list(range(1, 11))
    assert sorted(row["n"] for row in both.collect()) == list(range(10))
    old = jobs.read_table(spark, name, snapshot=first.snapshot, with_boxes=False, url=server.url)
    assert _seqs(old) == [1, 2, 3, 4, 5]
    old_and_box = jobs.read_table(spark, name, snapshot=first.snapshot, url=server.url)
    assert _seqs(old_and_box) == list(range(1, 11))
    versions = jobs.table_versions(name, url=server.url)
    assert [each.cursors[name].seq for each in versions] == [5, 8]

    # Another engine, which knows the folder alone.
    other = StaticTable.from_metadata(path)
    found = other.scan().to_arrow()
    assert sorted(found["seq"].to_pylist()) == list(range(1, 9))
    assert sorted(found["n"].to_pylist()) == list(range(8))
    assert other.scan(snapshot_id=first.snapshot).to_arrow().num_rows == 5
    summary = other.current_snapshot()
    assert summary is not None and summary.summary is not None
    assert json.loads(summary.summary["streams.cursors"] or "")[name][1] == 8


def test_inferred_columns_are_pinned_and_later_runs_only_add_some(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    options = {"name": name, "url": server.url}
    client.box(name).append_batch([{"id": 1, "ts": "x", "deep": {"a": [1]}}])
    jobs.archive_table(spark, [name], path, columns="infer", **options)
    client.box(name).append_batch([{"id": "no number", "new": 2.5}, 7])
    done = jobs.archive_table(spark, [name], path, columns="infer", **options)
    assert done.columns == ["new"]
    rows = {row["seq"]: row for row in jobs.read_table(spark, name, url=server.url).collect()}
    assert (rows[1]["id"], rows[1]["data_ts"], json.loads(rows[1]["deep"])) == (1, "x", {"a": [1]})
    assert (rows[1]["new"], rows[2]["new"], rows[2]["id"]) == (None, 2.5, None)
    assert json.loads(rows[2]["data"])["id"] == "no number" and rows[3]["data"] == "7"
    found = StaticTable.from_metadata(path).scan().to_arrow().sort_by("seq")
    assert found["new"].to_pylist() == [None, 2.5, None]
    client.box(name).append_batch([{"id": 2}])
    with pytest.raises(JobRefused, match="id is bigint in the table and cannot become string"):
        jobs.archive_table(spark, [name], path, columns="id string", **options)


def test_small_files_are_merged_and_old_snapshots_keep_their_records(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    for n in range(8):
        _append(client, name, range(n, n + 1))
        jobs.archive_table(spark, [name], path, name=name, partition_by=["box"], url=server.url)
    versions = jobs.table_versions(name, url=server.url)
    assert [each.cursors[name].seq for each in versions] == [*range(1, 9), 8], "the last one is the merge"
    table = StaticTable.from_metadata(path)
    assert len(list(table.scan().plan_files())) == 1
    assert sorted(table.scan().to_arrow()["seq"].to_pylist()) == list(range(1, 9))
    for version in versions:
        seqs = table.scan(snapshot_id=version.id).to_arrow()["seq"].to_pylist()
        assert sorted(seqs) == list(range(1, version.cursors[name].seq + 1))


def test_of_two_runs_at_once_one_commits(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    _append(client, name, range(3))
    jobs.archive_table(spark, [name], path, name=name, url=server.url)
    slow = open_table(Ledger(client, LEDGER + name), name)
    files = [each.path for each in slow.files()]
    _append(client, name, range(3, 5))
    jobs.archive_table(spark, [name], path, name=name, url=server.url)
    with pytest.raises(JobRefused, match="another run of this job"):
        slow.commit(files, {})
    assert _seqs(jobs.read_table(spark, name, url=server.url)) == [1, 2, 3, 4, 5]


def test_a_merged_table_has_the_newest_record_of_each_tag_and_null_deletes(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    boxes = [f"{name}.0", f"{name}.1"]

    def put(box: str, **values: object) -> None:
        client.box(box).append_batch([streams.Entry(value, tag=tag) for tag, value in values.items()])

    def run() -> jobs.TableArchive:
        return jobs.archive_table(spark, boxes, path, name=name, columns="v int", merge=True, url=server.url)

    def state(rows: DataFrame) -> dict[str, int]:
        return {f"{row['box'][-1]}{row['tag']}": row["v"] for row in rows.collect()}

    put(boxes[0], a={"v": 1}, b={"v": 2}, c={"v": 3})
    put(boxes[1], a={"v": 9})
    first = run()
    assert first.records == 4
    put(boxes[0], a={"v": 4})
    put(boxes[0], a={"v": 5}, b=None, d={"v": 6}, nobody=None)
    assert run().records == 4, "tags that were written or deleted"
    table = StaticTable.from_metadata(path)
    found = table.scan(selected_fields=("box", "tag", "v")).to_arrow().to_pylist()
    assert {f"{row['box'][-1]}{row['tag']}": row["v"] for row in found} == {
        "0a": 5,
        "0c": 3,
        "0d": 6,
        "1a": 9,
    }
    assert len(found) == 4
    old = jobs.read_table(spark, name, snapshot=first.snapshot, with_boxes=False, url=server.url)
    assert state(old) == {"0a": 1, "0b": 2, "0c": 3, "1a": 9}

    put(boxes[0], a=None, c={"v": 7})
    assert state(jobs.read_table(spark, name, url=server.url)) == {"0c": 7, "0d": 6, "1a": 9}
    client.box(boxes[1]).append_batch([{"v": 1}])
    with pytest.raises(JobRefused, match="some records have no tag"):
        run()
    with pytest.raises(JobRefused, match="the newest record of each tag, and cannot change"):
        jobs.archive_table(spark, boxes, path, name=name, url=server.url)
    with pytest.raises(JobRefused, match="needs a table of all records"):
        jobs.rollup_table(
            spark,
            name,
            f"{name}.to",
            name=name,
            window="1 hour",
            aggregates={"n": "count(*)"},
            url=server.url,
        )


def test_a_rollup_of_a_table_writes_the_windows_of_its_new_records(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    minute = 60_000
    client.box(name).create(timestamping={"mode": "client-require", "uncapped": True})

    def add(*minutes: float) -> None:
        entries = [streams.Entry({"v": 1}, tag="x", ts=int(at * minute)) for at in minutes]
        client.box(name).append_batch(entries)
        jobs.archive_table(spark, [name], str(tmp_path), name=name, columns="v int", url=server.url)

    def run(**more: Any) -> tuple[int, int]:
        done = jobs.rollup_table(
            spark,
            name,
            f"{name}.sums",
            name=name,
            window="5 minutes",
            aggregates={"orders": "count(*)", "total": "sum(v)"},
            url=server.url,
            **more,
        )
        return done.new_records, done.records

    add(1, 2, 7)
    assert (run(dry_run=True), client.box(f"{name}.sums").exists()) == ((3, 0), False)
    assert run() == (3, 2)
    assert run() == (0, 0)
    add(8, 11)
    assert run() == (2, 2), "the first window has no new record"
    records = [item for item in client.box(f"{name}.sums").read() if isinstance(item, Record)]
    newest = {item.tag: item.data for item in records}
    assert {tag: (each["orders"], each["total"]) for tag, each in newest.items()} == {
        "1970-01-01T00:00:00Z": (2, 2),
        "1970-01-01T00:05:00Z": (2, 2),
        "1970-01-01T00:10:00Z": (1, 1),
    }
    with pytest.raises(JobRefused, match="has run with other arguments"):
        run(by="tag")
