"""Which callers may see or end a transaction of another key: its owner, and admins of all its boxes."""

from __future__ import annotations

from shard.core.transactions.epochs import Epoch
from shard.core.transactions.state import Txns
from streams.protocol.access.grants import ADMIN
from streams.protocol.messages import bulk


def account_of(caller: bulk.Caller) -> str:
    """The key whose limits count; none for processes of the server's own user."""
    return "" if caller.grant is None else caller.key_id


def is_admin_of_all(caller: bulk.Caller) -> bool:
    grant = caller.grant
    return grant is None or (bool(grant.scopes & ADMIN) and not grant.prefixes)


def may_list(caller: bulk.Caller, owner: str | None) -> bool:
    is_admin = caller.grant is None or bool(caller.grant.scopes & ADMIN)
    return is_admin or owner is None or owner == caller.key_id


def may_list_writer(caller: bulk.Caller, txns: Txns, writer: str) -> bool:
    return any(may_list(caller, mark.owner) for mark in txns.marks.get(writer, ()))


def may_abort(caller: bulk.Caller, epoch: Epoch) -> bool:
    """Return True if the caller is an admin of all its boxes. Its owner may abort too: see `handlers.py`."""
    grant = caller.grant
    if grant is None:
        return True
    boxes = {box for chunk in epoch.chunks() for box in chunk.boxes}
    return bool(grant.scopes & ADMIN) and all(map(grant.covers, boxes))
