"""Assigns a cold store to one data directory, by an owner file in the store.

    owner.json    {"format": 1, "server": "1700000000000123456789", "host": "db1", "data_dir": "/data",
                   "since_ms": 1700000000000}

A server claims a store that has no owner file, and refuses one that names another server. `streams takeover`
replaces the file: for a restored server, or when the machine of the owner is gone.

    start       supervisor ─► [shard.offline.claim_cold] ─► claim ─► owned by another server: exit code 2
    then        each shard checks again before it changes the store, at most every `CHECK_S`

So a server that starts while its store does not answer checks later, and a server whose store was taken over
stops changing it within `CHECK_S`. Until then both may write: the owner file is no fence.

Rules of the file
- Reading needs no ownership: reads cannot harm another server.
- Nothing is deleted because of an owner file. Names of segments hold the server
  (`storage/segments/store.py`), so a second takeover undoes a mistaken one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from shard.storage.cold.base import ColdDamaged, ColdStore, ColdUnavailable
from shard.storage.files import Buffer

MARK: Final = "owner.json"
FORMAT: Final = 1

#: A check of the owner file is valid for this long. A check is one small request.
CHECK_S: Final = 5.0

#: Attempts of a claim, in case the owner file disappears again.
_TRIES: Final = 3
_MARK_BYTES_MAX: Final = 65_536


class Owner(msgspec.Struct, frozen=True):
    """A data directory, and its location when it claimed the store."""

    server: str
    host: str = ""
    data_dir: str = ""
    since_ms: int = 0
    format: int = FORMAT

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"server {self.server} (data directory {self.data_dir} on host {self.host}, since {since})"


def read_owner(store: ColdStore) -> Owner | None:
    """Return the owner in the owner file; None if there is no file. Raises `ColdDamaged` if it is not
    readable."""
    size = store.size(MARK)
    if size is None:
        return None
    if size > _MARK_BYTES_MAX:
        raise ColdDamaged(
            MARK, f"the owner file of the cold store is {size} bytes long, so it is not one of ours"
        )
    try:
        return msgspec.json.decode(store.read(MARK, 0, size), type=Owner)
    except msgspec.DecodeError as error:
        raise ColdDamaged(MARK, f"the owner file of the cold store cannot be decoded ({error})") from error


def claim(store: ColdStore, owner: Owner) -> Owner:
    """Claim a store that has no owner. Returns the owner it has now: this server or another."""
    for _ in range(_TRIES):
        current_owner = read_owner(store)
        if current_owner is not None:
            return current_owner
        # Read it again in any case: a response may have been lost, and some stores create twice.
        store.create(MARK, msgspec.json.encode(owner))
    current_owner = read_owner(store)
    if current_owner is None:
        raise ColdUnavailable(MARK, "the owner file of the cold store was written, but cannot be found")
    return current_owner


def take_over(store: ColdStore, owner: Owner) -> None:
    """Make this server the owner, in place of any other."""
    content = msgspec.json.encode(owner)
    store.put(MARK, [content], size=len(content), checksum=xxh3_64_intdigest(content))


class OwnedCold:
    """A cold store that refuses changes unless its owner file names this server."""

    def __init__(
        self, store: ColdStore, owner: Owner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._owner = owner
        self._clock = clock
        #: The last check is valid until then. Threads may check at once: each gets the same result.
        self._checked_until = float("-inf")

    def __repr__(self) -> str:
        return f"<OwnedCold {self._store!r} of {self._owner.server}>"

    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        self._check(name)
        self._store.put(name, source, size=size, checksum=checksum)

    def create(self, name: str, content: bytes) -> bool:
        self._check(name)
        return self._store.create(name, content)

    def delete(self, name: str) -> None:
        self._check(name)
        self._store.delete(name)

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        self._store.verify(name, size=size, checksum=checksum)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._store.read(name, offset, length)

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._store.read_many(name, ranges)

    def size(self, name: str) -> int | None:
        return self._store.size(name)

    def names(self, prefix: str = "") -> Iterator[str]:
        return self._store.names(prefix)

    def _check(self, name: str) -> None:
        now = self._clock()
        if now < self._checked_until:
            return
        current_owner = claim(self._store, self._owner)
        if current_owner.server != self._owner.server:
            raise ColdUnavailable(
                name,
                f"the cold store belongs to {current_owner}, so server "
                f"{self._owner.server} changes nothing in it. To take it over, stop that server "
                "and run `streams takeover`",
            )
        self._checked_until = now + CHECK_S
