"""Measures the load of a gateway and of its links to the shards, and adjusts append limiters and schedulers
(v0 §9).

A probe to each shard travels behind the appends on its link. So its round trip, minus the time that it waited
for this process, is the time that the next append would wait. Probes also report the pressure level of this
gateway to the shard.

Bounds: one probe to a shard at a time; twenty a second while there are appends, one otherwise.
"""

from __future__ import annotations

import time

import trio

from gateway.admission.request_scheduler import RequestScheduler
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from streams.protocol import wire
from streams.protocol.errors import StreamsError
from streams.protocol.telemetry import pressure
from streams.protocol.telemetry.reports import PressureReport

#: A probe costs both sides a tenth of a millisecond.
_PROBE_S = 0.05
#: Probe interval while idle. The first busy sample ends it early.
_IDLE_PROBE_S = 1.0
#: Probe interval while the shard does not answer.
_UNREACHABLE_PROBE_S = 0.1


class GatewayPressure:
    def __init__(self, dispatch: Dispatch, thresholds: pressure.Thresholds) -> None:
        self._dispatch = dispatch
        self._gauge = pressure.Gauge(thresholds)
        #: How long requests wait in the scheduler. Reported only: no decision depends on it.
        self._queue_gauge = pressure.Gauge(thresholds)
        #: By shard: the last round trip, and when the probe in flight was sent.
        self._round_trips_s = [0.0] * len(dispatch.links)
        self._probed_s: list[float | None] = [None] * len(dispatch.links)
        self._pause_s = pressure.SAMPLE_S
        #: Set while the gateway is busy.
        self._busy = trio.Event()
        #: One for each front.
        self._schedulers: list[RequestScheduler] = []

    def __repr__(self) -> str:
        return f"<GatewayPressure {self._gauge!r}>"

    def watch_over(self, scheduler: RequestScheduler) -> None:
        self._schedulers.append(scheduler)

    def report(self) -> PressureReport:
        limiters = self._dispatch.append_limiters
        windows = [*limiters, *self._dispatch.page_windows]
        return PressureReport(
            level=max(
                self._gauge.level, self._queue_gauge.level, *(limiter.gauge.level for limiter in limiters)
            ),
            lag_s=round(self._gauge.lag_ms / 1000, 6),
            throttled=sum(window.throttled_count for window in windows),
            paced=sum(window.paced_count for window in windows),
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for at, link in enumerate(self._dispatch.links):
                nursery.start_soon(self._keep_probing, at, link)
            await self._keep_sampling()

    async def _keep_sampling(self) -> None:
        while True:
            began_s, worked_s = trio.current_time(), time.process_time()
            await trio.sleep(self._pause_s)
            now_s, worked_s = trio.current_time(), time.process_time() - worked_s
            late_s = now_s - began_s - self._pause_s
            lag_ms = pressure.own_lag_ms(late_s, worked_s)
            self._gauge.sample(lag_ms)
            self._queue_gauge.sample(1000 * max((each.longest_s for each in self._schedulers), default=0.0))
            is_busy = max(self._gauge.level, self._queue_gauge.level) != pressure.NONE
            limiters = self._dispatch.append_limiters
            for at, limiter in enumerate(limiters):
                is_busy = is_busy or limiter.is_busy
                # Subtract the delay of this process: fewer appends in flight would not reduce that.
                limiter.sample(max(0.0, 1000 * (self._behind_s(at, now_s) - max(0.0, late_s))))
            for scheduler in self._schedulers:
                scheduler.sample()
            self._pause_s = pressure.SAMPLE_S if is_busy else pressure.IDLE_SAMPLE_S
            if is_busy:
                self._busy.set()
            elif self._busy.is_set():
                self._busy = trio.Event()

    def _behind_s(self, at: int, now_s: float) -> float:
        probed_s = self._probed_s[at]
        return max(self._round_trips_s[at], 0.0 if probed_s is None else now_s - probed_s)

    async def _keep_probing(self, at: int, link: Link) -> None:
        while True:
            self._probed_s[at] = began_s = trio.current_time()
            pause_s = _PROBE_S
            try:
                answer = await link.call(wire.OP_PING, b"", bytes((self._gauge.level,)))
                # A shard that is not ready answers with an empty body: its startup work is no pressure.
                took_s = trio.current_time() - began_s if answer.body else 0.0
            except StreamsError:
                took_s, pause_s = 0.0, _UNREACHABLE_PROBE_S
            self._round_trips_s[at], self._probed_s[at] = took_s, None
            await trio.sleep(pause_s)
            with trio.move_on_after(_IDLE_PROBE_S - pause_s):
                await self._busy.wait()
