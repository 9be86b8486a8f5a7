"""`make compare-spark`: Spark's writes and reads with boxes, Kafka, Parquet and nothing, in one run.

    streams    this data source, one transaction
    kafka      Spark's Kafka connector, a broker in KRaft mode, one topic with four partitions
    parquet    files on this disk
    empty      a Python sink that drops all rows, and a Python source that generates them

Every target gets the same rows (128 bytes of data, a tag, a box or key), from the same session. Runs
alternate, the first one warms up, and the figure is the best of the others. CPU seconds are those of that
run: Spark's JVM, all Python processes of Spark, and the server or broker. It writes the page
docs/reference/benchmarks-spark.md.

The broker needs the jars of `make peers`; the connector comes from Maven Central with Maven. Without one of
them the page says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

import streams.spark as ss
from loadtests import machine
from loadtests.peers import servers
from loadtests.peers.install import FOLDER, KAFKA_VERSION
from loadtests.peers.kafka import client as kafka_client
from loadtests.process_table import descendants, processes
from loadtests.rows import ROOT
from loadtests.spark_throughput import DropAll, make_rows
from streams.direct import Shards
from streams.testing import running_server

PAGE: Final = ROOT / "docs" / "reference" / "benchmarks-spark.md"
#: The newest one. In November 2026 there was none for Spark 4.3.
CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
PARTITIONS: Final = 4


@dataclass
class Figure:
    rows_per_s: float = 0.0
    #: CPU seconds by kind of process: jvm, python, server.
    cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass
class Target:
    name: str
    write: Callable[[], None]
    read: Callable[[], None]
    #: The process tree whose CPU time is the server's.
    server: int | None = None
    settle: Callable[[], None] = lambda: None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--without-kafka", action="store_true")
    arguments = parser.parse_args(argv)
    missing = ""
    connector: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="spark-compare-") as text, ExitStack() as stack:
        folder = Path(text)
        server = stack.enter_context(running_server(**machine.USER_SETTINGS))
        broker: servers.Running | None = None
        try:
            if arguments.without_kafka:
                raise servers.NotInstalled("Kafka was left out (--without-kafka)")
            connector = fetch_connector()
            kafka_client()
            (folder / "kafka").mkdir()
            broker = stack.enter_context(servers.kafka(folder / "kafka"))
        except (servers.NotInstalled, ImportError) as error:
            missing = str(error)
        config: dict[str, object] = {"spark.local.dir": folder, "spark.driver.memory": "2g"}
        if broker is not None:
            config["spark.jars"] = ",".join(map(str, connector))
        spark = ss.session(2, config=config)
        spark.dataSource.register(DropAll)
        targets = make_targets(spark, arguments.rows, folder, server.url, server.process.pid, broker)
        figures = measure(targets, arguments.rows, arguments.repeat)
        spark.stop()
    PAGE.write_text(page(figures, arguments.rows, arguments.repeat, missing))
    print(PAGE.read_text())
    return 0


def fetch_connector() -> list[Path]:
    """Return the jars of the connector without those that Spark has, fetched once with Maven."""
    folder = FOLDER / "spark-kafka"
    if not folder.is_dir():
        if shutil.which("mvn") is None:
            raise servers.NotInstalled("Maven (mvn) is not installed, which fetches the connector")
        folder.mkdir(parents=True)
        group, name, version = CONNECTOR.split(":")
        pom = folder / "pom.xml"
        pom.write_text(
            "<project><modelVersion>4.0.0</modelVersion><groupId>local</groupId><artifactId>connector</artifactId>"
            f"<version>1</version><packaging>pom</packaging><dependencies><dependency><groupId>{group}</groupId>"
            f"<artifactId>{name}</artifactId><version>{version}</version></dependency></dependencies></project>"
        )
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
        ran = subprocess.run(["mvn", "-q", "-B", "-f", pom, *goal], capture_output=True, timeout=600)
        if ran.returncode:
            shutil.rmtree(folder)
            raise servers.NotInstalled(
                f"Kafka is left out: Maven could not fetch `{CONNECTOR}` with all it needs"
            )
    spark_jars = Path(pyspark.__file__).parent / "jars"
    names = {re.sub(r"-\d.*", "", path.name) for path in spark_jars.iterdir()}
    return [path for path in folder.glob("*.jar") if re.sub(r"-\d.*", "", path.name) not in names]


def make_targets(
    spark: SparkSession, rows: int, folder: Path, url: str, server: int, broker: servers.Running | None
) -> list[Target]:
    def frame() -> DataFrame:
        return make_rows(spark, rows, f"bench.{uuid.uuid4().hex[:8]}.", partitions=PARTITIONS)

    def drain(rows: DataFrame) -> None:
        rows.write.format("noop").mode("append").save()

    def settle() -> None:
        """Wait until the rows of all commits are rendered: only then can the last record be read."""
        with Shards(url) as shards:
            for each in shards.states(prefix="bench."):
                shards.scan_page(each.box, from_seq=max(0, each.head_seq - 1))

    def streams_rows(prefix: str) -> DataFrame:
        return make_rows(spark, rows, prefix, partitions=PARTITIONS)

    streams_rows("bench.read.").write.format("streams").option("url", url).mode("append").save()
    frame().write.parquet(str(folder / "parquet-read"))
    generated = {"rows": str(rows), "cut": str(PARTITIONS)}
    targets = [
        Target(
            "streams",
            lambda: frame().write.format("streams").option("url", url).mode("append").save(),
            lambda: drain(
                spark.read.format("streams").options(url=url, subscribePrefix="bench.read.").load()
            ),
            server,
            settle,
        ),
        Target(
            "parquet",
            lambda: frame().write.parquet(str(folder / f"parquet-{uuid.uuid4().hex}")),
            lambda: drain(spark.read.parquet(str(folder / "parquet-read"))),
        ),
        Target(
            "empty",
            lambda: frame().write.format("drop_all").mode("append").save(),
            lambda: drain(spark.read.format("drop_all").options(**generated).load()),
        ),
    ]
    if broker is not None:
        targets.insert(1, _kafka_target(spark, frame, drain, broker))
    return targets


def _kafka_target(
    spark: SparkSession,
    frame: Callable[[], DataFrame],
    drain: Callable[[DataFrame], None],
    broker: servers.Running,
) -> Target:
    address = f"127.0.0.1:{broker.port}"
    admin = kafka_client().admin.AdminClient({"bootstrap.servers": address})
    topics = [kafka_client().admin.NewTopic(topic, PARTITIONS, 1) for topic in ("written", "read")]
    for future in admin.create_topics(topics).values():
        future.result(60)

    def write(topic: str) -> None:
        rows = frame().select(sql.col("tag").alias("key"), sql.col("data").alias("value"))
        sink = rows.write.format("kafka").option("kafka.bootstrap.servers", address)
        sink.option("kafka.acks", "all").option("topic", topic).save()

    def read() -> None:
        source = spark.read.format("kafka").option("kafka.bootstrap.servers", address)
        rows = source.option("subscribe", "read").load()
        drain(rows.selectExpr("cast(key as string)", "cast(value as string)", "timestamp"))

    write("read")
    return Target("kafka", lambda: write("written"), read, broker.pid)


def measure(targets: list[Target], rows: int, repeat: int) -> dict[tuple[str, str], Figure]:
    figures: dict[tuple[str, str], Figure] = {}
    for number in range(repeat + 1):
        for target in targets:
            for verb, run in (("write", target.write), ("read", target.read)):
                before = _cpu_s(target.server)
                began_s = time.perf_counter()
                run()
                took_s = time.perf_counter() - began_s
                target.settle()
                cpu_s = {kind: each - before[kind] for kind, each in _cpu_s(target.server).items()}
                figure = Figure(rows / took_s, cpu_s)
                best = figures.get((target.name, verb))
                if number and (best is None or figure.rows_per_s > best.rows_per_s):
                    figures[(target.name, verb)] = figure
                print(f"{verb} {target.name}: {figure.rows_per_s:,.0f} rows/s, CPU {cpu_s}", flush=True)
    return figures


def _cpu_s(server: int | None) -> dict[str, float]:
    """Return the CPU seconds so far of Spark's JVM, of Spark's Python processes, and of the server."""
    table = processes()
    server_pids = {each.pid for each in descendants(table, server)} | {server} if server else set()
    jvm = next(each.pid for each in descendants(table, os.getpid()) if "SparkSubmit" in each.command)
    workers = [each.pid for each in descendants(table, jvm)]
    return {
        "jvm": _ticks(jvm),
        "python": _ticks(os.getpid(), ended=False) + sum(map(_ticks, workers)),
        "server": sum(_ticks(pid) for pid in server_pids if pid is not None),
    }


def _ticks(pid: int, *, ended: bool = True) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, and its parent has its time
        return 0.0
    return sum(int(each) for each in fields[11 : 15 if ended else 13]) / os.sysconf("SC_CLK_TCK")


def page(figures: dict[tuple[str, str], Figure], rows: int, repeat: int, missing: str) -> str:
    kafka = f"Kafka {KAFKA_VERSION} with `{CONNECTOR}`, `acks=all`, one topic with {PARTITIONS} partitions."
    lines = [
        "# Spark: boxes, Kafka, Parquet and nothing",
        "",
        "Written by `make compare-spark` (`loadtests/spark_compare.py`), which describes the method.",
        "",
        f"{rows:,} rows, best of {repeat} after one warm-up, {os.cpu_count()} cores for Spark, Python and",
        f"server. Python {platform.python_version()}, Spark {pyspark.__version__}. {missing or kafka}",
        "",
    ]
    for verb in ("write", "read"):
        lines += [f"| {verb} | rows/s | CPU s: JVM | Python | server or broker |", "|---|---|---|---|---|"]
        for (name, each_verb), figure in figures.items():
            if each_verb != verb:
                continue
            has_server = name in ("streams", "kafka")
            cpu_s = [f"{each:.2f}" for each in figure.cpu_s.values()][: 3 if has_server else 2]
            cells = [name, f"{figure.rows_per_s:,.0f}", *cpu_s, *([] if has_server else ["–"])]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
