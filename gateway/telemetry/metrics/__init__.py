"""Every metric of a server: one table, from which text, JSON and the reference page come (v0 §13). Pure.

Names never change; a metric that means something else gets another name.

metric      what a metric is, and the families that share labels
health      what is wrong
stored      what the server stores, in all and by box
shards      the work of shards
gateways    the work of gateways
resources   pressure, disk, memory, processor
s2_lite     names of `s2 lite`

Bounds: series by box, router and group are those of the largest ones
(`streams/protocol/telemetry/top_rows.py`), and `streams_box_series_truncated` says that there are others;
every other label has as many values as there are shards, processes, statuses, routes or reasons.
"""

from __future__ import annotations

from typing import Final

from gateway.telemetry.metrics.gateways import GATEWAY_WORK
from gateway.telemetry.metrics.health import HEALTH
from gateway.telemetry.metrics.metric import Metric
from gateway.telemetry.metrics.resources import RESOURCES
from gateway.telemetry.metrics.s2_lite import S2_LITE
from gateway.telemetry.metrics.shards import SHARD_WORK
from gateway.telemetry.metrics.stored import STORED

METRICS: Final[tuple[Metric, ...]] = (
    *HEALTH,
    *STORED,
    *SHARD_WORK,
    *GATEWAY_WORK,
    *RESOURCES,
    *S2_LITE,
)
