"""Workers of the queue bench: one task that writes when it was sent and when it starts.

The bench sets the environment: QUEUE_BENCH_BROKER, the address of Redis or of a server here, and
QUEUE_BENCH_FILE, to which each task appends two doubles. `python -m loadtests.queue_apps` is the worker
without a framework.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from typing import Any

BROKER = os.environ.get("QUEUE_BENCH_BROKER", "")
CLAIM_JOBS = 100
PAIR = struct.Struct("dd")

_files: dict[int, int] = {}


def note(sent_s: float) -> None:
    """Append when a task was sent and when it starts; one write, which is atomic on a file opened to
    append."""
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = os.open(os.environ["QUEUE_BENCH_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(_files[pid], PAIR.pack(sent_s, time.time()))


def celery_app() -> Any:
    from celery import Celery

    import streams.brokers.kombu  # noqa: F401

    app = Celery("bench", broker=BROKER.replace("http://", "streams://"))
    app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=4, task_acks_late=True)
    app.conf.broker_connection_retry_on_startup = True
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = False
    app.task(note, name="note")
    return app


def dramatiq_actor() -> Any:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    from streams.brokers.dramatiq import DramatiqBroker

    broker = DramatiqBroker(BROKER) if BROKER.startswith("http") else RedisBroker(url=BROKER)
    dramatiq.set_broker(broker)
    return dramatiq.actor(note, broker=broker, actor_name="note")


def main() -> None:
    """Claim up to 100 jobs, note each, ack them together."""
    from streams.client._sync.client import Client

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Client(BROKER) as client:
        queue = client.queue("plain")
        queue.create()
        while True:
            jobs = queue.claim("bench", max=CLAIM_JOBS, wait_ms=1000)
            for job in jobs:
                note(job.data)
            if jobs:
                queue.ack("bench", jobs)


if __name__ == "__main__":
    main()
elif os.environ.get("QUEUE_BENCH_FRAMEWORK") == "celery":
    app = celery_app()
elif os.environ.get("QUEUE_BENCH_FRAMEWORK") == "dramatiq":
    actor = dramatiq_actor()
