"""Checks that a change of a transaction can be applied, before state changes: its rows must be pending."""

from __future__ import annotations

from collections.abc import Mapping

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.validation import require_behind
from shard.core.kernel import DoesNotApply
from shard.core.transactions.epochs import Epoch


def require_commit(change: changes.TxnCommitted, epoch: Epoch | None, boxes: Mapping[int, Box]) -> None:
    """Raise `DoesNotApply` unless every row of a commit is pending and its place in the box is free."""
    totals = require_parcels(change, epoch).totals_of(change.parcels)
    for part in change.parts:
        box = boxes.get(part.generation)
        rows = totals.get(part.box)
        if box is None or rows is None or rows.records != sum(part.counts):
            raise DoesNotApply(f"a commit has {sum(part.counts)} rows for {part.box}, but {rows} is pending")
        require_behind(box.log, part.first_seq, times_of(part, change.at_ms)[0])


def require_parcels(change: changes.TxnCommitted | changes.TxnDropped, epoch: Epoch | None) -> Epoch:
    """Return the epoch; raise `DoesNotApply` unless it has the parcels that the change names."""
    if epoch is None or not all(parcel in epoch.parcels for parcel in change.parcels):
        raise DoesNotApply(f"no pending rows of {change.writer}, epoch {change.epoch}")
    return epoch


def times_of(part: changes.TxnPart, at_ms: int) -> tuple[int, int]:
    """Return the times of the first and last row of a part, as known before it is rendered."""
    is_arrival = part.mode == "arrival"
    last_ts = part.last_ts
    if last_ts < 0:  # from a log without this field
        last_ts = max(at_ms, part.not_before) if is_arrival else part.not_before
    return (last_ts if is_arrival else part.not_before), last_ts
