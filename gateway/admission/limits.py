"""Limits open streams and requests in flight, for each key and for all keys together (v0 §12).

The code that takes a slot gives it back in a `finally` or a `close`; giving it back twice does nothing. The
limits of a server are divided evenly by its gateways, rounded up: the kernel spreads connections over them.
0 means no limit.

Bounds: one count for each key with open streams or requests; keys are at most `KEYS_MAX`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from streams.protocol.access.key_limits import limit_exceeded_error
from streams.protocol.access.keys import Key, KeyRing
from streams.protocol.access.rates import RequestRates
from streams.protocol.errors import Throttled

EndStream = Callable[[], None]


def share_of(limit: int, gateways: int) -> int:
    return -(-limit // gateways)


class Slot:
    """One open stream."""

    __slots__ = ("_end", "_is_revoked", "_slots", "is_of_ring", "is_session", "key")

    def __init__(
        self, slots: StreamSlots, key: Key | None, *, is_of_ring: bool = True, is_session: bool = False
    ) -> None:
        self.key = key
        #: True for a session of the S2 API.
        self.is_session = is_session
        #: True if the key comes from the key ring, which may revoke it.
        self.is_of_ring = is_of_ring
        self._slots: StreamSlots | None = slots
        self._end: EndStream | None = None
        self._is_revoked = False

    def __repr__(self) -> str:
        return f"<Slot {'taken' if self._slots else 'given back'}{', revoked' * self._is_revoked}>"

    def on_revoked(self, end: EndStream) -> None:
        """Set the function that ends the stream when its key is revoked. If the key is already revoked, call
        it now."""
        self._end = end
        if self._is_revoked:
            end()

    def revoke(self) -> None:
        self._is_revoked = True
        if self._end is not None:
            self._end()

    def give_back(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.remove(self)


class StreamSlots:
    """Counts open event streams, WebSockets and S2 sessions, in total and for each key."""

    def __init__(self, total_max: int = 0, per_key_max: int = 0, gateways: int = 1) -> None:
        self._total_max = total_max
        self._per_key_max = per_key_max
        #: How many gateways share a key's limit of sessions.
        self._gateways = gateways
        #: S2 sessions by key, for keys that have any.
        self.sessions_by_key: dict[str, int] = {}
        self._open_slots: set[Slot] = set()
        self._by_key: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<StreamSlots {len(self._open_slots)} of {self._total_max or 'any number'}>"

    def __len__(self) -> int:
        return len(self._open_slots)

    def sessions_of(self, id: str) -> int:
        return self.sessions_by_key.get(id, 0)

    def take(self, key: Key | None, *, is_of_ring: bool = True, is_session: bool = False) -> Slot:
        if self._total_max and len(self._open_slots) >= self._total_max:
            raise Throttled(
                f"{len(self._open_slots)} event streams are open; close some", limit="sse_connections"
            )
        if key is not None:
            count = self._by_key.get(key.id, 0)
            if self._per_key_max and count >= self._per_key_max:
                raise Throttled(
                    f"{count} event streams of this key are open; close some",
                    limit="sse_connections_per_key",
                )
            if is_session:
                self._take_session(key)
            self._by_key[key.id] = count + 1
        slot = Slot(self, key, is_of_ring=is_of_ring, is_session=is_session)
        self._open_slots.add(slot)
        return slot

    def _take_session(self, key: Key) -> None:
        count, limit = self.sessions_of(key.id), key.limits.sessions
        if limit and count >= share_of(limit, self._gateways):
            raise limit_exceeded_error("sessions", in_use=count, limit=limit)
        self.sessions_by_key[key.id] = count + 1

    def remove(self, slot: Slot) -> None:
        self._open_slots.discard(slot)
        if slot.key is not None:
            _count_down(self._by_key, slot.key)
            if slot.is_session:
                _count_down(self.sessions_by_key, slot.key)

    def revoke_all_but(self, ring: KeyRing) -> int:
        """End the streams whose key was removed or changed. Returns how many those were."""
        slots = [
            slot
            for slot in self._open_slots
            if slot.key is not None and slot.is_of_ring and not ring.holds(slot.key)
        ]
        for slot in slots:
            slot.revoke()
        return len(slots)


class InFlight:
    """Limits the requests in flight and the requests per second of each key."""

    def __init__(self, per_key_max: int = 0, rates: RequestRates | None = None) -> None:
        self._max = per_key_max
        self.rates = rates or RequestRates()
        self._by_key: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<InFlight {sum(self._by_key.values())} of {len(self._by_key)} keys>"

    def take(self, key: Key) -> None:
        """Count a request; the caller calls `give` when it ends. (A context manager would cost four times as
        much.) Raises `Throttled`."""
        if key.limits.requests_per_s:
            self.rates.take(key, time.monotonic())
        count = self._by_key.get(key.id, 0)
        if self._max and count >= self._max:
            raise Throttled(
                f"{count} requests of this key are in flight; wait for some", limit="inflight_per_key"
            )
        self._by_key[key.id] = count + 1

    def give(self, key: Key) -> None:
        _count_down(self._by_key, key)


def _count_down(counts: dict[str, int], key: Key) -> None:
    count = counts[key.id] - 1
    if count:
        counts[key.id] = count
    else:
        del counts[key.id]
