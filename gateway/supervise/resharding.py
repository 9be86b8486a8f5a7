"""Another number of shards: the supervisor's part of it, on start, before anything serves.

    manifest: building ─► [shard.offline.reshard, a process of its own, builds the folders] ─► manifest: the
    new ones, dropping the old ─► copy of the manifest ─► old folders go ─► manifest: settled

The second manifest is the moment at which the new folders count. Whatever ends before it leaves folders that
the next start removes; whatever ends after it leaves old folders, which the next start removes too.
"""

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
from gateway.supervise.data_dir import CannotServe, DataDir
from gateway.supervise.manifest import Manifest, folders
from gateway.supervise.reports import lines
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
    """The manifest with `shards` shards, in force; or `CannotServe`, and everything is as it was."""
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
        moved = await _build(directory, plan, command, environ)
    except CannotServe:
        directory.settle(replace(old, building=targets))
        raise
    new = replace(old, placement=placement, directories=targets, dropping=old.directories)
    directory.commit(new)
    directory.settle(new)
    log.info("moved", **moved)
    return new.settled()


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
            said = await _listen(trio.lowlevel.FdStream(report_fd))
            code = await process.wait()
        finally:
            if process.returncode is None:  # we were told to stop; what it has built means nothing
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
    if code != 0:
        why = said.get("error") or f"the process that moves them ended with {code}"
        raise CannotServe(f"the boxes of {directory.path} could not be moved to other shards: {why}")
    found: dict[str, Any] = orjson.loads(said["done"])
    return found


async def _listen(reports: trio.lowlevel.FdStream) -> dict[str, str]:
    """Shows how far it is. Returns the last line of each kind."""
    said: dict[str, str] = {}
    with progress.shown("moving boxes", line=_log_progress) as report:
        async with reports:
            async for line in lines(reports):
                word, _, rest = line.partition(" ")
                said[word] = rest
                if word == "progress":
                    report(float(rest))
    return said


def _log_progress(percent: int) -> None:
    log.info("moving boxes", percent=percent)
