"""Changes the number of shards on start, before any process serves: the supervisor's part.

    manifest: building ─► [shard.offline.reshard, a process of its own, builds the folders] ─► manifest: the
    new ones, dropping the old ─► copy of the manifest ─► old folders removed ─► manifest without intents

The second manifest puts the new folders in force. A crash before it leaves new folders, a crash after it
leaves old folders; the next start removes either."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import orjson
import structlog
import trio

from gateway.shards.placement import resize
from gateway.supervise.child_reports import lines
from gateway.supervise.data_dir import CannotServe, DataDir
from gateway.supervise.manifest import Manifest, folders
from streams import progress

log: Any = structlog.get_logger()


async def reshard(
    directory: DataDir,
    old: Manifest,
    shards: int,
    *,
    command: Sequence[str],
    environ: dict[str, str],
    wal_file_bytes: int,
) -> Manifest:
    """Move all boxes to `shards` shards and return the new manifest, which is in force. If it raises
    `CannotServe`, nothing has changed."""
    placement = resize(old.placement, shards)
    targets = folders(shards, placement.version)
    plan = {
        "data_dir": str(directory.path),
        "sources": old.directories,
        "targets": targets,
        "slots": placement.ranges(),
        "old_slots": old.placement.ranges(),
        "wal_file_bytes": wal_file_bytes,
    }
    log.info("moving boxes to another number of shards", shards_before=old.shards, shards=shards)
    directory.commit(replace(old, building=targets))
    try:
        counts = await _build(directory, plan, command, environ)
    except CannotServe:
        directory.settle(replace(old, building=targets))
        raise
    new = replace(old, placement=placement, directories=targets, dropping=old.directories)
    directory.commit(new)
    directory.settle(new)
    log.info("boxes moved to the new shards", **counts)
    return new.without_intents()


async def _build(
    directory: DataDir, plan: dict[str, Any], command: Sequence[str], environ: dict[str, str]
) -> dict[str, Any]:
    with ExitStack() as stack:
        (report_fd, their_report_fd), (their_parent_fd, parent_fd) = os.pipe(), os.pipe()
        stack.callback(os.close, parent_fd)
        arguments = ("--plan", orjson.dumps(plan).decode())
        descriptors = ("--parent-fd", str(their_parent_fd), "--report-fd", str(their_report_fd))
        try:
            process = await trio.lowlevel.open_process(
                [*command, *arguments, *descriptors],
                stdin=subprocess.DEVNULL,
                pass_fds=(their_parent_fd, their_report_fd, directory.lock_fd),
                env=environ,
            )
        finally:
            os.close(their_parent_fd)
            os.close(their_report_fd)
        try:
            last_lines = await _listen(trio.lowlevel.FdStream(report_fd))
            code = await process.wait()
        finally:
            if process.returncode is None:  # the supervisor stops: the unfinished folders are not needed
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
    if code != 0:
        why = last_lines.get("error") or f"the process that moves them ended with {code}"
        raise CannotServe(f"the boxes of {directory.path} could not be moved to other shards: {why}")
    counts: dict[str, Any] = orjson.loads(last_lines["done"])
    return counts


async def _listen(reports: trio.lowlevel.FdStream) -> dict[str, str]:
    """Show the progress. Returns the last line of each kind."""
    last_lines: dict[str, str] = {}
    with progress.show_progress("moving boxes", line=_log_progress) as report:
        async with reports:
            async for line in lines(reports):
                word, _, rest = line.partition(" ")
                last_lines[word] = rest
                if word == "progress":
                    report(float(rest))
    return last_lines


def _log_progress(percent: int) -> None:
    log.info("moving boxes", percent=percent)
