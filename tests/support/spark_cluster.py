"""`make cluster`: Spark as it is elsewhere, with a master, workers and executors, and with Spark Connect.

Too slow for every run of the tests: several JVMs start, each of them with half a dozen interpreters.

    executors   two, on addresses of their own, over TCP with a key: a round trip over four shards, a task
                that fails, a task so slow that Spark starts its twin elsewhere, an executor that is killed
    connect     a Spark Connect server, and every job through `streams pipeline … --remote`

Every row has its number, so what is missing or doubled is counted.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import streams
import streams.spark as ss
from streams.spark.java import java_home
from streams.spark.spark_home import spark_home
from streams.testing import Server, running_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: What happens to partition 1, and how often it is tried at least.
TROUBLES = {"none": 1, "raise": 2, "linger": 2, "kill the executor": 2}
ROWS, PARTITIONS, BOXES = 100_000, 6, 16
#: Everything here is waited for this long: several JVMs may start beside other work.
PATIENCE_S = 300.0
KEY = "secret-of-the-executors-0123456789"
ROOT = Path(__file__).parents[2]


@contextmanager
def running(name: str, *arguments: object, host: str = "127.0.0.1") -> Iterator[subprocess.Popen[bytes]]:
    """One of Spark's own programs."""
    home = spark_home()
    assert home is not None
    environ = {
        **os.environ,
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": host,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen([home / "bin" / name, *map(str, arguments)], env=environ)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        found: int = free.getsockname()[1]
        return found


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < until, "it does not start"
            time.sleep(0.2)


# -- executors


class Troubled(DataSource):
    """Numbered rows, from a source whose partition 1 gets into trouble when its rows have been handed on."""

    @classmethod
    def name(cls) -> str:
        return "troubled"

    def schema(self) -> str:
        return "box string, data string"

    def reader(self, schema: Any) -> DataSourceReader:
        return _Reader(dict(self.options))


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        size = ROWS // PARTITIONS + 1
        return [InputPartition((at, at * size, min(ROWS, at * size + size))) for at in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        number, first, last = partition.value
        prefix = self._options["prefix"]
        for start in range(first, last, 5_000):
            numbers = range(start, min(last, start + 5_000))
            yield pa.RecordBatch.from_pydict(
                {
                    "box": [f"{prefix}.{n % BOXES}" for n in numbers],
                    "data": [f'{{"n":{n}}}' for n in numbers],
                }
            )
        context = TaskContext.get()
        assert context is not None
        if number == 1:
            self._get_into_trouble(context.attemptNumber())

    def _get_into_trouble(self, attempt: int) -> None:
        told = Path(self._options["folder"], f"{self._options['prefix']}-{attempt}")
        told.touch()
        match self._options["trouble"], attempt:
            case "raise", 0:
                raise RuntimeError("injected")
            case "linger", 0:
                time.sleep(PATIENCE_S)  # it is ended when its twin is done
            case "kill the executor", 0:
                daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
                os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A master and two workers. Each has an address of its own, for Spark starts no twin on the same host."""
    port = free_port()
    base = "org.apache.spark.deploy"
    with running(
        "spark-class", f"{base}.master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", 0
    ) as master:
        wait_for(port, master)
        worker = ["spark-class", f"{base}.worker.Worker", "--cores", 1, "--memory", "1g", "--webui-port", 0]
        url = f"spark://127.0.0.1:{port}"
        with (
            running(*worker, "--host", "127.0.0.2", "--work-dir", folder / "2", url, host="127.0.0.2"),  # type: ignore[arg-type]
            running(*worker, "--host", "127.0.0.3", "--work-dir", folder / "3", url, host="127.0.0.3"),  # type: ignore[arg-type]
        ):
            yield url


def try_executors(folder: Path) -> None:
    keys, key = folder / "keys", folder / "spark.key"
    keys.write_text(f"{KEY}:rw:\n")
    key.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    with (
        running_server(shards=4, api_keys_file=keys, shard_host="127.0.0.1", shard_port=0) as server,
        cluster(folder) as master,
    ):
        spark = ss.session(
            master=master,
            config={
                "spark.driver.host": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.executor.memory": "512m",
                "spark.local.dir": folder,
                "spark.sql.shuffle.partitions": 2,
                "spark.speculation": "true",
                "spark.speculation.quantile": "0.5",
                "spark.excludeOnFailure.enabled": "false",
                "spark.executor.heartbeatInterval": "60s",
                "spark.network.timeout": "600s",
            },
        )
        spark.dataSource.register(Troubled)
        there = {"url": server.url, "transport": "tcp", "tokenFile": str(key)}
        for trouble, attempts in TROUBLES.items():
            prefix = trouble.replace(" ", "-")
            rows = spark.read.format("troubled").option("trouble", trouble).option("prefix", prefix)
            frame = rows.option("folder", str(folder)).load()
            frame.write.format("streams").options(**there).mode("append").save()
            made = len(list(folder.glob(f"{prefix}-[0-9]")))
            assert made >= attempts, f"{trouble}: {made} attempts were made"
            count, different = numbers(spark, there, f"{prefix}.")
            assert count == different == ROWS, f"{trouble}: {count} rows, {different} different ones"
            print(
                f"executors, {trouble}: {count} rows, each once, {made} attempts at partition 1", flush=True
            )
        spark.stop()


def numbers(spark: SparkSession, there: dict[str, str], prefix: str) -> tuple[int, int]:
    """How many rows there are, and how many different ones."""
    found: DataFrame = spark.read.format("streams").options(**there).option("subscribePrefix", prefix).load()
    number = sql.get_json_object("data", "$.n").cast("bigint")
    row = found.agg(sql.count(number), sql.count_distinct(number)).first()
    assert row is not None
    return row[0], row[1]


# -- Spark Connect


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server, as its own scripts start it."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": folder,
        "spark.sql.shuffle.partitions": 2,
    }
    given = [text for name, value in settings.items() for text in ("--conf", f"{name}={value}")]
    program = "org.apache.spark.sql.connect.service.SparkConnectServer"
    with running(
        "spark-submit", "--master", "local[2,3]", "--class", program, *given, "spark-internal"
    ) as process:
        wait_for(port, process)
        yield f"sc://127.0.0.1:{port}"


def try_connect(folder: Path) -> None:
    with running_server(shards=2) as server, connect_server(folder) as remote:
        with streams.Client(server.url) as client:
            orders = [streams.Entry({"n": n}, tag=f"user-{n % 20}") for n in range(1000)]
            client.box("orders").append_batch(orders)
        (folder / "orders.ndjson").write_text('{"n": 1}\n{"n": 2}\n')
        jobs = {
            f"archive orders --to {folder}/archive --name orders": ("records", 1000),
            "audit orders --archive orders": ("ok", True),
            "replay orders --to vip --name vip --where \"tag='user-7'\"": ("records", 50),
            "snapshot orders": ("keys", 20),
            f"backfill {folder}/orders.ndjson --box old --name old": ("records", 2),
            f"read-all orders --to {folder}/everything": ("records", 1000),
            f"rollup orders --to sums --window '1 hour' --sum n=count(*) --by tag "
            f"--checkpoint {folder}/sums": ("examined", 1000),
            "compact orders --all": ("folders", 0),
            "vacuum orders --older-than 0": ("files", 0),
        }
        for line, (fact, expected) in jobs.items():
            found = _pipeline(server, remote, line)
            assert found[fact] == expected, f"{line}: {found}"
            print(f"connect, {line.split()[0]}: {fact} {found[fact]}", flush=True)
        _read_and_write(server, remote, folder)


def _pipeline(server: Server, remote: str, line: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "streams", "pipeline", *shlex.split(line), "--json", "--remote", remote]
    ran = subprocess.run(
        command, env={**os.environ, "STREAMS_URL": server.url}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _read_and_write(server: Server, remote: str, folder: Path) -> None:
    spark = ss.session(remote=remote)
    there = {"url": server.url}
    rows = spark.range(5000).selectExpr("to_json(struct(id as n)) as data", "concat('many.', id % 8) as box")
    rows.write.format("streams").options(**there).mode("append").save()
    assert numbers(spark, there, "many.") == (5000, 5000)
    query = (
        spark.readStream.format("streams")
        .options(**there, startingOffsets="earliest")
        .load("orders")
        .selectExpr("data", "tag")
        .writeStream.format("streams")
        .options(**there, box="copy.1", checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert numbers(spark, there, "copy.") == (1000, 1000)
    print("connect, frames: written, read and streamed", flush=True)
    spark.stop()


def main() -> int:
    for part in (try_executors, try_connect):
        if sys.argv[1:] not in ([], [part.__name__.removeprefix("try_")]):
            continue
        with tempfile.TemporaryDirectory(prefix="spark-cluster-") as folder:
            part(Path(folder))
    return 0


if __name__ == "__main__":
    # Executors import this module by its name.
    from tests.support import spark_cluster

    raise SystemExit(spark_cluster.main())
