"""How far something long is: a bar for a person at a terminal, a log line now and then for everyone else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: Between two log lines.
_LINE_EVERY_S: Final = 2.0

#: Called with how far it is, from 0 to 1.
Report = Callable[[float], None]


@contextmanager
def shown(what: str, *, line: Callable[[int], None] = lambda percent: None) -> Iterator[Report]:
    """Shows a bar on standard error if that is a terminal. Elsewhere `line` is called with the percentage,
    every other second."""
    if sys.stderr.isatty():
        with _bar(what) as report:
            yield report
        return
    told_at = time.monotonic()

    def tell(ratio: float) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _LINE_EVERY_S:
            told_at = time.monotonic()
            line(int(100 * ratio))

    yield tell


@contextmanager
def _bar(what: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda ratio: progress.update(task, completed=ratio)
