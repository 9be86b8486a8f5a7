"""Opens the cold store at a location.

open_cold("/mnt/archive", disk)           a folder                  FolderCold
open_cold("file:///mnt/archive", disk)    the same folder
open_cold("s3://bucket/prefix", disk)     an object store           ObjectCold, through obstore
open_cold("gs://bucket/prefix", disk)     keys and endpoint come from the environment
open_cold("az://container/prefix", disk)  (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …)
"""

from __future__ import annotations

from urllib.parse import unquote

from shard.storage.cold.base import ColdConfigError, ColdStore
from shard.storage.cold.folder import FolderCold
from shard.storage.files import DiskLike

_SCHEMES = ("s3", "gs", "az")


def open_cold(location: str, disk: DiskLike) -> ColdStore:
    """Open the store at `location`. A folder must exist; an object store is not contacted yet."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme in _SCHEMES:
        from shard.storage.cold.object_store import ObjectCold  # imports obstore, which is slow

        return ObjectCold(location, disk)
    if separator and scheme != "file":
        raise ColdConfigError(location, f"{scheme}:// is not supported")
    if separator and not rest.startswith("/"):
        raise ColdConfigError(location, "a file URL has three slashes and then an absolute path")
    folder = (unquote(rest) if separator else location).rstrip("/")
    if not folder:
        raise ColdConfigError(location, "it does not name a folder")
    try:
        disk.listdir(folder)
    except OSError as error:
        # The folder is never created: it would hide that a disk is not mounted there.
        raise ColdConfigError(location, f"the folder cannot be read ({error.strerror})") from error
    return FolderCold(folder, disk)
