"""The jobs over boxes: exact, once, and going on where they were stopped.

Method: real Spark, real server. A run that is killed is one that stops at the worst place: after its files
and before its ledger, after its transaction and before its footer.
"""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import dataset
from pyspark.sql import functions as sql

import streams
from streams.client.answers import Entry, Record
from streams.direct import Shards
from streams.protocol.messages.bulk import TxnState
from streams.spark import jobs
from streams.spark.gaps import GapError
from streams.spark.jobs import archive_files, archive_upkeep
from streams.spark.jobs.backfill import _numbered_lines
from streams.spark.jobs.job_context import JobContext, JobRefused, Ledger
from streams.spark.jobs.spark_errors import parse_error
from streams.testing import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Killed(Exception):
    """In place of a SIGKILL."""


def stop(*_: Any, **__: Any) -> None:
    raise Killed


def filled(client: streams.Client, box: str, first: int, last: int) -> None:
    entries = [Entry({"n": n}, tag=f"k{n % 4}", meta={"m": n} if n % 2 else None) for n in range(first, last)]
    client.box(box).append_batch(entries)


def data(client: streams.Client, box: str) -> list[Any]:
    return [item.data for item in client.box(box).read() if isinstance(item, Record)]


def table(path: str) -> list[tuple[str, int]]:
    """What an engine reads that knows nothing of us: (box, seq) of all records below a path."""
    found = dataset.dataset(path, format="parquet", partitioning="hive")
    if not found.files:
        return []
    return sorted((row["box"], row["seq"]) for row in found.to_table(columns=["box", "seq"]).to_pylist())


def test_an_archive_goes_on_where_it_was_and_audit_proves_it(
    spark: SparkSession,
    server: Server,
    client: streams.Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes, where = [f"{name}.a", f"{name}.b"], str(tmp_path / "archive")
    filled(client, boxes[0], 0, 50)
    filled(client, boxes[1], 0, 20)
    planned = jobs.archive(spark, (), where, prefix=f"{name}.", name=name, url=server.url, dry_run=True)
    assert (planned.records, planned.is_dry, (tmp_path / "archive").exists()) == (70, True, False)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "append", stop)
        with pytest.raises(Killed):
            jobs.archive(spark, boxes, where, name=name, url=server.url)
    assert table(where) == [], "a run that was stopped leaves nothing to see"
    with monkeypatch.context() as patched:
        patched.setattr(archive_files, "move_files", stop)
        with pytest.raises(Killed):
            jobs.archive(spark, boxes, where, name=name, url=server.url)
    assert table(where) == []
    assert jobs.read_all(spark, name, url=server.url).count() == 70, "the ledger has it"
    assert jobs.archive(spark, (), where, prefix=f"{name}.", name=name, url=server.url).records == 0
    first = [(box, seq) for box, last in zip(boxes, (50, 20), strict=True) for seq in range(1, last + 1)]
    assert table(where) == first, "the next run has published it"
    filled(client, boxes[0], 50, 60)
    client.box(boxes[0]).delete(match="k3")
    (victim,) = Path(where).glob(f"box={boxes[1]}/date=*/*.parquet")
    hidden = victim.rename(tmp_path / "hidden")
    with pytest.raises(JobRefused, match=rf"of {boxes[1]} is not in the archive as the box holds it"):
        jobs.archive(spark, boxes, where, name=name, url=server.url, trim=True)
    assert [client.box(box).state().count for box in boxes] == [45, 20], "nothing was deleted"
    hidden.rename(victim)
    filled(client, boxes[0], 60, 64)
    client.box(boxes[0]).delete(match="k3")
    with monkeypatch.context() as patched:
        patched.setattr(type(client.box(name)), "delete", stop)
        with pytest.raises(Killed):
            jobs.archive(spark, boxes, where, name=name, url=server.url, trim=True)
    assert client.box(boxes[0]).state().count == 48, "archived, and not trimmed"
    second = jobs.archive(spark, boxes, where, name=name, url=server.url, trim=True)
    assert (second.records, second.trimmed) == (0, 68), "what the run that was killed has left"
    assert [client.box(box).state().count for box in boxes] == [0, 0]
    filled(client, boxes[0], 64, 65)
    client.box(boxes[1]).drop()

    everything = jobs.read_all(spark, name, boxes, url=server.url)
    found = {
        row["box"]: sorted(row["seqs"])
        for row in everything.groupBy("box").agg(sql.collect_list("seq").alias("seqs")).collect()
    }
    assert found[boxes[0]] == [*range(1, 51), *[n + 1 for n in range(50, 64) if n % 4 != 3], 65]
    assert found[boxes[1]] == [*range(1, 21)], "of a box that is gone, what is archived"

    audited = jobs.audit(spark, boxes[:1], archive=name, url=server.url)
    assert audited.ok and audited.findings == []
    entries = [each for each in data(client, f"archive.{name}") if "box" in each]
    assert [(each["box"], each["first"], each["last"], each["records"]) for each in entries] == [
        (boxes[0], 1, 50, 50),
        (boxes[1], 1, 20, 20),
        (boxes[0], 51, 60, 7),
        (boxes[0], 61, 64, 3),
    ]
    for victim in Path(where).rglob(f"{entries[-1]['run']}-*.parquet"):
        victim.unlink()
    audited = jobs.audit(spark, boxes[:1], archive=name, url=server.url)
    assert audited.findings == [f"{boxes[0]}: the files have 57 records, but the ledger has 60"]


