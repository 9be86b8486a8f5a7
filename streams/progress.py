"""Shows the progress of a long operation: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

#: Between two log lines, and between two lines of a command that reads many bytes.
_LINE_EVERY_S: Final = 2.0
_BYTES_LINE_EVERY_S: Final = 30.0

#: Called with how far it is, from 0 to 1.
Report = Callable[[float], None]


#: Called with bytes that are done, and all of them.
ReportBytes = Callable[[int, int], None]


@contextmanager
def show_progress(what: str, *, line: Callable[[int], None] = lambda percent: None) -> Iterator[Report]:
    """Shows a bar on standard error if that is a terminal. Elsewhere `line` is called with the percentage,
    every other second."""
    if sys.stderr.isatty():
        with _bar(what) as report:
            yield report
        return
    last_line_s = time.monotonic()

    def tell(ratio: float) -> None:
        nonlocal last_line_s
        if time.monotonic() - last_line_s >= _LINE_EVERY_S:
            last_line_s = time.monotonic()
            line(int(100 * ratio))

    yield tell


@contextmanager
def show_bytes(what: str) -> Iterator[ReportBytes]:
    """Shows bytes, rate and time left on standard error: a bar if that is a terminal, else a line now and
    then."""
    if sys.stderr.isatty():
        from rich.progress import DownloadColumn, TransferSpeedColumn

        with _progress(what, DownloadColumn(binary_units=True), TransferSpeedColumn()) as update:
            yield lambda current, total: update(completed=current, total=total or None)
        return
    lines = ByteLines(what)

    def tell(current: int, total: int) -> None:
        text = lines.line(current, total, time.monotonic())
        if text:
            print(text, file=sys.stderr, flush=True)

    yield tell


class ByteLines:
    """Lines that say how far a command is, for a log. Pure."""

    def __init__(self, what: str, *, every_s: float = _BYTES_LINE_EVERY_S) -> None:
        self._what = what
        self._every_s = every_s
        self._last_line: tuple[float, int] | None = None

    def line(self, done_bytes: int, total: int, now_s: float) -> str:
        """Return a line if it is time for one, else nothing."""
        if self._last_line is None:
            self._last_line = (now_s, done_bytes)
        before_s, before = self._last_line
        if now_s - before_s < self._every_s:
            return ""
        self._last_line = (now_s, done_bytes)
        mib = 1 << 20
        text = f"{self._what}: {done_bytes / mib:.0f} of {total / mib:.0f} MiB"
        if done_bytes <= before:
            return f"{text}, no progress for {now_s - before_s:.0f} s"
        per_s = (done_bytes - before) / (now_s - before_s)
        left_s = round((total - done_bytes) / per_s)
        time_left = f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"
        return f"{text}, {per_s / mib:.1f} MiB/s, {time_left} left"


@contextmanager
def _bar(what: str) -> Iterator[Report]:
    from rich.progress import TaskProgressColumn

    with _progress(what, TaskProgressColumn(), total=1.0) as update:
        yield lambda ratio: update(completed=ratio)


@contextmanager
def _progress(what: str, *columns: Any, total: float | None = None) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*all_columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda **state: progress.update(task, **state)
