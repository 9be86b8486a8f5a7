"""Collects the report of a shard (its metrics) in small steps, and answers all pending requests with it.

Bounds: one walk over the boxes at a time, in steps of a quarter of a millisecond. Requests that arrive during
a walk wait for the next one and share its report. Pending requests are requests in flight, which links and
fronts bound.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from shard.core.boxes.box_statistics import BoxStatistics
from shard.core.machine import Machine
from shard.engine.engine import Engine
from shard.engine.timekeeper import Timekeeper
from shard.server.answer_times import AnswerTimes
from shard.server.pressure import ShardPressure
from streams import process
from streams.protocol.access.key_limits import Use
from streams.protocol.telemetry import reports
from streams.protocol.telemetry.reports import ShardReport

#: Boxes counted in one step.
_STEP_BOXES = 96
#: Keys whose use is counted in one step, about as long.
_STEP_KEYS = 64

Answer = Callable[[ShardReport], None]


class Reporter:
    def __init__(
        self,
        machine: Machine,
        engine: Engine,
        *,
        shard: int,
        rows_max: int,
        times: AnswerTimes,
        pressure: ShardPressure,
        timekeeper: Timekeeper,
    ) -> None:
        self._machine = machine
        self._engine = engine
        self._shard = shard
        self._rows_max = rows_max
        self._times = times
        self._pressure = pressure
        self._timekeeper = timekeeper
        self._waiting: list[Answer] = []
        self._request_event = trio.Event()

    def __repr__(self) -> str:
        return f"<Reporter of shard {self._shard}, {len(self._waiting)} waiting>"

    def request(self, answer: Answer, *, is_brief: bool = False) -> None:
        """Answer with a report. A brief one counts no boxes and no keys, and is answered at once."""
        if is_brief:
            census = BoxStatistics(self._machine, 0, now_ms=0, rates=self._machine.box_rates)
            answer(self._report(census, {}))
            return
        self._waiting.append(answer)
        self._request_event.set()

    async def run(self) -> None:
        while True:
            await self._request_event.wait()
            self._request_event = trio.Event()
            waiting, self._waiting = self._waiting, []
            now_ms = self._timekeeper.now_ms()
            census = BoxStatistics(
                self._machine, self._rows_max, now_ms=now_ms, rates=self._machine.box_rates
            )
            while census.step(_STEP_BOXES):
                await trio.lowlevel.checkpoint()
            report = self._report(census, await self._key_use())
            for answer in waiting:
                answer(report)

    async def _key_use(self) -> dict[str, Use]:
        usage = self._machine.usage
        use_by_key: dict[str, Use] = {}
        for account in list(usage.accounts.values()):
            use_by_key[account.id] = usage.use_of(account)
            if len(use_by_key) % _STEP_KEYS == 0:
                await trio.lowlevel.checkpoint()
        return use_by_key

    def _report(self, census: BoxStatistics, key_use: dict[str, Use]) -> ShardReport:
        machine, engine = self._machine, self._engine
        commit_statistics = engine.statistics()
        schedules = machine.schedules.totals(self._timekeeper.now_ms())
        return ShardReport(
            shard=self._shard,
            ready=True,
            replay_progress=1.0,
            process=process.report(),
            pressure=self._pressure.report(engine),
            totals=census.totals,
            tally=machine.tally,
            wal=reports.WalReport(
                frames=commit_statistics.frames,
                batches=commit_statistics.groups,
                fsyncs=commit_statistics.fsyncs,
                bytes=commit_statistics.bytes_written,
                rotations=commit_statistics.rotations,
                queue_bytes=commit_statistics.backlog_bytes,
                unsynced_frames=max(0, machine.lsn - machine.durable_lsn),
            ),
            disk=engine.disk_space.report(),
            objects=engine.objects_report(),
            faults=engine.faults.report(self._timekeeper.steps),
            fsync=engine.fsync_times.facts(),
            ack=self._times.acks.facts(),
            read=self._times.reads.facts(),
            claim=self._times.claims.facts(),
            watch_sessions=len(machine.sessions),
            waiting_reads=len(engine.delivery.reads.waiting),
            waiting_claims=len(engine.delivery.claims.waiting),
            unsealed_bytes=machine.unsealed_boxes.bytes,
            cache_bytes=engine.cache_bytes,
            idempotency_keys=machine.keys_kept,
            schedules=schedules.schedules,
            schedules_blocked=schedules.blocked_count,
            schedule_lag_s=schedules.lag_ms / 1000,
            clock_ahead_s=self._timekeeper.behind_s,
            key_use=key_use,
            boxes=census.boxes,
            routers=census.routers,
            groups=census.groups,
            snapshot_age_s=engine.snapshot_age_s,
            has_more=census.has_more,
        )