def as_version_0_1(client: streams.Client, name: str, where: Path) -> None:
    """Turns an archive of one run into one that the first version has written."""
    entries = [each for each in data(client, f"archive.{name}") if "box" in each]
    folder = where / "000000-0badcafe"
    for file in where.glob("box=*/date=*/*.parquet"):
        inside = folder / str(file.parent.relative_to(where)).replace("/date=", "/day=")
        inside.mkdir(parents=True)
        file.rename(inside / "part-0.parquet")
    for path in where.glob("box=*"):
        shutil.rmtree(path)
    client.box(f"archive.{name}").drop()
    old = [{**each, "folder": str(folder)} for each in entries]
    client.box(f"archive.{name}").append_batch(
        [{key: value for key, value in each.items() if key not in ("path", "run")} for each in old]
    )


def test_an_archive_of_the_first_version_is_read_and_moved_and_small_files_are_merged(
    spark: SparkSession,
    server: Server,
    client: streams.Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = tmp_path / "archive"

    def files() -> int:
        return len(list(where.glob("box=*/date=*/*.parquet")))

    def archive(first: int, last: int) -> None:
        filled(client, name, first, last)
        jobs.archive(spark, [name], str(where), name=name, url=server.url)

    archive(0, 10)
    as_version_0_1(client, name, where)
    assert (files(), jobs.read_all(spark, name, url=server.url).count()) == (0, 10)
    archive(10, 15)
    assert files() == 2 and table(str(where)) == [(name, seq) for seq in range(1, 16)]
    assert not (where / "000000-0badcafe").exists()
    assert jobs.compact(spark, name, url=server.url).folders == 0, "two files are not many"

    real: Any = archive_files.move_files
    moved: list[Any] = []

    def once(spark: Any, pairs: Any) -> None:
        if moved:
            raise Killed
        moved.append(pairs)
        real(spark, pairs)

    with monkeypatch.context() as patched:
        patched.setattr(archive_files, "move_files", once)
        with pytest.raises(Killed):
            jobs.compact(spark, name, url=server.url, everything=True)
    assert files() == 3, "the merged file is there, and those that it replaces are too"
    assert jobs.read_all(spark, name, url=server.url).count() == 15
    monkeypatch.setattr(archive_upkeep, "_RUNS_BETWEEN_MERGES", 1)
    monkeypatch.setattr(archive_upkeep, "_FILES_OPEN", 1)
    archive(15, 18)
    assert files() == 1 and table(str(where)) == [(name, seq) for seq in range(1, 19)], "merged by itself"
    assert [each["records"] for each in data(client, f"archive.{name}")] == [18], "one entry for all runs"
    assert jobs.audit(spark, [name], archive=name, url=server.url).ok
    gone = jobs.vacuum(spark, name, url=server.url, older_than_s=0)
    assert gone.files == 4 and not list(where.glob("_streams/*/*/box=*"))
    assert jobs.read_all(spark, name, url=server.url).count() == 18


def test_an_archive_refuses_what_is_lost_unless_told_and_then_notes_it(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    client.box(name).create(cap_records=10)
    filled(client, name, 0, 10)
    jobs.archive(spark, [name], str(tmp_path), name=name, url=server.url)
    filled(client, name, 10, 20)
    filled(client, name, 20, 28)
    with pytest.raises(GapError, match=f"{name} has lost records 11 to 18"):
        jobs.archive(spark, [name], str(tmp_path), name=name, url=server.url)
    done = jobs.archive(spark, [name], str(tmp_path), name=name, url=server.url, on_gap="emit")
    assert done.records == 10 and (done.ranges[0].gaps[0]["from"], done.ranges[0].gaps[0]["to"]) == (11, 18)
    audited = jobs.audit(spark, [name], archive=name, url=server.url)
    assert audited.findings == [f"{name}: records 11 to 18 were lost before the archive run"]


def test_a_backfill_takes_each_file_once_and_names_bad_lines_before(
    spark: SparkSession,
    server: Server,
    client: streams.Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(3):
        lines = [f'{{"n": {n}, "price": 1.10}}' for n in range(10 * number, 10 * number + 10)]
        (tmp_path / f"{number}.json").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "3.json").write_bytes(b'{"n": 30}\n\n{"n": \n{"n": "\xff"}\n')

    def run(**more: Any) -> jobs.Backfill:
        return jobs.backfill(
            spark,
            str(tmp_path),
            name=name,
            box=name,
            url=server.url,
            tag="get_json_object(data, '$.n')",
            files_per_group=2,
            **more,
        )

    tried = run(dry_run=True)
    assert (tried.files, tried.records, tried.groups, tried.groups_done_before) == (4, 33, 2, 0)
    bad = [(Path(file).name, line, text) for file, line, text in tried.bad]
    assert bad == [("3.json", 3, '{"n": '), ("3.json", 4, '{"n": "\N{REPLACEMENT CHARACTER}"}')]
    assert not client.box(name).exists()

    real: Any = JobContext.write
    written: list[Any] = []

    def once(self: Any, rows: Any, **more: Any) -> int:
        if written:
            raise Killed
        written.append(more)
        return int(real(self, rows, **more))

    with monkeypatch.context() as patched:
        patched.setattr(JobContext, "write", once)
        with pytest.raises(Killed):
            run()
    assert client.box(name).state().count == 20
    with pytest.raises(JobRefused, match=r"3\.json, line 3: '\{\"n\": '; .*3\.json, line 4"):
        run()
    done = run(on_bad_row="deadletter")
    assert (done.records, done.dead_letters, done.groups, done.groups_done_before) == (11, 2, 2, 1)
    dead = [item.data for item in client.box(f"{name}.dead").read() if isinstance(item, Record)]
    found = [(Path(each["source"]["file"]).name, each["source"]["line"], each["data"]) for each in dead]
    assert sorted(found) == bad and all(each["reason"].startswith("data: not ") for each in dead)
    assert run().records == 0
    records = [item for item in client.box(name).read() if isinstance(item, Record)]
    assert sorted(item.data["n"] for item in records) == list(range(31))
    assert all(item.tag == str(item.data["n"]) and item.node == "backfill" for item in records)
    assert '"price": 1.10' in bytes(client.box(name).raw_page(from_seq=0).records[0]).decode(), "digits stay"
    with pytest.raises(JobRefused, match="give either a box"):
        jobs.backfill(spark, str(tmp_path), name=name, url=server.url)


def test_lines_of_a_file_that_spark_reads_in_blocks_keep_their_numbers(
    spark: SparkSession, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.json").write_text("".join(f"{n} {'x' * (n % 50)}\n" for n in range(1, 3001)))
    spark.conf.set("spark.sql.files.maxPartitionBytes", "20000")
    spark.conf.set("spark.sql.files.openCostInBytes", "1000")
    try:
        rows = _numbered_lines(spark, [str(tmp_path)]).collect()
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
        spark.conf.unset("spark.sql.files.openCostInBytes")
    assert len(rows) == 6000
    assert all(row["value"].split()[0] == str(row["line"]) for row in rows)


def test_a_job_runs_in_a_thread_that_did_not_create_the_session(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    """Spark finds Python data sources in the active session of a thread only."""
    (tmp_path / "one.json").write_text('{"n": 1}\n')
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(jobs.backfill, spark, str(tmp_path), name=name, box=name, url=server.url)
        assert done.result().records == 1
    assert data(client, name) == [{"n": 1}]


def test_a_backfill_from_parquet_makes_a_record_of_each_row(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    client.box(f"{name}.1").create(timestamping={"mode": "client-prefer", "uncapped": False})
    rows = spark.createDataFrame(
        [(1, "a", 1000), (1, "b", 2000), (2, "c", 3000)], "shop int, what string, at long"
    )
    rows.coalesce(1).write.parquet(str(tmp_path / "in"))
    jobs.backfill(
        spark,
        str(tmp_path / "in"),
        name=name,
        format="parquet",
        box_column=f"concat('{name}.', shop)",
        ts="timestamp_millis(at)",
        url=server.url,
    )
    found = [item for item in client.box(f"{name}.1").read() if isinstance(item, Record)]
    assert [(item.data, item.ts) for item in found] == [
        ({"shop": 1, "what": "a", "at": 1000}, 1000),
        ({"shop": 1, "what": "b", "at": 2000}, 2000),
    ]
    assert data(client, f"{name}.2") == [{"shop": 2, "what": "c", "at": 3000}]


def test_a_replay_copies_what_is_wanted_once_and_goes_on(
    spark: SparkSession,
    server: Server,
    client: streams.Client,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = f"{name}.from", f"{name}.to"
    filled(client, source, 0, 40)

    def run(**more: Any) -> jobs.Replay:
        return jobs.replay(
            spark,
            [source],
            target,
            name=name,
            url=server.url,
            where="tag in ('k1', 'k2')",
            with_source=True,
            step_records=25,
            **more,
        )

    assert run(dry_run=True).examined == 40 and not client.box(target).exists()
    with monkeypatch.context() as patched:
        patched.setattr(JobContext, "write", stop)
        with pytest.raises(Killed):
            run()
    filled(client, source, 40, 44)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "note", stop)
        with pytest.raises(Killed):
            run(step_bytes=client.box(source).state().bytes // 4)
    # The step that failed was cut anew and smaller. It is committed now, though the ledger does not say so.
    assert data(client, f"replay.{name}")[-1]["end"][source]["seq"] == 11
    done = run()
    assert (done.examined, done.steps, client.box(target).state().count) == (33, 2, 22)
    copies = [item for item in client.box(target).read() if isinstance(item, Record)]
    assert sorted(item.data["n"] for item in copies) == [n for n in range(44) if n % 4 in (1, 2)]
    assert all(item.meta == {"src": f"{source}:{item.data['n'] + 1}"} for item in copies)
    assert {item.node for item in copies} == {"replay"}
    assert run().steps == 0

    def doubled(rows: Any) -> Any:
        return rows.selectExpr(f"'{name}.new' as box", "to_json(struct(seq * 2 as twice)) as data")

    some = {"url": server.url, "transform": doubled}
    upto = jobs.replay(spark, [source], name=f"{name}.2", from_seq=40, to_seq=42, **some)
    assert (upto.examined, upto.cursors) == (2, {source: 42})
    assert jobs.replay(spark, [source], name=f"{name}.2", to_ts=1000, **some).steps == 0
    jobs.replay(spark, [source], name=f"{name}.2", to_ts=2**42, **some)
    assert sorted(each["twice"] for each in data(client, f"{name}.new")) == [82, 84, 86, 88]
    audited = jobs.audit(spark, [target], against=f"{name}.new", url=server.url)
    assert audited.findings == [
        f"22 records of {target} are missing in {name}.new",
        f"4 records of {name}.new are missing in {target}",
    ]


def test_the_ledger_decides_what_was_done_when_marks_are_gone(
    spark: SparkSession,
    server: Server,
    client: streams.Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled(client, f"{name}.from", 0, 10)
    (tmp_path / "0.json").write_text('{"n": 1}\n')

    def run() -> tuple[int, int]:
        replayed = jobs.replay(spark, [f"{name}.from"], f"{name}.to", name=name, url=server.url)
        filled_in = jobs.backfill(spark, str(tmp_path), name=name, box=f"{name}.lines", url=server.url)
        return replayed.records, filled_in.records

    assert run() == (10, 1)
    monkeypatch.setattr(Shards, "txn_list", lambda *_, **__: TxnState([], []))
    assert run() == (0, 0)
    assert [client.box(f"{name}.{each}").state().count for each in ("to", "lines")] == [10, 1]


def test_a_rollup_counts_each_record_once_over_several_runs(
    spark: SparkSession, server: Server, client: streams.Client, name: str, tmp_path: Path
) -> None:
    minute = 60_000
    client.box(name).create(timestamping={"mode": "client-require", "uncapped": True})

    def add(*minutes: float) -> None:
        client.box(name).append_batch([Entry({"v": 1}, tag="x", ts=int(at * minute)) for at in minutes])

    def run(**more: Any) -> jobs.Rollup:
        return jobs.rollup(
            spark,
            [name],
            f"{name}.sums",
            checkpoint=str(tmp_path / "checkpoint"),
            window="5 minutes",
            aggregates={"orders": "count(*)", "total": "sum(cast(get_json_object(data, '$.v') as int))"},
            by="tag",
            url=server.url,
            **more,
        )

    add(1, 2, 7)
    assert (run(dry_run=True).examined, client.box(f"{name}.sums").exists()) == (3, False)
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1")
    done = run(max_records=2)
    spark.conf.unset("spark.sql.streaming.numRecentProgressUpdates")
    assert (done.examined, done.records, done.batches) == (3, 2, 2), "Spark itself remembers one micro-batch"
    assert client.box(f"{name}.sums").config().compact == "tag"
    client.box(name).create(cap_records=3, timestamping={"mode": "client-require", "uncapped": True})
    add(7.5)
    add(8, 8.5, 11)
    assert run(dry_run=True).examined == 4, "since the last run"
    with pytest.raises(GapError, match=f"{name} has lost records 4 to 4"):
        run()
    run(on_gap="skip")
    newest = {item.tag: item.data for item in client.box(f"{name}.sums").read() if isinstance(item, Record)}
    assert {tag: (each["orders"], each["total"]) for tag, each in newest.items()} == {
        "x|1970-01-01T00:00:00Z": (2, 2),
        "x|1970-01-01T00:05:00Z": (3, 3),
        "x|1970-01-01T00:10:00Z": (1, 1),
    }
    with pytest.raises(JobRefused, match="closed_only needs late"):
        jobs.rollup(
            spark,
            [name],
            name,
            checkpoint="",
            window="1 hour",
            aggregates={"n": "count(*)"},
            closed_only=True,
        )


def test_a_snapshot_and_what_follows_it_are_the_whole_story(
    spark: SparkSession,
    server: Server,
    client: streams.Client,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = client.box(name)

    def state() -> dict[str, Any]:
        """As a reader gets it: the snapshot, and then what follows."""
        rows, cursor = jobs.read_snapshot(spark, name, url=server.url)
        found = {row["tag"]: json.loads(row["data"]) for row in rows.collect()}
        for item in box.read(cursor):
            assert isinstance(item, Record) and item.tag is not None
            found[item.tag] = item.data
        return {tag: value for tag, value in found.items() if value is not None}

    with pytest.raises(streams.Refused, match="there is no box"):
        jobs.snapshot(spark, name, url=server.url)
    box.append_batch([Entry(n, tag=f"k{n % 5}") for n in range(20)])
    assert jobs.snapshot(spark, name, url=server.url, dry_run=True).cursor == 20
    with pytest.raises(JobRefused, match="there is no snapshot"):
        state()
    first = jobs.snapshot(spark, name, url=server.url, trim=True)
    assert (first.cursor, first.keys, first.trimmed) == (20, 5, 20)
    box.append_batch([Entry("new", tag="k1"), Entry(None, tag="k2"), Entry("more", tag="k9")])
    expected = {"k0": 15, "k1": "new", "k3": 18, "k4": 19, "k9": "more"}
    assert state() == expected

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["streams.spark.jobs.snapshot"], "_write_footer", stop)
        with pytest.raises(Killed):
            jobs.snapshot(spark, name, url=server.url, trim=True)
    assert state() == expected, "the old snapshot still stands"
    box.append_batch([Entry("late", tag="k0")])
    with monkeypatch.context() as patched:
        patched.setattr(type(box), "delete", stop)
        with pytest.raises(Killed):
            jobs.snapshot(spark, name, url=server.url, trim=True)
    second = jobs.snapshot(spark, name, url=server.url, trim=True)
    assert (second.cursor, second.keys, second.trimmed) == (24, 5, 4), "also of the runs that were killed"
    assert state() == expected | {"k0": "late"}
    assert jobs.snapshot(spark, name, url=server.url).cursor == 24
    assert client.box(f"{name}.snap").state().count == 6, "five keys and a footer"
    box.append({"n": 1})
    with pytest.raises(JobRefused, match="without a tag"):
        jobs.snapshot(spark, name, url=server.url)


def test_audit_says_what_is_lost(
    spark: SparkSession, server: Server, client: streams.Client, name: str
) -> None:
    client.box(name).create(cap_records=10)
    filled(client, name, 0, 8)
    filled(client, name, 8, 16)
    client.box(name).delete(match="k0")
    audited = jobs.audit(spark, [name], url=server.url)
    (box,) = audited.boxes
    assert (box.records, box.holes) == (8, 2) and audited.findings == [
        f"{name} has lost records 1 to 6 (cap)"
    ]
    with pytest.raises(JobRefused, match="there is no archive"):
        jobs.audit(spark, [name], archive="none", url=server.url)


def test_an_error_of_ours_is_found_in_a_traceback() -> None:
    text = "Traceback:\n  File\nstreams.spark.gaps.GapError: a has lost records 1 to 2 (cap). To\n SQLSTATE"
    found = parse_error(text)
    assert isinstance(found, GapError) and found.message == "a has lost records 1 to 2 (cap). To"
    assert parse_error("ValueError: no") is None and parse_error("streams.other.Thing: no") is None
