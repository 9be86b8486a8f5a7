"""Where a reading verb starts: `--since`, `--at`, and the seq at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streams.cli import output
from streams.cli.verbs import MILLIS

if TYPE_CHECKING:
    from streams.client._sync.box import Box

F = TypeVar("F", bound=Callable[..., Any])


class _Moment(click.ParamType[int]):
    """A time as epoch milliseconds: `2026-11-18`, `2026-11-18T09:30`, with an offset or in local time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int) or value.isdigit():
            return int(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r} is neither a time such as 2026-11-18T09:30 nor epoch milliseconds", param, ctx
            )
        return int(moment.timestamp() * 1000)


def time_options(function: F) -> F:
    """Add `--since` and `--at` to a verb that reads."""
    at = click.option("--at", type=_Moment(), metavar="TIME", help="Start at this time: 2026-11-18T09:30.")
    since = click.option("--since", type=MILLIS, help="Only records younger than this: 90s, 2h, 7d.")
    return since(at(function))


def start_ts(since: int | None, at: int | None, **others: object) -> int | None:
    """Return the time to start at, or None. At most one of these and `others` may be given."""
    names = [name for name, value in {"since": since, "at": at, **others}.items() if value is not None]
    if len(names) > 1:
        flags = " and ".join(f"--{name}" for name in names)
        raise output.Refusal(f"{flags} each set the start; use only one of them")
    return at if since is None else max(0, int(time.time() * 1000) - since)


def seq_before(box: Box, ts: int) -> int:
    """Return the seq after which the first record of this time or a later one comes."""
    import msgspec

    page = box.raw_page(from_ts=ts, limit=1, include_data=False)
    if not page.records:
        return page.next_from_seq
    return int(msgspec.json.decode(page.records[0])["$seq"]) - 1
