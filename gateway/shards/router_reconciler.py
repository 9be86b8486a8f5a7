"""Reconciles registered routers with their endpoints.

    registry (shard 0)       the source of truth: which routers exist, each with its number
    endpoints (at the boxes) the state that shards act on: outbox at the source, origin at the destination

The reconciler attaches missing endpoints and detaches endpoints whose router no longer exists. The order of
the steps makes this safe. A router is registered before an endpoint is attached, so an endpoint without an
entry is a remnant and is detached. A router is marked as attached after both endpoints are, so a marked entry
that lacks an endpoint has lost a box and is dropped. An unmarked entry is attached (again). Every step is
idempotent, so a crash between two steps is repaired by the next pass. `run` makes a pass whenever something
has changed.

    put      register ─► attach destination ─► attach source ─► mark
    delete   detach source ─► drop ─► detach destination

On the wire an endpoint is a "tie": the tags of these messages, and `RegisteredRouter.is_tied`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog
import trio

from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import Refused, StreamsError, Throttled
from streams.protocol.messages import forwards, routers
from streams.protocol.messages.replies import BoxState, PutBoxReply
from streams.protocol.messages.routers import RegisteredRouter, Route

log = structlog.get_logger()

#: How often the registry and the shards are asked for changes. The reply is a few bytes if nothing has
#: changed.
_RECONCILE_EVERY_S = 0.5
#: All routers in one reply: some 200 bytes each, so 2 MB at the default limit.
_ALL_ROUTERS = routers.ListRouters(limit=2**31)

_R = TypeVar("_R")
_encode_head = wire.head_encoder.encode


class RouterReconciler:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        #: Versions of the registry and of each shard's endpoints at the last complete pass; empty if none is.
        self._versions: list[int] = []

    def __repr__(self) -> str:
        return f"<RouterReconciler complete at {self._versions}>"

    # -- calls to shards

    async def _ask(self, shard: int, command: forwards.Command, reply: type[_R]) -> _R:
        message = await self._dispatch.links[shard].call(wire.OP_FORWARDING, forwards.encode(command), b"")
        return msgspec.msgpack.decode(message.body, type=reply)

    async def _ask_registry(self, command: routers.Command, reply: type[_R]) -> _R:
        return await self._ask(0, command, reply)

    async def _ask_owner(self, box: str, command: forwards.Command, reply: type[_R]) -> _R:
        return await self._ask(self._dispatch.placement.shard_of(box), command, reply)

    async def _call_box(self, op: int, box: str, query: str = "", account: str = "") -> wire.Message:
        return await self._dispatch.to_owner(op, wire.RequestHead(box, query, account=account), b"")

    # -- requests of the API

    async def put(
        self, name: str, route: Route, from_seq: int | None, account: str = ""
    ) -> routers.PutRouterResult:
        """Register a router and attach its endpoints. `account` is the key whose limits count for the router
        and for the boxes that it creates."""
        if not route.create_dest:
            await self._call_box(wire.OP_GET_STATE, route.dest, "touch=false")
        command = routers.PutRouter(name, route, from_seq, account)
        put = await self._ask_registry(command, routers.PutRouterResult)
        if put.previous is not None:
            await self._detach(put.previous)
        if not put.router.is_tied:
            try:
                await self._attach(put.router, account)
            except (Refused, Throttled):
                if put.created:  # a refused request changes nothing
                    await self.drop(put.router)
                raise
        return put

    async def get(self, name: str) -> RegisteredRouter | None:
        return (await self._ask_registry(routers.GetRouter(name), routers.GetRouterResult)).router

    async def state(self, router: RegisteredRouter) -> forwards.OutboxState:
        request = forwards.GetOutbox(router.route.source, router.origin)
        return await self._ask_owner(router.route.source, request, forwards.OutboxState)

    async def page(self, request: routers.ListRouters) -> routers.ListRoutersResult:
        return await self._ask_registry(request, routers.ListRoutersResult)

    async def drop(self, router: RegisteredRouter) -> None:
        """Delete a router. After this returns, it copies nothing more."""
        await self._detach_endpoint(router.route.source, router.origin)
        await self._ask_registry(routers.DropRouter(router.name, router.number), routers.GetRouterResult)
        await self._detach_endpoint(router.route.dest, router.origin)

    async def on_box_delete(self, origins: list[str]) -> None:
        """Drop the routers of a box that was deleted. If that fails, `run` does it later."""
        for name, number in filter(None, map(routers.router_of, origins)):
            try:
                drop = await self._ask_registry(routers.DropRouter(name, number), routers.GetRouterResult)
                if drop.router is not None:
                    await self._detach(drop.router)
            except StreamsError as error:
                log.info("router of a deleted box not dropped yet, retrying", router=name, error=error.code)

    # -- steps

    async def _attach(self, router: RegisteredRouter, account: str = "") -> None:
        """Create the boxes of a router and attach its endpoints. A refusal leaves no new box behind."""
        new_boxes: list[str] = []
        try:
            await self._create_boxes(router.route, new_boxes, account)
            await self._attach_endpoints(router)
        except (Refused, Throttled):
            for box in new_boxes:
                with suppress(StreamsError):
                    await self._call_box(wire.OP_DELETE_BOX, box, "if_empty=true")
            raise

    async def _create_boxes(self, route: Route, new_boxes: list[str], account: str) -> None:
        """Create the boxes that do not exist yet, and append their names to `new_boxes`."""
        if not route.create_dest:
            await self._call_box(wire.OP_GET_STATE, route.dest, "touch=false")
        for box in (route.dest, route.source) if route.create_dest else (route.source,):
            answer = await self._call_box(wire.OP_PUT_BOX, box, account=account)
            if msgspec.json.decode(answer.body, type=PutBoxReply).created:
                new_boxes.append(box)

    async def _attach_endpoints(self, router: RegisteredRouter) -> None:
        route, origin = router.route, router.origin
        message = await self._call_box(wire.OP_GET_STATE, route.source, "touch=false")
        source = msgspec.json.decode(message.body, type=BoxState)
        start = source.head_seq if router.from_seq is None else min(router.from_seq, source.head_seq)
        receiver = forwards.AttachEndpoint(
            box=route.dest, origin=origin, life=source.generation, position=start
        )
        # A receiver that is attached already replies with its own position, which counts.
        progress = await self._ask_owner(route.dest, receiver, forwards.AttachEndpointReply)
        sender = forwards.AttachEndpoint(
            box=route.source,
            origin=origin,
            life=progress.life,
            position=max(0, progress.position),
            route=route,
        )
        await self._ask_owner(route.source, sender, forwards.AttachEndpointReply)
        mark = routers.SettleRouter(router.name, router.number, route.revision)
        if (await self._ask_registry(mark, routers.GetRouterResult)).router is None:
            await self._detach(router)  # another request dropped it meanwhile

    async def _detach(self, router: RegisteredRouter) -> None:
        await self._detach_endpoint(router.route.source, router.origin)
        await self._detach_endpoint(router.route.dest, router.origin)

    async def _detach_endpoint(self, box: str, origin: str) -> None:
        await self._ask_owner(box, forwards.DetachEndpoint(box, origin), forwards.DetachEndpointReply)

    # -- reconciliation

    async def run(self) -> None:
        """Reconcile until cancelled. Runs in one gateway; the others only complete their own requests."""
        while True:
            try:
                await self._reconcile()
            except StreamsError as error:  # a shard is down: nothing is known about its endpoints
                log.debug("router reconciliation failed, retrying", error=error.code)
                self._versions = []
            await trio.sleep(_RECONCILE_EVERY_S)

    async def _reconcile(self) -> None:
        if await self._is_unchanged():
            return
        self._versions = []
        entries = await self._ask_registry(_ALL_ROUTERS, routers.ListRoutersResult)
        endpoints = [
            await self._ask(shard, forwards.ListEndpoints(), forwards.EndpointList)
            for shard in range(len(self._dispatch.links))
        ]
        sources = {endpoint for each in endpoints for endpoint in each.sources}
        dests = {endpoint for each in endpoints for endpoint in each.dests}
        is_complete = True
        for router in entries.routers:
            has_source = (router.route.source, router.origin) in sources
            has_dest = (router.route.dest, router.origin) in dests
            if not router.is_tied:
                is_complete = await self._try_attach(router) and is_complete
            elif not (has_source and has_dest):
                log.info("router dropped: its source or destination box was deleted", router=router.name)
                await self.drop(router)
        # Listed after the endpoints: an endpoint without an entry by now belongs to a dropped router.
        later = await self._ask_registry(_ALL_ROUTERS, routers.ListRoutersResult)
        origins = {router.origin for router in later.routers}
        for box, origin in sorted(sources | dests):
            if routers.router_of(origin) is not None and origin not in origins:
                await self._detach_endpoint(box, origin)
        if is_complete:
            self._versions = [entries.version, *(each.version for each in endpoints)]

    async def _is_unchanged(self) -> bool:
        """Return True if nothing has changed since the last complete pass. The replies are then tiny."""
        if not self._versions:
            return False
        registry, *shards = self._versions
        entries = await self._ask_registry(
            routers.ListRouters(limit=0, version=registry), routers.ListRoutersResult
        )
        endpoints = [
            await self._ask(shard, forwards.ListEndpoints(version), forwards.EndpointList)
            for shard, version in enumerate(shards)
        ]
        return entries.is_same and all(each.is_same for each in endpoints)

    async def _try_attach(self, router: RegisteredRouter) -> bool:
        """Return True if the router is attached now. Otherwise each pass tries again: its box may be created,
        or get room."""
        try:
            await self._attach(router)
        except (Refused, Throttled) as error:
            log.info("router not attached, retrying", router=router.name, error=error.message)
            return False
        return True
