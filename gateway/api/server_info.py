"""Handlers for health, readiness, placement and the key of a request (v0 §13, §14)."""

from __future__ import annotations

import time
from typing import Any

from gateway.access.key_use import KeyUseExchange
from gateway.api.responses import from_facts, from_reply
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch
from gateway.shards.process_states import REASONS
from streams.protocol.access.grants import READ, WRITE
from streams.protocol.errors import NotReady
from streams.protocol.messages.query import Query
from streams.protocol.messages.server_replies import Health, Placement, Ready


class ServerInfo:
    def __init__(
        self,
        dispatch: Dispatch,
        *,
        version: str,
        sockets: tuple[str, ...],
        addresses: tuple[str, ...] = (),
        key_use: KeyUseExchange,
        settings: list[dict[str, str]] | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._version = version
        self._sockets = sockets
        self._addresses = addresses
        self._key_use = key_use
        self._settings = settings or []
        self._started_ns = time.monotonic_ns()

    async def health(self, request: Request) -> Response:
        """Report that the process is alive. `ready` reports whether it can serve."""
        uptime_ms = (time.monotonic_ns() - self._started_ns) // 1_000_000
        return from_reply(request, Health("ok", self._version, uptime_ms))

    async def ready(self, request: Request) -> Response:
        shards = await self._dispatch.describe()
        waiting = [shard for shard in shards if not shard["ready"]]
        if waiting:
            progress = sum(float(shard.get("replay_progress", 0.0)) for shard in shards) / len(shards)
            names = ", ".join(_describe_shard(shard) for shard in waiting)
            detail: dict[str, Any] = {"replay_progress": round(progress, 4), "shards": shards}
            steps = [shard["next_step"] for shard in waiting if "next_step" in shard]
            if steps:
                detail["next_step"] = steps[0]
            raise NotReady(f"shards not ready: {names}", **detail)
        reply = Ready(
            status="ready",
            wal_replay_complete=True,
            boxes=sum(int(shard["boxes"]) for shard in shards),
            shards=len(shards),
            disk=max((str(shard["disk"]) for shard in shards), key=("ok", "low", "full").index),
        )
        return from_reply(request, reply)

    async def whoami(self, request: Request) -> Response:
        """Describe the key of the request: its scopes, its limits and its usage."""
        Query(request.query).reject_unknown()
        return from_facts(request, await self._key_use.whoami(request.key))

    async def settings(self, request: Request) -> Response:
        """List every setting of the server with the origin of its value; secrets are hidden."""
        Query(request.query).reject_unknown()
        return from_facts(request, {"settings": self._settings})

    async def placement(self, request: Request) -> Response:
        """Describe the slots and the addresses of each shard, for clients that connect to shards directly.

        A shard does not check key prefixes on its Unix socket. So the socket path is shown only to keys that
        read or write and have no prefixes. Other keys get an empty path for each shard and use TCP.
        """
        grant = request.grant
        shows_paths = grant is None or (bool(grant.scopes & (READ | WRITE)) and not grant.prefixes)
        sockets = self._sockets if shows_paths else ("",) * len(self._sockets)
        placement = self._dispatch.placement.to_dict()
        return from_reply(
            request, Placement(**placement, sockets=list(sockets), addresses=list(self._addresses))
        )


def _describe_shard(shard: dict[str, Any]) -> str:
    """Return the number of a shard, and the reason why it is down if the supervisor knows it."""
    reason = shard.get("reason", "")
    return f"{shard['shard']} ({REASONS[reason][0]})" if reason in REASONS else str(shard["shard"])
