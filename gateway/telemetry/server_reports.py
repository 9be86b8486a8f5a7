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
    """The state of a server at one moment."""

    version: str
    #: Reports of the shards that answered. `shards_total` also counts the others.
    shards: list[ShardReport]
    gateways: list[GatewayReport]
    shards_total: int
    gateways_total: int
    #: Of the file system of the data directory.
    disk_bytes: int
    disk_free_bytes: int
    #: (shard, row) of the largest boxes, routers and groups, by name.
    boxes: list[tuple[str, BoxRow]]
    routers: list[tuple[str, RouterRow]]
    groups: list[tuple[str, GroupRow]]
    is_truncated: bool
    #: The supervisor's view: why processes do not serve, and how often they were restarted.
    processes: ProcessStates = ProcessStates()
    #: Age of the last complete backup; None if there is none.
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
