"""Writes the table of limits into `docs/explanation/pressure.md`, from the table in code: `make docs`."""

from __future__ import annotations

from pathlib import Path

from gateway.admission.limit_table import REQUEST_LIMITS, RequestLimit
from gateway.requests.errors import STATUS_OF
from streams.config import SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "pressure.md"
_BEGIN = "<!-- Written by `make docs` from gateway/admission/limit_table.py. Do not edit. -->\n"
_END = "<!-- End of the written table. -->\n"
_DEFAULTS = {setting.variable: setting.shown_default() for setting in SETTINGS}


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _beyond(limit: RequestLimit) -> str:
    errors = _quoted(tuple(f"{STATUS_OF[code]} {code}" for code in limit.errors))
    joiner = ", then " if "delays" in limit.effects else ": "
    text = joiner.join(filter(None, (limit.note, errors)))
    if limit.names:
        text += f", limit {_quoted(limit.names)}"
    return text


def table() -> str:
    lines = [
        "| # | limit | beyond it | fixed bound | setting (default) | metric |",
        "|---|---|---|---|---|---|",
    ]
    for number, limit in enumerate(REQUEST_LIMITS, 1):
        settings = ", ".join(
            f"`{name}`" + f" ({_DEFAULTS[name]})" * bool(_DEFAULTS[name]) for name in limit.settings
        )
        cells = (str(number), limit.bounds, _beyond(limit), limit.value, settings, _quoted(limit.metrics))
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The text of the page with the table as it is now."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return before + _BEGIN + "\n" + table() + "\n" + _END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
