"""Which shard owns a box, the connections to all of them, and what is tried again.

Which shard owns a box is asked of a gateway (`GET /v0/placement`). The map changes only while the whole
server is down, and then every connection breaks. So the map is asked for *after* connecting, and the
connection is used only when it still says the same: a box is never written to a shard that does not own it. A
shard that says `moved` is believed too.

One connection a shard; threads may share them. What a lost connection leaves open is repeated, for everything
that is sent from here may be.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypedDict, TypeVar
from urllib.parse import urlsplit

from streams.client._sync.client import Client
from streams.client.attempts import Attempts
from streams.client.errors import Unreachable
from streams.client.retry import Retry
from streams.direct.links import BoxMoved, Link
from streams.protocol import wire
from streams.protocol.errors import Busy, StreamsError
from streams.protocol.messages.server_replies import Placement
from streams.protocol.model.slots import slot_of
from streams.protocol.payloads.packed import Buffer

T = TypeVar("T")


class Access(TypedDict, total=False):
    """How to reach the shards. `over_tcp`: left out, by their Unix sockets where they can be seen."""

    key: str | None
    retry: Retry | None
    over_tcp: bool | None


class Closing:
    """Something with connections, which a `with` block closes at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class Ways:
    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        retry: Retry | None = None,
        over_tcp: bool | None = None,
    ) -> None:
        self.retry = retry or Retry()
        self._client = Client(url, key=key, retry=self.retry)
        self._key = key or os.environ.get("STREAMS_KEY") or ""
        self._over_tcp = over_tcp
        self._lock = threading.Lock()
        self._placement: Placement | None = None
        self._slots = b""
        self._links: dict[str, Link] = {}

    def __repr__(self) -> str:
        up = sum(link.is_up for link in self._links.values())
        return f"<Ways to {self.url}, {up} of {len(self._links)} shards connected>"

    @property
    def url(self) -> str:
        return self._client.url

    def close(self) -> None:
        for link in list(self._links.values()):
            with link.lock:
                link.close()
        self._client.close()

    # -- the map

    def placement(self) -> Placement:
        with self._lock:
            if self._placement is not None:
                return self._placement
        placement = self._client.placement()
        slots = bytearray()
        for start, end, shard in placement.slots:
            slots += bytes([shard]) * (end - start)
        with self._lock:
            self._placement, self._slots = placement, bytes(slots)
        return placement

    def owner(self, box: str) -> int:
        self.placement()
        return self._slots[slot_of(box)]

    def forget(self) -> None:
        """Asks for the map again before it is used the next time."""
        with self._lock:
            self._placement = None

    # -- the way

    def to_box(self, box: str) -> Link:
        return self._link(lambda: self._slots[slot_of(box)])

    def to_shard(self, shard: int, boxes: Iterable[str] = ()) -> Link:
        """A connection to this shard. `BoxMoved` when it does not own all of these boxes."""
        link = self._link(lambda: shard)
        slots = self._slots
        for box in boxes:
            if slots[slot_of(box)] != shard:
                raise BoxMoved(f"{box} belongs to shard {slots[slot_of(box)]}, not to shard {shard}", box=box)
        return link

    def _link(self, choose: Callable[[], int]) -> Link:
        """A connection that was made before the map was read which says that it is the right one."""
        for _ in range(3):
            placement = self.placement()
            shard = choose()
            if shard >= len(placement.sockets):
                raise BoxMoved(f"there is no shard {shard} (any more)", shard=shard)
            path, key = self._way_to(placement, shard)
            with self._lock:
                link = self._links.setdefault(path, Link(path, key))
            with link.lock:
                if link.is_up:
                    return link
                link.connect()
            self.forget()
            if self.placement() == placement:
                return link
            with link.lock:
                link.close()
        raise Busy("the map of shards keeps changing; try again")

    def _way_to(self, placement: Placement, shard: int) -> tuple[str, str]:
        """Where the shard is, and the key to say there. A Unix socket takes everything without one; the key
        says whose the transactions are, so that they can go on over TCP."""
        path = placement.sockets[shard]
        if path and (self._over_tcp is False or (self._over_tcp is None and os.path.exists(path))):
            return path, self._key
        if self._over_tcp is False or not placement.addresses:
            why = (
                f"{path} is on another machine" if path else "this key has prefixes or may not read or write"
            )
            raise Unreachable(
                f"shard {shard} cannot be reached by its Unix socket ({why}); have the shards listen on TCP "
                "(STREAMS_SHARD_HOST)",
                path=path,
            )
        host, _, port = placement.addresses[shard].rpartition(":")
        return f"{host or urlsplit(self._client.url).hostname}:{port}", self._key

    # -- trying again

    def call_box(
        self, box: str, op: int, head: bytes, body: Sequence[Buffer], retry: Retry | None = None
    ) -> wire.Message:
        """The answer of the shard that owns the box, also after the box has moved."""
        return self.attempt(lambda: self.to_box(box).locked_call(op, head, body), retry)

    def attempt(self, ask: Callable[[], T], retry: Retry | None = None, *, follows: bool = True) -> T:
        """Asks until there is an answer, as the HTTP client does. What is asked may be repeated. Unless it
        `follows` boxes that have moved, the caller is told of that at once."""
        attempts = Attempts(retry or self.retry)
        while True:
            try:
                return ask()
            except StreamsError as error:
                if isinstance(error, BoxMoved | Unreachable):
                    self.forget()
                if isinstance(error, BoxMoved) and not follows:
                    attempts.check_last(error)
                    raise
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
            time.sleep(pause_s)
