"""One page of a shard for watchers, encoded once for all of them. Pure.

place ──── page ────► place        a place is (seq, generation, is the box deleted)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from streams.protocol import wire
from streams.protocol.messages.watch_events import TombstoneEvent


class Place(NamedTuple):
    """The exact position of a reader of one box, across the box's generations."""

    seq: int
    #: None if it is not known yet: any generation of the box.
    generation: int | None = None
    #: True once the deletion of the box was reported to the reader.
    is_gone: bool = False


#: A generation that no box has: the shard reports the current generation to a reader there.
OTHER_GENERATION = 0


class Encoding(NamedTuple):
    """The form of the records that a watcher gets. Watchers with equal encodings share one feed and its
    bytes."""

    limit: int = 256
    max_bytes: int = 256 * 1024
    nodes: tuple[str, ...] = ()
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    strong: bool = False
    touch: bool = True

    def request_head(self, box: str, place: Place, wait_ms: int) -> wire.FollowHead:
        return wire.FollowHead(
            box,
            place.seq,
            place.generation,
            self.limit,
            self.max_bytes,
            self.nodes,
            self.include_tags,
            self.include_meta,
            self.include_data,
            wait_ms,
            self.strong,
            place.is_gone,
            self.touch,
        )


class EncodedPage:
    """From one place to the next. `record` is the JSON of the records, b"" when there are none to show."""

    __slots__ = (
        "_texts",
        "appended_ms",
        "gap",
        "head_seq",
        "place",
        "record",
        "start_seq",
        "tombstone",
        "unread",
        "was",
    )

    def __init__(self, box: str, was: Place, head: wire.PageHead, records: bytes) -> None:
        self.was = was
        self.place = Place(head.next_from_seq, head.generation)
        self.head_seq = head.head_seq
        self.appended_ms = head.appended_ms
        self.gap = head.gap
        #: The place behind the tombstone, if there is one, and before the records.
        self.start_seq = was.seq
        self.tombstone: TombstoneEvent | None = None
        if head.gap is not None:
            gap_from, gap_to, reason = head.gap
            self.start_seq = head.earliest_seq - 1 if reason == "recreated" else gap_to
            self.tombstone = TombstoneEvent(box, reason, gap_from, gap_to, head.earliest_seq, head.head_seq)
        #: A `RecordsEvent`.
        self.record = b""
        if records:
            self.record = b'{"box":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}' % (
                box.encode(),
                records,
                self.start_seq,
                head.next_from_seq,
                head.head_seq,
            )
        self._texts: dict[object, bytes] = {}
        #: The `SharedCharge` of the text that all followers of the feed share, until the last of them has
        #: read it. Set by the stream that puts the page; not used here.
        self.unread: Any = None

    def __repr__(self) -> str:
        return f"<Page {self.was.seq}..{self.place.seq} of {self.head_seq}, {len(self.record)} B>"

    @property
    def reaches_head(self) -> bool:
        return self.place.seq >= self.head_seq

    def tombstone_json(self, *, at_connect: bool) -> bytes:
        """Return the tombstone as JSON. A gap that existed before the reader connected has another reason."""
        tombstone = self.tombstone
        assert tombstone is not None
        if at_connect and tombstone.reason in ("cap", "ttl", "mixed"):
            tombstone = msgspec.structs.replace(tombstone, reason="from_seq_too_old")
        return msgspec.json.encode(tombstone)

    def text_of(self, key: object) -> bytes | None:
        """Return the text that another stream has encoded for this page, if any."""
        return self._texts.get(key)

    def keep_text(self, key: object, text: bytes) -> None:
        """Keep an encoded text for other streams. Bound: one for each encoder (SSE, WebSocket)."""
        self._texts[key] = text
