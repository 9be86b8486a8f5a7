"""Limits how fast a command reads the files of a running server, so that clients hardly notice.

    pause(bytes) ─► sleeps for the rate ─► every `SAMPLE_S`: asks the shards how long their acks take
                                              │ slower than before, or under pressure   half the rate
                                              └ otherwise                               a quarter more

A shard reports its ack times of the seconds before the command began (`recent_acks` of its hello) and of all
acks since its start (`acks` of `load`). The p99 since the last sample may be up to twice the p99 before.

Bounds: the rate stays between `LEAST_BYTES_PER_S` and `MOST_BYTES_PER_S`, so a command ends however busy the
server is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from streams import progress
from streams.protocol.model.units import UNITS, parse_number
from streams.protocol.telemetry.histogram import quantile
from streams.protocol.telemetry.pressure import NONE

if TYPE_CHECKING:
    from streams.cli.shardlinks import ShardExports

LEAST_BYTES_PER_S: Final = 4 << 20
MOST_BYTES_PER_S: Final = 4 << 30

#: First rate if the server has no upkeep limit of its own.
_START_BYTES_PER_S: Final = 16 << 20

#: Time between two samples.
SAMPLE_S: Final = 0.25
#: Acks that a sample needs: with fewer, one slow ack would decide.
_ACKS_MIN: Final = 50
#: Allowed growth of the p99 of acks, and the allowed p99 if the earlier one is unknown.
_FACTOR: Final = 2.0
_UNKNOWN_P99_S: Final = 0.01

#: Values of `--rate`: adapt to the shards' load, or no limit.
AUTO: Final = -1
UNLIMITED: Final = 0


class Rate(click.ParamType[int]):
    """Click type: `auto`, `max`, or bytes per second."""

    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value in ("auto", "max"):
            return AUTO if value == "auto" else UNLIMITED
        try:
            rate = parse_number(value, UNITS["bytes"])
        except ValueError:
            rate = 0
        if not rate:
            self.fail(f"{value!r} is not auto, max, or a size per second such as 64MiB", param, ctx)
        return rate


option = click.option(
    "--rate",
    type=Rate(),
    default="auto",
    metavar="RATE",
    show_default=True,
    help="Read rate: bytes per second such as 64MiB, auto (slow down when clients would notice), or max.",
)


class Pace:
    """A read rate that halves under load and recovers in steps of a quarter."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = float(bytes_per_s)

    def __repr__(self) -> str:
        return f"<Pace {self.bytes_per_s / 2**20:.0f} MiB/s>"

    def sample(self, *, is_pressed: bool) -> None:
        rate = self.bytes_per_s / 2 if is_pressed else self.bytes_per_s * 1.25
        self.bytes_per_s = min(max(rate, LEAST_BYTES_PER_S), MOST_BYTES_PER_S)


class ShardWatch:
    """Decides from the ack times of one shard whether the command slows down its clients."""

    def __init__(self, recent_acks: Sequence[int]) -> None:
        """`recent_acks`: histogram of the ack times in the seconds before the command began."""
        is_known = sum(recent_acks) >= _ACKS_MIN
        self.limit_s = _FACTOR * quantile(recent_acks, 0.99) if is_known else _UNKNOWN_P99_S
        self._acks: Sequence[int] | None = None

    def __repr__(self) -> str:
        return f"<ShardWatch, at most {1000 * self.limit_s:.1f} ms>"

    def is_pressed(self, load: dict[str, Any]) -> bool:
        """Return True if acks have become too slow since the last call that had enough of them."""
        acks: list[int] = load["acks"]
        if self._acks is None:
            self._acks = acks
        new = [now - before for now, before in zip(acks, self._acks, strict=True)]
        if int(load["level"]) != NONE:
            return True
        if sum(new) < _ACKS_MIN:
            return False
        self._acks = acks
        return quantile(new, 0.99) > self.limit_s


class CopyThrottle:
    """Counts the bytes that a command reads, shows its progress, and sleeps to keep to the rate."""

    def __init__(
        self,
        pace: Pace | None,
        *,
        is_pressed: Callable[[], bool] | None = None,
        show: progress.ReportBytes = lambda count, total: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Without `is_pressed` the pace is constant; without a pace there is no limit."""
        self._pace = pace
        self._is_pressed = is_pressed
        self._show = show
        self._clock = clock
        self._sleep = sleep
        self._owed_s = 0.0
        self._last_sample_s = clock()
        self._bytes_done = self._bytes_total = 0

    def __repr__(self) -> str:
        return f"<CopyThrottle {self._bytes_done} of {self._bytes_total} B, {self._pace!r}>"

    def expect(self, size: int) -> None:
        """Set how many bytes the command will read."""
        self._bytes_total = size

    def pause(self, size: int) -> None:
        """Count bytes that were read, and sleep if the command is ahead of its rate."""
        self._bytes_done += size
        self._show(min(self._bytes_done, self._bytes_total), self._bytes_total)
        if self._pace is None:
            return
        self._owed_s += size / self._pace.bytes_per_s
        if self._owed_s > 0.01:  # shorter sleeps overshoot
            self._sleep(self._owed_s)
            self._owed_s = 0.0
        if self._is_pressed is not None and self._clock() - self._last_sample_s >= SAMPLE_S:
            self._pace.sample(is_pressed=self._is_pressed())
            self._last_sample_s = self._clock()


@contextmanager
def throttle_copy(what: str, rate: int, exports: ShardExports | None) -> Iterator[CopyThrottle]:
    """Limit and show the reads of a command. `exports` is None if the server is stopped."""
    pace: Pace | None = None
    is_pressed: Callable[[], bool] | None = None
    if rate > 0:
        pace = Pace(rate)
    elif rate == AUTO and exports is not None:
        pace = Pace(exports.usual_bytes_per_s or _START_BYTES_PER_S)
        watches = [ShardWatch(server["recent_acks"]) for server in exports.servers if "recent_acks" in server]
        if len(watches) == len(exports.servers):  # earlier versions do not report acks: constant rate
            is_pressed = _pressure_check(exports, watches)
    with progress.show_bytes(what) as show:
        yield CopyThrottle(pace, is_pressed=is_pressed, show=show)


def _pressure_check(exports: ShardExports, watches: list[ShardWatch]) -> Callable[[], bool]:
    def is_pressed() -> bool:
        answers = [
            load is not None and watch.is_pressed(load)
            for load, watch in zip(exports.loads(), watches, strict=True)
        ]
        return any(answers)

    return is_pressed
