"""Rates of boxes: records appended a second, over windows of at least ten seconds. Volatile.

Both walks over all boxes use them and move the window on: the report of a shard (`box_statistics.py`) and a
listing by rate (`box_ordering.py`).
"""

from __future__ import annotations

#: A rate is that of the last window of at least this long, however often the boxes are counted.
WINDOW_MS = 10_000
#: A window that ended this long ago says nothing about now.
_OLD_MS = 6 * WINDOW_MS


class BoxRates:
    """Records appended a second, by box, since the last window began.

    Costs memory for one number a box: about 50 bytes.
    """

    def __init__(self) -> None:
        self._began_ms: int | None = None
        #: By generation: the newest seq when the window began, and the rates of the window before it.
        self._seqs: dict[int, int] = {}
        self._rates: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<BoxRates of {len(self._seqs)} boxes, {len(self._rates)} in use>"

    def rate_of(self, generation: int, now_ms: int) -> float:
        """Return the rate of a box in the last whole window; 0 if that window is old."""
        if self._began_ms is None or now_ms - self._began_ms > _OLD_MS:
            return 0.0
        return self._rates.get(generation, 0.0)

    def begin(self, now_ms: int) -> RateWalk:
        elapsed_ms = 0 if self._began_ms is None else now_ms - self._began_ms
        if self._began_ms is None or elapsed_ms >= WINDOW_MS or elapsed_ms < 0:
            return RateWalk(self._seqs, self._rates, elapsed_ms, now_ms)
        return RateWalk(self._seqs, self._rates, None, now_ms)

    def end(self, walk: RateWalk) -> None:
        if walk.elapsed_ms is not None:
            self._began_ms, self._seqs, self._rates = walk.now_ms, walk.seqs, walk.rates


class RateWalk:
    """The rates of one walk over the boxes. `elapsed_ms` is None while the window goes on."""

    def __init__(
        self, seqs: dict[int, int], rates: dict[int, float], elapsed_ms: int | None, now_ms: int
    ) -> None:
        self._seqs_before = seqs
        self._rates_before = rates
        self.elapsed_ms = elapsed_ms
        self.now_ms = now_ms
        self.seqs: dict[int, int] = {}
        self.rates: dict[int, float] = {}

    def rate_of(self, generation: int, seq: int) -> float:
        if self.elapsed_ms is None:
            return self._rates_before.get(generation, 0.0)
        self.seqs[generation] = seq
        new_records = seq - self._seqs_before.get(generation, seq)
        if new_records <= 0 or self.elapsed_ms <= 0:
            return 0.0
        rate = self.rates[generation] = round(new_records * 1000 / self.elapsed_ms, 3)
        return rate
