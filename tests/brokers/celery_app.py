"""The Celery app of the tests. Tasks write what they do into the box `done`."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery, Task

import streams
import streams.brokers.kombu

URL = os.environ["TEST_STREAMS_URL"]

app = Celery("shop", broker=URL.replace("http://", "streams://"), backend="rpc://")
app.conf.broker_transport_options = {
    "lease_s": 0.6,
    "queue_settings": {"max_deliveries": 3},
    "dead_letter": "dead",
}
app.conf.broker_connection_retry_on_startup = True
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.worker_prefetch_multiplier = 1
app.conf.worker_enable_remote_control = True


def note(name: str, **facts: Any) -> None:
    with streams.Client(URL) as client:
        client.box("done").append({"task": name, "at": time.time(), **facts})


@app.task
def add(a: int, b: int) -> int:
    note("add", result=a + b)
    return a + b


@app.task
def takes_longer_than_its_lease(seconds: float) -> None:
    note("slow", seconds=seconds)
    time.sleep(seconds)  # the work itself; the test waits for its end
    note("slow end")


@app.task(bind=True, max_retries=3)
def fails_twice(self: Task) -> None:
    note("fails_twice", retries=self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)


@app.task(bind=True)
def dies_once(self: Task) -> None:
    note("dies_once", redelivered=bool(self.request.delivery_info["redelivered"]))
    if not self.request.delivery_info["redelivered"]:
        os._exit(9)


@app.task
def says(word: str) -> None:
    note("says", word=word)
