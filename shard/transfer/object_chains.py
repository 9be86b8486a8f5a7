"""Lists the chains of an object store, decides which chain owns each slot, and removes superseded chains.

A shard writes one chain (`shard/core/objects/replication.py`). It begins another one when its folder is
rebuilt: by resharding, a repair or a restore. The number of a chain is higher than that of any chain that
existed when it began. So of two chains with the same slot, the one with the higher number owns it once it has
a base; until then the older one does.

    chain 1   slots 0..4095   base, log          server with one shard
    chain 2   slots 0..2047   base, log          after resharding: shard 0
    chain 3   slots 2048..4095   (no base yet)   shard 1: chain 1 still owns its slots

Rules of the file
- A chain is removed when other chains own all its slots; never because it is old.
- Chains of servers that this server does not follow are never changed, and block new chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shard.storage import object_log
from shard.storage.cold import ColdStore
from shard.storage.files import DiskLike
from shard.storage.object_log import ChainName, LogName
from shard.transfer.backup import BackupStore
from shard.transfer.backup_manifest import Backup
from shard.transfer.transaction_marks import owners_of
from streams.protocol.model.slots import SLOTS


class ForeignChains(Exception):
    """The store holds chains of another data directory."""


class ChainObjects(NamedTuple):
    """A chain, as the names of its objects describe it."""

    name: ChainName
    #: The lsns of its bases, ascending.
    bases: list[int]
    logs: list[LogName]
    #: Every name below its root, including bases and logs.
    names: list[str]


class RestorableChain(NamedTuple):
    """A chain that has a base, with its newest base and the slots it had."""

    objects: ChainObjects
    base: Backup
    slots: frozenset[int]


def list_chains(store: ColdStore, root: str = object_log.ROOT) -> list[ChainObjects]:
    """Return all chains in the order of their numbers; or the one with this root."""
    chains: dict[ChainName, ChainObjects] = {}
    for name in store.names(root):
        chain_text, _, rest = name.removeprefix(object_log.ROOT).partition("/")
        chain = ChainName.parse(chain_text)
        if chain is None:
            continue
        objects = chains.setdefault(chain, ChainObjects(chain, [], [], []))
        objects.names.append(name)
        lsn, log = object_log.base_lsn(rest), LogName.parse(rest)
        if lsn is not None:
            objects.bases.append(lsn)
        elif log is not None:
            objects.logs.append(log)
    return [chains[name] for name in sorted(chains)]


def target_of(store: ColdStore, disk: DiskLike, chain: ChainName) -> BackupStore:
    """Return the backup target that holds the bases of a chain."""
    return BackupStore(store, disk, root=chain.root)


def load_bases(store: ColdStore, disk: DiskLike, chains: Iterable[ChainObjects]) -> list[RestorableChain]:
    """Return the chains that have a base, with their newest base."""
    restorable_chains: list[RestorableChain] = []
    for chain in chains:
        if chain.bases:
            base = target_of(store, disk, chain.name).load(object_log.base_id(chain.bases[-1]))
            owners = owners_of(base.slots)
            own = frozenset(slot for slot in range(SLOTS) if owners[slot] == chain.name.shard)
            restorable_chains.append(RestorableChain(chain, base, own))
    return restorable_chains


def chain_of_each_slot(chains: Sequence[RestorableChain]) -> list[int]:
    """Return for each slot the index of the chain that owns it; `len(chains)` if there is none."""
    owners = [len(chains)] * SLOTS
    for place, each in enumerate(chains):  # ascending numbers: later chains take over
        for slot in each.slots:
            owners[slot] = place
    return owners


def find_superseded(chains: Sequence[RestorableChain]) -> list[RestorableChain]:
    """Return the chains that own no slot any more."""
    owners = set(chain_of_each_slot(chains))
    return [each for place, each in enumerate(chains) if place not in owners]


def next_name(
    chains: Sequence[ChainObjects], *, shard: int, server: str, follows: Iterable[str]
) -> ChainName:
    """Return the name for a new chain. Raises `ForeignChains`."""
    own_servers = {server, *follows}
    foreign = sorted({chain.name.server for chain in chains if chain.name.server not in own_servers})
    if foreign:
        raise ForeignChains(
            f"it holds data of {len(foreign)} other data directories: restore that data with "
            "`streams restore`, or give this server another location with STREAMS_COLD_DIR, or remove "
            f"{object_log.ROOT} there if it is not needed"
        )
    number = max((chain.name.number for chain in chains), default=0) + 1
    return ChainName(number, shard, server)


def remove_superseded(store: ColdStore, disk: DiskLike, own: ChainName, *, follows: Iterable[str]) -> None:
    """Remove objects that a new base of `own` supersedes: older bases, changes that it contains, and chains
    that own no slot any more. The next call removes the objects that a failed call leaves."""
    chains = list_chains(store)
    mine = next(chain for chain in chains if chain.name == own)
    for log in mine.logs:
        if log.last_lsn <= mine.bases[-1]:
            store.delete(own.root + log.text)
    target_of(store, disk, own).prune(keep=1)
    own_servers = {own.server, *follows}
    for each in find_superseded(load_bases(store, disk, chains)):
        if each.objects.name.server in own_servers and each.objects.name != own:
            # Bases first: without a base the remaining objects are no chain.
            rest = sorted(each.objects.names, key=lambda name: "/backups/" not in name)
            for name in rest:
                store.delete(name)
