"""Idempotency keys of one box, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class IdempotencyKey(NamedTuple):
    """The seqs that an idempotency key was answered with, and when. Has the layout of a snapshot: a list of a
    million is copied in a few milliseconds."""

    key: str
    first_seq: int
    last_seq: int
    at_ms: int
    lsn: int


#: The order of no keys: shared, because most boxes have none and an empty deque is 0.6 kB.
_NO_ORDER: deque[IdempotencyKey] = deque()


class IdempotencyKeys(dict[str, IdempotencyKey]):
    """Idempotency keys, in the order in which they were first used.

    The oldest go first, for which a dict alone is slow: it looks past all that have gone since it was last
    resized, 0.3 ms at a million keys. So their order is kept beside it.
    """

    __slots__ = ("_order",)

    def __init__(self, entries: Iterable[IdempotencyKey] = ()) -> None:
        super().__init__()
        #: Entries of keys that are gone, or were used again, may be among them.
        self._order = _NO_ORDER
        for entry in entries:
            self.note(entry)

    def note(self, entry: IdempotencyKey) -> None:
        self.pop(entry.key, None)  # a lapsed one may stand here
        self[entry.key] = entry
        if self._order is _NO_ORDER:
            self._order = deque()
        self._order.append(entry)

    def oldest(self) -> IdempotencyKey | None:
        order = self._order
        while order and self.get(order[0].key) is not order[0]:
            order.popleft()
        return order[0] if order else None
