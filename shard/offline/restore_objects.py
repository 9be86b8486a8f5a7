"""Restores object boxes into the folders of new shards, from the object store alone.

    chain: newest base ──► machine ──apply, in the order of the log──► objects after it ──► ShardBuilder

Each chain is replayed up to its first gap: an object counts if it begins where the one before it ended, or
earlier, and each lsn is applied once. So objects that two processes of a shard uploaded twice are applied
once, and objects after a missing or damaged one are left out and counted. Boxes that are no longer of class
object are left out too: the store has only their old state.

The caller marks the new folders as unfinished, and activates them when this returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from shard.core.boxes.box import Box
from shard.core.boxes.offline_edits import fit_change
from shard.core.changes import Change, UploadsMoved
from shard.core.machine import Machine
from shard.core.snapshot_facts import BoxFacts
from shard.offline.payload_loading import load_missing
from shard.offline.restore import Report, RestoreJob, RestoreResult, scratch_of
from shard.storage import object_log
from shard.storage.cold import ColdDamaged, ColdMissing, ColdStore
from shard.storage.files import Corrupt, DiskLike, remove_tree
from shard.storage.object_log import LogName, ObjectLog
from shard.storage.wal import FILE_BYTES
from shard.transfer import object_chains
from shard.transfer.object_chains import RestorableChain
from streams.protocol.model.slots import slot_of

#: Objects that are fetched at once: they are small, and each takes a round trip.
_FETCHES = 8


class ObjectRestoreResult(NamedTuple):
    """The result of a restore, and counts of chains and objects."""

    result: RestoreResult
    chains: int
    objects: int
    #: Objects after a missing or damaged one.
    left_out: int


def find_chains(store: ColdStore, disk: DiskLike) -> list[RestorableChain]:
    """Return the chains that own slots. Raises `Corrupt` if the base of one is damaged."""
    chains = object_chains.load_bases(store, disk, object_chains.list_chains(store))
    superseded_chains = object_chains.find_superseded(chains)
    return [each for each in chains if each not in superseded_chains]


def shard_count(chains: Sequence[RestorableChain]) -> int:
    """Return the number of shards of the newest server among these chains."""
    return max(shard for _, _, shard in chains[-1].base.slots) + 1


class ReplayResult(NamedTuple):
    """The last lsn that was applied, and counts of objects."""

    last_lsn: int
    objects: int
    left_out: int


def replay(
    machine: Machine,
    base_lsn: int,
    contents: Iterable[ObjectLog | None],
    fit: Callable[[Change, Box], Change],
) -> ReplayResult:
    """Apply the objects after a base, in the order of their names; None is a damaged object."""
    last_lsn, object_count, left_out = base_lsn, 0, 0
    for content in contents:
        if content is None or content.previous_lsn > last_lsn:
            left_out += 1
        elif content.last_lsn > last_lsn:
            for lsn, change in content.changes:
                if lsn > last_lsn:
                    box: Box | None = machine.generations.get(getattr(change, "generation", 0))
                    machine.apply(change if box is None else fit(change, box), machine.lsn + 1)
            last_lsn = content.last_lsn
            object_count += 1
    # All of it is in the store, so all of it is visible.
    machine.apply(UploadsMoved("", machine.lsn, 0, False), machine.lsn + 1)
    return ReplayResult(last_lsn, object_count, left_out)


class ObjectRestoreJob(RestoreJob):
    """One restore of all chains of an object store."""

    def __init__(
        self,
        disk: DiskLike,
        store: ColdStore,
        chains: Sequence[RestorableChain],
        *,
        data_dir: str,
        folders: list[str],
        slots: list[int],
        file_bytes: int = FILE_BYTES,
        boot_id: str,
        now_ms: int,
        report: Report = lambda ratio: None,
    ) -> None:
        """`slots` has the new shard of each slot, `folders` the folder of each new shard."""
        self._store = store
        self._chains = chains
        #: The chain of each slot, by its index in `chains`.
        self._slot_chains = object_chains.chain_of_each_slot(chains)
        self._place = 0
        self._objects = self._left_out = 0
        super().__init__(
            disk,
            object_chains.target_of(store, disk, chains[-1].objects.name),
            chains[-1].base,
            data_dir=data_dir,
            folders=folders,
            slots=slots,
            owners=self._slot_chains,
            file_bytes=file_bytes,
            boot_id=boot_id,
            now_ms=now_ms,
            report=report,
        )

    def restore(self) -> ObjectRestoreResult:
        result = self.run()
        return ObjectRestoreResult(result, len(self._chains), self._objects, self._left_out)

    def machines(self) -> Iterator[tuple[int, Machine]]:
        for builder in self._builders:
            builder.add_follows({each.objects.name.server for each in self._chains})
        for place, each in enumerate(self._chains):
            self._place = place
            self._target = object_chains.target_of(self._store, self._disk, each.objects.name)
            self._backup = each.base
            scratch = f"{self._data_dir}/{scratch_of(place)}"
            (shard,) = each.base.shards
            self._fetch_files(shard, scratch)
            machine = self._read(shard, scratch, place)
            self._replay(machine, each)
            yield place, machine
            remove_tree(self._disk, scratch)
            self._report(min(0.99, (place + 1) / len(self._chains)))

    def includes(self, facts: BoxFacts) -> bool:
        """Return True for an object box in the chain that owns its slot."""
        return facts.config.durability == "object" and self._slot_chains[slot_of(facts.name)] == self._place

    def includes_registers(self, number: int) -> bool:
        """Return True for the newest chain of shard 0, which has the registries."""
        places = [place for place, each in enumerate(self._chains) if each.objects.name.shard == 0]
        return bool(places) and number == places[-1]

    # -- the log

    def _replay(self, machine: Machine, chain: RestorableChain) -> None:
        base_lsn = chain.objects.bases[-1]
        names = sorted(log for log in chain.objects.logs if log.last_lsn > base_lsn)

        def fit(change: Change, box: Box) -> Change:
            store = self._stores[self._slots[slot_of(box.name)]]
            return load_missing(store, lambda: fit_change(change, box))

        _, object_count, left_out = replay(
            machine, base_lsn, self._fetch_logs(chain.objects.name.root, names), fit
        )
        self._objects += object_count
        self._left_out += left_out

    def _fetch_logs(self, root: str, names: Sequence[LogName]) -> Iterator[ObjectLog | None]:
        """Yield the contents of the objects in order, and fetch a few ahead; None for a damaged one."""
        waiting = (root + name.text for name in names)
        with ThreadPoolExecutor(_FETCHES, thread_name_prefix="objects") as pool:
            under_way = [pool.submit(self._fetch_log, name) for name in islice(waiting, _FETCHES)]
            while under_way:
                yield under_way.pop(0).result()
                under_way += [pool.submit(self._fetch_log, name) for name in islice(waiting, 1)]

    def _fetch_log(self, name: str) -> ObjectLog | None:
        try:
            size = self._store.size(name)
            return None if size is None else object_log.decode(name, self._store.read(name, 0, size))
        except (ColdMissing, ColdDamaged, Corrupt):
            return None
