"""One answer of a shard to somebody who stays, worded once for everyone it goes to. Pure.

place ──── page ────► place        a place is (seq, generation, whether the box is gone)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from streams.protocol import wire


class Place(NamedTuple):
    """Where a reader of one box is: exactly, across the box's lives."""

    seq: int
    #: None: not known yet, whatever life the box is in.
    generation: int | None = None
    #: The reader has been told that the box was deleted.
    is_gone: bool = False


#: A generation that no box has: a reader there is told of the life its box is in now.
ANOTHER_LIFE = 0


class Encoding(NamedTuple):
    """In what form a watcher wants records. Watchers who agree share one feed and its bytes."""

    limit: int = 256
    max_bytes: int = 256 * 1024
    nodes: tuple[str, ...] = ()
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    strong: bool = False

    def asking(self, box: str, place: Place, wait_ms: int) -> wire.FollowHead:
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
        )


class Page:
    """From one place to the next. `record` is the JSON of the records, b"" when there are none to show."""

    __slots__ = (
        "_shared",
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
        #: After what there is to tell of loss, and before the records.
        self.start_seq = was.seq
        self.tombstone: dict[str, object] | None = None
        if head.gap is not None:
            gap_from, gap_to, reason = head.gap
            self.start_seq = head.earliest_seq - 1 if reason == "recreated" else gap_to
            self.tombstone = {
                "box": box,
                "reason": reason,
                "gap_from": gap_from,
                "gap_to": gap_to,
                "earliest_seq": head.earliest_seq,
                "head_seq": head.head_seq,
            }
        self.record = b""
        if records:
            self.record = b'{"box":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}' % (
                box.encode(),
                records,
                self.start_seq,
                head.next_from_seq,
                head.head_seq,
            )
        self._shared: dict[object, bytes] = {}
        #: The `SharedCharge` of the text that all who follow the feed share, while one of them has not taken
        #: it. Whoever puts the page has it: nothing here uses it.
        self.unread: Any = None

    def __repr__(self) -> str:
        return f"<Page {self.was.seq}..{self.place.seq} of {self.head_seq}, {len(self.record)} B>"

    @property
    def reaches_head(self) -> bool:
        return self.place.seq >= self.head_seq

    def tombstone_json(self, *, at_connect: bool) -> bytes:
        """A gap made by a cap or the TTL that was there when the reader came is called by another name."""
        assert self.tombstone is not None
        if at_connect and self.tombstone["reason"] in ("cap", "ttl", "mixed"):
            return orjson.dumps({**self.tombstone, "reason": "from_seq_too_old"})
        return orjson.dumps(self.tombstone)

    def shared(self, key: object) -> bytes | None:
        """What somebody before has made of this page."""
        return self._shared.get(key)

    def share(self, key: object, text: bytes) -> None:
        """Bound: one text a wording (SSE, a WebSocket), for readers of this box alone."""
        self._shared[key] = text
