"""Numbers with units as people write them: `4096`, `10GiB`, `1.5MB`, `30s`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

UNITS: Final[dict[str, dict[str, int]]] = {
    "count": {"": 1},
    "bytes": {"": 1, "b": 1}
    | {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
    | {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    "ms": {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000},
}
_number_and_unit = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([A-Za-z]*)").fullmatch


def parse_number(text: str, units: Mapping[str, int]) -> int:
    """Return `text` as a whole number of units. Raises `ValueError` when it is not one."""
    match = _number_and_unit(text)
    if match is None or match[3].lower() not in units:
        raise ValueError
    whole, fraction, unit = match[1], match[2] or "", units[match[3].lower()]
    denominator: int = 10 ** len(fraction)
    number, rest = divmod(int(whole + fraction) * unit, denominator)
    if rest or (fraction and unit == 1):
        raise ValueError
    return number
