"""`streams top`: the busiest boxes, refreshed continuously."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from streams.cli import output
from streams.cli.verbs import MILLIS, ServerTarget, example, server_options

_COLUMNS: Final = ("box", "type", "appends_per_s", "count", "bytes", "head_seq", "durability")


@example("streams top --count 1", "streams top --every 200ms --count 2 --json")
@click.command("top")
@click.argument("prefix", default="")
@click.option("--every", "every_ms", type=MILLIS, default=1000, help="Refresh interval (default 1s).")
@click.option("--count", type=click.IntRange(1), help="Exit after this many refreshes.")
@click.option(
    "--rows",
    "rows_max",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Number of boxes to show.",
)
@server_options
def command(target: ServerTarget, prefix: str, every_ms: int, count: int | None, rows_max: int) -> None:
    """Show the boxes with the most appends per second, refreshed until Ctrl-C. Does not count as a read."""
    with target.client(is_patient=True) as client, output.screen(as_json=target.as_json) as draw:
        before: dict[str, int] = {}
        last_s = time.monotonic()
        frames = 0
        while True:
            boxes = list(client.boxes(prefix))
            now_s = time.monotonic()
            rows: list[dict[str, Any]] = []
            for box in boxes:
                appends = max(0, box.head_seq - before.get(box.box, box.head_seq))
                rate = appends / max(now_s - last_s, 0.001)
                fields = {column: getattr(box, column, None) for column in _COLUMNS}
                rows.append({**fields, "appends_per_s": round(rate, 1)})
            rows.sort(key=lambda row: (-row["appends_per_s"], row["box"]))
            draw(_COLUMNS, rows[:rows_max])
            frames += 1
            if frames == count:
                return
            before, last_s = {box.box: box.head_seq for box in boxes}, now_s
            time.sleep(every_ms / 1000)
