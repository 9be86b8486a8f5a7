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


class Found(NamedTuple):
    """A chain as its names tell it."""

    name: ChainName
    #: The lsns of its bases, ascending.
    bases: list[int]
    logs: list[LogName]
    #: Every name below its root, those included.
    names: list[str]


class Told(NamedTuple):
    """A chain that has a base, and the slots it had."""

    found: Found
    base: Backup
    slots: frozenset[int]


def survey(store: ColdStore, root: str = object_log.ROOT) -> list[Found]:
    """All chains, in the order of their numbers; or the one with this root."""
    found: dict[ChainName, Found] = {}
    for name in store.names(root):
        chain_text, _, rest = name.removeprefix(object_log.ROOT).partition("/")
        chain = ChainName.parse(chain_text)
        if chain is None:
            continue
        here = found.setdefault(chain, Found(chain, [], [], []))
        here.names.append(name)
        lsn, log = object_log.base_lsn(rest), LogName.parse(rest)
        if lsn is not None:
            here.bases.append(lsn)
        elif log is not None:
            here.logs.append(log)
    return [found[name] for name in sorted(found)]


def target_of(store: ColdStore, disk: DiskLike, chain: ChainName) -> Target:
    """Where the bases of a chain are."""
    return Target(store, disk, root=chain.root)


def tell(store: ColdStore, disk: DiskLike, chains: Iterable[Found]) -> list[Told]:
    """Those that have a base, with the newest of it."""
    told: list[Told] = []
    for chain in chains:
        if chain.bases:
            base = target_of(store, disk, chain.name).load(object_log.base_id(chain.bases[-1]))
            owners = owners_of(base.slots)
            own = frozenset(slot for slot in range(SLOTS) if owners[slot] == chain.name.shard)
            told.append(Told(chain, base, own))
    return told


def owners_among(told: Sequence[Told]) -> list[int]:
    """Of each slot the chain that tells it, by its place in `told`; `len(told)` where there is none."""
    owners = [len(told)] * SLOTS
    for place, each in enumerate(told):  # ascending numbers: later ones take over
        for slot in each.slots:
            owners[slot] = place
    return owners


def superseded(told: Sequence[Told]) -> list[Told]:
    """Chains that tell nothing any more."""
    needed = set(owners_among(told))
    return [each for place, each in enumerate(told) if place not in needed]


def next_name(chains: Sequence[Found], *, shard: int, server: str, follows: Iterable[str]) -> ChainName:
    """A name for a chain that is about to begin. Raises `ForeignChains`."""
    known = {server, *follows}
    foreign = sorted({chain.name.server for chain in chains if chain.name.server not in known})
    if foreign:
        raise ForeignChains(
            f"it holds what {len(foreign)} other data directories have put there: put that back with "
            "`streams restore`, or give this server another place with STREAMS_COLD_DIR, or remove "
            f"{object_log.ROOT} there if nobody needs it"
        )
    number = max((chain.name.number for chain in chains), default=0) + 1
    return ChainName(number, shard, server)


def tidy(store: ColdStore, disk: DiskLike, own: ChainName, *, follows: Iterable[str]) -> None:
    """Drops what a new base of `own` has made needless: older bases, changes that it holds, chains whose
    slots are told by others. What this leaves behind is dropped the next time."""
    chains = survey(store)
    mine = next(chain for chain in chains if chain.name == own)
    for log in mine.logs:
        if log.last_lsn <= mine.bases[-1]:
            store.delete(own.root + log.text)
    target_of(store, disk, own).prune(keep=1)
    known = {own.server, *follows}
    for each in superseded(tell(store, disk, chains)):
        if each.found.name.server in known and each.found.name != own:
            # Its bases first: without one it is not a chain, whatever is left of it.
            rest = sorted(each.found.names, key=lambda name: "/backups/" not in name)
            for name in rest:
                store.delete(name)
