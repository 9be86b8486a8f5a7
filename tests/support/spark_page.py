"""Writes the table of options into `docs/reference/spark.md`: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from streams.spark.option_table import markdown

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "spark.md"
_TABLE = re.compile(r"(<!-- Options: written by `make docs`. -->\n\n).*?\n(?=\n)", re.DOTALL)


def main() -> None:
    text, count = _TABLE.subn(lambda found: found[1] + markdown(), PAGE.read_text())
    assert count == 1, "the page has a place for the table"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
