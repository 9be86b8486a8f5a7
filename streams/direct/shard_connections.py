"""Connections to all shards, the placement of boxes, and retries.

A gateway reports which shard owns a box (`GET /v0/placement`). The map changes only while the whole server is
down, and then every connection breaks. So the client fetches the map *after* connecting, and uses the
connection only if the map is unchanged: a box is never written to a shard that does not own it. An error
`moved` of a shard counts too.

One connection for each shard; threads may share them. After a lost connection, unanswered requests are
repeated: every request from here is idempotent.
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


class ShardConnections:
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
        return f"<ShardConnections to {self.url}, {up} of {len(self._links)} shards connected>"

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

    # -- connections

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
        """Return a connection that is older than the placement that selects it."""
        for _ in range(3):
            placement = self.placement()
            shard = choose()
            if shard >= len(placement.sockets):
                raise BoxMoved(
                    f"there is no shard {shard}; the number of shards may have changed", shard=shard
                )
            path, key = self._address_of(placement, shard)
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

    def _address_of(self, placement: Placement, shard: int) -> tuple[str, str]:
        """Return the address of a shard, and the key to present. A Unix socket needs none; the key is the
        owner of
        transactions, so that they can continue over TCP."""
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
        """Call `ask` until it returns, with the retries of the HTTP client; it must be idempotent. Unless it
        `follows` boxes that have moved, `BoxMoved` is raised at once."""
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
