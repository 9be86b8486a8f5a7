"""Counts the usage of keys in this shard and enforces their limits (v0 §12).

An account is a key with limits. Its usage in this shard is exact at any time; its usage in other shards is
the last report of a gateway, about a second old (`elsewhere`). A command that would exceed a limit is refused
where it would create something. So with one shard limits are exact; with several, a key can exceed a limit by
the amount that it creates in other shards within that second.

    boxes, routers         names under the prefixes, counted by two bisections at each query
    bytes, groups, keys    a sum for each account, corrected after every change of a box (`note`)
    sessions, txn_bytes    counted where they are stored, by their key

Rules of the file
- Nothing here is logged or stored, and no change depends on it: the shard counts again after each start.
- A shard whose keys have no limits pays one test for each change (`is_on`).

Bounds: an account for each key, at most `KEYS_MAX`; a small entry for each box while there are accounts.

Invariant
- SUMS: when `is_counted`, the sums of an account are those of the boxes under its prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from shard.core.boxes.box import Box
from shard.core.changes import Change, TxnCommitted
from shard.core.context import Context
from streams.protocol.access.grants import Grant
from streams.protocol.access.key_limits import STORED, Limits, Use, limit_exceeded_error
from streams.protocol.access.keys import Key


class Account:
    """A key with limits, and its usage of boxes in this shard."""

    __slots__ = ("elsewhere", "groups", "id", "idempotency_keys", "limits", "prefixes", "stored_bytes")

    def __init__(self, id: str, prefixes: tuple[str, ...], limits: Limits) -> None:
        self.id = id
        #: None of them begins with another one.
        self.prefixes = prefixes
        self.limits = limits
        self.elsewhere = Use()
        self.stored_bytes = 0
        self.groups = 0
        self.idempotency_keys = 0

    def __repr__(self) -> str:
        return f"<Account {self.id}, {self.stored_bytes} B>"


class _Entry:
    """A box as it is counted in its accounts."""

    __slots__ = ("accounts", "bytes", "groups", "keys")

    def __init__(self, accounts: list[Account]) -> None:
        self.accounts = accounts
        self.bytes = 0
        self.groups = 0
        self.keys = 0


#: The entry of every box that no account covers.
_UNCOVERED = _Entry([])


class Usage:
    def __init__(self, context: Context) -> None:
        self._context = context
        context.on_check(self.check)
        self.accounts: dict[str, Account] = {}
        #: True while changes of boxes have to be noted.
        self.is_on = False
        #: True when every box is in the sums.
        self.is_counted = True
        #: Boxes up to this name are in the sums.
        self._counted_name = ""
        #: By generation.
        self._entries: dict[int, _Entry] = {}
        #: Accounts by prefix, and the lengths that prefixes have.
        self._by_prefix: dict[str, list[Account]] = {}
        self._lengths: list[int] = []

    def __repr__(self) -> str:
        return f"<Usage of {len(self.accounts)} accounts in {len(self._entries)} boxes>"

    # -- accounts

    def set_accounts(self, keys: Iterable[Key]) -> None:
        """Replaces the accounts. Unless only limits have changed, `step` has to count the boxes again."""
        old = self.accounts
        new = {key.account: Account(key.account, _disjoint(key.grant), key.limits) for key in keys}
        if {id: each.prefixes for id, each in new.items()} == {id: each.prefixes for id, each in old.items()}:
            for id, account in old.items():
                account.limits = new[id].limits
            return
        for id in new.keys() & old.keys():
            new[id].elsewhere = old[id].elsewhere
        self.accounts = new
        self._entries = {}
        self._by_prefix = {}
        for account in self.accounts.values():
            for prefix in account.prefixes or ("",):
                self._by_prefix.setdefault(prefix, []).append(account)
        self._lengths = sorted(set(map(len, self._by_prefix)))
        if self.is_on:
            self._context.after_apply.remove(self.note)
        self.is_on = bool(self.accounts)
        if self.is_on:
            self._context.after_apply.append(self.note)
        self.is_counted = not self.is_on
        self._counted_name = ""

    def step(self, count: int) -> bool:
        """Count the next `count` boxes. Return True if there are more."""
        if self.is_counted:
            return False
        boxes = self._context.boxes
        names = list(islice(boxes.irange(minimum=self._counted_name, inclusive=(False, True)), count))
        for name in names:
            self.recount(boxes[name].generation)
        if names:
            self._counted_name = names[-1]
        self.is_counted = len(names) < count
        return not self.is_counted

    # -- counting

    def note(self, change: Change, lsn: int) -> None:
        """Brings the sums up to date after a change was applied."""
        generation = getattr(change, "generation", 0)
        if generation:
            self.recount(generation)
        elif type(change) is TxnCommitted:
            for part in change.parts:
                self.recount(part.generation)

    def recount(self, generation: int) -> None:
        """Brings the sums up to date for one box."""
        box = self._context.generations.get(generation)
        entry = self._entries.get(generation)
        if entry is None:
            if box is None:
                return
            accounts = self._covering(box.name)
            entry = self._entries[generation] = _Entry(accounts) if accounts else _UNCOVERED
        if entry is not _UNCOVERED:
            self._correct(entry, box)
        if box is None:
            del self._entries[generation]

    @staticmethod
    def _correct(entry: _Entry, box: Box | None) -> None:
        size, groups, keys = (0, 0, 0) if box is None else (box.log.bytes, len(box.groups), len(box.keys))
        more_bytes = size - entry.bytes
        entry.bytes = size
        for account in entry.accounts:
            account.stored_bytes += more_bytes
        if groups != entry.groups or keys != entry.keys:
            for account in entry.accounts:
                account.groups += groups - entry.groups
                account.idempotency_keys += keys - entry.keys
            entry.groups, entry.keys = groups, keys

    def _covering(self, name: str) -> list[Account]:
        accounts: list[Account] = []
        for length in self._lengths:
            if length <= len(name):
                accounts += self._by_prefix.get(name[:length], ())
        return accounts

    # -- queries

    def use_of(self, account: Account) -> Use:
        """Return the usage of an account in this shard."""
        return Use(*(self._amount_in_use(account, name) for name in STORED))

    def _amount_in_use(self, account: Account, name: str) -> int:
        context = self._context
        match name:
            case "boxes":
                return _names_in(context.boxes, account.prefixes) + context.basins.count(account.prefixes)
            case "routers":
                return _names_in(context.routers.routers, account.prefixes)
            case "sessions":
                return context.sessions.count_of(account.id)
            case "txn_bytes":
                return context.txns.bytes_of(account.id)
        amount: int = getattr(account, name)
        return amount

    def require(self, account_id: str, name: str, more: int = 1) -> None:
        """Raises `Throttled` if the key has a limit of this name and would exceed it."""
        account = self.accounts.get(account_id)
        if account is not None:
            self._require(account, name, more)

    def require_for_all(self, box: str, name: str, more: int = 1) -> None:
        """Raise `Throttled` if a copy or dead letter, which no key requests, would exceed a limit.

        It counts for the keys whose prefixes cover the box. A key without prefixes is not checked: it would
        stop the copies of all keys."""
        for account in self._covering(box):
            if account.prefixes:
                self._require(account, name, more)

    def _require(self, account: Account, name: str, more: int) -> None:
        limit: int = getattr(account.limits, name)
        if not limit:
            return
        in_use = self._amount_in_use(account, name) + getattr(account.elsewhere, name)
        if in_use + more > limit:
            raise limit_exceeded_error(name, in_use=in_use, limit=limit)

    def exchange(self, ids: Iterable[str], elsewhere: dict[str, Use]) -> dict[str, Use]:
        """Store the usage of accounts in other shards; return the usage of these ids here."""
        for id, use in elsewhere.items():
            if id in self.accounts:
                self.accounts[id].elsewhere = use
        return {id: self.use_of(self.accounts[id]) for id in ids if id in self.accounts}

    def check(self) -> None:
        """Asserts the invariant of the file. For tests."""
        assert self.is_on == bool(self.accounts), "SUMS"
        if not (self.is_on and self.is_counted):
            return
        boxes = self._context.boxes.values()
        assert self._entries.keys() == self._context.generations.keys(), "SUMS"
        for account in self.accounts.values():
            grant = Grant(prefixes=account.prefixes)
            own_boxes = [box for box in boxes if grant.covers(box.name)]
            assert account.stored_bytes == sum(box.log.bytes for box in own_boxes), "SUMS"
            assert account.groups == sum(len(box.groups) for box in own_boxes), "SUMS"
            assert account.idempotency_keys == sum(len(box.keys) for box in own_boxes), "SUMS"
            assert _names_in(self._context.boxes, account.prefixes) == len(own_boxes), "SUMS"


def _disjoint(grant: Grant) -> tuple[str, ...]:
    return grant.within("") if grant.prefixes else ()


def _names_in(names: Any, prefixes: tuple[str, ...]) -> int:
    """Return how many names of a `SortedDict` begin with one of these prefixes; all, if there are none."""
    if not prefixes:
        return len(names)
    return sum(names.bisect_left(_after(prefix)) - names.bisect_left(prefix) for prefix in prefixes)


def _after(prefix: str) -> str:
    """Return the first text that is greater than every text that begins with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
