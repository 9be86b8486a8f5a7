"""Goal: a read that waits does so for as long as it may, and asks its shard in slices that a link gives it
time for (s2 §11). Method: a shard that never has anything, and notes for how long it was asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from gateway.requests.request import Request
from gateway.s2.records import StreamRecordApi
from gateway.s2.shard_calls import ShardCalls
from gateway.s2.usage_history import UsageHistory
from gateway.shards.dispatch import Dispatch
from gateway.shards.placement import even
from streams.protocol.messages.s2 import ReadHead, StreamRecords

NOTHING = StreamRecords(
    records=b"", count=0, next_seq_num=0, tail_seq_num=0, tail_ts=0, generation=1, cipher=None, is_full=False
)


class Silent:
    def __init__(self) -> None:
        self.waits_ms: list[int] = []
        dispatch = Dispatch(even(1), [])
        self.history = UsageHistory(dispatch, 0)
        self.answers = dispatch.answers

    async def call_or_create(self, *_: Any, call: Callable[[], Awaitable[Any]], **__: Any) -> Any:
        return await call()

    async def read(self, head: ReadHead) -> StreamRecords:
        self.waits_ms.append(head.wait_ms)
        return NOTHING


@pytest.mark.parametrize(
    ("wait_s", "waits_ms"),
    [
        (0, [0]),
        (1, [0, 1_000]),
        (45, [0, 20_000, 20_000, 5_000]),
        (60, [0, 20_000, 20_000, 20_000]),
        (4_000_000_000, [0, 20_000, 20_000, 20_000]),
    ],
)
async def test_a_read_waits_in_slices_and_for_a_minute_at_most(wait_s: int, waits_ms: list[int]) -> None:
    silent = Silent()
    request = Request("GET", "/v1/streams/s/records", f"seq_num=0&clamp=true&wait={wait_s}", {})
    answer = await StreamRecordApi(cast(ShardCalls, silent)).read(request, "the-basin", "s")
    assert answer.status == 200
    assert silent.waits_ms == waits_ms
