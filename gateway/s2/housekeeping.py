"""Deletes basins and orphan streams in the background.

Deleting a basin: mark it ─► delete its streams in all shards ─► drop it when no stream remains. Every step is
idempotent, so the next round repairs a crash between two steps.

An orphan is a stream whose basin is missing from the register, or registered there with another number: a
request looked up the basin just before it was dropped, and created the stream after that. Streams are listed
before the register is read, and a basin is registered before its first stream is created. So a basin that is
missing then was dropped.
"""

from __future__ import annotations

import structlog
import trio

from gateway.s2.shard_calls import ShardCalls
from streams.protocol.errors import StreamNotFound, StreamsError
from streams.protocol.messages import s2

log = structlog.get_logger()

#: Polling interval for deleted basins; the reply is short when there is none. A deletion through this gateway
#: wakes the loop at once, and it polls faster while a basin is being deleted.
_EVERY_S = 0.5
_BUSY_EVERY_S = 0.05
#: Interval of the search for orphans: they are rare and cost only space.
_ORPHANS_EVERY_S = 60.0
_PAGE = 1000


class Housekeeping:
    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    def __repr__(self) -> str:
        return f"<Housekeeping {self._calls!r}>"

    async def run(self) -> None:
        """Delete basins and orphans, forever. Runs in one gateway."""
        orphans_at_s = 0.0
        while True:
            is_busy = False
            self._calls.has_deleted_basin = trio.Event()
            try:
                is_busy = await self._empty_basins()
                if trio.current_time() >= orphans_at_s:
                    await self._delete_orphans()
                    orphans_at_s = trio.current_time() + _ORPHANS_EVERY_S
            except StreamsError as error:  # a shard is down: retry later
                log.debug("S2 housekeeping failed, retrying", error=error.code)
            if is_busy:
                await trio.sleep(_BUSY_EVERY_S)
            else:
                with trio.move_on_after(_EVERY_S):
                    await self._calls.has_deleted_basin.wait()

    async def _basins(self, *, is_deleting: bool) -> list[s2.Basin]:
        basins: list[s2.Basin] = []
        after = ""
        while True:
            command = s2.ListBasins("", after, _PAGE, is_deleting)
            page = await self._calls.call_register(command, s2.BasinPage)
            basins += page.basins
            if not page.more:
                return basins
            after = page.basins[-1].name

    async def _empty_basins(self) -> bool:
        """Return True if a basin is still being deleted."""
        is_busy = False
        for basin in await self._basins(is_deleting=True):
            remaining = 0
            for shard in range(self._calls.shards):
                for box, stream in await self._streams(shard, f"{basin.name}/"):
                    remaining += 1
                    if not stream.deleted_ms:
                        await self._delete(box, stream)
            if not remaining:
                await self._calls.call_register(s2.DropBasin(basin.name, basin.number), s2.GetBasinReply)
            is_busy = is_busy or bool(remaining)
        return is_busy

    async def _delete_orphans(self) -> None:
        streams_by_box = [
            each for shard in range(self._calls.shards) for each in await self._streams(shard, "")
        ]
        if not streams_by_box:
            return
        numbers = {basin.name: basin.number for basin in await self._basins(is_deleting=False)}
        for box, stream in streams_by_box:
            if not stream.deleted_ms and numbers.get(box.partition("/")[0]) != stream.basin_number:
                log.info("deleting an S2 stream whose basin no longer exists", stream=box)
                await self._delete(box, stream)

    async def _streams(self, shard: int, prefix: str) -> list[tuple[str, s2.Stream]]:
        streams_by_box: list[tuple[str, s2.Stream]] = []
        after = ""
        while True:
            command = s2.ListStreams(prefix, after, _PAGE)
            page = await self._calls.call_shard(shard, command, s2.StreamPage)
            streams_by_box += page.streams
            after = page.after
            if not after:
                return streams_by_box

    async def _delete(self, box: str, stream: s2.Stream) -> None:
        try:
            command = s2.DeleteStream(box, stream.basin_number)
            await self._calls.call_owner(box, command, s2.GetStreamReply)
        except StreamNotFound:
            pass
