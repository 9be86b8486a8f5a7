"""Which chains an object store holds, which of them count, and what nobody needs any more.

A shard writes one chain (`shard/core/objects/replication.py`), and begins another one when its folder was
made anew: by resharding, a repair, a restore. The number of a chain is higher than that of any that was
there when it began. So of two chains that had the same slot, the one with the higher number tells what is in
it, from the moment it has a base; until then the older one does.

    chain 1   slots 0..4095   base, log          server with one shard
    chain 2   slots 0..2047   base, log          the same after resharding: shard 0
    chain 3   slots 2048..4095   (no base yet)   shard 1: for its slots chain 1 still counts

Rules of the file
- A chain goes when all its slots are told by others; never because it is old.
- Chains of a server that ours does not follow are never touched, and never written beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shard.storage import object_log
from shard.storage.cold import ColdStore
from shard.storage.files import DiskLike
from shard.storage.object_log import ChainName, LogName
from shard.transfer.backup import Target
from shard.transfer.backup_manifest import Backup
from shard.transfer.transaction_marks import owners_of
from streams.protocol.model.slots import SLOTS


class ForeignChains(Exception):
    """The store holds what another data directory has put there."""


class ChainObjects(NamedTuple):
    """A chain as its names tell it."""

    name: ChainName
    #: The lsns of its bases, ascending.
    bases: list[int]
    logs: list[LogName]
    #: Every name below its root, those included.
    names: list[str]


class RestorableChain(NamedTuple):
    """A chain that has a base, and the slots it had."""

    objects: ChainObjects
    base: Backup
    slots: frozenset[int]


def list_chains(store: ColdStore, root: str = object_log.ROOT) -> list[ChainObjects]:
    """All chains, in the order of their numbers; or the one with this root."""
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


def target_of(store: ColdStore, disk: DiskLike, chain: ChainName) -> Target:
    """Where the bases of a chain are."""
    return Target(store, disk, root=chain.root)


def load_bases(store: ColdStore, disk: DiskLike, chains: Iterable[ChainObjects]) -> list[RestorableChain]:
    """Those that have a base, with the newest of it."""
    restorable_chains: list[RestorableChain] = []
    for chain in chains:
        if chain.bases:
            base = target_of(store, disk, chain.name).load(object_log.base_id(chain.bases[-1]))
            owners = owners_of(base.slots)
            own = frozenset(slot for slot in range(SLOTS) if owners[slot] == chain.name.shard)
            restorable_chains.append(RestorableChain(chain, base, own))
    return restorable_chains


def chain_of_each_slot(chains: Sequence[RestorableChain]) -> list[int]:
    """Of each slot the chain that tells it, by its place in `told`; `len(told)` where there is none."""
    owners = [len(chains)] * SLOTS
    for place, each in enumerate(chains):  # ascending numbers: later ones take over
        for slot in each.slots:
            owners[slot] = place
    return owners


def find_superseded(chains: Sequence[RestorableChain]) -> list[RestorableChain]:
    """Chains that tell nothing any more."""
    owners = set(chain_of_each_slot(chains))
    return [each for place, each in enumerate(chains) if place not in owners]


def next_name(
    chains: Sequence[ChainObjects], *, shard: int, server: str, follows: Iterable[str]
) -> ChainName:
    """A name for a chain that is about to begin. Raises `ForeignChains`."""
    own_servers = {server, *follows}
    foreign = sorted({chain.name.server for chain in chains if chain.name.server not in own_servers})
    if foreign:
        raise ForeignChains(
            f"it holds what {len(foreign)} other data directories have put there: put that back with "
            "`streams restore`, or give this server another place with STREAMS_COLD_DIR, or remove "
            f"{object_log.ROOT} there if nobody needs it"
        )
    number = max((chain.name.number for chain in chains), default=0) + 1
    return ChainName(number, shard, server)


def remove_superseded(store: ColdStore, disk: DiskLike, own: ChainName, *, follows: Iterable[str]) -> None:
    """Drops what a new base of `own` has made needless: older bases, changes that it holds, chains whose
    slots are told by others. What this leaves behind is dropped the next time."""
    chains = list_chains(store)
    mine = next(chain for chain in chains if chain.name == own)
    for log in mine.logs:
        if log.last_lsn <= mine.bases[-1]:
            store.delete(own.root + log.text)
    target_of(store, disk, own).prune(keep=1)
    own_servers = {own.server, *follows}
    for each in find_superseded(load_bases(store, disk, chains)):
        if each.objects.name.server in own_servers and each.objects.name != own:
            # Its bases first: without one it is not a chain, whatever is left of it.
            rest = sorted(each.objects.names, key=lambda name: "/backups/" not in name)
            for name in rest:
                store.delete(name)
