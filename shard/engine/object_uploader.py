"""Uploads the changes of object boxes to the object store, in groups, and bases of them. One task of the
engine.

    machine.uploading ─► group, at most one each `flush_ms` ─► put, retried until it succeeds ─► moved
                      ─► a base: the current state of all object boxes ─► put, verified ─► moved ─► old
                      objects go

One object is in flight at a time, so the store always has a prefix of the changes. A failed put is retried,
under the same name with the same bytes, until it succeeds; meanwhile further changes gather. A base that is
due because there are many objects is put beside further groups. A base without which no group can be put is
waited for.

Rules of the file
- Only durable changes are put: after a crash the log has them again, under the same lsns, and unconfirmed
ones are
  put again. A reader of the store takes each lsn once
  (`transfer/object_chains.py`).
- A name is never put with other bytes: the name of a group contains its lsns and the life of the shard (the
lsn
  of its start).
- An unreachable store is not a failure of the shard: writers of object boxes wait, then are refused with a
  `Retry-After`.

Bounds: `OBJECT_BYTES_MAX` per object; `Uploading` bounds the pending changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
import trio
from xxhash import xxh3_64_intdigest

from shard.core.machine import Machine
from shard.core.objects.replication import Pending
from shard.core.outcome import Outcome
from shard.core.snapshot_facts import BoxFacts
from shard.storage import object_log
from shard.storage.cold import ColdError, ColdStore
from shard.storage.files import Corrupt, DiskLike, remove_tree
from shard.storage.object_log import ChainName, LogName
from shard.storage.segments.store import ColdStoreUnreachable, Name, SegmentStore
from shard.transfer import object_chains
from shard.transfer.backup import ShardSource
from shard.transfer.exports import write_export
from shard.transfer.shard_folders import Parts, parts_of
from streams.protocol.telemetry.reports import ObjectsReport

log = structlog.get_logger()

#: The size of one request, see `PIECE_BYTES` in `cold/object_store.py`; a group ends with the change that
#: reaches it.
OBJECT_BYTES_MAX = 4 << 20

#: A new base is due when this much was put after the last one; a restore has to read that beside the base. At
#: full speed there are 20 objects a second, so a base is taken every four minutes at most.
COMPACT_BYTES = 256 << 20
COMPACT_OBJECTS = 5_000

_BACKOFF_S, _BACKOFF_S_MAX = 0.1, 5.0
#: How often a base checks whether the rows of commits are rendered.
_UNRENDERED_S = 0.05
#: Pause before a store that belongs to another server is checked again.
_REFUSED_S = 30.0
#: How long an orderly stop waits for the store.
_FINISH_S = 5.0


class UploadTarget(NamedTuple):
    """The object store, and the server and shard that write to it."""

    store: ColdStore
    #: The permanent id of the data directory.
    server: str
    shard: int
    #: The slot ranges of the shards, as in the manifest.
    slots: list[tuple[int, int, int]]
    #: A folder on this disk in which a base is assembled.
    folder: str
    flush_ms: int = 50
    compact_bytes: int = COMPACT_BYTES
    compact_objects: int = COMPACT_OBJECTS


class ObjectUploader:
    def __init__(
        self,
        machine: Machine,
        target: UploadTarget,
        disk: DiskLike,
        segments: SegmentStore,
        *,
        now_ms: Callable[[], int],
        wait_durable: Callable[[int], Awaitable[bool]],
        on_uploaded: Callable[[Outcome], None],
        pins: set[Name],
        on_unpinned: Callable[[], None],
        file_bytes: int,
    ) -> None:
        self._machine = machine
        self._uploading = machine.uploading
        self._target = target
        self._disk = disk
        self._segments = segments
        self._now_ms = now_ms
        self._wait_durable = wait_durable
        self._on_uploaded = on_uploaded
        self._pins = pins
        self._on_unpinned = on_unpinned
        self._file_bytes = file_bytes
        self._work_event = trio.Event()
        self._next_put = 0.0
        #: Since the last base: objects, including those of earlier runs, and the bytes put by this run.
        self._objects = 0
        self._bytes = 0
        self._is_compacting = False
        self._is_unreachable = False
        #: Counters since start. Metrics only: no decision depends on them.
        self._objects_put = self._bytes_put = self._bases_put = self._failures = 0

    def __repr__(self) -> str:
        return f"<ObjectUploader of shard {self._target.shard}: {self._objects} objects since the last base>"

    def report(self) -> ObjectsReport:
        return ObjectsReport(
            objects=self._objects_put,
            bytes=self._bytes_put,
            bases=self._bases_put,
            failures=self._failures,
            backlog_bytes=self._uploading.pending_bytes,
        )

    def wake(self) -> None:
        """Check for work: there may be changes to upload."""
        self._work_event.set()

    async def run(self) -> None:
        await self._find_chain()
        async with trio.open_nursery() as nursery:
            while True:
                self._work_event = trio.Event()
                if not self._uploading.has_work:
                    await self._work_event.wait()
                elif self._uploading.needs_base_lsn:
                    if not self._is_compacting:
                        await self._upload_base()
                    else:  # the end of the running base wakes this task
                        await self._work_event.wait()
                else:
                    await self._put_group()
                    if self._is_base_due and not self._is_compacting:
                        self._is_compacting = True
                        nursery.start_soon(self._compact)

    async def finish(self) -> None:
        """Upload the pending changes, for `_FINISH_S` at most, so that the next run has nothing to catch
        up."""
        with trio.move_on_after(_FINISH_S):
            while self._uploading.has_work and not self._uploading.needs_base_lsn:
                await self._put_group()

    async def _find_chain(self) -> None:
        """Check that the store has the chain of earlier runs before more objects are appended to it. If it
        was replaced by another store, a new chain begins, with a base. Also count the objects of the chain,
        or many short runs would build a chain that is never compacted."""
        chain = ChainName.parse(self._uploading.chain)
        chains_there: list[object_chains.ChainObjects] = []
        backoff_s = _BACKOFF_S
        while chain is not None and not await self._try(
            lambda: chains_there.extend(object_chains.list_chains(self._target.store, chain.root)),
            "listing its chains",
        ):
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
        if chain is not None and not (chains_there and chains_there[0].bases):
            log.warning(
                "the object store does not contain the chain of this shard; the shard begins a new one",
                chain=chain.text,
            )
            self._uploading.begin_anew()
        elif chains_there:
            self._objects = len(chains_there[0].logs)

    # -- groups

    async def _put_group(self) -> None:
        await trio.sleep_until(self._next_put)
        self._next_put = trio.current_time() + self._target.flush_ms / 1000
        group = self._uploading.group(OBJECT_BYTES_MAX)
        if not group:
            return
        chain = ChainName.parse(self._uploading.chain)
        assert chain is not None, "a chain begins with a base"
        log_name = LogName(group[0].lsn, group[-1].lsn, self._machine.forwarding.outboxes.start_lsn)
        name = chain.root + log_name.text
        content = self._encode_group(name, group, log_name)
        put = partial(
            self._target.store.put,
            name,
            [content],
            size=len(content),
            checksum=xxh3_64_intdigest(content),
        )
        backoff_s = _BACKOFF_S
        while not await self._try(put, "changes of object boxes"):
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
        self._objects += 1
        self._objects_put += 1
        self._bytes += len(content)
        self._bytes_put += len(content)
        self._on_uploaded(self._uploading.on_upload(chain.text, log_name.last_lsn, is_base=False))

    def _encode_group(self, name: str, group: Sequence[Pending], log_name: LogName) -> bytes:
        return object_log.encode(
            name,
            [(each.lsn, each.change) for each in group],
            previous_lsn=self._uploading.tail_lsn,
            last_lsn=log_name.last_lsn,
            life=log_name.life,
        )

    async def _try(self, work: Callable[[], object], what: str) -> bool:
        """Run a store operation. Return True if it succeeded. Only the first error and the recovery are
        logged."""
        try:
            # A stop of the shard does not wait for it: every operation may be repeated.
            await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        except (ColdError, ColdStoreUnreachable, Corrupt, OSError) as error:
            if not self._is_unreachable:
                log.warning("an object store operation failed, retrying", what=what, error=str(error))
            self._is_unreachable = True
            self._failures += 1
            return False
        if self._is_unreachable:
            log.info("the object store works again")
        self._is_unreachable = False
        return True

    # -- bases

    @property
    def _is_base_due(self) -> bool:
        target = self._target
        return self._objects >= target.compact_objects or self._bytes >= target.compact_bytes

    async def _compact(self) -> None:
        try:
            # During a base, enough objects for the next one may have been put, and no later group may come.
            while self._is_base_due and await self._upload_base():
                pass
        finally:
            self._is_compacting = False
            self.wake()

    async def _upload_base(self) -> bool:
        """Take a base and upload it, retrying until it succeeds. Each retry takes a new base, which includes
        the changes since. Return False if the log has failed and the shard must end."""
        backoff_s = _BACKOFF_S
        while True:
            chain = await self._choose_chain()
            if chain is not None:
                while self._has_unrendered():  # noqa: ASYNC110 (no event reports the end of it)
                    await trio.sleep(_UNRENDERED_S)
                objects, bytes_before = self._objects, self._bytes
                parts = parts_of(self._machine, keep=lambda box: box.is_object)
                self._pins.update(_names_in(parts))
                try:
                    if not await self._wait_durable(parts.state.lsn):
                        return False
                    is_there = await self._try(
                        partial(self._write_base, chain, parts), "a base of object boxes"
                    )
                finally:
                    self._pins.clear()
                    self._on_unpinned()
                if is_there:
                    self._bases_put += 1
                    self._objects -= objects
                    self._bytes -= bytes_before
                    lsn = parts.state.lsn
                    del parts
                    self._on_uploaded(self._uploading.on_upload(chain.text, lsn, is_base=True))
                    follows = list(self._uploading.follows)
                    tidy = partial(
                        object_chains.remove_superseded,
                        self._target.store,
                        self._disk,
                        chain,
                        follows=follows,
                    )
                    await self._try(tidy, "removing old objects")
                    return True
            await trio.sleep(_REFUSED_S if self._uploading.refusal else backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)

    def _has_unrendered(self) -> bool:
        """Return True if an object box has rows of commits that are not rendered; a base needs all of
        them."""
        if not self._machine.txns.commits:
            return False
        return any(box.is_object and box.log.tail.has_unrendered for box in self._machine.boxes.values())

    async def _choose_chain(self) -> ChainName | None:
        """Return the current chain, or a new one; None if the store is unreachable or belongs to another
        server. Called before a base is assembled, so that none is assembled in vain."""
        target, chains_there = self._target, list[object_chains.ChainObjects]()
        chain = ChainName.parse(self._uploading.chain)
        if chain is not None:
            probe = partial(target.store.size, f"{chain.root}backups/{object_log.base_id(0)}.json")
            return chain if await self._try(probe, "checking its chain") else None
        if not await self._try(
            lambda: chains_there.extend(object_chains.list_chains(target.store)), "listing its chains"
        ):
            return None
        try:
            name = object_chains.next_name(
                chains_there, shard=target.shard, server=target.server, follows=self._uploading.follows
            )
        except object_chains.ForeignChains as error:
            if not self._uploading.refusal:
                log.error("object boxes cannot use this object store: change the store", reason=str(error))
            self._uploading.refusal = str(error)
            return None
        self._uploading.refusal = ""
        return name

    def _write_base(self, chain: ChainName, parts: Parts) -> None:
        """Assemble a base on disk, upload it and verify it. Runs in a thread."""
        folder, taken_ms = self._target.folder, self._now_ms()
        # All records of a base are stored, so a restore must show all of them.
        for at, facts in enumerate(parts.state.boxes):
            parts.state.boxes[at] = _all_shown(facts)
        remove_tree(self._disk, folder)
        try:
            write_export(self._disk, folder, parts, now_ms=taken_ms, file_bytes=self._file_bytes)
            target = object_chains.target_of(self._target.store, self._disk, chain)
            source = ShardSource(folder, self._segments, taken_ms)
            target.take([source], self._target.slots, id=object_log.base_id(parts.state.lsn))
        finally:
            remove_tree(self._disk, folder)


def _names_in(parts: Parts) -> set[Name]:
    return {
        Name(facts.generation, segment.first_seq, segment.serial)
        for facts in parts.state.boxes
        for segment in facts.segments
    }


def _all_shown(facts: BoxFacts) -> BoxFacts:
    return msgspec.structs.replace(facts, shown=None)
