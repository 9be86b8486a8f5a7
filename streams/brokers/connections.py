"""Options that all brokers share, and the names of their boxes."""

from __future__ import annotations

import logging
import os
import re
import socket
import uuid

#: Length of a lease. Leases of running tasks are extended; this is how long the tasks of a worker that died
#: wait for another.
LEASE_S = 30.0
#: How long a claim waits for a job at the server, and so how long a consumer takes to stop.
WAIT_MS = 1_000
#: Jobs of one claim, ack or extension.
JOBS_MAX = 1_000
PRIORITY_MAX = 9
#: Jobs that one consumer may hold, whatever its framework asks for.
PREFETCH_MAX = 10_000

_unsafe = re.compile(rb"[^A-Za-z0-9._-]")


def box_name(prefix: str, queue: str) -> str:
    """The box of a queue. A character that is not allowed there is written as `:` and its code: `a@b`
    becomes `a:40b`."""
    safe = _unsafe.sub(lambda match: b":%02x" % match[0][0], queue.encode())
    return prefix + safe.decode()


def consumer_name() -> str:
    """A name for the leases of one consumer: host, process, and a part that no other has."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def lease_ms_of(lease_s: float) -> int:
    if not 0.1 <= lease_s <= 86_400:
        raise ValueError(f"lease_s must be from 0.1 to 86400 seconds, got {lease_s!r}")
    return round(lease_s * 1000)


def job_priority_of(priority: object) -> int:
    """A priority of a framework as one of a job, from 0 to 9; anything that is not a number counts as 0."""
    try:
        number = int(priority)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return 0
    return max(0, min(int(number), PRIORITY_MAX))


def quiet_http_log() -> None:
    """Keep the HTTP library from logging each request at INFO, which is the level that workers run at."""
    logger = logging.getLogger("httpx2")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
