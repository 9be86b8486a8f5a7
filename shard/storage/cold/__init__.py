"""The cold store: immutable files, stored by name in a cheap folder or object store.

base              errors, names and checksums that both kinds of store share
folder            a store in a folder
object_store      a store in an object store, through obstore
store_urls        opens the store at a location
fault_recorder    counts failures
ownership         gives a store to one data directory; others do not change it

Rules of all of them:
  1. Every call may come from any thread and blocks it. Never call it from a thread that runs an event loop.
  2. No call holds more than a few pieces of a file in memory besides its result.
  3. After `ColdUnavailable` a put or a delete may have happened, or may still happen on the server.

Only `object_store` imports obstore, which is slow to import.
"""

from shard.storage.cold.base import (
    ColdConfigError,
    ColdDamaged,
    ColdError,
    ColdMissing,
    ColdSource,
    ColdStore,
    ColdUnavailable,
    Measure,
    measure,
)
from shard.storage.cold.folder import FolderCold
from shard.storage.cold.store_urls import open_cold

__all__ = [
    "ColdConfigError",
    "ColdDamaged",
    "ColdError",
    "ColdMissing",
    "ColdSource",
    "ColdStore",
    "ColdUnavailable",
    "FolderCold",
    "Measure",
    "measure",
    "open_cold",
]
