"""Figures of the operating system about this process, and how the process ends. Linux; a figure that is not
available is 0."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from typing import NoReturn

from streams.protocol.telemetry.reports import ProcessReport

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STARTED_S = time.monotonic()
_STARTED_AT_S = round(time.time(), 3)
#: As many as a process of a server ever uses: its clients, and as much again for all else.
_DESCRIPTORS = 20_000
#: Growth that is worth a look for free memory.
_GROWN_BYTES = 32 << 20


def report() -> ProcessReport:
    """Costs about 30 µs, and more with thousands of open files."""
    virtual_bytes, resident_bytes = _memory_bytes()
    return ProcessReport(
        pid=os.getpid(),
        uptime_s=round(time.monotonic() - _STARTED_S, 3),
        resident_bytes=resident_bytes,
        cpu_s=round(time.process_time(), 3),
        open_files=_count_entries("/proc/self/fd"),
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_limit_bytes=_MEMORY_LIMIT_BYTES,
        virtual_bytes=virtual_bytes,
        threads=_count_entries("/proc/self/task"),
        started_s=_STARTED_AT_S,
        gc_runs=tuple(_gc.runs),
        gc_s=round(_gc.seconds, 6),
    )


class _GcTimes:
    """Counts and times the runs of the garbage collector. Costs a microsecond a run."""

    def __init__(self) -> None:
        self.runs = [0, 0, 0]
        self.seconds = 0.0
        self._began_ns = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        else:
            self.runs[info["generation"]] += 1
            self.seconds += (time.perf_counter_ns() - self._began_ns) / 1e9


_gc = _GcTimes()


def time_gc() -> None:
    """Have the runs of the garbage collector of this process counted and timed."""
    if _gc not in gc.callbacks:
        gc.callbacks.append(_gc)


def _memory_bytes() -> tuple[int, int]:
    """Virtual and resident."""
    try:
        with open("/proc/self/statm", "rb") as file:
            virtual, resident, *_ = file.read().split()
        return int(virtual) * _PAGE_BYTES, int(resident) * _PAGE_BYTES
    except OSError:
        return 0, 0


class MemoryReturn:
    """Gives memory that a burst has left free inside this process back to the system.

    glibc keeps what was freed between two pieces that are in use. A process that has no `malloc_trim`, with
    another C library or on another system, keeps it for good: nothing happens there.
    """

    def __init__(self) -> None:
        #: After the last return.
        self._resident_bytes = _memory_bytes()[1]

    def __repr__(self) -> str:
        return f"<MemoryReturn at {self._resident_bytes} B>"

    @property
    def is_worth_it(self) -> bool:
        """True if the process has grown since the last return."""
        return _memory_bytes()[1] > self._resident_bytes + _GROWN_BYTES

    def run(self) -> int:
        """Give memory back; return how many bytes. Takes 0.1 s a gigabyte; other threads go on until they
        allocate."""
        import ctypes

        before = _memory_bytes()[1]
        try:
            trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            pass
        else:
            trim(ctypes.c_size_t(0))
        self._resident_bytes = _memory_bytes()[1]
        return before - self._resident_bytes


def _count_entries(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as allowed. The default of 1024 is for programs that use `select`;
    a server with that many clients could not open its own files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


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
    except OSError:  # the reader is gone, or the disk is full: the output is incomplete
        code = code or 1
    os._exit(code)
