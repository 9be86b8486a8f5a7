"""Runs the tests of task frameworks with our brokers, against a server of this tree.

The sources of the frameworks are not part of this project. Provide those that you want:

    pip download --no-deps --no-binary :all: kombu celery        # unpack them
    git clone https://github.com/Bogdanp/dramatiq
    git clone https://github.com/taskiq-python/taskiq-redis
    pip install pika pytest-celery redis
    python -m tests.support.broker_suites --kombu kombu-5.7.0 --celery celery-5.7.0 --dramatiq dramatiq
        --taskiq-redis taskiq-redis --redis redis://127.0.0.1:6379/0

Which part applies:

    kombu          the base classes of t/integration: functions, exchanges, time to live, priorities, acks,
                   event loops, failover
    celery         t/integration: tasks, inspect, chains and, with `--canvas`, canvas. Results are in Redis
    dramatiq       tests of the Redis and the RabbitMQ broker that are not about Redis and RabbitMQ, and those
                   of actors, workers and middleware that get a broker, with ours in its place
    taskiq-redis   the tests of its brokers, with ours under their names; Taskiq itself has none for a broker

Work is done in copies, in build/broker-suites.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from streams.testing import running_server

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "broker-suites"
TIMEOUT_S = 1800

_KOMBU = """
import os
import uuid

import kombu
import pytest

from t.integration import common

HOST = os.environ["SUITE_HOST"]


@pytest.fixture
def connection():
    return kombu.Connection(f"streams://{HOST}/k{uuid.uuid4().hex[:8]}")


@pytest.fixture
def invalid_connection():
    return kombu.Connection("streams://127.0.0.1:1", transport_options={"max_retries": 1})


class test_Functions(common.BasicFunctionality):
    pass


class test_Exchanges(common.BaseExchangeTypes):
    pass


class test_TimeToLive(common.BaseTimeToLive):
    pass


class test_Priorities(common.BasePriority):
    pass


class test_Messages(common.BaseMessage):
    pass


class test_EventLoop(common.BaseEventLoop):
    pass


class test_Failover(common.BaseFailover):
    @pytest.fixture
    def failover_connection(self):
        urls = f"streams://127.0.0.1:1;streams://{HOST}/f"
        return kombu.Connection(urls, transport_options={"max_retries": 1})
