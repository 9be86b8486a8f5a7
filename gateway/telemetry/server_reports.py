"""The reports of all processes of a server at one moment: metrics, status and checks show them. Pure.

Bounds: rows of boxes, routers and groups are those of the largest ones
(`streams/protocol/telemetry/top_rows.py`); `is_truncated` says that there are others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.shards.process_states import ProcessStates
from streams.protocol.telemetry.reports import BoxRow, GatewayReport, GroupRow, RouterRow, ShardReport
from streams.protocol.telemetry.top_rows import TopBoxes, top_of


class Reports(NamedTuple):
    """All that is known of a server at one moment."""

    version: str
    #: Of shards that answer; one that is away is missing here and counted in `shards_total`.
    shards: list[ShardReport]
    gateways: list[GatewayReport]
    shards_total: int
    gateways_total: int
    #: Of the file system that the data is on.
    disk_bytes: int
    disk_free_bytes: int
    #: (shard, row) of what is shown one by one: the largest, by name.
    boxes: list[tuple[str, BoxRow]]
    routers: list[tuple[str, RouterRow]]
    groups: list[tuple[str, GroupRow]]
    is_truncated: bool
    #: Why processes are away and how often they were started again, as the supervisor says.
    processes: ProcessStates = ProcessStates()
    #: Of the last complete backup; None if none is known.
    backup_age_s: float | None = None


def reports_of(
    shards: list[ShardReport], gateways: list[GatewayReport], *, rows_max: int, **facts: Any
) -> Reports:
    shard_of = {row.box: str(shard.shard) for shard in shards for row in shard.boxes}
    boxes = TopBoxes(rows_max)
    for shard in shards:
        for row in shard.boxes:
            boxes.add(row)
    routers, has_more_routers = top_of(
        ((row.lag, row.router, (str(shard.shard), row)) for shard in shards for row in shard.routers),
        rows_max,
    )
    groups, has_more_groups = top_of(
        (
            (row.lag, f"{row.box}\0{row.group}", (str(shard.shard), row))
            for shard in shards
            for row in shard.groups
        ),
        rows_max // 2,
    )
    has_more = boxes.has_more or has_more_routers or has_more_groups
    return Reports(
        shards=shards,
        gateways=gateways,
        boxes=[(shard_of[row.box], row) for row in boxes.rows()],
        routers=routers,
        groups=groups,
        is_truncated=has_more or any(shard.has_more for shard in shards),
        **facts,
    )
