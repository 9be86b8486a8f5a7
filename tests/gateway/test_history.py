"""The history of a server: what a sample is made of, and what the ring keeps (§31)."""

from __future__ import annotations

from gateway.telemetry.history import SECONDS_MAX, Ring, sample_of
from streams.protocol.telemetry.histogram import TIMES_S, HistogramFacts
from streams.protocol.telemetry.reports import ProcessReport, ShardReport, TallyReport, WalReport


def report(appended: int, *, cpu_s: float, acks: int) -> ShardReport:
    counts = [0] * (len(TIMES_S) + 1)
    counts[2] = acks
    return ShardReport(
        shard=1,
        process=ProcessReport(pid=7, cpu_s=cpu_s, resident_bytes=5),
        tally=TallyReport(appends=appended, records_appended=10 * appended),
        wal=WalReport(bytes=100 * appended),
        ack=HistogramFacts(tuple(counts)),
    )


def test_a_sample_has_rates_and_the_latencies_of_its_second_alone() -> None:
    sample = sample_of([(2.0, report(10, cpu_s=1.0, acks=50), report(14, cpu_s=2.0, acks=54))])
    assert (sample["appends"], sample["records_appended"], sample["bytes_logged"]) == (2, 20, 200)
    assert sample["shard_cpu.1"] == 0.5 and sample["shard_bytes.1"] == 5
    assert 0.5 < sample["ack_p50_ms"] <= 1.0
    assert "fsync_p50_ms" not in sample, "nothing was synced"
    assert sample_of([]) == {}


def test_a_ring_keeps_its_last_samples_and_leaves_gaps_empty() -> None:
    ring = Ring()
    ring.put(1000, {"a": 1.0})
    ring.put(1002, {"a": 3.0, "b": 9.0})
    cut = ring.cut(1003, 4)
    assert cut.series == {"a": [1.0, None, 3.0, None], "b": [None, None, 9.0, None]}
    ring.put(1000 + SECONDS_MAX, {"a": 5.0})
    assert ring.cut(1000, 1).series["a"] == [None], "its place was used again"
