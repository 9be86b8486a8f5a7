"""Saves usage counters (`usage_counters.py`) in a box of this server, and sums them up.

The box is an ordinary one: it is in backups, belongs to a shard and is readable over `/v0`. Each gateway
appends one batch per minute and one when it stops, with one record per basin and the basin name as its tag.
Counts that a gateway has not saved are visible only in its own responses, and are lost if it is killed.

Each minute has its own idempotency key, so a retry after a lost reply counts it once.

Limits: `_RETENTION_MS` and `_RETENTION_BYTES`, whichever is reached first. Summing reads one page at a time.
"""

from __future__ import annotations

import time
import uuid

import msgspec
import structlog
import trio

from gateway.s2.usage_counters import MINUTES_MAX, Minute, Sums, UsageCounters, UsageEntry
from gateway.shards.dispatch import Dispatch
from streams.protocol import wire
from streams.protocol.errors import BoxNotFound, StreamsError
from streams.protocol.model.boxes import BoxPatch

log = structlog.get_logger()

BOX = "s2.usage"

_MINUTE_MS = 60_000
_RETENTION_MS = 32 * 24 * 60 * _MINUTE_MS
#: A record has about 170 bytes: enough for 32 days of 15 basins that are used every minute.
_RETENTION_BYTES = 128 * 1024 * 1024
#: The idempotency window is longer than the buffer of unsaved minutes, so no minute counts twice.
_CONFIG = BoxPatch(
    ttl_ms=_RETENTION_MS,
    cap_bytes=_RETENTION_BYTES,
    durability="disk",
    idempotency_window_ms=2 * MINUTES_MAX * _MINUTE_MS,
)
_PAGE_RECORDS, _PAGE_BYTES = 1000, 1024 * 1024


class _Record(msgspec.Struct):
    data: UsageEntry
    tag: str


class _Batch(msgspec.Struct):
    records: list[_Record]
    idempotency_key: str
    config: BoxPatch


class _DiffRequest(msgspec.Struct, omit_defaults=True):
    match: tuple[str, str, str]
    from_ts: int | None = None
    from_seq: int | None = None
    limit: int = 0
    max_bytes: int = 0


class _HistoryRecord(msgspec.Struct):
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw = msgspec.Raw(b"null")


class _HistoryPage(msgspec.Struct):
    records: list[_HistoryRecord]
    next_from_seq: int
    caught_up: bool


_decode_page = msgspec.json.Decoder(_HistoryPage).decode
_decode_entry = msgspec.json.Decoder(UsageEntry).decode


class UsageHistory:
    def __init__(self, dispatch: Dispatch, now_s: int) -> None:
        self._dispatch = dispatch
        self._writer = uuid.uuid4().hex[:12]
        self.counters = UsageCounters(now_s)

    def __repr__(self) -> str:
        return f"<UsageHistory {self.counters!r}>"

    # -- writing

    async def run(self) -> None:
        """Save once a minute, forever. Runs in every gateway."""
        while True:
            await trio.sleep(60 - time.time() % 60)
            await self.save(int(time.time()))

    async def save(self, now_s: int) -> None:
        """Save the finished minutes."""
        self.counters.roll_over(now_s)
        await self._write()

    async def finish(self, within_s: float) -> None:
        """Save everything before the gateway stops, within `within_s` seconds."""
        self.counters.end()
        with trio.move_on_after(within_s):
            await self._write()

    async def _write(self) -> None:
        for minute in list(self.counters.unsaved_minutes):
            try:
                await self._dispatch.append(wire.RequestHead(BOX), self._batch(minute))
            except StreamsError as error:
                log.warning(
                    "usage counters are not saved, retrying in a minute",
                    error=error.code,
                    minutes=len(self.counters.unsaved_minutes),
                    lost=self.counters.minutes_lost,
                )
                return
            self.counters.mark_saved(minute)

    def _batch(self, minute: Minute) -> bytes:
        records = [
            _Record(UsageEntry(minute.at_s, self._writer, minute.number, counts), basin)
            for basin, counts in minute.rows.items()
        ]
        return msgspec.json.encode(_Batch(records, f"{self._writer}-{minute.number}", _CONFIG))

    # -- reading

    async def add_to(self, sums: Sums, basin: str) -> None:
        """Add the saved and unsaved counts of a basin to `sums`. Foreign records in the box are skipped."""
        # Copied first: a minute that is saved meanwhile appears twice, and its number reveals it.
        unsaved_minutes = self.counters.snapshot_unsaved()
        saved_numbers: set[int] = set()
        # A minute is saved after its start, and at most `MINUTES_MAX` minutes late.
        request = _DiffRequest(
            ("tag", "Eq", basin), sums.first_s * 1000, limit=_PAGE_RECORDS, max_bytes=_PAGE_BYTES
        )
        last_ms = sums.last_s * 1000 + (MINUTES_MAX + 2) * _MINUTE_MS
        is_over = False
        while not is_over:
            page = await self._page(request)
            for record in page.records:
                entry = _entry_untrusted(record.data)
                if entry is not None:
                    sums.add(entry.minute, entry.counts)
                    if entry.writer == self._writer:
                        saved_numbers.add(entry.number)
            is_over = page.caught_up or (bool(page.records) and page.records[-1].ts > last_ms)
            request.from_ts, request.from_seq = None, page.next_from_seq
        for minute in unsaved_minutes:
            if minute.number not in saved_numbers and basin in minute.rows:
                sums.add(minute.at_s, minute.rows[basin])

    async def _page(self, request: _DiffRequest) -> _HistoryPage:
        try:
            body = msgspec.json.encode(request)
            message = await self._dispatch.to_owner(wire.OP_DIFF, wire.RequestHead(BOX), body)
        except BoxNotFound:
            return _HistoryPage([], 0, caught_up=True)
        return _decode_page(message.body)


def _entry_untrusted(data: msgspec.Raw) -> UsageEntry | None:
    try:
        return _decode_entry(data)
    except msgspec.DecodeError:
        return None
