"""What the operating system says of this process, and how it ends. Linux; where a figure is not to be had it
is 0."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import NoReturn

from streams.protocol.reports import ProcessReport

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STARTED_S = time.monotonic()
#: As many as a process of a server ever uses: its clients, and as much again for all else.
_DESCRIPTORS = 20_000
#: Growth that is worth a look for free memory.
_GROWN_BYTES = 32 << 20


def report() -> ProcessReport:
    """Costs about 30 µs, and more with thousands of open files."""
    return ProcessReport(
        pid=os.getpid(),
        uptime_s=round(time.monotonic() - _STARTED_S, 3),
        resident_bytes=_resident_bytes(),
        cpu_s=round(time.process_time(), 3),
        open_files=_open_files(),
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_limit_bytes=_MEMORY_LIMIT_BYTES,
    )


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class MemoryReturn:
    """Gives memory that a burst has left free inside this process back to the system.

    glibc keeps what was freed between two pieces that are in use. A process that has no `malloc_trim`, with
    another C library or on another system, keeps it for good: nothing happens there.
    """

    def __init__(self) -> None:
        #: After the last return.
        self._resident_bytes = _resident_bytes()

    def __repr__(self) -> str:
        return f"<MemoryReturn at {self._resident_bytes} B>"

    @property
    def is_worth_it(self) -> bool:
        """True if the process has grown since the last return."""
        return _resident_bytes() > self._resident_bytes + _GROWN_BYTES

    def run(self) -> int:
        """Give memory back; return how many bytes. Takes 0.1 s a gigabyte; other threads go on until they
        allocate."""
        import ctypes

        before = _resident_bytes()
        try:
            trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            pass
        else:
            trim(ctypes.c_size_t(0))
        self._resident_bytes = _resident_bytes()
        return before - self._resident_bytes


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and sockets as it may. The usual 1024 are for programs that use
    `select`, and a server with as many clients could not open its own files any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _memory_limit_bytes() -> int:
    """Return what the control group of this process allows, or else all memory of the machine."""
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
        if text.isdigit():
            return int(text)
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


_MEMORY_LIMIT_BYTES = _memory_limit_bytes()


def leave(code: int) -> NoReturn:
    """Ends this process at once. To take the interpreter down first costs 30 ms, a seventh of what a process
    of a server needs to start and stop, and frees what the system frees anyway. Nothing of ours is left to
    be done by then."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads it, or a full disk: what was printed is not whole
        code = code or 1
    os._exit(code)
