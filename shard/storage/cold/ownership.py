"""The owner of a cold store: one data directory, named by a mark in the store.

    owner.json    {"format": 1, "server": "1700000000000123456789", "host": "db1", "data_dir": "/data",
                   "since_ms": 1700000000000}

A server claims a store that has no mark, and refuses one whose mark names another server. `streams takeover`
replaces the mark: for a restored server, or when the machine of the owner is gone.

    start       supervisor ─► [shard.offline.claim_cold] ─► claim ─► another server's: exit code 2
    then        each shard looks again before it changes anything there, at most every `CHECK_S`

So a server that starts while its store is away checks when the store is back, and a server whose store was
taken over stops changing it within `CHECK_S`. Until then both may write: the mark is no fence.

Rules of the file
- Reading needs no ownership: what another server has put there does no harm to those who read it.
- Nothing is deleted because of a mark. Names of segments hold the server (`storage/segments/store.py`), so a
  take-over by mistake is undone by another one.
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

#: How long a shard relies on the last look at the mark. A look is one small request.
CHECK_S: Final = 5.0

#: A claim that finds the mark gone again, or lost a race to one that is gone, tries so often.
_TRIES: Final = 3
_MARK_BYTES_MAX: Final = 65_536


class Owner(msgspec.Struct, frozen=True):
    """A data directory, and where it was when it claimed the store."""

    server: str
    host: str = ""
    data_dir: str = ""
    since_ms: int = 0
    format: int = FORMAT

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"server {self.server} (data directory {self.data_dir} on host {self.host}, since {since})"


def read_owner(store: ColdStore) -> Owner | None:
    """The owner that the mark names; None if there is no mark. Raises `ColdDamaged` if it cannot be read."""
    size = store.size(MARK)
    if size is None:
        return None
    if size > _MARK_BYTES_MAX:
        raise ColdDamaged(MARK, f"it is {size} bytes long, and no mark of an owner")
    try:
        return msgspec.json.decode(store.read(MARK, 0, size), type=Owner)
    except msgspec.DecodeError as error:
        raise ColdDamaged(MARK, f"it is no mark of an owner ({error})") from error


def claim(store: ColdStore, owner: Owner) -> Owner:
    """Claim a store that has no owner. Returns the owner it has now: this one, or another."""
    for _ in range(_TRIES):
        current_owner = read_owner(store)
        if current_owner is not None:
            return current_owner
        # Whether it was created or not, the next look says who owns it: an answer may have been lost, and
        # some stores create twice.
        store.create(MARK, msgspec.json.encode(owner))
    current_owner = read_owner(store)
    if current_owner is None:
        raise ColdUnavailable(MARK, "it was created, and is not there")
    return current_owner


def take_over(store: ColdStore, owner: Owner) -> None:
    """Make this server the owner, in the place of any other."""
    content = msgspec.json.encode(owner)
    store.put(MARK, [content], size=len(content), checksum=xxh3_64_intdigest(content))


class OwnedCold:
    """A cold store that is changed only while its mark names this server."""

    def __init__(
        self, store: ColdStore, owner: Owner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._owner = owner
        self._clock = clock
        #: The last look is good until then. Threads may look at once: each gets the same answer.
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
                f"the cold store belongs to {current_owner}; nothing is changed there by server "
                f"{self._owner.server}. To take it back, stop that server and run `streams takeover`",
            )
        self._checked_until = now + CHECK_S
