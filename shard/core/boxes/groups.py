"""Groups: cursors of readers that want the box to remember their place (v0 §10).

A group is a name and a seq. It is as durable as a write to its box, ends with the box, and reads like any
other cursor: one below the floor is told of the loss. A conditional commit is told when it comes too late.

Rules of the file
- A cursor is a seq that readers can have seen: at most `visible_seq`.
- An answer that tells of a cursor waits until the commit behind it cannot vanish.
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import TYPE_CHECKING, NamedTuple

from sortedcontainers import SortedDict

from shard.core import changes
from shard.core.kernel import DoesNotApply
from streams.protocol.errors import GroupNotFound, InvalidRequest, SeqMismatch, Throttled
from streams.protocol.messages import queues

if TYPE_CHECKING:
    from shard.core.boxes.box import Box
    from shard.core.context import Context
    from shard.core.outcome import Made, Outcome

#: Groups of one box. About 200 bytes each, so that a runaway client costs 2 MB and is told.
GROUPS_MAX = 10_000


class Group(NamedTuple):
    cursor: int
    updated_ms: int
    lsn: int


#: The groups of a box that has none: shared, because most boxes have none and an empty table is 1.5 kB.
_NO_GROUPS: SortedDict[str, Group] = SortedDict()


class Groups:
    """The groups of one box, by name."""

    __slots__ = ("_by_name", "deleted_lsn")

    def __init__(self) -> None:
        self._by_name = _NO_GROUPS
        #: Where the last deletion is logged: what an answer rests on that says that a group is not there.
        self.deleted_lsn = 0

    def __repr__(self) -> str:
        return f"<Groups {list(self._by_name.items())}>"

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Group | None:
        group: Group | None = self._by_name.get(name)
        return group

    def items(self) -> ItemsView[str, Group]:
        """All groups, in no order: to walk them sorted costs three times as much."""
        return dict.items(self._by_name)

    def require(self, name: str, box: str) -> Group:
        group = self.find(name)
        if group is None:
            raise GroupNotFound(
                f"group {name} does not exist in {box}; create it with PUT /v0/boxes/{box}/groups/{name}",
                box=box,
                group=name,
            )
        return group

    def page(self, command: queues.ListGroups) -> tuple[list[tuple[str, Group]], bool]:
        """Names after `after` that start with `prefix`, and whether there are more than `limit` of them."""
        found: list[tuple[str, Group]] = []
        for name in self._by_name.irange(minimum=max(command.prefix, command.after)):
            if not name.startswith(command.prefix):
                break
            if name <= command.after:
                continue
            if len(found) == command.limit:
                return found, True
            found.append((name, self._by_name[name]))
        return found, False

    # -- applying

    def committed(self, change: changes.GroupCommitted, lsn: int) -> None:
        self._put(change.group, Group(change.cursor, change.at_ms, lsn))

    def _put(self, name: str, group: Group) -> None:
        if self._by_name is _NO_GROUPS:
            self._by_name = SortedDict()
        self._by_name[name] = group

    def deleted(self, change: changes.GroupDeleted, lsn: int) -> None:
        del self._by_name[change.group]
        self.deleted_lsn = lsn

    # -- snapshots

    def facts(self) -> list[tuple[str, int, int]]:
        return [(name, group.cursor, group.updated_ms) for name, group in self._by_name.items()]

    def restore(self, facts: list[tuple[str, int, int]]) -> None:
        for name, cursor, updated_ms in facts:
            self._put(name, Group(cursor, updated_ms, 0))


class GroupHandlers:
    """What the machine does with commands and changes of groups."""

    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_command(queues.CommitGroup, self._commit)
        context.on_command(queues.GetGroup, self._get)
        context.on_command(queues.ListGroups, self._list)
        context.on_command(queues.DeleteGroup, self._delete)
        context.on_box_change(changes.GroupCommitted, self._apply_committed)
        context.on_box_change(changes.GroupDeleted, self._apply_deleted, _require_group)

    def _commit(self, command: queues.CommitGroup, now_ms: int, made: Made) -> Outcome:
        context = self._context
        box = context.find_box(command.box, now_ms, made)
        groups = box.groups
        group = groups.find(command.group)
        at = group.cursor if group is not None else 0
        if command.if_cursor is not None and command.if_cursor != at:
            raise SeqMismatch(
                f"if_cursor: group {command.group} of {box.name} is at {at}, not {command.if_cursor}",
                cursor=at,
            )
        if command.cursor > box.log.visible_seq:
            raise InvalidRequest(
                f"cursor: {command.cursor} is beyond the head of {box.name}, {box.log.visible_seq}",
                field="cursor",
            )
        if group is None and len(groups) >= GROUPS_MAX:
            raise Throttled(f"{box.name} has {len(groups)} groups already; delete some", limit="groups")
        if group is None and command.account:
            context.usage.require(command.account, "groups")
        if group is None or group.cursor != command.cursor:
            change = changes.GroupCommitted(box.generation, command.group, command.cursor, now_ms)
            context.stage(change, box, made)
        committed = groups.require(command.group, box.name)
        shown = _shown(box, command.group, committed)
        reply = queues.GroupPut(
            shown.box, shown.group, shown.cursor, shown.lag, shown.updated_ts, group is None
        )
        return context.answer(box, reply, made, max(committed.lsn, box.config_lsn))

    def _get(self, command: queues.GetGroup, now_ms: int, made: Made) -> Outcome:
        box = self._context.find_box(command.box, now_ms, made)
        group = box.groups.require(command.group, box.name)
        reply = _shown(box, command.group, group)
        return self._context.answer(box, reply, made, max(group.lsn, box.floor_lsn))

    def _list(self, command: queues.ListGroups, now_ms: int, made: Made) -> Outcome:
        box = self._context.find_box(command.box, now_ms, made)
        found, more = box.groups.page(command)
        reply = queues.GroupPage([_shown(box, name, group) for name, group in found], more)
        lsns = [group.lsn for _, group in found]
        return self._context.answer(box, reply, made, max(box.floor_lsn, box.groups.deleted_lsn, *lsns, 0))

    def _delete(self, command: queues.DeleteGroup, now_ms: int, made: Made) -> Outcome:
        box = self._context.find_box(command.box, now_ms, made)
        is_there = box.groups.find(command.group) is not None
        if is_there:
            self._context.stage(changes.GroupDeleted(box.generation, command.group), box, made)
        reply = queues.GroupGone(box.name, command.group, is_there)
        return self._context.answer(box, reply, made, max(box.groups.deleted_lsn, box.config_lsn))

    def _apply_committed(self, change: changes.GroupCommitted, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.groups.committed(change, lsn)
        box.last_lsn = max(box.last_lsn, lsn)

    def _apply_deleted(self, change: changes.GroupDeleted, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.groups.deleted(change, lsn)
        box.last_lsn = max(box.last_lsn, lsn)


def _require_group(change: changes.GroupDeleted, box: Box) -> None:
    if box.groups.find(change.group) is None:
        raise DoesNotApply(f"box {box.name} has no group {change.group}")


def _shown(box: Box, name: str, group: Group) -> queues.GroupState:
    lag = box.log.visible_seq - group.cursor
    return queues.GroupState(box.name, name, group.cursor, lag, group.updated_ms)
