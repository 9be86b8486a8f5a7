"""Fits the number of connections to the number of files that this process may open.

Each connection is one descriptor. A process without free descriptors accepts no connection and reaches no
shard, so connections leave `OTHERS` descriptors for everything else.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

import structlog

log = structlog.get_logger("gateway.front")

#: Descriptors for links, listeners, logs, libraries, and connections that are closed and not yet gone.
OTHERS: Final = 256


def fit_connections(connections_max: int) -> int:
    """Raise the soft limit of open files to the hard limit. Returns how many connections it allows, at most
    `connections_max`. Logs a warning if these are fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # The kernel refuses an unlimited number.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fitting = connections_max if hard == resource.RLIM_INFINITY else connections_within(hard, connections_max)
    if fitting < connections_max:
        log.warning(
            "the limit of open files (ulimit -n, LimitNOFILE) is too low for STREAMS_MAX_CONNECTIONS",
            open_files_max=hard,
            connections=fitting,
            wanted=connections_max,
        )
    return fitting


def connections_within(files: int, connections_max: int) -> int:
    """Return how many of `connections_max` connections fit into a limit of open files."""
    return min(connections_max, max(files // 2, files - OTHERS))
