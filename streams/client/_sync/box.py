# Written by `make twin` from ../_async/box.py. Do not edit.
"""One box: append, read, delete, its settings and its groups."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import quote

from streams.client import answers
from streams.client._sync.reader import Reader
from streams.client.answers import Entry, Record, Tombstone
from streams.client.job_times import epoch_ms_of, millis_of
from streams.client.options import BoxSettings, ProducerBounds, ReadOptions, WriteOptions
from streams.client.retry import Retry
from streams.protocol.messages import replies
from streams.protocol.model.boxes import BoxConfig
from streams.protocol.model.names import check_group_name, check_readable_name

if TYPE_CHECKING:
    from pathlib import Path

    from streams.client._sync.client import Client
    from streams.client._sync.producer import Producer
    from streams.client._sync.snapshots import BoxSnapshots, Dump, Load, StoredSnapshots
    from streams.client._sync.watch import BoxWatch
    from streams.client.stores import Store

#: How far `tail` looks back at first, for each record that is wanted: a few may have been deleted.
_TAIL_MARGIN = 2


class Box:
    """A named append-only log. Making this object sends nothing; a box is made by its first write, or
    `create`."""

    def __init__(self, client: Client, name: str, *, node: str | None = None) -> None:
        self.client = client
        self.node = node if node is not None else client.node
        self.name = check_readable_name(name)
        self.path = f"/v0/boxes/{quote(name, safe='')}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self.client.url}>"

    # -- writing

    def append(
        self,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        ts: int | None = None,
        ordering_key: str | None = None,
        job_priority: int = 0,
        delay: float | timedelta | None = None,
        deliver_at: int | datetime | None = None,
        **options: Unpack[WriteOptions],
    ) -> replies.AppendReply:
        """Append one record; `options` are those of `append_batch`. A job can wait: for `delay` (seconds
        or a timedelta), or until `deliver_at` (epoch milliseconds or a datetime)."""
        entry = Entry(
            data, tag, node, meta, ts, ordering_key, job_priority, millis_of(delay), epoch_ms_of(deliver_at)
        )
        return self.append_batch([entry], **options)

    def append_batch(
        self,
        entries: Iterable[Entry | Any],
        *,
        idempotency_key: str | None = None,
        match_seq: int | None = None,
        fencing_token: str | None = None,
        trim_before_seq: int | None = None,
        create: bool | None = None,
        config: BoxSettings | Mapping[str, Any] | None = None,
        disable_backpressure: bool = False,
        retry: Retry | None = None,
    ) -> replies.AppendReply:
        """Appends all of them, with seqs in a row, or none. A value that is not an `Entry` becomes its data.

        A write whose answer is lost is repeated with the same key, its own or one that is made up, so it is
        never doubled. With `disable_backpressure` it is urgent: it goes before others and is not refused
        under load. Use it for the few writes that must go through.
        """
        fields: dict[str, Any] = {
            "match_seq": match_seq,
            "fencing_token": fencing_token,
            "trim_before_seq": trim_before_seq,
            "create": create,
            "config": config,
            "disable_backpressure": disable_backpressure or None,
        }
        return self.append_encoded(
            answers.encode_entries(entries, self.node),
            key=idempotency_key or uuid.uuid4().hex,
            fields={name: value for name, value in fields.items() if value is not None},
            retry=retry,
        )

    def append_encoded(
        self,
        records: list[bytes],
        *,
        key: str,
        fields: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> replies.AppendReply:
        """Append records that are JSON of an `Entry` each."""
        body = answers.append_body(records, key, fields)
        is_urgent = bool(fields and fields.get("disable_backpressure"))
        path = f"{self.path}?return_seqs=false"
        return answers.decode(
            self.client.send("POST", path, body, is_urgent=is_urgent, retry=retry),
            replies.AppendReply,
        )

    def idempotency_window_ms(self) -> int | None:
        """Return how long the box remembers idempotency keys, or None if the box does not exist."""
        state = self.client.find(self.path + "?touch=false", replies.BoxState)
        return state.config.idempotency_window_ms if state is not None else None

    def producer(
        self,
        *,
        settle_s: float = 60.0,
        stop_at_failure: bool = False,
        **bounds: Unpack[ProducerBounds],
    ) -> Producer:
        """Return a producer, which sends many records in batches in the background; see `Producer`."""
        from streams.client._sync.producer import Producer
        from streams.client.batching import Bounds

        return Producer(
            self, Bounds(**bounds), settle_s=settle_s, stop_at_failure=stop_at_failure, node=self.node
        )

    def delete(
        self, match: str | list[str] | None = None, *, before_seq: int | None = None, dry_run: bool = False
    ) -> replies.DeleteRecordsReply:
        """Deletes, for ever, records with this tag (`["tag", "Glob", "user-*"]` for all that begin so) and,
        or, before this seq; `dry_run` only counts them. A delete by tag alone is not repeated when its answer
        is lost: it would delete records that were appended since."""
        fields = {"match": match, "before_seq": before_seq, "dry_run": dry_run or None}
        body = {name: value for name, value in fields.items() if value is not None}
        is_repeatable = before_seq is not None or dry_run
        return self.client.call(
            "POST", f"{self.path}/delete", replies.DeleteRecordsReply, body, is_repeatable=is_repeatable
        )

    # -- reading

    def read(self, from_seq: int | None = None, **options: Unpack[ReadOptions]) -> Reader:
        """Read records after `from_seq` (or from `from_ts` on, or after the group's cursor) up to the head at
        the start of the read. Yields `Record` and, where records were lost, `Tombstone`."""
        return Reader(self, from_seq, **options)

    def follow(self, from_seq: int | None = None, **options: Unpack[ReadOptions]) -> Reader:
        """As `read`, then wait for new records, for ever. It also waits while the server cannot be
        reached."""
        return Reader(self, from_seq, is_endless=True, **options)

    def watch(
        self, from_seq: int | None = None, *, node: str | None = None, include_tags: bool = True
    ) -> BoxWatch:
        """Watch records after `from_seq` (None: new records only), pushed by the server. A lost connection is
        made again. Yields `Record` and `Tombstone`."""
        from streams.client._sync.watch import BoxWatch

        return BoxWatch(
            self.client.watch({self.name: from_seq}, node=node, include_tags=include_tags), self.name
        )

    def page(self, from_seq: int = 0, *, retry: Retry | None = None, **options: Any) -> answers.Page:
        """Return one page: one answer to a read, with the options of the HTTP call (`limit`,
        `max_bytes`, `wait_ms`, …)."""
        body = {"from_seq": from_seq, **options}
        return self.client.call("POST", f"{self.path}/diff", answers.Page, body, retry=retry)

    def raw_page(self, *, retry: Retry | None = None, **options: Any) -> answers.RawPage:
        """As `page`, with each record as the bytes of the answer."""
        return self.client.call("POST", f"{self.path}/diff", answers.RawPage, options, retry=retry)

    def tail(
        self,
        count: int = 10,
        *,
        match: str | list[str] | None = None,
        node: str | list[str] | None = None,
    ) -> list[Record | Tombstone]:
        """Return the last `count` records that match. A tombstone is among them when records in that range
        were lost."""
        state = self.state()
        span = _TAIL_MARGIN * count
        while True:
            start = max(state.head_seq - span, state.earliest_seq - 1, 0)
            items = [item for item in self.read(start, match=match, node=node)]
            records = [item for item in items if isinstance(item, Record)]
            if len(records) >= count or start < state.earliest_seq:
                break
            span *= 4
        if len(records) <= count:
            return items
        first = records[-count].seq if count else state.head_seq + 1
        return [item for item in items if (item.seq if isinstance(item, Record) else item.gap_to) >= first]

    def record(self, seq: int) -> Record:
        """Return one record. Raises `NotFound` if it is gone or was never written."""
        return (self.client.get(f"{self.path}/records/{seq}", replies.OneRecord)).record

    def position(self) -> replies.Tail:
        """Return the position of the end of the box: `head_seq`, `next_seq` and the time of the last
        record."""
        return self.client.get(f"{self.path}/tail", replies.Tail)

    def snapshots(self, *, dump: Dump | None = None, load: Load | None = None) -> BoxSnapshots:
        """Return snapshots that are stored in the box itself. States are JSON unless `dump` and `load`
        convert them."""
        from streams.client._sync.snapshots import BoxSnapshots

        return BoxSnapshots(self, dump=dump, load=load)

    def stored_snapshots(
        self, place: str | Path | Store, *, dump: Dump | None = None, load: Load | None = None
    ) -> StoredSnapshots:
        """Return snapshots that are stored outside: in a folder, or in an object store by its URL."""
        from streams.client._sync.snapshots import StoredSnapshots
        from streams.client.stores import open_store

        store = open_store(place) if isinstance(place, str | os.PathLike) else place
        return StoredSnapshots(self, store, dump=dump, load=load)

    # -- the box itself

    def create(self, **config: Unpack[BoxSettings]) -> replies.PutBoxReply:
        """Create the box, or change the settings that are given. The settings are those of
        [`BoxSettings`](#boxsettings)."""
        return self.client.call("PUT", self.path, replies.PutBoxReply, config)

    #: A box that is there is changed in the same way.
    configure = create

    def config(self) -> BoxConfig:
        """Return all settings of the box."""
        return (self.state()).config

    def state(self, *, touch: bool = False) -> replies.BoxState:
        """Return positions, counts and settings of the box. `touch=True` counts as reading, for the
        priority of the box."""
        return self.client.get(self.path, replies.BoxState, {"touch": "true" if touch else "false"})

    def exists(self) -> bool:
        """Return True if the box exists."""
        return self.client.find(self.path + "?touch=false", replies.BoxState) is not None

    def drop(self, *, if_empty: bool = False) -> replies.DeleteBoxReply:
        """Delete the box with all its records, groups and routers. With `if_empty`, a box with records
        raises `BoxNotEmpty`."""
        path = f"{self.path}?if_empty={'true' if if_empty else 'false'}"
        return self.client.call("DELETE", path, replies.DeleteBoxReply)

    def fence(self, token: str, *, if_token: str | None = None) -> None:
        """Set the fencing token: appends with a different token, or with none, are refused from now on.
        An empty token removes it. With `if_token`, the box must have this token now."""
        body = {"token": token} | ({"if_token": if_token} if if_token is not None else {})
        self.client.call("PUT", f"{self.path}/fence", dict[str, Any], body, is_repeatable=if_token is None)

    # -- groups

    def group(self, name: str) -> Group:
        """Return a group: a position that the box stores for its readers."""
        return Group(self, name)

    def groups(self, prefix: str = "") -> Iterator[replies.GroupState]:
        """Yield all groups of the box whose name begins with `prefix`."""
        cursor: str | None = ""
        while cursor is not None:
            params = {"prefix": prefix, "page_size": 1000, "cursor": cursor}
            page = self.client.get(f"{self.path}/groups", replies.GroupPage, params)
            for group in page.groups:
                yield group
            cursor = page.next_cursor


class Group:
    """A position that a box stores for its readers."""

    def __init__(self, box: Box, name: str) -> None:
        self._box = box
        self.name = check_group_name(name)
        self._path = f"{box.path}/groups/{quote(name, safe='')}"

    def __repr__(self) -> str:
        return f"<Group {self.name} of {self._box.name}>"

    def commit(self, cursor: int, *, if_cursor: int | None = None) -> None:
        """Save the seq up to which all records are processed. `SeqMismatch` when the cursor is not
        `if_cursor`."""
        body = {"cursor": cursor} | ({"if_cursor": if_cursor} if if_cursor is not None else {})
        self._box.client.call("PUT", self._path, dict[str, Any], body, is_repeatable=if_cursor is None)

    def state(self) -> replies.GroupState:
        """Return the position, its lag, and when it was committed."""
        return self._box.client.get(self._path, replies.GroupState)

    def drop(self) -> bool:
        """Delete the group; return True if it existed."""
        return (self._box.client.call("DELETE", self._path, replies.DeleteGroupReply)).deleted
