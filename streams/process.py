"""What the operating system says of this process. Linux; where a figure is not to be had it is 0."""

from __future__ import annotations

import os
import time

from streams.protocol.reports import ProcessReport

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STARTED_S = time.monotonic()


def report() -> ProcessReport:
    """Costs about 30 µs, and more with thousands of open files."""
    return ProcessReport(
        pid=os.getpid(),
        uptime_s=round(time.monotonic() - _STARTED_S, 3),
        resident_bytes=_resident_bytes(),
        cpu_s=round(time.process_time(), 3),
        open_files=_open_files(),
    )


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
