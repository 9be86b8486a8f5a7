"""How fast a command reads the files of a running server: as fast as its clients hardly notice.

    pause(bytes) ─► sleeps for the rate ─► every `SAMPLE_S`: asks the shards how long their acks take
                                              │ longer than before, or under pressure   half the rate
                                              └ otherwise                               a quarter more

A shard tells the acks of the seconds before the command began (`recent_acks` of its hello) and all acks since
its start (`acks` of `load`). The p99 of those that came since the last sample may be twice that of before.

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
    from streams.cli.shardlinks import Exported

LEAST_BYTES_PER_S: Final = 4 << 20
MOST_BYTES_PER_S: Final = 4 << 30

#: Where a server has no rate of its own for such work.
_START_BYTES_PER_S: Final = 16 << 20

#: Between two samples.
SAMPLE_S: Final = 0.25
#: Acks that a sample needs: with fewer, one slow ack would be taken for all.
_ACKS_MIN: Final = 50
#: How much longer the p99 of acks may get, and what it may be where it is not known what it was before.
_FACTOR: Final = 2.0
_UNKNOWN_P99_S: Final = 0.01

#: Of `--rate`: by what the shards say, or without a limit.
AUTO: Final = -1
UNLIMITED: Final = 0


class Rate(click.ParamType[int]):
    """`auto`, `max`, or a size a second."""

    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value in ("auto", "max"):
            return AUTO if value == "auto" else UNLIMITED
        try:
            found = parse_number(value, UNITS["bytes"])
        except ValueError:
            found = 0
        if not found:
            self.fail(f"{value!r} is neither auto, max, nor a size a second such as 64MiB", param, ctx)
        return found


option = click.option(
    "--rate",
    type=Rate(),
    default="auto",
    metavar="RATE",
    show_default=True,
    help="Bytes a second, such as 64MiB; auto: as fast as a running server's clients hardly notice; max.",
)


class Pace:
    """A rate that gives way at once and comes back bit by bit."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = float(bytes_per_s)

    def __repr__(self) -> str:
        return f"<Pace {self.bytes_per_s / 2**20:.0f} MiB/s>"

    def sample(self, *, is_pressed: bool) -> None:
        rate = self.bytes_per_s / 2 if is_pressed else self.bytes_per_s * 1.25
        self.bytes_per_s = min(max(rate, LEAST_BYTES_PER_S), MOST_BYTES_PER_S)


class ShardWatch:
    """Tells from what a shard says of its acks whether its clients notice us."""

    def __init__(self, recent_acks: Sequence[int]) -> None:
        """`recent_acks`: those of the seconds before we began."""
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


class Copying:
    """Counts the bytes that go by, shows how far they are, and sleeps for the rate."""

    def __init__(
        self,
        pace: Pace | None,
        *,
        is_pressed: Callable[[], bool] | None = None,
        show: progress.ReportBytes = lambda done, total: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Without `is_pressed` the pace stays as it is, and without a pace there is no limit."""
        self._pace = pace
        self._is_pressed = is_pressed
        self._show = show
        self._clock = clock
        self._sleep = sleep
        self._owed_s = 0.0
        self._sampled_s = clock()
        self._done = self._total = 0

    def __repr__(self) -> str:
        return f"<Copying {self._done} of {self._total} B, {self._pace!r}>"

    def expect(self, size: int) -> None:
        """So many bytes will go by."""
        self._total = size

    def pause(self, size: int) -> None:
        """So many bytes have gone by."""
        self._done += size
        self._show(min(self._done, self._total), self._total)
        if self._pace is None:
            return
        self._owed_s += size / self._pace.bytes_per_s
        if self._owed_s > 0.01:  # shorter sleeps take longer than they say
            self._sleep(self._owed_s)
            self._owed_s = 0.0
        if self._is_pressed is not None and self._clock() - self._sampled_s >= SAMPLE_S:
            self._pace.sample(is_pressed=self._is_pressed())
            self._sampled_s = self._clock()


@contextmanager
def copying(what: str, rate: int, exported: Exported | None) -> Iterator[Copying]:
    """Pace and show a command that reads what shards have exported; None is a server that is stopped."""
    pace: Pace | None = None
    is_pressed: Callable[[], bool] | None = None
    if rate > 0:
        pace = Pace(rate)
    elif rate == AUTO and exported is not None:
        pace = Pace(exported.usual_bytes_per_s or _START_BYTES_PER_S)
        watches = [
            ShardWatch(server["recent_acks"]) for server in exported.servers if "recent_acks" in server
        ]
        if len(watches) == len(exported.servers):  # an earlier version does not tell: the usual rate, then
            is_pressed = _asking(exported, watches)
    with progress.bytes_shown(what) as show:
        yield Copying(pace, is_pressed=is_pressed, show=show)


def _asking(exported: Exported, watches: list[ShardWatch]) -> Callable[[], bool]:
    def is_pressed() -> bool:
        found = [
            load is not None and watch.is_pressed(load)
            for load, watch in zip(exported.loads(), watches, strict=True)
        ]
        return any(found)

    return is_pressed
