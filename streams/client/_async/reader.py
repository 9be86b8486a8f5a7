"""A reader that keeps its place: pages in, records out, and on again after whatever happened to the
server."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from streams.client.answers import Page, Record, Tombstone
from streams.client.retry import FOREVER, Retry
from streams.protocol.errors import GroupNotFound

if TYPE_CHECKING:
    from streams.client._async.box import AsyncBox

#: How long one request of an endless reader waits for something new. The server allows 30 s.
_WAIT_MS = 25_000


class AsyncReader:
    """Yields what is in a box, in order, each once.

    `cursor` is the seq up to which everything has been handed out: where another reader would go on. With a
    group, `commit` saves it on the server; do that after an item is dealt with, and a reader that dies in
    between reads it again.
    """

    def __init__(
        self,
        box: AsyncBox,
        from_seq: int | None = None,
        *,
        is_endless: bool = False,
        from_ts: int | None = None,
        group: str | None = None,
        match: str | list[str] | None = None,
        node: str | list[str] | None = None,
        include_tags: bool = True,
        include_meta: bool = True,
        include_data: bool = True,
        page_records: int = 1000,
    ) -> None:
        if sum(start is not None for start in (from_seq, from_ts, group)) > 1:
            raise ValueError("from_seq, from_ts and group each set the start; pass only one of them")
        self._box = box
        self._from_ts = from_ts
        self._group = box.group(group) if group is not None else None
        self._is_endless = is_endless
        self._retry: Retry | None = FOREVER if is_endless else None
        options: dict[str, Any] = {
            "match": match,
            "node": node,
            "include_tags": include_tags,
            "include_meta": include_meta,
            "include_data": include_data,
            "limit": page_records,
        }
        self._options = {name: value for name, value in options.items() if value is not None}
        self.cursor = from_seq or 0
        self.generation: int | None = None
        #: Of the last answer: the first seq that is there, the last one, and whether there was no more.
        self.earliest_seq = self.head_seq = 0
        self._was_caught_up = False
        #: Where a reading ends that is not endless: the head when it began.
        self._until: int | None = None
        self._is_started = False
        self._page_end = self.cursor
        self._items: deque[Record | Tombstone] = deque()

    def __repr__(self) -> str:
        return f"<AsyncReader of {self._box.name} at {self.cursor}, {len(self._items)} items at hand>"

    def __aiter__(self) -> AsyncReader:
        return self

    async def __anext__(self) -> Record | Tombstone:
        while not self._items:
            self.cursor = self._page_end
            if self.is_at_end():
                raise StopAsyncIteration
            await self._fetch()
        item = self._items.popleft()
        if isinstance(item, Record):
            self.cursor = item.seq
        return item

    async def next_page(self, *, is_patient: bool = True) -> list[Record | Tombstone]:
        """The items of one more answer, maybe none. An endless reader that is not patient does not wait."""
        self.cursor = self._page_end
        await self._fetch(is_patient=is_patient)
        items = list(self._items)
        self._items.clear()
        return items

    async def commit(self) -> None:
        """Store the position of this reader in its group."""
        if self._group is None:
            raise ValueError("commit needs a group; create the reader with group=NAME")
        await self._group.commit(self.cursor)

    @property
    def is_caught_up(self) -> bool:
        """True if everything was handed out that the server had when it was last asked."""
        return self._was_caught_up and not self._items

    def is_at_end(self) -> bool:
        """True when a reading that is not endless has asked for all there was when it began."""
        return not self._is_endless and self._until is not None and self._page_end >= self._until

    async def _fetch(self, *, is_patient: bool = True) -> None:
        if not self._is_started and self._group is not None:
            try:
                self.cursor = self._page_end = (await self._group.state()).cursor
            except GroupNotFound:
                pass  # it is made by the first commit
        options = dict(self._options)
        if not self._is_started and self._from_ts is not None:
            options["from_ts"] = self._from_ts
        else:
            options["from_seq"] = self.cursor
        if self.generation is not None:
            options["generation"] = self.generation
        if self._is_endless and is_patient:
            options["wait_ms"] = _WAIT_MS
        self._take(
            await self._box.client.call("POST", f"{self._box.path}/diff", Page, options, retry=self._retry)
        )

    def _take(self, page: Page) -> None:
        is_other_life = self.generation is not None and page.generation != self.generation
        if self._until is None or is_other_life:
            self._until = page.head_seq
        self._is_started = True
        self.generation = page.generation
        self.earliest_seq, self.head_seq = page.earliest_seq, page.head_seq
        self._was_caught_up = page.caught_up
        if page.tombstone is not None:
            self._items.append(page.tombstone)
        self._items.extend(page.records)
        self._page_end = page.next_from_seq
