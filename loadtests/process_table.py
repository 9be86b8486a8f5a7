"""The process table of /proc: parents and sessions of processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    name: str
    command: str


def processes() -> dict[int, Process]:
    """Return all running processes by pid, without zombies."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # the process has just ended
        state, parent, _, session = tail.split()[:4]
        if state != "Z":
            pid = int(entry.name)
            table[pid] = Process(pid, int(parent), int(session), head.partition("(")[2], command)
    return table


def descendants(table: dict[int, Process], pid: int) -> list[Process]:
    """Return all descendants of a process, sorted by pid."""
    result: list[Process] = []
    parents = {pid}
    while parents:
        children = [each for each in table.values() if each.parent in parents]
        result += children
        parents = {each.pid for each in children}
    return sorted(result, key=lambda each: each.pid)
