"""Processes as /proc lists them: who started whom, and which belong to one session."""

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
    """All processes that run right now, by pid. Zombies are left out."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        state, parent, _, session = tail.split()[:4]
        if state != "Z":
            pid = int(entry.name)
            found[pid] = Process(pid, int(parent), int(session), head.partition("(")[2], command)
    return found


def descendants(table: dict[int, Process], pid: int) -> list[Process]:
    """Children of a process, their children and so on, by pid."""
    found: list[Process] = []
    parents = {pid}
    while parents:
        children = [each for each in table.values() if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return sorted(found, key=lambda each: each.pid)
