"""The manifest of a data directory: which shard owns which slots, and the folder of each shard. Pure.

    {"format": 3, "shards": 2, "slots": [[0, 2048, 0], [2048, 4096, 1]], "version": 1,
     "created_ms": 1700000000000, "server": "1700000000000123456789", "directories": ["shard-00", "shard-01"],
     "building": [], "dropping": [], "restoring": false, "checksum": "<xxh3_64 of all before it>"}

`server` identifies the data directory permanently: names in a cold store contain this number.

The manifest also records the intent of a change of folders, so that only folders that it names are removed:

    building    folders that are being built; if a start finds any here, they are unfinished
    dropping    folders that were replaced and have to be removed
    restoring   `streams restore` is filling the folders; no server may serve them yet

Format 1 had no folders (`shard-00` and so on), no intents and no checksum. Formats 1 and 2 had no `server`:
`created_ms` identified the data directory. Both are still read, and written as format 3 by the next start.

Invariants: `canonical` (the file is byte for byte what `encode` would write, so any flipped bit is found),
`one-folder-each` (one folder for each shard, no folder twice).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from json import JSONDecodeError
from typing import Any, Final

import orjson
from xxhash import xxh3_64_hexdigest

from gateway.shards.placement import Placement, even

FORMAT: Final = 3

_SALT_DIGITS: Final = 9
SALTS: Final = 10**_SALT_DIGITS

#: The only folder names that the server creates or removes.
_FOLDER = re.compile(r"(shard|restore)-[0-9]{2,3}(-v[0-9]{1,10})?")
#: A part of names in object stores, where a chain has its numbers separated by dashes (`shard/storage`).
_SERVER = re.compile(r"[0-9]{1,40}")


class ManifestDamaged(Exception):
    """The manifest differs from what was written."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"damaged at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class ManifestUnknown(Exception):
    """The manifest has a format that this version does not support."""


@dataclass(frozen=True, slots=True)
class Manifest:
    placement: Placement
    directories: tuple[str, ...]
    created_ms: int
    building: tuple[str, ...] = ()
    dropping: tuple[str, ...] = ()
    is_restoring: bool = False
    #: Identifies the data directory; `created_ms` if it is not set.
    server: str = ""

    def __post_init__(self) -> None:
        folder_names = self.directories + self.dropping
        if len(self.directories) != self.placement.shards or len(set(folder_names)) != len(folder_names):
            raise ValueError(f"{self.placement.shards} shards are in {', '.join(folder_names)}")
        invalid = [name for name in folder_names + self.building if _FOLDER.fullmatch(name) is None]
        if invalid:
            raise ValueError(f"{invalid[0]!r} is not the name of a shard's folder")
        if not self.server:
            object.__setattr__(self, "server", str(self.created_ms))
        if _SERVER.fullmatch(self.server) is None:
            raise ValueError(f"{self.server!r} is not the number of a server")

    @property
    def shards(self) -> int:
        return self.placement.shards

    @property
    def is_settled(self) -> bool:
        """True if no change of folders has to be completed or undone."""
        return not (self.building or self.dropping or self.is_restoring)

    def without_intents(self) -> Manifest:
        """Return this manifest without the intents of a change that is complete."""
        return replace(self, building=(), dropping=(), is_restoring=False)

    def encode(self) -> bytes:
        return self._encode_as(FORMAT)

    def _encode_as(self, format: int) -> bytes:
        fields = {
            "format": format,
            **self.placement.to_dict(),
            "created_ms": self.created_ms,
            **({"server": self.server} if format >= 3 else {}),
            "directories": self.directories,
            "building": self.building,
            "dropping": self.dropping,
            "restoring": self.is_restoring,
        }
        checksum = xxh3_64_hexdigest(orjson.dumps(fields))
        return orjson.dumps({**fields, "checksum": checksum}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Parse a manifest. Raises `ManifestDamaged` or `ManifestUnknown`."""
        try:
            fields: dict[str, Any] = orjson.loads(content)
            format = fields["format"]
            if format == 1 and "checksum" not in fields:  # one flipped bit turns a 3 into a 1
                return _decode_first(fields)
            if format not in (1, 2, FORMAT):
                raise ManifestUnknown(f"has format {format}, and this version knows {FORMAT}")
            manifest = cls(
                Placement.from_dict(fields),
                tuple(fields["directories"]),
                int(fields["created_ms"]),
                tuple(fields["building"]),
                tuple(fields["dropping"]),
                bool(fields["restoring"]),
                str(fields["server"]) if format >= 3 else "",
            )
        except JSONDecodeError as error:
            raise ManifestDamaged(error.pos, error.msg) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestDamaged(0, str(error)) from error
        if manifest._encode_as(format) != content:
            raise ManifestDamaged(0, "it does not match its checksum")
        return manifest


def _decode_first(fields: dict[str, Any]) -> Manifest:
    placement = Placement.from_dict(fields)
    return Manifest(placement, folders(placement.shards), int(fields.get("created_ms", 0)))


def fresh(shards: int, *, now_ms: int, salt: int) -> Manifest:
    """Return the manifest of a new data directory. `salt`, a random number below `SALTS`, makes its id
    unique: servers that are installed together may start in the same millisecond."""
    assert 0 <= salt < SALTS
    return Manifest(even(shards), folders(shards), now_ms, server=f"{now_ms}{salt:0{_SALT_DIGITS}d}")


def folders(shards: int, version: int = 1) -> tuple[str, ...]:
    """Return folder names for all shards that no earlier version has used."""
    return tuple(folder(shard, version) for shard in range(shards))


def folder(shard: int, version: int) -> str:
    return f"shard-{shard:02d}" if version == 1 else f"shard-{shard:02d}-v{version}"
