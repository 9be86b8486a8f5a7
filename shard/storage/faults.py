"""Counts the faults of a shard since it started: damaged files and failed calls of the cold store.

A shard goes on serving after these faults, so only this record shows them: in the metrics, in `/v0/status`
and in `streams doctor`. No decision depends on it.

Bounds: the first `FILES_MAX` damaged files are listed, and all are counted; one error text of the cold store
is stored, cut to `_TEXT_MAX` characters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Literal

from streams.protocol.telemetry.reports import COLD_OPERATIONS, DAMAGE_KINDS, DamagedFile, FaultsReport

Kind = Literal["segment", "snapshot"]
Operation = Literal["read", "write", "delete"]

#: A status lists no more; `streams verify` lists all.
FILES_MAX: Final = 20
_TEXT_MAX: Final = 300


class Faults:
    """Damage and cold store failures. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._damaged_files: dict[str, DamagedFile] = {}
        self._damage_seen: dict[str, int] = dict.fromkeys(DAMAGE_KINDS, 0)
        self._cold_failures: dict[str, int] = dict.fromkeys(COLD_OPERATIONS, 0)
        self._cold_error = ""
        #: Time of the first failure after the last call that succeeded.
        self._cold_failing_since: float | None = None

    def __repr__(self) -> str:
        return f"<Faults {len(self._damaged_files)} damaged files, cold store {self._cold_failures}>"

    def note_damage(self, kind: Kind, path: str, reason: str, box: str = "") -> None:
        with self._mutex:
            self._damage_seen[kind] += 1
            if path in self._damaged_files or len(self._damaged_files) < FILES_MAX:
                self._damaged_files[path] = DamagedFile(kind, path, box, reason[:_TEXT_MAX])

    def note_cold_failure(self, operation: Operation, error: str) -> None:
        with self._mutex:
            self._cold_failures[operation] += 1
            self._cold_error = error[:_TEXT_MAX]
            if self._cold_failing_since is None:
                self._cold_failing_since = self._clock()

    def note_cold_success(self) -> None:
        if self._cold_failing_since is not None:
            with self._mutex:
                self._cold_failing_since = None

    def report(self, clock_steps: int = 0) -> FaultsReport:
        with self._mutex:
            since = self._cold_failing_since
            return FaultsReport(
                damaged=list(self._damaged_files.values()),
                damage_seen=dict(self._damage_seen),
                cold_failures=dict(self._cold_failures),
                cold_failing_s=0.0 if since is None else max(0.001, round(self._clock() - since, 3)),
                cold_error="" if since is None else self._cold_error,
                clock_steps=clock_steps,
            )
