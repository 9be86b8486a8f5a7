"""Which shard owns a box: name -> slot -> shard. Pure.

A name's slot never changes: XXH64 of its UTF-8 with seed 42, modulo 4096. Spark SQL computes the same number
with `pmod(xxhash64(name), 4096)`, so a Spark job can group rows by owner without calling the server.

Only the map from slots to shards can change. A fresh map gives each shard one run of neighbouring slots, as
even as 4096 divides. Runs are better than `slot % shards`: a run is one line of the manifest and of
`GET /v0/placement`, while a modulo map has 4096 lines. When the number of shards changes, a fresh map of
either kind would reassign nearly every slot. So `resize` takes the existing map and moves only the slots that
must move. The result has runs too, if shorter ones.

Invariants: `total` (4096 slots, each with an owner), `dense` (every shard below `shards`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson
from xxhash import xxh64_intdigest

from streams.protocol.model.slots import SEED, SLOTS, slot_of

__all__ = ["SEED", "SLOTS", "Placement", "even", "resize", "slot_of"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The map from slots to shards. `version` grows with every change, so that an old map is recognised.

    `slots` has one byte a slot, the number of its shard: a lookup is one index, and 256 shards fit.
    """

    slots: bytes
    shards: int
    version: int = 1

    def __post_init__(self) -> None:
        if len(self.slots) != SLOTS:
            raise ValueError(f"a placement has {SLOTS} slots, not {len(self.slots)}")
        if not 1 <= self.shards <= 256 or max(self.slots) >= self.shards:
            raise ValueError(f"slots name shard {max(self.slots)}, but there are {self.shards}")

    def __repr__(self) -> str:
        return f"<Placement v{self.version}: {self.shards} shards in {len(self.ranges())} ranges>"

    def shard_of(self, name: str) -> int:
        return self.slots[xxh64_intdigest(name.encode(), SEED) % SLOTS]

    def ranges(self) -> list[tuple[int, int, int]]:
        """Runs of slots with one owner: (start, end, shard), end exclusive."""
        ranges: list[tuple[int, int, int]] = []
        for shard, run in groupby(self.slots):
            start = ranges[-1][1] if ranges else 0
            ranges.append((start, start + sum(1 for _ in run), shard))
        return ranges

    def to_dict(self) -> dict[str, Any]:
        return {"shards": self.shards, "slots": self.ranges(), "version": self.version}

    def to_json(self) -> str:
        return orjson.dumps(self.to_dict()).decode()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Placement:
        """Raises `ValueError` when the fields do not give every slot exactly one owner."""
        slots = bytearray()
        try:
            for start, end, shard in fields["slots"]:
                if start != len(slots) or not start < end <= SLOTS:
                    raise ValueError(f"the range [{start}, {end}) does not follow slot {len(slots)}")
                slots += bytes([shard]) * (end - start)
            return cls(bytes(slots), shards=int(fields["shards"]), version=int(fields["version"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a placement: {error!r}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Placement:
        return cls.from_dict(orjson.loads(text))


def even(shards: int) -> Placement:
    """The map of a new server: neighbouring slots together, sizes differing by at most one."""
    return Placement(bytes(slot * shards // SLOTS for slot in range(SLOTS)), shards)


def resize(old: Placement, shards: int) -> Placement:
    """Return an even map for another number of shards that moves as few slots as possible.

    Each shard keeps its first slots up to its share. The others go, in order, to shards below their share.
    """
    missing = [SLOTS * (shard + 1) // shards - SLOTS * shard // shards for shard in range(shards)]
    moves: list[int] = []
    for slot, shard in enumerate(old.slots):
        if shard < shards and missing[shard]:
            missing[shard] -= 1
        else:
            moves.append(slot)
    slots = bytearray(old.slots)
    receivers = (shard for shard, count in enumerate(missing) for _ in range(count))
    for slot, shard in zip(moves, receivers, strict=True):
        slots[slot] = shard
    return Placement(bytes(slots), shards, old.version + 1)
