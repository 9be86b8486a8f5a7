"""Wraps a cold store and records its failures.

Only `ColdUnavailable` is a failure of the store. A missing or damaged file is a normal response, and the
caller handles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from shard.storage.cold.base import ColdError, ColdStore, ColdUnavailable
from shard.storage.faults import Faults, Operation
from shard.storage.files import Buffer


class FaultRecordingCold:
    """A cold store that reports failures and successes to `Faults`."""

    def __init__(self, store: ColdStore, faults: Faults) -> None:
        self._store = store
        self._faults = faults

    def __repr__(self) -> str:
        return f"<FaultRecordingCold {self._store!r}>"

    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        with self._recording("write"):
            self._store.put(name, source, size=size, checksum=checksum)

    def create(self, name: str, content: bytes) -> bool:
        with self._recording("write"):
            return self._store.create(name, content)

    def delete(self, name: str) -> None:
        with self._recording("delete"):
            self._store.delete(name)

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        with self._recording("read"):
            self._store.verify(name, size=size, checksum=checksum)

    def read(self, name: str, offset: int, length: int) -> bytes:
        with self._recording("read"):
            return self._store.read(name, offset, length)

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._recording("read"):
            return self._store.read_many(name, ranges)

    def size(self, name: str) -> int | None:
        with self._recording("read"):
            return self._store.size(name)

    def names(self, prefix: str = "") -> Iterator[str]:
        with self._recording("read"):
            yield from self._store.names(prefix)

    @contextmanager
    def _recording(self, operation: Operation) -> Iterator[None]:
        """Record whether the calls inside fail."""
        try:
            yield
        except ColdUnavailable as error:
            self._faults.note_cold_failure(operation, str(error))
            raise
        except ColdError:
            self._faults.note_cold_success()
            raise
        self._faults.note_cold_success()
