"""Waits until shards have sealed segments, without a guess about the timing of their upkeep."""

from __future__ import annotations

from pathlib import Path

from streams.cli.shardlinks import ShardExports
from tests.support.crashing import eventually


def wait_for_segments(data_dir: Path, count: int) -> None:
    """Blocks until the shards of a running server name at least `count` segments.

    A segment file exists before its shard names it, so a look at the folders is too early. An export has the
    segments that a backup taken after it has, too.
    """
    eventually(lambda: _count_segments(data_dir) >= count)


def _count_segments(data_dir: Path) -> int:
    sockets = sorted((data_dir / "run").glob("shard-*.sock"))
    with ShardExports(sockets, "test") as exported:
        return sum(int(facts["segments"]) for facts in exported.facts)
