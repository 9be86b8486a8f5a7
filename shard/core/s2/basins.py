"""The registry of basins and of the default config of their streams (s2 §8).

Shard 0 keeps it for the whole server. It does not list streams: those are boxes on any shard, and each stores
the number of its basin.

Rules of the file
- A basin is registered before its first stream is created, and is removed after its last stream. A stream of
  an unregistered basin is a remnant, which `gateway/s2/housekeeping.py` deletes.
- Every reply waits until the last change of the registry is durable: no client sees a change that a crash can
  undo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from sortedcontainers import SortedDict

from shard.core import changes
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome
from shard.core.snapshot_facts import ShardState
from streams.protocol.errors import (
    BasinDeletionPending,
    BasinNotFound,
    Forbidden,
    ResourceAlreadyExists,
    StreamsError,
    Throttled,
)
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import Basin

#: A basin costs about a kilobyte here, and all of them are in every snapshot of the first shard.
BASINS_MAX = 10_000


class Basins:
    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_check(self.check)
        context.on_snapshot(self._take_snapshot, self._restore)
        self.basins: SortedDict[str, Basin] = SortedDict()
        self.last_number = 0
        #: The last change of the register.
        self.lsn = 0
        context.on_command(s2.PutBasin, self._refusing(self._put))
        context.on_command(s2.PatchBasin, self._refusing(self._patch))
        context.on_command(s2.GetBasin, self._get)
        context.on_command(s2.ListBasins, self._list)
        context.on_command(s2.DeleteBasin, self._refusing(self._delete))
        context.on_command(s2.DropBasin, self._drop)
        context.on_change(changes.BasinRegistered, self._apply_registered)
        context.on_change(changes.BasinDropped, self._apply_dropped)

    def __repr__(self) -> str:
        return f"<Basins {len(self.basins)} up to number {self.last_number}>"

    def count(self, prefixes: tuple[str, ...]) -> int:
        """Return the number of basins under these prefixes: a basin counts as the name before its slash."""
        if not prefixes:
            return len(self.basins)
        total = 0
        for prefix in prefixes:
            basin, slash, stream = prefix.partition("/")
            if slash:
                total += not stream and basin in self.basins
            else:
                after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
                total += self.basins.bisect_left(after) - self.basins.bisect_left(prefix)
        return total

    # -- deciding

    def _refusing(
        self, handle: Callable[[Any, int, LogEntries], Outcome]
    ) -> Callable[[Any, int, LogEntries], Outcome]:
        """Wrap a handler: its errors depend on the registry too, so they wait like any reply."""

        def handle_or_refuse(command: Any, now_ms: int, entries: LogEntries) -> Outcome:
            try:
                return handle(command, now_ms, entries)
            except StreamsError as error:
                return self._answer(entries, error.with_traceback(None))

        return handle_or_refuse

    def _require(self, name: str) -> Basin:
        basin: Basin | None = self.basins.get(name)
        if basin is None:
            raise BasinNotFound(f"basin {name} does not exist", basin=name)
        return basin

    def _put(self, command: s2.PutBasin, now_ms: int, entries: LogEntries) -> Outcome:
        existing: Basin | None = self.basins.get(command.name)
        if existing is None:
            if len(self.basins) >= BASINS_MAX:
                raise Throttled(f"there are {len(self.basins)} basins already; delete some", limit="basins")
            if command.account:
                self._context.usage.require(command.account, "boxes")
            basin = Basin(
                name=command.name,
                number=self.last_number + 1,
                config=command.config,
                created_ms=now_ms,
                token=command.token,
                asked=command.config,
            )
            return self._register(basin, "created", entries)
        if existing.deleted_ms:
            raise BasinDeletionPending(f"basin {command.name} is being deleted", basin=command.name)
        if command.ensures:
            if existing.config == command.config:
                return self._answer(entries, s2.PutBasinReply(existing, "noop"))
            if not command.may_update:
                raise Forbidden(
                    f"basin {command.name} exists with another config, which the caller may not change"
                )
            return self._register(replace(existing, config=command.config), "updated", entries)
        if not command.token or (command.token, command.config) != (existing.token, existing.asked):
            raise ResourceAlreadyExists(f"basin {command.name} already exists", basin=command.name)
        return self._answer(entries, s2.PutBasinReply(existing, "noop"))

    def _register(self, basin: Basin, result: s2.Result, entries: LogEntries) -> Outcome:
        self._context.log(changes.BasinRegistered(basin), entries)
        return self._answer(entries, s2.PutBasinReply(basin, result))

    def _patch(self, command: s2.PatchBasin, now_ms: int, entries: LogEntries) -> Outcome:
        basin = self._require(command.name)
        if basin.deleted_ms:
            raise BasinDeletionPending(f"basin {basin.name} is being deleted", basin=basin.name)
        config = command.patch.apply(basin.config)
        if config != basin.config:
            basin = replace(basin, config=config)
            self._context.log(changes.BasinRegistered(basin), entries)
        return self._answer(entries, s2.GetBasinReply(basin))

    def _get(self, command: s2.GetBasin, now_ms: int, entries: LogEntries) -> Outcome:
        return self._answer(entries, s2.GetBasinReply(self.basins.get(command.name)))

    def _list(self, command: s2.ListBasins, now_ms: int, entries: LogEntries) -> Outcome:
        page: list[Basin] = []
        more = False
        for name in self.basins.irange(minimum=max(command.prefix, command.after)):
            if not name.startswith(command.prefix):
                break
            if len(page) == command.limit:
                more = True
                break
            basin = self.basins[name]
            if name > command.after and (basin.deleted_ms or not command.deleted):
                page.append(basin)
        return self._answer(entries, s2.BasinPage(page, more))

    def _delete(self, command: s2.DeleteBasin, now_ms: int, entries: LogEntries) -> Outcome:
        basin = self._require(command.name)
        if not basin.deleted_ms:
            basin = replace(basin, deleted_ms=now_ms)
            self._context.log(changes.BasinRegistered(basin), entries)
        return self._answer(entries, s2.GetBasinReply(basin))

    def _drop(self, command: s2.DropBasin, now_ms: int, entries: LogEntries) -> Outcome:
        basin: Basin | None = self.basins.get(command.name)
        if basin is None or basin.number != command.number or not basin.deleted_ms:
            return self._answer(entries, s2.GetBasinReply(None))
        self._context.log(changes.BasinDropped(command.name), entries)
        return self._answer(entries, s2.GetBasinReply(basin))

    def _answer(self, entries: LogEntries, reply: s2.Reply | StreamsError) -> Outcome:
        return self._context.when_registered(reply, self.lsn, entries)

    # -- applying

    def _apply_registered(self, change: changes.BasinRegistered, lsn: int) -> None:
        self.basins[change.basin.name] = change.basin
        self.last_number = max(self.last_number, change.basin.number)
        self.lsn = lsn

    def _apply_dropped(self, change: changes.BasinDropped, lsn: int) -> None:
        self.basins.pop(change.name, None)
        self.lsn = lsn

    def _take_snapshot(self, state: ShardState) -> None:
        state.basins = list(self.basins.values())
        state.last_basin_number = self.last_number

    def _restore(self, state: ShardState) -> None:
        for basin in state.basins:
            self.basins[basin.name] = basin
        self.last_number = state.last_basin_number

    def check(self) -> None:
        """Asserts BASINS: each basin has its own number, and none above the last one given. For tests."""
        numbers = [basin.number for basin in self.basins.values()]
        assert len(set(numbers)) == len(numbers), "BASINS"
        assert max(numbers, default=0) <= self.last_number, "BASINS"
        assert all(basin.name == name for name, basin in self.basins.items()), "BASINS"
