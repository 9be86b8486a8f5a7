"""Gathers the reports of all processes of the server, for metrics and status (v0 §13).

Bounds: all processes are asked at the same time and have `_ANSWER_S_MAX` to answer; a process that does not
answer is reported as away. Only one gathering runs at a time: requests that come meanwhile share its result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
import trio

from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from gateway.shards.process_states import StatesReader
from gateway.supervise.backup_note import read_note
from gateway.telemetry.server_reports import Reports, reports_of
from streams.protocol import wire
from streams.protocol.errors import StreamsError
from streams.protocol.telemetry import reports
from streams.protocol.telemetry.reports import GatewayReport, ShardReport

log = structlog.get_logger()

_ANSWER_S_MAX = 3.0

_R = TypeVar("_R")


class Collector:
    def __init__(
        self,
        dispatch: Dispatch,
        *,
        here: Callable[[], GatewayReport],
        others: list[Link],
        version: str,
        data_dir: Path,
        rows_max: int,
        states: StatesReader | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._here = here
        self._others = others
        self._version = version
        self._data_dir = data_dir
        self._rows_max = rows_max
        self._states = states or StatesReader(None)
        self._last_reports: Reports | None = None
        self._in_progress: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<Collector of {len(self._dispatch.links)} shards, {len(self._others) + 1} gateways>"

    async def gather(self) -> Reports:
        if self._in_progress is not None:
            await self._in_progress.wait()
            if self._last_reports is not None:
                return self._last_reports
        is_done = self._in_progress = trio.Event()
        self._last_reports = None
        try:
            self._last_reports = reports = await self._gather()
            return reports
        finally:
            is_done.set()
            self._in_progress = None

    async def _gather(self) -> Reports:
        shards: dict[int, ShardReport] = {}
        gateways: dict[int, GatewayReport] = {}
        async with trio.open_nursery() as nursery:
            for link in self._dispatch.links:
                nursery.start_soon(self._ask, link, reports.decode_shard, partial(_keep, shards))
            for link in self._others:
                nursery.start_soon(self._ask, link, reports.decode_gateway, partial(_keep, gateways))
        here = self._here()
        gateways[here.gateway] = here
        disk = os.statvfs(self._data_dir)
        backup = read_note(self._data_dir)
        return reports_of(
            [shards[each] for each in sorted(shards)],
            [gateways[each] for each in sorted(gateways)],
            version=self._version,
            shards_total=len(self._dispatch.links),
            gateways_total=len(self._others) + 1,
            disk_bytes=disk.f_blocks * disk.f_frsize,
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            rows_max=self._rows_max,
            processes=self._states.states(),
            backup_age_s=None if backup is None else max(0.0, time.time() - backup.taken_ms / 1000),
        )

    async def _ask(self, link: Link, decode: Callable[[bytes], _R], keep: Callable[[int, _R], None]) -> None:
        try:
            with trio.move_on_after(_ANSWER_S_MAX):
                keep(link.shard, decode((await link.call(wire.OP_REPORT, b"", b"")).body))
        except StreamsError as error:
            log.debug("process sent no report", link=repr(link), error=error.message)


def _keep(reports: dict[int, _R], at: int, report: _R) -> None:
    reports[at] = report
