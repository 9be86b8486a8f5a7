"""Watches boxes (v0 §7): the server pushes records, and a lost connection is made again.

The server keeps the position of a session. After a lost connection the client resumes from the id of the last
event it got; when the session itself is gone, a new one begins at the client's position.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from streams.client.answers import BoxDeleted, CaughtUp, RawRecordsEvent, Record, Tombstone, decode
from streams.client.async_concurrency import asleep
from streams.client.errors import AnswerLost, error_of
from streams.client.events import Event, EventReader
from streams.client.retry import FOREVER
from streams.protocol.errors import BoxNotFound, Busy, NotFound, StreamsError, Uncertain
from streams.protocol.messages.replies import WatchReply
from streams.protocol.messages.watch_events import RecordsEvent, TombstoneEvent

if TYPE_CHECKING:
    from streams.client._async.client import AsyncClient

Item = Record | Tombstone | CaughtUp | BoxDeleted

HEARTBEAT_MS = 5_000
#: Three heartbeats that did not come.
_SILENCE_S = 15.0


class _ErrorEvent(msgspec.Struct):
    code: Any
    error: str = ""


class AsyncWatch:
    """Yields (box, item): records and tombstones in the order of each box, and marks: `CaughtUp` when all
    there was of a box has been shown, `BoxDeleted` when it is gone; the rest goes on."""

    def __init__(
        self,
        client: AsyncClient,
        boxes: Mapping[str, int | None],
        *,
        node: str | None,
        include_tags: bool,
        strong: bool,
        raw_data: bool,
    ) -> None:
        self._client = client
        self._records_kind = RawRecordsEvent if raw_data else RecordsEvent
        #: Box -> the seq after which it goes on; None: at its end, which is learnt when a session is made.
        self.cursors: dict[str, int | None] = dict(boxes)
        self._options: dict[str, Any] = {"heartbeat_ms": HEARTBEAT_MS, "include_tags": include_tags}
        if node is not None:
            self._options["node"] = node
        if strong:
            self._options["consistency"] = "strong"
        self._url = ""
        self._last_id = ""
        self._items = self._run()

    def __repr__(self) -> str:
        return f"<AsyncWatch {self.cursors}>"

    def __aiter__(self) -> AsyncIterator[tuple[str, Item]]:
        return self._items

    async def aclose(self) -> None:
        """Close the connection at once."""
        await self._items.aclose()

    async def _run(self) -> AsyncGenerator[tuple[str, Item], None]:
        attempt = 0
        while self.cursors:
            try:
                if not self._url:
                    await self._begin()
                headers = {"accept": "text/event-stream"}
                if self._last_id:
                    headers["last-event-id"] = self._last_id
                transport = self._client.transport
                async with transport.stream("GET", self._url, headers=headers, silence_s=_SILENCE_S) as (
                    answer,
                    pieces,
                ):
                    if answer.status != 200:
                        raise error_of(answer.status, answer.body, url=self._client.url)
                    events = EventReader()
                    async for piece in pieces:
                        for event in events.feed(piece):
                            attempt = 0
                            for box, item in self._items_of(event):
                                yield box, item
                        if not self.cursors:  # every box was deleted
                            return
                raise AnswerLost("the server ended the stream")
            except NotFound as error:  # the session was forgotten; the next one begins where we are
                self._url = self._last_id = ""
                await self._pause(AnswerLost(error.message), attempt)
            except StreamsError as error:
                if not isinstance(error, Busy | Uncertain):
                    raise
                await self._pause(error, attempt)
            attempt += 1

    @staticmethod
    async def _pause(error: StreamsError, attempt: int) -> None:
        luck = random.random()
        await asleep(
            FOREVER.pause_s(error, attempt=attempt, spent_s=0.0, is_repeatable=True, luck=luck) or 0.0
        )

    async def _begin(self) -> None:
        starts = {
            box: {"tail": True} if seq is None else {"from_seq": seq} for box, seq in self.cursors.items()
        }
        body = {"boxes": starts, **self._options}
        session = await self._client.call("POST", "/v0/watch", WatchReply, body, retry=FOREVER)
        for box, start in session.boxes.items():
            self.cursors[box] = start.from_seq
        self._url = session.stream_url

    def _items_of(self, event: Event) -> list[tuple[str, Item]]:
        if event.id:
            self._last_id = event.id
        match event.name:
            case "record":
                page = decode(event.data, self._records_kind)
                self.cursors[page.box] = page.to_seq
                return [(page.box, record) for record in page.records]
            case "tombstone":
                gap = decode(event.data, TombstoneEvent)
                self.cursors[gap.box] = gap.earliest_seq - 1  # of a box made anew, its first is next
                tombstone = Tombstone(gap.gap_from, gap.gap_to, gap.reason, gap.earliest_seq, gap.head_seq)
                return [(gap.box, tombstone)]
            case "caught-up":
                caught_up = decode(event.data, CaughtUp)
                return [(caught_up.box, caught_up)]
            case "box-deleted":
                deletion = decode(event.data, BoxDeleted)
                self.cursors.pop(deletion.box, None)
                return [(deletion.box, deletion)]
            case "error":
                fault = decode(event.data, _ErrorEvent)
                raise AnswerLost(f"the server ended the stream: {fault.error or fault.code}")
            case _:
                return []  # of a newer server


class AsyncBoxWatch:
    """One box of a watch: `Record` and `Tombstone`, until the box is deleted, which is `BoxNotFound`."""

    def __init__(self, watch: AsyncWatch, box: str) -> None:
        self._watch = watch
        self._box = box
        self._items = aiter(watch)
        #: The seq up to which everything has been handed out; None while that is not known.
        self.cursor = watch.cursors.get(box)

    def __repr__(self) -> str:
        return f"<AsyncBoxWatch {self._box} at {self.cursor}>"

    def __aiter__(self) -> AsyncBoxWatch:
        return self

    async def __anext__(self) -> Record | Tombstone:
        while True:
            _, item = await anext(self._items)
            if isinstance(item, BoxDeleted):
                raise BoxNotFound(f"box {self._box} was deleted", box=self._box)
            if isinstance(item, Record):
                self.cursor = item.seq
                return item
            if isinstance(item, Tombstone):
                self.cursor = item.earliest_seq - 1
                return item

    async def aclose(self) -> None:
        """Close the connection at once."""
        await self._watch.aclose()
