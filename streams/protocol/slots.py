"""Which slot a box's name falls into: fixed for ever, and the same for gateways, direct writers and Spark."""

from __future__ import annotations

from typing import Final

from xxhash import xxh64_intdigest

SLOTS: Final = 4096
SEED: Final = 42


def slot_of(name: str) -> int:
    return xxh64_intdigest(name.encode(), SEED) % SLOTS
