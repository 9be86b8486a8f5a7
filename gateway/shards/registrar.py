"""Makes routers true: ties both ends of a registered one, unties what is not registered any more.

    register (shard 0)    the truth: which routers there are, each with its number
    ties (at the boxes)   what the shards act on: an outbox at the source, an origin at the destination

Order makes it safe. A router is registered before an end of it is tied, so an end without an entry is a
remnant and is untied. It is marked as tied after both ends are, so an entry so marked that lacks an end has
lost a box and is dropped. An entry not so marked is tied (again). Every step can be repeated, so whoever is
killed between two of them leaves something that the next comparison settles; `run` compares whenever
something has changed.

    put      register ─► destination tied ─► source tied ─► marked
    delete   source untied ─► dropped ─► destination untied
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
from streams.protocol.messages.routers import Route, Router

log = structlog.get_logger()

#: How often the registers are asked whether anything has changed. The answer is a few bytes when nothing has.
_COMPARE_EVERY_S = 0.5
#: All routers in one answer: some 200 bytes each, so 2 MB at the default limit.
_EVERYTHING = routers.ListRouters(limit=2**31)

_R = TypeVar("_R")
_encode_head = wire.head_encoder.encode


class _BoxState(msgspec.Struct):
    generation: int
    head_seq: int


class _BoxPut(msgspec.Struct):
    created: bool


class Registrar:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        #: What the register and each shard had when they last agreed.
        self._versions: list[int] = []

    def __repr__(self) -> str:
        return f"<Registrar agreed at {self._versions}>"

    # -- asking

    async def _ask(self, shard: int, command: forwards.Command, reply: type[_R]) -> _R:
        message = await self._dispatch.links[shard].call(wire.OP_FORWARDING, forwards.encode(command), b"")
        return msgspec.msgpack.decode(message.body, type=reply)

    async def _ask_register(self, command: routers.Command, reply: type[_R]) -> _R:
        return await self._ask(0, command, reply)

    async def _ask_owner(self, box: str, command: forwards.Command, reply: type[_R]) -> _R:
        return await self._ask(self._dispatch.placement.shard_of(box), command, reply)

    async def _call_box(self, op: int, box: str, query: str = "", account: str = "") -> wire.Message:
        return await self._dispatch.to_owner(op, wire.RequestHead(box, query, account=account), b"")

    # -- what the API asks for

    async def put(
        self, name: str, route: Route, from_seq: int | None, account: str = ""
    ) -> routers.RouterPut:
        """`account` is the key whose limits count for the router and the boxes that it needs."""
        if not route.create_dest:
            await self._call_box(wire.OP_GET_STATE, route.dest, "touch=false")
        command = routers.PutRouter(name, route, from_seq, account)
        put = await self._ask_register(command, routers.RouterPut)
        if put.replaced is not None:
            await self._untie(put.replaced)
        if not put.router.is_tied:
            try:
                await self._tie(put.router, account)
            except (Refused, Throttled):
                if put.created:  # a refused request changes nothing
                    await self.drop(put.router)
                raise
        return put

    async def get(self, name: str) -> Router | None:
        return (await self._ask_register(routers.GetRouter(name), routers.RouterFound)).router

    async def state(self, router: Router) -> forwards.OutboxState:
        question = forwards.GetOutbox(router.route.source, router.origin)
        return await self._ask_owner(router.route.source, question, forwards.OutboxState)

    async def page(self, question: routers.ListRouters) -> routers.RouterPage:
        return await self._ask_register(question, routers.RouterPage)

    async def drop(self, router: Router) -> None:
        """Ends a router. When this returns, no copy is made any more."""
        await self._untie_end(router.route.source, router.origin)
        await self._ask_register(routers.DropRouter(router.name, router.number), routers.RouterFound)
        await self._untie_end(router.route.dest, router.origin)

    async def box_deleted(self, origins: list[str]) -> None:
        """Its routers have lost an end, and are dropped. Should that fail, `run` does it later."""
        for name, number in filter(None, map(routers.router_of, origins)):
            try:
                gone = await self._ask_register(routers.DropRouter(name, number), routers.RouterFound)
                if gone.router is not None:
                    await self._untie(gone.router)
            except StreamsError as error:
                log.info("a router of a deleted box is dropped later", router=name, error=error.code)

    # -- steps

    async def _tie(self, router: Router, account: str = "") -> None:
        made: list[str] = []
        try:
            await self._make_boxes(router.route, made, account)
            await self._tie_ends(router)
        except (Refused, Throttled):
            for box in made:
                with suppress(StreamsError):
                    await self._call_box(wire.OP_DELETE_BOX, box, "if_empty=true")
            raise

    async def _make_boxes(self, route: Route, made: list[str], account: str) -> None:
        """Sees to it that both are there. `made` gets the names of those that were not."""
        if not route.create_dest:
            await self._call_box(wire.OP_GET_STATE, route.dest, "touch=false")
        for box in (route.dest, route.source) if route.create_dest else (route.source,):
            answer = await self._call_box(wire.OP_PUT_BOX, box, account=account)
            if msgspec.json.decode(answer.body, type=_BoxPut).created:
                made.append(box)

    async def _tie_ends(self, router: Router) -> None:
        route, origin = router.route, router.origin
        message = await self._call_box(wire.OP_GET_STATE, route.source, "touch=false")
        source = msgspec.json.decode(message.body, type=_BoxState)
        start = source.head_seq if router.from_seq is None else min(router.from_seq, source.head_seq)
        end = forwards.Tie(box=route.dest, origin=origin, life=source.generation, position=start)
        # An end that is tied already has the position that counts.
        tied = await self._ask_owner(route.dest, end, forwards.Tied)
        begin = forwards.Tie(
            box=route.source, origin=origin, life=tied.life, position=max(0, tied.position), route=route
        )
        await self._ask_owner(route.source, begin, forwards.Tied)
        settle = routers.SettleRouter(router.name, router.number, route.revision)
        if (await self._ask_register(settle, routers.RouterFound)).router is None:
            await self._untie(router)  # somebody dropped it meanwhile

    async def _untie(self, router: Router) -> None:
        await self._untie_end(router.route.source, router.origin)
        await self._untie_end(router.route.dest, router.origin)

    async def _untie_end(self, box: str, origin: str) -> None:
        await self._ask_owner(box, forwards.Untie(box, origin), forwards.Untied)

    # -- comparing

    async def run(self) -> None:
        """Compares, for ever. Runs in one gateway; the others settle their own requests."""
        while True:
            try:
                await self._compare()
            except StreamsError as error:  # a shard is away: what it holds cannot be judged
                log.debug("routers not compared", error=error.code)
                self._versions = []
            await trio.sleep(_COMPARE_EVERY_S)

    async def _compare(self) -> None:
        if await self._is_unchanged():
            return
        self._versions = []
        entries = await self._ask_register(_EVERYTHING, routers.RouterPage)
        ties = [
            await self._ask(shard, forwards.ListTies(), forwards.Ties)
            for shard in range(len(self._dispatch.links))
        ]
        sources = {end for each in ties for end in each.sources}
        dests = {end for each in ties for end in each.dests}
        is_settled = True
        for router in entries.routers:
            has_source = (router.route.source, router.origin) in sources
            has_dest = (router.route.dest, router.origin) in dests
            if not router.is_tied:
                is_settled = await self._try_tie(router) and is_settled
            elif not (has_source and has_dest):
                log.info("a router has lost a box and is dropped", router=router.name)
                await self.drop(router)
        # Asked after the ties: what is tied and not registered by now was dropped, however long ago.
        later = await self._ask_register(_EVERYTHING, routers.RouterPage)
        registered = {router.origin for router in later.routers}
        for box, origin in sorted(sources | dests):
            if routers.router_of(origin) is not None and origin not in registered:
                await self._untie_end(box, origin)
        if is_settled:
            self._versions = [entries.version, *(each.version for each in ties)]

    async def _is_unchanged(self) -> bool:
        """Whether nothing has moved since everything last agreed. The answers are a few bytes then."""
        if not self._versions:
            return False
        register, *shards = self._versions
        asked = await self._ask_register(routers.ListRouters(limit=0, version=register), routers.RouterPage)
        ties = [
            await self._ask(shard, forwards.ListTies(version), forwards.Ties)
            for shard, version in enumerate(shards)
        ]
        return asked.is_same and all(each.is_same for each in ties)

    async def _try_tie(self, router: Router) -> bool:
        """Whether it is tied. If not, its box may come, or room for it: it is tried at every comparison."""
        try:
            await self._tie(router)
        except (Refused, Throttled) as error:
            log.info("a router cannot be tied", router=router.name, error=error.message)
            return False
        return True
