"""Options that all brokers share, and the names of their boxes."""

from __future__ import annotations

import logging
import os
import re
import socket
import uuid

#: Length of a lease. Workers extend the leases of running tasks. When a worker dies, its tasks can be claimed
#: by another worker after this time.
LEASE_S = 30.0
#: How long a claim waits for a job. A consumer that stops ends its last claim first, so it takes this long.
WAIT_MS = 1_000
#: Maximum number of jobs in one claim, ack or extend.
JOBS_MAX = 1_000
PRIORITY_MAX = 9
#: Maximum number of jobs that one consumer holds, even if its framework requests more.
PREFETCH_MAX = 10_000

_unsafe = re.compile(rb"[^A-Za-z0-9._-]")


def box_name(prefix: str, queue: str) -> str:
    """Return the name of the box for a queue. A character that box names cannot have becomes `:` and its
    code: `a@b` becomes `a:40b`."""
    safe = _unsafe.sub(lambda match: b":%02x" % match[0][0], queue.encode())
    return prefix + safe.decode()


def consumer_name() -> str:
    """Return a unique name for a consumer, for its leases: host, process id and a random part."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def lease_ms_of(lease_s: float) -> int:
    if not 0.1 <= lease_s <= 86_400:
        raise ValueError(f"lease_s must be from 0.1 to 86400 seconds, got {lease_s!r}")
    return round(lease_s * 1000)


def job_priority_of(priority: object) -> int:
    """Convert a task priority of the framework to a job priority from 0 to 9. Not a number: 0."""
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
