"""The last 15 minutes of the server by the second, for charts (v0 §31).

Each gateway samples itself once a second; the first one also samples the shards, with a report that counts no
boxes. `Histories` merges the rings of all gateways: numbers of gateways are added up.

Bounds: a ring has `SECONDS_MAX` samples of fixed series and `PER_SHARD` series a shard, 8 bytes each: about
400 KiB with eight shards. A sample asks each shard once and waits `_ANSWER_S_MAX`.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
import trio

from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from streams.protocol import wire
from streams.protocol.errors import StreamsError
from streams.protocol.telemetry import reports
from streams.protocol.telemetry.histogram import HistogramFacts, quantile
from streams.protocol.telemetry.reports import GatewayReport, ShardReport

log = structlog.get_logger()

SECONDS_MAX: Final = 900
_ANSWER_S_MAX: Final = 0.8
#: Bodies of messages to a shard and to another gateway.
BRIEF: Final = b"brief"
HISTORY: Final = b"history"

SHARD_SERIES: Final = (
    "appends",
    "records_appended",
    "reads",
    "records_read",
    "bytes_logged",
    "ack_p50_ms",
    "ack_p99_ms",
    "fsync_p50_ms",
    "fsync_p99_ms",
    "pressure",
    "wal_queue_bytes",
    "disk_free_bytes",
    "waiting_reads",
    "waiting_claims",
)
GATEWAY_SERIES: Final = (
    "requests",
    "errors",
    "throttled",
    "connections",
    "open_streams",
    "gateway_cpu",
    "gateway_bytes",
)
#: One series for each shard, with its number: `shard_cpu.0`.
PER_SHARD: Final = ("shard_cpu", "shard_lag_ms", "shard_bytes")

Sample = dict[str, float]


class RingSlice(msgspec.Struct, frozen=True):
    """The last samples of a ring; NaN is sent as null. `end_s` is the second of the last one."""

    end_s: int
    series: dict[str, list[float | None]]


encode_slice = msgspec.json.encode
decode_slice = msgspec.json.Decoder(RingSlice).decode


class Ring:
    """Samples by second. A second that was not sampled has no value."""

    def __init__(self) -> None:
        self._seconds = array("q", [0] * SECONDS_MAX)
        self._series: dict[str, array[float]] = {}

    def __repr__(self) -> str:
        return f"<Ring of {len(self._series)} series>"

    def put(self, second: int, sample: Sample) -> None:
        at = second % SECONDS_MAX
        self._seconds[at] = second
        for name in sample.keys() - self._series.keys():
            self._series[name] = array("d", [math.nan] * SECONDS_MAX)
        for name, values in self._series.items():
            values[at] = sample.get(name, math.nan)

    def cut(self, end_s: int, seconds: int = SECONDS_MAX) -> RingSlice:
        places = [
            (second % SECONDS_MAX if self._seconds[second % SECONDS_MAX] == second else -1)
            for second in range(end_s - seconds + 1, end_s + 1)
        ]
        series: dict[str, list[float | None]] = {}
        for name, values in self._series.items():
            numbers = [values[at] if at >= 0 else math.nan for at in places]
            series[name] = [None if math.isnan(number) else round(number, 3) for number in numbers]
        return RingSlice(end_s, series)


class Sampler:
    """Fills the ring of one gateway."""

    def __init__(
        self, dispatch: Dispatch, here: Callable[[], GatewayReport], *, samples_shards: bool
    ) -> None:
        self.ring = Ring()
        self._dispatch = dispatch
        self._here = here
        self._samples_shards = samples_shards
        self._gateway_before: tuple[float, GatewayReport] | None = None
        #: By shard: when it was sampled last, and its report.
        self._before: dict[int, tuple[float, ShardReport]] = {}

    def __repr__(self) -> str:
        return f"<Sampler {self.ring!r}>"

    async def run(self) -> None:
        while True:
            await trio.sleep(1 - time.time() % 1)
            second = int(time.time())
            sample = self._sample_gateway()
            if self._samples_shards:
                sample |= await self._sample_shards()
            self.ring.put(second, sample)

    def _sample_gateway(self) -> Sample:
        now_s, report = time.monotonic(), self._here()
        before, self._gateway_before = self._gateway_before, (now_s, report)
        sample: Sample = {
            "connections": report.connections,
            "open_streams": report.sse_connections,
            "gateway_bytes": report.process.resident_bytes,
        }
        # The report shares its dict of statuses with the next one.
        counts = dict(report.requests)
        self._gateway_before = (now_s, msgspec.structs.replace(report, requests=counts))
        if before is None:
            return sample
        elapsed_s, last = max(now_s - before[0], 1e-3), before[1]
        sample["gateway_cpu"] = (report.process.cpu_s - last.process.cpu_s) / elapsed_s
        new_counts = {status: count - last.requests.get(status, 0) for status, count in counts.items()}
        sample["requests"] = sum(new_counts.values()) / elapsed_s
        sample["errors"] = sum(count for status, count in new_counts.items() if status >= 500) / elapsed_s
        sample["throttled"] = new_counts.get(429, 0) / elapsed_s
        return sample

    async def _sample_shards(self) -> Sample:
        answers: dict[int, ShardReport] = {}

        async def ask(link: Link) -> None:
            try:
                answers[link.shard] = reports.decode_shard((await link.call(wire.OP_REPORT, b"", BRIEF)).body)
            except StreamsError as error:
                log.debug("shard was not sampled", shard=link.shard, error=error.message)

        with trio.move_on_after(_ANSWER_S_MAX):
            async with trio.open_nursery() as nursery:
                for link in self._dispatch.links:
                    nursery.start_soon(ask, link)
        now_s = time.monotonic()
        pairs: list[tuple[float, ShardReport, ShardReport]] = []
        for shard, report in answers.items():
            before = self._before.get(shard)
            if before is not None and before[1].process.pid == report.process.pid:
                pairs.append((max(now_s - before[0], 1e-3), before[1], report))
            self._before[shard] = (now_s, report)
        return sample_of(pairs)


def sample_of(pairs: list[tuple[float, ShardReport, ShardReport]]) -> Sample:
    """Return the numbers of the shards from two reports of each, and the seconds between them. Pure."""
    if not pairs:
        return {}
    sample: Sample = dict.fromkeys(SHARD_SERIES, 0.0)
    for name in ("ack_p50_ms", "ack_p99_ms", "fsync_p50_ms", "fsync_p99_ms"):
        del sample[name]
    sample["disk_free_bytes"] = min(new.disk.free_bytes for _, _, new in pairs)
    sample["pressure"] = max(new.pressure.level for _, _, new in pairs)
    for elapsed_s, old, new in pairs:
        for name in ("appends", "records_appended", "reads", "records_read"):
            sample[name] += (getattr(new.tally, name) - getattr(old.tally, name)) / elapsed_s
        sample["bytes_logged"] += (new.wal.bytes - old.wal.bytes) / elapsed_s
        sample["wal_queue_bytes"] += new.wal.queue_bytes
        sample["waiting_reads"] += new.waiting_reads
        sample["waiting_claims"] += new.waiting_claims
        cpu = (new.process.cpu_s - old.process.cpu_s) / elapsed_s
        sample[f"shard_cpu.{new.shard}"] = cpu
        sample[f"shard_lag_ms.{new.shard}"] = new.pressure.lag_s * 1000
        sample[f"shard_bytes.{new.shard}"] = new.process.resident_bytes
    for name in ("ack", "fsync"):
        counts = _new_counts([(getattr(old, name), getattr(new, name)) for _, old, new in pairs])
        if any(counts):
            sample[f"{name}_p50_ms"] = quantile(counts, 0.5) * 1000
            sample[f"{name}_p99_ms"] = quantile(counts, 0.99) * 1000
    return sample


def _new_counts(pairs: list[tuple[HistogramFacts, HistogramFacts]]) -> list[int]:
    counts = [0] * len(pairs[0][0].counts)
    for old, new in pairs:
        for at, (before, after) in enumerate(zip(old.counts, new.counts, strict=True)):
            counts[at] += max(0, after - before)
    return counts


class Histories:
    """Merges the rings of all gateways."""

    def __init__(self, sampler: Sampler, others: list[Link], shards: int) -> None:
        self._sampler = sampler
        self._others = others
        self.names = (
            *SHARD_SERIES,
            *GATEWAY_SERIES,
            *(f"{name}.{shard}" for name in PER_SHARD for shard in range(shards)),
        )

    def __repr__(self) -> str:
        return f"<Histories of {len(self._others) + 1} gateways>"

    async def read(self, names: set[str], seconds: int) -> RingSlice:
        """Return the last whole seconds of these series. A gateway that does not answer is left out."""
        end_s = int(time.time()) - 1
        slices = [self._sampler.ring.cut(end_s, seconds)]

        async def ask(link: Link) -> None:
            try:
                body = b"%b %d %d" % (HISTORY, end_s, seconds)
                slices.append(decode_slice((await link.call(wire.OP_REPORT, b"", body)).body))
            except StreamsError as error:
                log.debug("gateway sent no history", link=repr(link), error=error.message)

        with trio.move_on_after(_ANSWER_S_MAX):
            async with trio.open_nursery() as nursery:
                for link in self._others:
                    nursery.start_soon(ask, link)
        series: dict[str, list[float | None]] = {name: [None] * seconds for name in sorted(names)}
        for each in slices:
            for name in each.series.keys() & names:
                series[name] = [_add(a, b) for a, b in zip(series[name], each.series[name], strict=True)]
        return RingSlice(end_s, series)


def _add(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b
