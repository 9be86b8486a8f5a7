"""Exchanges the usage of keys between shards, and reports it.

Each shard knows its own usage of every key and enforces the limits. For the usage in the other shards, the
first gateway collects the usage of all shards once a second (`run`) and sends each shard the sum of the
others.

Limits: `_CHUNK` keys per message, about a millisecond of a shard's time. A shard that does not reply counts
with its last reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
import trio

from gateway.admission.limits import StreamSlots
from gateway.shards.dispatch import Dispatch
from gateway.shards.links import Link
from streams.protocol import wire
from streams.protocol.access.grants import ALL, words
from streams.protocol.access.key_limits import STORED, ExchangeUse, Use, decode_use
from streams.protocol.access.keys import Key, KeyRing
from streams.protocol.access.rates import RequestRates
from streams.protocol.errors import StreamsError
from streams.protocol.telemetry import reports

log = structlog.get_logger()

EXCHANGE_EVERY_S = 1.0
_CHUNK = 128

_encode = wire.head_encoder.encode

#: The keys as they are now: a reload replaces them.
RingSource = Callable[[], KeyRing]


class KeyUseExchange:
    def __init__(
        self,
        dispatch: Dispatch,
        slots: StreamSlots,
        rates: RequestRates | None = None,
        others: list[Link] | None = None,
    ) -> None:
        """`slots` and `rates` have the usage of keys in this gateway; `others` are the other gateways."""
        self._dispatch = dispatch
        self._slots = slots
        self._rates = rates or RequestRates()
        self._others = others or []
        #: By shard: the usage of each key in its last reply.
        self._last: list[dict[str, Use]] = [{} for _ in dispatch.links]

    def __repr__(self) -> str:
        return f"<KeyUseExchange of {len(self._last[0])} keys in {len(self._last)} shards>"

    # -- exchange between shards

    async def run(self, ring: RingSource) -> None:
        """Exchange usage between the shards every `EXCHANGE_EVERY_S`, forever."""
        while True:
            await self.exchange(ring())
            await trio.sleep(EXCHANGE_EVERY_S)

    async def exchange(self, ring: KeyRing) -> None:
        ids = list(ring.accounts())
        self._last = [{id: use[id] for id in ids if id in use} for use in self._last]
        for at in range(0, len(ids), _CHUNK):
            chunk = ids[at : at + _CHUNK]
            for shard, use in enumerate(await self._exchange_all([ExchangeUse(chunk)] * len(self._last))):
                if use is not None:
                    self._last[shard] |= use
            total = self._total(chunk)
            messages = [
                ExchangeUse([], {id: total[id].minus(use.get(id, Use())) for id in chunk})
                for use in self._last
            ]
            await self._exchange_all(messages)

    def _total(self, ids: list[str]) -> dict[str, Use]:
        total = dict.fromkeys(ids, Use())
        for use in self._last:
            for id in ids:
                if id in use:
                    total[id] = total[id].plus(use[id])
        return total

    async def _exchange_all(self, messages: list[ExchangeUse]) -> list[dict[str, Use] | None]:
        """Send each shard its message. Return the replies by shard; None if a shard does not reply."""
        replies: list[dict[str, Use] | None] = [None] * len(messages)

        async def exchange_with(shard: int, message: ExchangeUse) -> None:
            try:
                link = self._dispatch.links[shard]
                answer = await link.call(wire.OP_EXCHANGE_USE, _encode(message), b"")
                replies[shard] = decode_use(answer.body).use
            except StreamsError as error:
                log.debug("key usage of a shard is not available", shard=shard, error=error.code)

        async with trio.open_nursery() as nursery:
            for shard, message in enumerate(messages):
                nursery.start_soon(exchange_with, shard, message)
        return replies

    # -- reports

    async def whoami(self, key: Key | None) -> dict[str, Any]:
        """Describe a key, its limits and its current usage."""
        if key is None:
            return {"id": None, "scopes": words(ALL), "prefixes": [], "limits": {}}
        use: Use | None = Use()
        if key.account:
            for answer in await self._exchange_all([ExchangeUse([key.account])] * len(self._last)):
                shard_use = None if answer is None else answer.get(key.account)
                use = None if use is None or shard_use is None else use.plus(shard_use)
        sessions = self._slots.sessions_of(key.id)
        if key.limits.sessions:
            sessions += await self._sessions_in_other_gateways(key.id)
        return self.describe(key, use, sessions)

    async def _sessions_in_other_gateways(self, id: str) -> int:
        """Return the number of S2 sessions of a key in the other gateways that reply."""
        count = 0

        async def add_sessions(link: Link) -> None:
            nonlocal count
            try:
                report = reports.decode_gateway((await link.call(wire.OP_REPORT, b"", b"")).body)
                count += report.s2_sessions.get(id, 0)
            except StreamsError as error:
                log.debug("key usage of a gateway is not available", link=repr(link), error=error.code)

        async with trio.open_nursery() as nursery:
            for link in self._others:
                nursery.start_soon(add_sessions, link)
        return count

    def describe(self, key: Key, use: Use | None, s2_sessions: int) -> dict[str, Any]:
        """Describe a key without its digest. `use` is None if a shard has not reported its usage."""
        limits: dict[str, dict[str, int | None]] = {}
        for name, limit in key.limits.to_fields().items():
            if name in STORED:
                limits[name] = {"limit": limit, "used": None if use is None else getattr(use, name)}
            else:
                limits[name] = {"limit": limit, "used": self._rates.in_use(key, time.monotonic())}
        if key.limits.sessions:
            limits["s2_sessions"] = {"limit": key.limits.sessions, "used": s2_sessions}
        return {
            "id": key.id,
            "scopes": words(key.grant.scopes),
            "prefixes": list(key.grant.prefixes),
            "limits": limits,
        }

    def describe_all(
        self, ring: KeyRing, use: list[dict[str, Use]], s2_sessions: list[dict[str, int]]
    ) -> list[dict[str, Any]]:
        """Describe all keys, ordered by id, with the usage in the reports of shards and gateways."""
        descriptions: dict[str, dict[str, Any]] = {}
        for key in sorted(ring.keys, key=lambda key: key.id):
            if key.id not in descriptions:
                total = Use()
                for each in use:
                    total = total.plus(each.get(key.id, Use()))
                sessions = sum(each.get(key.id, 0) for each in s2_sessions)
                descriptions[key.id] = self.describe(key, total, sessions)
        return list(descriptions.values())
