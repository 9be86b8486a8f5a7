"""`streams top`: the busiest boxes, refreshed continuously."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, Final

import click

from streams.cli import output
from streams.cli.verbs import MILLIS, ServerTarget, example, server_options

_COLUMNS: Final = (
    "box",
    "type",
    "appends_per_s",
    "lag",
    "ready",
    "in_flight",
    "dead_lettered",
    "count",
    "bytes",
    "head_seq",
    "durability",
)


@example("streams top --count 1", "streams top --sort ready --count 1", "streams top --count 2 --json")
@click.command("top")
@click.argument("prefix", default="")
@click.option("--every", "every_ms", type=MILLIS, default=1000, help="Refresh interval (default 1s).")
@click.option("--count", type=click.IntRange(1), help="Exit after this many refreshes.")
@click.option(
    "--sort",
    type=click.Choice(["rate", "lag", "ready", "count", "bytes", "last_write"]),
    default="rate",
    show_default=True,
    help="The number that orders the boxes, largest first.",
)
@click.option(
    "--rows",
    "rows_max",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Number of boxes to show.",
)
@server_options
def command(
    target: ServerTarget, prefix: str, every_ms: int, count: int | None, sort: str, rows_max: int
) -> None:
    """Show the busiest boxes with rates, lag, leases and dead letters until Ctrl-C. Does not count as a read.

    The lag of a box is that of its slowest group or router. `in_flight` are leased jobs; `dead_lettered`
    counts jobs that were given up."""
    with target.client(is_patient=True) as client, output.screen(as_json=target.as_json) as draw:
        before: dict[str, int] = {}
        last_s = time.monotonic()
        frames = 0
        while True:
            # A rate is the difference of two looks at every box; other orders come from the server.
            listing = (
                client.boxes(prefix) if sort == "rate" else client.boxes(prefix, sort=sort, page_size=100)
            )
            boxes = list(listing if sort == "rate" else islice(listing, rows_max))
            now_s = time.monotonic()
            rows = [_row(box, before, max(now_s - last_s, 0.001)) for box in boxes]
            if sort == "rate":
                rows.sort(key=lambda row: (-row["appends_per_s"], row["box"]))
            draw(_COLUMNS, rows[:rows_max])
            frames += 1
            if frames == count:
                return
            before, last_s = {box.box: box.head_seq for box in boxes}, now_s
            time.sleep(every_ms / 1000)


def _row(box: Any, before: dict[str, int], elapsed_s: float) -> dict[str, Any]:
    fields = {column: getattr(box, column, None) for column in _COLUMNS}
    appends = max(0, box.head_seq - before.get(box.box, box.head_seq))
    fields["appends_per_s"] = round(appends / elapsed_s, 1)
    if box.queue is not None:
        fields |= {
            "ready": box.queue.ready,
            "in_flight": box.queue.in_flight,
            "dead_lettered": box.queue.dead_lettered,
        }
    return fields
