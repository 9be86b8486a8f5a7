"""The Dramatiq actors of the tests. They write what they do into the box `done`."""

from __future__ import annotations

import os
import time
from typing import Any

import dramatiq
from dramatiq.middleware import AgeLimit, Callbacks, CurrentMessage, Retries

import streams
from streams.brokers.dramatiq import DramatiqBroker

URL = os.environ["TEST_STREAMS_URL"]

broker = DramatiqBroker(
    URL,
    lease_s=0.6,
    middleware=[AgeLimit(), Callbacks(), CurrentMessage(), Retries(min_backoff=50, max_backoff=50)],
)
dramatiq.set_broker(broker)


def note(name: str, **facts: Any) -> None:
    with streams.Client(URL) as client:
        client.box("done").append({"task": name, "at": time.time(), **facts})


@dramatiq.actor
def add(a: int, b: int) -> None:
    note("add", result=a + b)


@dramatiq.actor
def takes_longer_than_its_lease(seconds: float) -> None:
    note("slow")
    time.sleep(seconds)  # the work itself; the test waits for its end
    note("slow end")


@dramatiq.actor(max_retries=5)
def fails_twice() -> None:
    message = CurrentMessage.get_current_message()
    retries = message.options.get("retries", 0)
    note("fails_twice", retries=retries)
    if retries < 2:
        raise ValueError("not yet")


@dramatiq.actor(max_retries=0)
def fails_always() -> None:
    note("fails_always")
    raise ValueError("never")


@dramatiq.actor(queue_name="words")
def says(word: str) -> None:
    note("says", word=word)
