"""The register of routers and the graph they make: who exists, under which number, where a cycle would be.

One shard keeps it for the whole server (shard 0), so that a number, a limit and a cycle are decided one after
the other, whichever gateway asks. It knows definitions only: ties are at the boxes (`forwarding.py`).

Rules of the file
- A router is written down here before any end of it is tied, and an end that is tied for a router that is not
  written down here is a remnant, to be untied. So a crash is settled by comparing
  (`gateway/shards/router_reconciler.py`).
- Answers wait for the last change of the register, whatever they say: nobody learns of what may yet vanish.

Invariants
- GRAPH: `_dests` counts exactly the edges of `routers`.
- CYCLES: every cycle of the graph has a router in it that allows cycles.
"""

from __future__ import annotations

from collections import deque
from graphlib import TopologicalSorter

from msgspec.structs import replace
from sortedcontainers import SortedDict

from shard.core import changes
from shard.core.changes import ShardState
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome
from streams.protocol.errors import RouterCycle, StreamsError, Throttled
from streams.protocol.messages import routers as protocol
from streams.protocol.messages.routers import Route, Router


class Routers:
    def __init__(self, context: Context, routers_max: int) -> None:
        self._context = context
        context.on_check(self.check)
        context.on_snapshot(self._take_snapshot, self._restore)
        self._max = routers_max
        self.routers: SortedDict[str, Router] = SortedDict()
        self.last_number = 0
        #: source -> dest -> how many routers go that way.
        self._dests: dict[str, dict[str, int]] = {}
        #: The last change of the register, which is its version too.
        self.lsn = 0
        context.on_command(protocol.PutRouter, self._put)
        context.on_command(protocol.SettleRouter, self._settle)
        context.on_command(protocol.DropRouter, self._drop)
        context.on_command(protocol.GetRouter, self._get)
        context.on_command(protocol.ListRouters, self._list)
        context.on_change(changes.RouterRegistered, self._apply_registered)
        context.on_change(changes.RouterDropped, self._apply_dropped)

    def __repr__(self) -> str:
        return f"<Routers {len(self.routers)} up to number {self.last_number}>"

    # -- deciding

    def _put(self, command: protocol.PutRouter, now_ms: int, entries: LogEntries) -> Outcome:
        known: Router | None = self.routers.get(command.name)
        try:
            if known is None and self._max and len(self.routers) >= self._max:
                raise Throttled(
                    f"there are {len(self.routers)} routers already; delete some or raise the limit",
                    limit="routers",
                )
            if known is None and command.account:
                self._context.usage.require(command.account, "routers")
            if not command.route.allow_cycle:
                self._check_cycle(command.route, without=known)
        except StreamsError as error:
            return self._answer(entries, error)
        revision = self.last_number + 1
        router = Router(
            name=command.name,
            number=revision,
            route=replace(command.route, revision=revision),
            from_seq=command.from_seq,
        )
        if known is not None and _ends(known.route) == _ends(command.route):
            if replace(command.route, revision=known.route.revision) == known.route:
                return self._answer(entries, protocol.PutRouterResult(known, False, None))
            # Another definition of the same router: it goes on where it stands.
            router = replace(router, number=known.number, from_seq=known.from_seq)
            self._context.log(changes.RouterRegistered(router), entries)
            return self._answer(entries, protocol.PutRouterResult(router, False, None))
        self._context.log(changes.RouterRegistered(router), entries)
        return self._answer(entries, protocol.PutRouterResult(router, known is None, known))

    def _check_cycle(self, route: Route, *, without: Router | None) -> None:
        path = self._path(route.dest, route.source, without=_ends(without.route) if without else None)
        if path is not None:
            cycle = [route.source, *path]
            raise RouterCycle(
                f"copies would go round in a circle: {' -> '.join(cycle)}; allow_cycle permits that",
                cycle=cycle,
            )

    def _path(self, start: str, end: str, *, without: tuple[str, str] | None) -> list[str] | None:
        """The shortest way from box to box along routers; None when there is none."""
        came_from = {start: start}
        queue = deque([start])
        while queue:
            box = queue.popleft()
            if box == end:
                path = [box]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            for dest, count in self._dests.get(box, {}).items():
                if dest not in came_from and not ((box, dest) == without and count == 1):
                    came_from[dest] = box
                    queue.append(dest)
        return None

    def _settle(self, command: protocol.SettleRouter, now_ms: int, entries: LogEntries) -> Outcome:
        router = self._numbered(command.name, command.number)
        if router is not None and router.route.revision == command.revision and not router.is_tied:
            router = replace(router, is_tied=True, from_seq=None)
            self._context.log(changes.RouterRegistered(router), entries)
        return self._answer(entries, protocol.GetRouterResult(router))

    def _drop(self, command: protocol.DropRouter, now_ms: int, entries: LogEntries) -> Outcome:
        router = self._numbered(command.name, command.number)
        if router is not None:
            self._context.log(changes.RouterDropped(command.name), entries)
        return self._answer(entries, protocol.GetRouterResult(router))

    def _get(self, command: protocol.GetRouter, now_ms: int, entries: LogEntries) -> Outcome:
        return self._answer(entries, protocol.GetRouterResult(self.routers.get(command.name)))

    def _list(self, command: protocol.ListRouters, now_ms: int, entries: LogEntries) -> Outcome:
        if command.version == self.lsn:
            return self._answer(entries, protocol.RouterPage(self.lsn, True, [], False))
        page: list[Router] = []
        more = False
        for name in self.routers.irange(minimum=max(command.prefix, command.after)):
            if not name.startswith(command.prefix):
                break
            router = self.routers[name]
            if name <= command.after or not _matches(router.route, command):
                continue
            if len(page) == command.limit:
                more = True
                break
            page.append(router)
        return self._answer(entries, protocol.RouterPage(self.lsn, False, page, more))

    def _numbered(self, name: str, number: int) -> Router | None:
        router: Router | None = self.routers.get(name)
        return router if router is not None and router.number == number else None

    def _answer(self, entries: LogEntries, reply: protocol.Reply | StreamsError) -> Outcome:
        return self._context.when_registered(reply, self.lsn, entries)

    # -- applying

    def _apply_registered(self, change: changes.RouterRegistered, lsn: int) -> None:
        router = change.router
        self._forget(router.name)
        self._add(router)
        self.last_number = max(self.last_number, router.number, router.route.revision)
        self.lsn = lsn

    def _apply_dropped(self, change: changes.RouterDropped, lsn: int) -> None:
        self._forget(change.name)
        self.lsn = lsn

    def _take_snapshot(self, state: ShardState) -> None:
        state.routers = list(self.routers.values())
        state.last_router_number = self.last_number

    def _restore(self, state: ShardState) -> None:
        for router in state.routers:
            self._add(router)
        self.last_number = state.last_router_number

    def _add(self, router: Router) -> None:
        self.routers[router.name] = router
        ways = self._dests.setdefault(router.route.source, {})
        ways[router.route.dest] = ways.get(router.route.dest, 0) + 1

    def _forget(self, name: str) -> None:
        router = self.routers.pop(name, None)
        if router is None:
            return
        ways = self._dests[router.route.source]
        ways[router.route.dest] -= 1
        if not ways[router.route.dest]:
            del ways[router.route.dest]
        if not ways:
            del self._dests[router.route.source]

    def check(self) -> None:
        """Asserts the invariants named above. For tests."""
        edges: dict[str, dict[str, int]] = {}
        for router in self.routers.values():
            ways = edges.setdefault(router.route.source, {})
            ways[router.route.dest] = ways.get(router.route.dest, 0) + 1
        assert edges == self._dests, "GRAPH"
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for router in self.routers.values():
            if not router.route.allow_cycle:
                sorter.add(router.route.dest, router.route.source)
        sorter.prepare()  # raises CycleError: "CYCLES"


def _ends(route: Route) -> tuple[str, str]:
    return route.source, route.dest


def _matches(route: Route, command: protocol.ListRouters) -> bool:
    return command.source in ("", route.source) and command.dest in ("", route.dest)
