"""The registry of routers and their graph: assigns numbers, enforces the limit and rejects cycles.

Shard 0 stores it for the whole server, so numbers, the limit and cycles are decided in one order for all
gateways. It holds definitions only: endpoints are at the boxes (`forwarding.py`).

Rules of the file
- A router is registered before its endpoints are attached. An endpoint of an unregistered router is a
  remnant, which `gateway/shards/router_reconciler.py` detaches: so it repairs a crash by comparison.
- Every reply waits for the last change of the registry: no client learns of a change that a crash can undo.

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
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import RouterCycle, StreamsError, Throttled
from streams.protocol.messages import routers as protocol
from streams.protocol.messages.routers import RegisteredRouter, Route


class Routers:
    """The registered routers, and the commands and changes of the registry."""

    def __init__(self, context: Context, routers_max: int) -> None:
        self._context = context
        context.on_check(self.check)
        context.on_snapshot(self._take_snapshot, self._restore)
        self._max = routers_max
        self.routers: SortedDict[str, RegisteredRouter] = SortedDict()
        self.last_number = 0
        #: source -> dest -> number of routers.
        self._dests: dict[str, dict[str, int]] = {}
        #: The lsn of the last change of the registry; it is the version of `ListRoutersResult` too.
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
        current: RegisteredRouter | None = self.routers.get(command.name)
        try:
            if current is None and self._max and len(self.routers) >= self._max:
                raise Throttled(
                    f"there are {len(self.routers)} routers, which is the limit; delete some "
                    "or raise STREAMS_MAX_ROUTERS",
                    limit="routers",
                )
            if current is None and command.account:
                self._context.usage.require(command.account, "routers")
            if not command.route.allow_cycle:
                self._check_cycle(command.route, without=current)
        except StreamsError as error:
            return self._answer(entries, error)
        revision = self.last_number + 1
        router = RegisteredRouter(
            name=command.name,
            number=revision,
            route=replace(command.route, revision=revision),
            from_seq=command.from_seq,
        )
        if current is not None and _ends(current.route) == _ends(command.route):
            if replace(command.route, revision=current.route.revision) == current.route:
                return self._answer(entries, protocol.PutRouterResult(current, False, None))
            # A new definition of an existing router: it continues from its position.
            router = replace(router, number=current.number, from_seq=current.from_seq)
            self._context.log(changes.RouterRegistered(router), entries)
            return self._answer(entries, protocol.PutRouterResult(router, False, None))
        self._context.log(changes.RouterRegistered(router), entries)
        return self._answer(entries, protocol.PutRouterResult(router, current is None, current))

    def _check_cycle(self, route: Route, *, without: RegisteredRouter | None) -> None:
        path = self._path(route.dest, route.source, without=_ends(without.route) if without else None)
        if path is not None:
            cycle = [route.source, *path]
            raise RouterCycle(
                f"the router would close a cycle: {' -> '.join(cycle)}; set allow_cycle to permit it",
                cycle=cycle,
            )

    def _path(self, start: str, end: str, *, without: tuple[str, str] | None) -> list[str] | None:
        """Return the shortest path between two boxes along routers; None when there is none."""
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
        router = self._find(command.name, command.number)
        if router is not None and router.route.revision == command.revision and not router.is_tied:
            router = replace(router, is_tied=True, from_seq=None)
            self._context.log(changes.RouterRegistered(router), entries)
        return self._answer(entries, protocol.GetRouterResult(router))

    def _drop(self, command: protocol.DropRouter, now_ms: int, entries: LogEntries) -> Outcome:
        router = self._find(command.name, command.number)
        if router is not None:
            self._context.log(changes.RouterDropped(command.name), entries)
        return self._answer(entries, protocol.GetRouterResult(router))

    def _get(self, command: protocol.GetRouter, now_ms: int, entries: LogEntries) -> Outcome:
        return self._answer(entries, protocol.GetRouterResult(self.routers.get(command.name)))

    def _list(self, command: protocol.ListRouters, now_ms: int, entries: LogEntries) -> Outcome:
        if command.version == self.lsn:
            return self._answer(entries, protocol.ListRoutersResult(self.lsn, True, [], False))
        page: list[RegisteredRouter] = []
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
        return self._answer(entries, protocol.ListRoutersResult(self.lsn, False, page, more))

    def _find(self, name: str, number: int) -> RegisteredRouter | None:
        router: RegisteredRouter | None = self.routers.get(name)
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

    def _add(self, router: RegisteredRouter) -> None:
        self.routers[router.name] = router
        counts = self._dests.setdefault(router.route.source, {})
        counts[router.route.dest] = counts.get(router.route.dest, 0) + 1

    def _forget(self, name: str) -> None:
        router = self.routers.pop(name, None)
        if router is None:
            return
        counts = self._dests[router.route.source]
        counts[router.route.dest] -= 1
        if not counts[router.route.dest]:
            del counts[router.route.dest]
        if not counts:
            del self._dests[router.route.source]

    def check(self) -> None:
        """Asserts the invariants named above. For tests."""
        edges: dict[str, dict[str, int]] = {}
        for router in self.routers.values():
            counts = edges.setdefault(router.route.source, {})
            counts[router.route.dest] = counts.get(router.route.dest, 0) + 1
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
