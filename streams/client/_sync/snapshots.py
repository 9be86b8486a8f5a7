# Written by `make twin` from ../_async/snapshots.py. Do not edit.
"""Snapshot and follow: begin with a saved state instead of the first record, then go live without gap or
repeat.

    snapshots = client.box("orders").stored_snapshots("s3://b/orders")  # an object store, or a folder
    snapshots = client.box("orders").snapshots()                        # or kept in the box itself

    for item in snapshots.restore_and_follow():
        if isinstance(item, Restored):
            state = item.state or {}
        elif isinstance(item, Record):
            apply(item, state)
            if enough_has_come:
                snapshots.save(state, item.seq)

Saving trims what the state covers, so a reader that is behind can be overtaken: records that it has not seen
are gone, and nobody tells, for they were deleted on purpose. It notices (a part of a snapshot covers more
than it has seen; the first seq of the box is after the next one) and is given the newer state, as another
`Restored`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from streams.client.answers import CaughtUp, Record, Tombstone
from streams.client.concurrency import in_thread
from streams.client.framing import TAG, Assembler, Restored, entries_of, part_of, writes_of
from streams.client.json_values import encode_json
from streams.client.stores import Store
from streams.protocol.errors import BoxNotFound

if TYPE_CHECKING:
    from streams.client._sync.box import Box

#: Snapshots that are kept outside: the newest may be the one that turns out bad.
KEPT = 3

Dump = Callable[[Any], bytes]
Load = Callable[[bytes], Any]


class _AsyncSnapshots:
    """Restoring, which is the same wherever states are kept."""

    def load(self) -> Restored:
        """The newest state that is whole."""
        raise NotImplementedError

    @overload
    def restore_and_follow(
        self, *, marks_caught_up: Literal[True]
    ) -> Iterator[Restored | Record | Tombstone | CaughtUp]: ...

    @overload
    def restore_and_follow(
        self, *, marks_caught_up: Literal[False] = False
    ) -> Iterator[Restored | Record | Tombstone]: ...

    def restore_and_follow(self, *, marks_caught_up: bool = False) -> Iterator[Any]:
        """The newest state, then every record after it, for ever. With `marks_caught_up` there is a
        `CaughtUp` once, when all that was there has been yielded: from here on the state is current."""
        for item in self._restore(is_endless=True):
            if marks_caught_up or not isinstance(item, CaughtUp):
                yield item

    def restore_and_read(self) -> Iterator[Restored | Record | Tombstone]:
        """The newest state, then every record after it up to the head that the box has when this begins. The
        state is None, and nothing follows, when there is no such box."""
        try:
            for item in self._restore(is_endless=False):
                if not isinstance(item, CaughtUp):
                    yield item
        except BoxNotFound:
            return

    def _restore(self, *, is_endless: bool) -> Iterator[Restored | Record | Tombstone | CaughtUp]:
        raise NotImplementedError


class BoxSnapshots(_AsyncSnapshots):
    """States kept in the box itself: one record, or several when it is big (`client/framing.py`)."""

    def __init__(self, box: Box, *, dump: Dump | None, load: Load | None) -> None:
        self._box = box
        self._dump: Dump = dump or partial(encode_json, place="state")
        self._load: Load = load or msgspec.json.decode

    def __repr__(self) -> str:
        return f"<BoxSnapshots of {self._box.name}>"

    def save(self, state: Any, seq: int) -> None:
        """Saves the state of everything up to `seq`, which must be the last record, and trims what it covers.
        All at once, but for a state of over ten megabytes, whose last step is the one that counts.
        `SeqMismatch` when something came since: apply it, and save again."""
        entries = entries_of(uuid.uuid4().hex, seq, self._dump(state))
        for part, is_first, is_last in writes_of(entries):
            self._box.append_batch(
                part,
                match_seq=seq + 1 if is_first else None,
                trim_before_seq=seq + 1 if is_last else None,
            )

    def load(self) -> Restored:
        """Return the newest complete state."""
        assembler = Assembler()
        newest = Restored(None, 0)
        if not self._box.exists():
            return newest
        for item in self._box.read(match=TAG):
            if isinstance(item, Record) and (part := part_of(item)) is not None:
                content = assembler.add(part, item.data)
                if content is not None:
                    newest = Restored(self._load(content), part.covers)
        return newest

    def _restore(self, *, is_endless: bool) -> Iterator[Restored | Record | Tombstone | CaughtUp]:
        newest = self.load()
        yield newest
        position = newest.seq
        assembler = Assembler()
        #: Items between the parts of a snapshot that is newer than our state; they follow the new state.
        pending: list[Record | Tombstone] | None = None
        reader = self._box.follow(position) if is_endless else self._box.read(position)
        is_live = False
        while True:
            items = reader.next_page(is_patient=is_live)
            for item in items:
                part = part_of(item) if isinstance(item, Record) else None
                if part is None:
                    if pending is not None:
                        pending.append(item)
                    else:
                        yield item
                        position = _end_of(item)
                    continue
                assert isinstance(item, Record)
                content = assembler.add(part, item.data)
                if part.covers > position:
                    pending = [] if pending is None else pending
                    if content is not None:
                        yield Restored(self._load(content), part.covers)
                        position = part.covers
                if pending is not None and part.covers <= position:
                    for each in pending:
                        yield each
                        position = _end_of(each)
                    pending = None
            # The write that trims is the one that completes. So when all there is has been read and the
            # snapshot is not whole, nothing was trimmed for it, and the pending items are next.
            if reader.is_caught_up:
                for each in pending or ():
                    yield each
                    position = _end_of(each)
                pending = None
            if pending is None and reader.is_at_end():
                return
            if reader.is_caught_up and not is_live:
                is_live = True
                yield CaughtUp(self._box.name, reader.head_seq)


def _start_of(item: Record | Tombstone) -> int:
    return item.seq if isinstance(item, Record) else item.gap_from


def _end_of(item: Record | Tombstone) -> int:
    """The seq after which all is still to come. After a tombstone that is where the box begins now, which in
    a box that was made anew is its first record."""
    return item.seq if isinstance(item, Record) else item.earliest_seq - 1


class StoredSnapshots(_AsyncSnapshots):
    """States kept outside, by the seq they cover: `00000000000000000042-<generation>.snapshot`."""

    def __init__(self, box: Box, store: Store, *, dump: Dump | None, load: Load | None) -> None:
        self._box = box
        self._store = store
        self._dump: Dump = dump or partial(encode_json, place="state")
        self._load: Load = load or msgspec.json.decode

    def __repr__(self) -> str:
        return f"<StoredSnapshots of {self._box.name} in {self._store!r}>"

    def save(self, state: Any, seq: int, *, trim: bool = False) -> None:
        """Saves the state of everything up to `seq`; then, with `trim`, deletes what it covers. A crash in
        between leaves both, which does no harm."""
        generation = (self._box.state()).generation
        name = f"{seq:020}-{generation}.snapshot"
        in_thread(self._store.put, name, self._dump(state))
        for old in (self._names(generation))[:-KEPT]:
            in_thread(self._store.drop, old)
        if trim:
            self._box.delete(before_seq=seq + 1)

    def load(self) -> Restored:
        """Return the newest state of this box. States of a deleted box with the same name do not count."""
        if not self._box.exists():
            return Restored(None, 0)
        generation = (self._box.state()).generation
        for name in reversed(self._names(generation)):
            content = in_thread(self._store.get, name)
            if content is not None:  # else somebody has dropped it since, and there is a newer one
                return Restored(self._load(content), int(name.partition("-")[0]))
        return Restored(None, 0)

    def _restore(self, *, is_endless: bool) -> Iterator[Restored | Record | Tombstone | CaughtUp]:
        newest = self.load()
        yield newest
        position = newest.seq
        reader = self._box.follow(position) if is_endless else self._box.read(position)
        is_live = is_idle = False
        while True:
            # A trim that took all that this reader has not seen leaves nothing to wake it. So it waits only
            # after an answer that said that there is nothing.
            items = reader.next_page(is_patient=is_idle)
            if reader.earliest_seq > position + 1 and (not items or _start_of(items[0]) > position + 1):
                newer = self.load()
                if newer.seq > position:
                    yield newer
                    position = newer.seq
            for item in items:
                if isinstance(item, Tombstone) or item.seq > position:
                    yield item
                    position = _end_of(item)
            if reader.is_at_end():
                return
            is_idle = reader.is_caught_up and not items
            if reader.is_caught_up and not is_live:
                is_live = True
                yield CaughtUp(self._box.name, reader.head_seq)

    def _names(self, generation: int) -> list[str]:
        ours = f"-{generation}.snapshot"
        return [name for name in in_thread(self._store.names) if name.endswith(ours)]
