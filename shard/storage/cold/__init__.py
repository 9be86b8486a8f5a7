"""The cold store: files that never change again, kept by name where keeping is cheap.

base        what all kinds share: errors, names, measured sources
folder      a folder, by way of the disk
objects     an object store, by way of obstore
locations   which of the two a location means
fault_recorder    counts failures
ownership   one data directory owns a store, and others do not change it

Rules of all of them:
  1. Every call may come from any thread and blocks it. None may come from a thread that runs an event loop.
  2. No call holds more than a few pieces of a file beside what it returns.
  3. After `ColdUnavailable` a put or a delete may still have happened, or may yet happen on the server.

Only `objects` imports obstore, which is slow to import.
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
from shard.storage.cold.locations import open_cold

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
