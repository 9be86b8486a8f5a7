"""Handles commands of groups, and applies their changes. `groups.py` defines a group."""

from __future__ import annotations

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.groups import GROUPS_MAX, Group
from shard.core.context import Context
from shard.core.kernel import DoesNotApply
from shard.core.outcome import LogEntries, Outcome
from streams.protocol.errors import InvalidRequest, SeqMismatch, Throttled
from streams.protocol.messages import queues


class GroupHandlers:
    """Registers the handlers and appliers of groups."""

    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_command(queues.CommitGroup, self._commit)
        context.on_command(queues.GetGroup, self._get)
        context.on_command(queues.ListGroups, self._list)
        context.on_command(queues.DeleteGroup, self._delete)
        context.on_box_change(changes.GroupCommitted, self._apply_committed)
        context.on_box_change(changes.GroupDeleted, self._apply_deleted, _require_group)

    def _commit(self, command: queues.CommitGroup, now_ms: int, entries: LogEntries) -> Outcome:
        context = self._context
        box = context.find_box(command.box, now_ms, entries)
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
            raise Throttled(
                f"{box.name} has {len(groups)} groups, which is the limit; delete some", limit="groups"
            )
        if group is None and command.account:
            context.usage.require(command.account, "groups")
        if group is None or group.cursor != command.cursor:
            change = changes.GroupCommitted(box.generation, command.group, command.cursor, now_ms)
            context.stage(change, box, entries)
        existing_group = groups.require(command.group, box.name)
        state = _state_of(box, command.group, existing_group)
        reply = queues.CommitGroupReply(
            state.box, state.group, state.cursor, state.lag, state.updated_ts, group is None
        )
        return context.answer(box, reply, entries, max(existing_group.lsn, box.config_lsn))

    def _get(self, command: queues.GetGroup, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        group = box.groups.require(command.group, box.name)
        reply = _state_of(box, command.group, group)
        return self._context.answer(box, reply, entries, max(group.lsn, box.floor_lsn))

    def _list(self, command: queues.ListGroups, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        groups, more = box.groups.page(command)
        reply = queues.ListGroupsResult([_state_of(box, name, group) for name, group in groups], more)
        lsns = [group.lsn for _, group in groups]
        return self._context.answer(box, reply, entries, max(box.floor_lsn, box.groups.deleted_lsn, *lsns, 0))

    def _delete(self, command: queues.DeleteGroup, now_ms: int, entries: LogEntries) -> Outcome:
        box = self._context.find_box(command.box, now_ms, entries)
        is_there = box.groups.find(command.group) is not None
        if is_there:
            self._context.stage(changes.GroupDeleted(box.generation, command.group), box, entries)
        reply = queues.DeleteGroupReply(box.name, command.group, is_there)
        return self._context.answer(box, reply, entries, max(box.groups.deleted_lsn, box.config_lsn))

    def _apply_committed(self, change: changes.GroupCommitted, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.groups.apply_commit(change, lsn)
        box.last_lsn = max(box.last_lsn, lsn)

    def _apply_deleted(self, change: changes.GroupDeleted, lsn: int) -> None:
        box = self._context.generations[change.generation]
        box.groups.apply_deletion(change, lsn)
        box.last_lsn = max(box.last_lsn, lsn)


def _require_group(change: changes.GroupDeleted, box: Box) -> None:
    if box.groups.find(change.group) is None:
        raise DoesNotApply(f"box {box.name} has no group {change.group}")


def _state_of(box: Box, name: str, group: Group) -> queues.GroupState:
    lag = box.log.visible_seq - group.cursor
    return queues.GroupState(box.name, name, group.cursor, lag, group.updated_ms)
