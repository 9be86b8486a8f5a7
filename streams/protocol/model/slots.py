"""A name's slot: what placement, clients and moving boxes agree on. Pure, and fixed for ever.

XXH64 of the name's UTF-8 with seed 42, modulo 4096: what Spark SQL computes for `pmod(xxhash64(name), 4096)`.
Which shard has a slot is for `manifest.json` to say (`gateway/shards/placement.py`).
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh64_intdigest

SLOTS: Final = 4096
SEED: Final = 42


def slot_of(name: str) -> int:
    return xxh64_intdigest(name.encode(), SEED) % SLOTS
