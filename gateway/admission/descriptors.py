"""Fits the number of connections to the number of files that this process may open.

Each connection is one descriptor. A process out of descriptors accepts nobody and reaches no shard, so the
connections leave some for everything else.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

import structlog

log = structlog.get_logger("gateway.front")

#: Descriptors for links, listeners, logs, libraries, and connections that are closed and not yet gone.
OTHERS: Final = 256


def fit_connections(wanted: int) -> int:
    """Raises the soft limit of open files to the hard one, and returns how many connections it allows, at
    most `wanted`. Warns if these are fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # An unlimited one is over the kernel's own limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fitting = wanted if hard == resource.RLIM_INFINITY else connections_within(hard, wanted)
    if fitting < wanted:
        log.warning(
            "the limit of open files (ulimit -n, LimitNOFILE) is too low for STREAMS_MAX_CONNECTIONS",
            open_files_max=hard,
            connections=fitting,
            wanted=wanted,
        )
    return fitting


def connections_within(files: int, wanted: int) -> int:
    """How many of `wanted` connections fit into so many files."""
    return min(wanted, max(files // 2, files - OTHERS))
