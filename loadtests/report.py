"""Prints a run: with rich on a terminal, else as plain text. Figures go to stdout, progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from loadtests.machine import REFERENCE_SYNC_MS

_HEADINGS = ("", "figure", "", "spread", "floor", "aim", "speed", "")


class Progress(Protocol):
    def begin(self, title: str) -> None: ...
    def end(self, line: str) -> None: ...


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._at, self._title = total, 0, ""

    def begin(self, title: str) -> None:
        self._at += 1
        self._title = title

    def end(self, line: str) -> None:
        print(f"[{self._at}/{self._total}] {self._title}: {line}", file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, total: int, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def begin(self, title: str) -> None:
        self._bar.update(self._task, description=title)

    def end(self, line: str) -> None:
        self._bar.advance(self._task)


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield _Lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description:<46}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(total, bar)


def number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def verdict(row: dict[str, Any]) -> str:
    if row.get("skipped"):
        return f"skipped: {row['skipped']}"
    if row["figure"] is None:
        return "failed"
    if row["floor"] is None:
        return "info"
    if row["meets_aim"]:
        return "aim"
    if row["meets_floor"]:
        return "floor"
    return "below floor, slow machine" if _meets_floor_for_its_speed(row) else "BELOW FLOOR"


def _meets_floor_for_its_speed(row: dict[str, Any]) -> bool:
    """Return True if a figure below its floor would meet it on a machine of full speed with a quick disk.

    This is an estimate. It scales the time of a request by the speed of the processor. In a row of class
    fsync one sync is part of that time; it counts as on the reference disk.
    """
    speed = min(1.0, row["speed"] or 1.0)
    factor = speed
    sync_ms, request_ms = row.get("sync_ms"), row.get("latency_ms")
    if sync_ms and request_ms:
        own_ms = max(0.0, request_ms - sync_ms)
        factor = (own_ms * speed + min(sync_ms, REFERENCE_SYNC_MS)) / (own_ms + sync_ms)
    figure, floor = row["figure"], row["floor"]
    return bool(figure * factor <= floor if row["better"] == "less" else figure / factor >= floor)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    spread = row["spread"]
    return (
        row["title"],
        number(row["figure"]) or "–",
        row["unit"],
        f"{number(spread[0])}–{number(spread[1])}" if spread else "",
        number(row["floor"]),
        number(row["aim"]),
        number(row["speed"]),
        verdict(row),
    )


def show(run: dict[str, Any]) -> None:
    facts = run["machine"]
    load = ", ".join(map(str, facts["load_average"]))
    print(
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
        f"Python {facts['python']}"
    )
    print(f"data in {facts['data_dir']} ({facts['filesystem']})")
    print(
        f"load average {load}; others used {facts['cores_used_by_others']} cores before the run; "
        f"speed {facts['speed']:.2f} of the reference"
    )
    repeat_note = f", median of {run['repeat']}" if run["repeat"] > 1 else ""
    print(
        f"{run['seconds']:g} s a row{repeat_note}{', quick' if run['quick'] else ''}; load generator included"
    )
    table = [cells(row) for row in run["rows"]]
    if sys.stdout.isatty():
        _show_rich(table)
    else:
        _show_plain(table)
    for row in run["rows"]:
        if row["error"]:
            print(f"{row['key']}: {row['error']}")
    for warning in run["warnings"]:
        print(f"warning: {warning}")


def _show_plain(table: list[tuple[str, ...]]) -> None:
    rows = [_HEADINGS, *table]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    # Without --repeat there is no spread.
    columns = [at for at in range(len(_HEADINGS)) if at != 3 or any(row[3] for row in table)]
    for row in rows:
        texts = [
            row[at].rjust(widths[at]) if at in (1, 3, 4, 5, 6) else row[at].ljust(widths[at])
            for at in columns
        ]
        print("  ".join(texts).rstrip())


def _show_rich(table: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    colours = {
        "aim": "green",
        "floor": "yellow",
        "below floor, slow machine": "red",
        "BELOW FLOOR": "bold red",
        "failed": "bold red",
        "info": "dim",
    }
    rich_table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    with_spread = any(row[3] for row in table)
    for at, heading in enumerate(_HEADINGS):
        if at != 3 or with_spread:
            rich_table.add_column(
                heading, justify="right" if at in (1, 3, 4, 5, 6) else "left", no_wrap=at != 0
            )
    for row in table:
        texts = [text for at, text in enumerate(row) if at != 3 or with_spread]
        texts[-1] = f"[{colours[row[-1]]}]{row[-1]}[/]"
        rich_table.add_row(*texts)
    Console().print(rich_table)
