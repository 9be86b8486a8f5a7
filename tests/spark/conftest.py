"""One Spark and one server of four shards for all tests that need them. A failed task is tried again, as on a
cluster (`local[2,3]`)."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import streams
from streams.protocol.model.slots import SLOTS, slot_of
from streams.testing import Server, running_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running_server(shards=4) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[streams.Client]:
    with streams.Client(server.url) as found:
        yield found


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A box that nobody else uses, and that says whose it is. Boxes `NAME.0` to `NAME.11` are on all of the
    four shards; with any name, one in eight would leave one out."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.originalname.removeprefix("test_").lower())
    while True:
        found = f"{words[:40].strip('-')}.{uuid.uuid4().hex[:8]}"
        if len({slot_of(f"{found}.{n}") * 4 // SLOTS for n in range(12)}) == 4:
            return found


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from streams.spark.sessions import session
    from tests.spark.numbered import Numbered

    # Short-lived: the second compiler and a collector for many cores only cost here.
    os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    folder = tmp_path_factory.mktemp("spark")
    found = session(
        master="local[2,3]",
        config={
            "spark.sql.shuffle.partitions": 2,
            "spark.default.parallelism": 2,
            "spark.sql.adaptive.enabled": "false",
            # Each plan runs once: interpreting it is quicker than compiling it.
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.driver.memory": "1g",
            # On a machine that is busy with other things, nobody is given up because he is slow.
            "spark.network.timeout": "600s",
            "spark.executor.heartbeatInterval": "60s",
            "spark.python.authenticate.socketTimeout": "300s",
            "spark.local.dir": folder,
            "spark.sql.warehouse.dir": folder / "warehouse",
            "spark.sql.python.filterPushdown.enabled": "true",
        },
    )
    # What a test makes fail on purpose is not for the eye.
    found.sparkContext.setLogLevel("OFF")
    found.dataSource.register(Numbered)
    yield found
    found.stop()
