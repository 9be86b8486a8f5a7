"""Measures the pressure of this shard, and paces low-priority delivery while it is high (v0 §9).

Pressure is the lag of the event loop and the backlog of the log. Gateways report their own pressure with each
probe. Low-priority delivery is paced while the shard or a gateway is under pressure.

Bounds: readers of paced boxes are served in rounds of `_ROUND_BOXES`; the level that a gateway reported
counts
for `_GATEWAY_LEVEL_S`.
"""

from __future__ import annotations

import time

import trio

from shard.engine.engine import Engine
from shard.server.recent_times import RecentTimes
from streams.protocol.errors import Throttled
from streams.protocol.telemetry import pressure
from streams.protocol.telemetry.reports import PressureReport

#: Boxes whose readers are served in one round, highest priority first; there are forty rounds a second.
_ROUND_BOXES = 16
#: Gateways probe forty times a second under load.
_GATEWAY_LEVEL_S = 0.5


class ShardPressure:
    def __init__(self, thresholds: pressure.Thresholds, recent_acks: RecentTimes) -> None:
        self.gauge = pressure.Gauge(thresholds)
        self._recent_acks = recent_acks
        self.throttle_count = 0
        self._gateway_level = pressure.NONE
        self._gateway_until_s = 0.0

    def __repr__(self) -> str:
        return f"<ShardPressure {self.gauge!r}, gateway {self._gateway_level}>"

    def note_gateway_level(self, level: int) -> None:
        """Note the pressure level that a gateway has reported."""
        now_s = trio.current_time()
        if level >= self._gateway_level or now_s > self._gateway_until_s:
            self._gateway_level = level
            self._gateway_until_s = now_s + _GATEWAY_LEVEL_S

    def refuse(self) -> Throttled:
        self.throttle_count += 1
        wait_ms = pressure.retry_after_ms(self.gauge.lag_ms)
        return Throttled(f"the server is overloaded; try again in {wait_ms} ms", retry_after_ms=wait_ms)

    async def run(self, engine: Engine) -> None:
        pause_s = pressure.SAMPLE_S
        lsn = 0
        while True:
            began_s, worked_s = trio.current_time(), time.process_time()
            await trio.sleep(pause_s)
            late_s, worked_s = trio.current_time() - began_s - pause_s, time.process_time() - worked_s
            self.gauge.sample(pressure.own_lag_ms(late_s, worked_s), engine.backlog_bytes)
            self._recent_acks.update(trio.current_time())
            self._pace(engine)
            reads = engine.delivery.reads
            is_busy = engine.machine.lsn != lsn or reads.is_pacing or reads.paced_boxes
            lsn = engine.machine.lsn
            pause_s = pressure.SAMPLE_S if is_busy else pressure.IDLE_SAMPLE_S

    def _pace(self, engine: Engine) -> None:
        is_gateway_pressed = (
            self._gateway_level != pressure.NONE and trio.current_time() <= self._gateway_until_s
        )
        reads = engine.delivery.reads
        reads.is_pacing = self.gauge.level != pressure.NONE or is_gateway_pressed
        if reads.paced_boxes:
            reads.serve_paced(_ROUND_BOXES if reads.is_pacing else reads.paced_boxes)

    def report(self, engine: Engine) -> PressureReport:
        reads = engine.delivery.reads
        return PressureReport(
            level=max(self.gauge.level, pressure.PACING if reads.is_pacing else pressure.NONE),
            lag_s=round(self.gauge.lag_ms / 1000, 6),
            throttled=self.throttle_count,
            paced=reads.paced_total,
        )
