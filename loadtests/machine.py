"""Describes the machine of a measurement, and its load from other processes. Reads /proc only."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any

import msgspec

from loadtests.generator import machine_cpu_s

#: Filesystems in RAM: figures for disk and fsync mean nothing there.
RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_LOOK_S = 0.5

#: Settings for `running_server` that undo its test defaults, so that it runs as a server of users.
USER_SETTINGS: dict[str, Any] = {"wal_file_bytes": ""}


def facts(data_dir: Path) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(_memory_bytes("MemTotal") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "data_dir": str(data_dir),
        "filesystem": filesystem_of(data_dir),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "cores_used_by_others": round(cores_in_use(_LOOK_S), 2),
        "speed": speed(),
        "sync_ms": sync_ms(data_dir),
    }


#: Time to decode one record of the speed test, at best, on the kind of machine that floors and aims were set
#: on.
REFERENCE_NS = 155.0


def speed(seconds: float = 0.1) -> float:
    """Return the current speed of this machine, as a share of the best of its kind.

    The cores of a virtual machine run at half speed while its neighbours are busy, which no load average
    shows. The test decodes a write of 1000 records into raw values, as a shard does.
    """
    spent_ns = monotonic_ns()
    count = 0
    while (now_ns := monotonic_ns()) - spent_ns < seconds * 1e9:
        _decode(_WRITE)
        count += 1
    return round(REFERENCE_NS * 1000 * count / (now_ns - spent_ns), 2)


#: Median time of `sync_ms` on the kind of machine that floors and aims were set on, when it is quiet.
REFERENCE_SYNC_MS = 0.19


def sync_ms(folder: Path, count: int = 40) -> float:
    """Return the median time in which the disk of a folder makes 4 KiB durable, in a file without holes."""
    page = bytes(4096)
    times_ms: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(page * count)
        os.fsync(file.fileno())
        for number in range(count):
            began_ns = monotonic_ns()
            os.pwrite(file.fileno(), page, number * len(page))
            os.fdatasync(file.fileno())
            times_ms.append((monotonic_ns() - began_ns) / 1e6)
    return round(statistics.median(times_ms), 3)


class _Record(msgspec.Struct, gc=False):
    data: msgspec.Raw
    tag: str


_decode = msgspec.json.Decoder(list[_Record]).decode
_WRITE = msgspec.json.encode([{"data": {"id": i, "pad": "x" * 70}, "tag": f"user-{i}"} for i in range(1000)])


def warnings_of(machine: dict[str, Any]) -> list[str]:
    warnings = []
    if machine["cores_used_by_others"] > 0.1 * machine["cores"]:
        warnings.append(
            f"the machine is busy: others use {machine['cores_used_by_others']} of {machine['cores']} cores "
            f"(load average {machine['load_average'][0]}); figures will be low"
        )
    if machine["speed"] < 0.8:
        warnings.append(
            f"the machine runs at {machine['speed']:.2f} of the best speed seen on one of its kind; "
            "its neighbours are busy, or its processor is slower"
        )
    if machine["filesystem"] in RAM_FILESYSTEMS:
        warnings.append(
            f"{machine['data_dir']} is on {machine['filesystem']}: disk and fsync rows mean nothing"
        )
    return warnings


def cores_in_use(seconds: float) -> float:
    """Return how many cores all processes use over the next `seconds`."""
    began, before = monotonic(), machine_cpu_s()
    sleep(seconds)
    return (machine_cpu_s() - before) / (monotonic() - began)


def memory_available_bytes() -> int:
    return _memory_bytes("MemAvailable")


def resident_bytes(pid: int) -> int:
    """Return the proportional set size (Pss) of a process: shared pages are divided among their users."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss")


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def filesystem_of(path: Path) -> str:
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount_point, mount_kind, *_ = line.split()
        inside = mount_point == "/" or str(path) == mount_point or str(path).startswith(mount_point + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, mount_kind
    return kind


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
