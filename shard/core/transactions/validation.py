"""Says whether a change of a transaction can be applied, before anything is changed: are its rows held?"""

from __future__ import annotations

from collections.abc import Mapping

from shard.core import changes
from shard.core.boxes.box import Box
from shard.core.boxes.validation import require_behind
from shard.core.kernel import DoesNotApply
from shard.core.transactions.epochs import Epoch


def committed(change: changes.TxnCommitted, epoch: Epoch | None, boxes: Mapping[int, Box]) -> None:
    """Raises `DoesNotApply` unless every row of a commit is held, and its place in a box is free."""
    totals = parcels_held(change, epoch).totals_of(change.parcels)
    for part in change.parts:
        box = boxes.get(part.generation)
        held = totals.get(part.box)
        if box is None or held is None or held.records != sum(part.counts):
            raise DoesNotApply(f"a commit has {sum(part.counts)} rows for {part.box}, and {held} is held")
        require_behind(box.log, part.first_seq, times_of(part, change.at_ms)[0])


def parcels_held(change: changes.TxnCommitted | changes.TxnDropped, epoch: Epoch | None) -> Epoch:
    """The epoch, if it has the parcels that the change names."""
    if epoch is None or not all(parcel in epoch.parcels for parcel in change.parcels):
        raise DoesNotApply(f"rows of {change.writer}, epoch {change.epoch}, are not held")
    return epoch


def times_of(part: changes.TxnPart, at_ms: int) -> tuple[int, int]:
    """The times of the first and last row of a part, as far as they are known before it is rendered."""
    is_arrival = part.mode == "arrival"
    last_ts = part.last_ts
    if last_ts < 0:  # from a log that did not say
        last_ts = max(at_ms, part.not_before) if is_arrival else part.not_before
    return (last_ts if is_arrival else part.not_before), last_ts
