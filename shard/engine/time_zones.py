"""Finds time zones by their IANA names, for schedules (`core/schedules/`).

The zones are those of the system, or of the package `tzdata` where the system has none. A zone is read once:
new rules take effect after a restart.
"""

from __future__ import annotations

from datetime import tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


@lru_cache(maxsize=1024)  # there are about 600
def find_zone(name: str) -> tzinfo | None:
    """Return the time zone, or None if there is none of this name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # no such file; not a name; a folder
        return None
