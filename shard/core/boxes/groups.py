"""Groups: cursors of readers that want the box to remember their place (v0 §10).

A group is a name and a seq. It is as durable as a write to its box, ends with the box, and reads like any
other cursor: one below the floor gets a tombstone. A conditional commit that comes too late is rejected.

Rules of the file
- A cursor is a seq that readers can have seen: at most `visible_seq`.
- An answer that shows a cursor waits until the commit behind it cannot vanish.
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import NamedTuple

from sortedcontainers import SortedDict

from shard.core import changes
from streams.protocol.errors import GroupNotFound
from streams.protocol.messages import queues

#: Groups of one box. About 200 bytes each, so that a runaway client gets an error after 2 MB.
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
        groups: list[tuple[str, Group]] = []
        for name in self._by_name.irange(minimum=max(command.prefix, command.after)):
            if not name.startswith(command.prefix):
                break
            if name <= command.after:
                continue
            if len(groups) == command.limit:
                return groups, True
            groups.append((name, self._by_name[name]))
        return groups, False

    # -- applying

    def apply_commit(self, change: changes.GroupCommitted, lsn: int) -> None:
        self._put(change.group, Group(change.cursor, change.at_ms, lsn))

    def _put(self, name: str, group: Group) -> None:
        if self._by_name is _NO_GROUPS:
            self._by_name = SortedDict()
        self._by_name[name] = group

    def apply_deletion(self, change: changes.GroupDeleted, lsn: int) -> None:
        del self._by_name[change.group]
        self.deleted_lsn = lsn

    # -- snapshots

    def facts(self) -> list[tuple[str, int, int]]:
        return [(name, group.cursor, group.updated_ms) for name, group in self._by_name.items()]

    def restore(self, facts: list[tuple[str, int, int]]) -> None:
        for name, cursor, updated_ms in facts:
            self._put(name, Group(cursor, updated_ms, 0))