"""

_DRAMATIQ = '''
import logging
import os
import uuid

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.rate_limits import backends as rl_backends
from dramatiq.results import backends as res_backends

from streams.brokers.dramatiq import DramatiqBroker


class Broker(DramatiqBroker):
    """What tests ask of a broker beside its interface."""

    def join(self, queue_name, *args, fail_fast=None, min_successes=None, **options):
        super().join(queue_name, *args, **options)

    do_qsize = DramatiqBroker.count

    def get_queue_message_counts(self, queue_name):
        dead = self.client.box(self.dead_letter_box(queue_name))
        return self.count(queue_name), 0, dead.state().count if dead.exists() else 0


def brokers():
    broker = Broker(os.environ["SUITE_URL"], prefix=f"d{uuid.uuid4().hex[:8]}.")
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.flush_all()
    broker.close()


def workers(broker):
    worker = Worker(broker, worker_timeout=100, worker_threads=32)
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture
def redis_broker():
    yield from brokers()


@pytest.fixture
def rabbitmq_broker():
    yield from brokers()


@pytest.fixture
def stub_broker():
    yield from brokers()


@pytest.fixture
def redis_worker(redis_broker):
    yield from workers(redis_broker)


@pytest.fixture
def rabbitmq_worker(rabbitmq_broker):
    yield from workers(rabbitmq_broker)


@pytest.fixture
def stub_worker(stub_broker):
    yield from workers(stub_broker)


@pytest.fixture
def info_logging():
    logger = logging.getLogger()
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(logging.DEBUG)


@pytest.fixture
def stub_rate_limiter_backend():
    return rl_backends.StubBackend()


@pytest.fixture
def stub_result_backend():
    return res_backends.StubBackend()


@pytest.fixture
def rate_limiter_backend(stub_rate_limiter_backend):
    return stub_rate_limiter_backend


@pytest.fixture
def result_backend(stub_result_backend):
    return stub_result_backend
'''

#: Replaces the package that the tests import: our broker under the names of the brokers there.
_TASKIQ_REDIS = '''
import os

from streams.brokers.taskiq import TaskiqBroker


class Broker(TaskiqBroker):
    def __init__(self, url, queue_name="taskiq", **options):
        super().__init__(os.environ["SUITE_URL"], queue=queue_name)

    async def kick(self, message):
        await self._start()
        await super().kick(message)

    async def listen(self):
        await self._start()
        async for message in super().listen():
            yield message

    async def _start(self):
        if self._client is None:
            await self.startup()


class ListQueueBroker(Broker):
    """Without acks, as theirs."""

    async def listen(self):
        async for message in super().listen():
            yield message.data


RedisStreamBroker = Broker
ListQueueClusterBroker = ListQueueSentinelBroker = PubSubBroker = PubSubSentinelBroker = Broker
RedisStreamClusterBroker = RedisStreamSentinelBroker = Broker
'''


def copy(source: Path, name: str) -> Path:
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "*.pyc"))
    for settings in ("setup.cfg", "pyproject.toml", "tox.ini"):
        (folder / settings).unlink(missing_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\npython_classes = test_* Test*\n")
    return folder


def pytest_in(folder: Path, words: list[str], environ: Mapping[str, str]) -> bool:
    """Run tests in a folder; return True if all passed."""
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:trio"]
    command = [sys.executable, "-m", "pytest", *options, "--timeout", "60", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, cwd=folder, env=environment, timeout=TIMEOUT_S).returncode == 0


def kombu(source: Path, host: str) -> bool:
    folder = copy(source, "kombu")
    (folder / "t" / "integration" / "test_streams.py").write_text(_KOMBU)
    words = ["-p", "streams.brokers.kombu", "t/integration/test_streams.py"]
    return pytest_in(folder, words, {"SUITE_HOST": host})


def celery(source: Path, host: str, redis: str, with_canvas: bool) -> bool:
    folder = copy(source, "celery")
    names = ["test_tasks", "test_inspect", "test_group_chains", *(["test_canvas"] if with_canvas else [])]
    words = ["-p", "streams.brokers.kombu", *(f"t/integration/{name}.py" for name in names)]
    place = redis.removeprefix("redis://").partition("/")[0]
    environ = {
        "TEST_BROKER": f"streams://{host}/suite",
        "TEST_BACKEND": redis,
        "REDIS_HOST": place.partition(":")[0],
        "REDIS_PORT": place.partition(":")[2] or "6379",
    }
    return pytest_in(folder, [*words, *_without(_NOT_AT_WORKERS)], environ)


#: Of Dramatiq, tests of what only the other brokers have: URLs, clients, channels, the inside of queues,
#: and errors of actors that the broker for tests raises again.
_NOT_OURS = (
    *("connect_via", "invalid_attribute", "connection_error", "missing_id", "are_cleaned_up", "join_race"),
    *(
        "uri",
        "parameter",
        "lazy",
        "declaring",
        "reconnects",
        "failures_gracefully",
        "be_deleted",
        "scary_logs",
    ),
    *("close_only", "re_declares", "ignore_unknown", "failed_to_decode", "canonical_name"),
    *(
        "unhandled_delay",
        "unacked_messages_can_be_requeued",
        "redis_requeues_unhandled",
        "can_be_dead_lettered",
    ),
    *("redis_messages_belonging", "test_messages_belonging", "rabbitmq_broker_can_flush", "_eta"),
    *("test_actors_can_be_sent", "time_limits", "age_limits", "rate_limit_exceeded"),
)


#: Of Celery, the list of tasks with an ETA that a worker holds: here they wait at the server.
_NOT_AT_WORKERS = ("test_scheduled",)


def _without(words: tuple[str, ...]) -> list[str]:
    return ["-k", " and ".join(f"not {word}" for word in words)]


def dramatiq(source: Path, url: str) -> bool:
    folder = copy(source, "dramatiq")
    (folder / "tests" / "conftest.py").write_text(_DRAMATIQ)
    files = [
        f"tests/test_{name}.py"
        for name in ("redis", "rabbitmq", "actors", "composition", "callbacks", "worker")
    ]
    return pytest_in(
        folder, [*files, "-k", " and ".join(f"not {word}" for word in _NOT_OURS)], {"SUITE_URL": url}
    )


def taskiq_redis(source: Path, url: str) -> bool:
    folder = copy(source, "taskiq-redis")
    shutil.rmtree(folder / "taskiq_redis", ignore_errors=True)
    (folder / "taskiq_redis").mkdir()
    (folder / "taskiq_redis" / "__init__.py").write_text(_TASKIQ_REDIS)
    (folder / "taskiq_redis" / "redis_broker.py").write_text("from taskiq_redis import RedisStreamBroker\n")
    words = [
        "tests/test_broker.py",
        "-k",
        "not pub_sub and not cluster and not sentinel and not typeerror and not maxlen and not lock",
    ]
    return pytest_in(folder, words, {"SUITE_URL": url})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.broker_suites")
    for name in ("kombu", "celery", "dramatiq", "taskiq-redis"):
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"sources of {name}")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0", help="results of Celery's tests")
    parser.add_argument(
        "--canvas", action="store_true", help="also Celery's tests of canvas, which take ten minutes"
    )
    options = parser.parse_args(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, bool] = {}
    with running_server(shards=1, throttle_lag_ms=60_000) as server:
        host = f"127.0.0.1:{server.port}"
        if options.kombu:
            outcomes["kombu"] = kombu(options.kombu, host)
        if options.celery:
            outcomes["celery"] = celery(options.celery, host, options.redis, options.canvas)
        if options.dramatiq:
            outcomes["dramatiq"] = dramatiq(options.dramatiq, server.url)
        if options.taskiq_redis:
            outcomes["taskiq-redis"] = taskiq_redis(options.taskiq_redis, server.url)
    for name, is_ok in outcomes.items():
        print(f"{name}: {'all passed' if is_ok else 'some failed'}")
    return 0 if outcomes and all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
