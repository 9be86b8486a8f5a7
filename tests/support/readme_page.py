"""Writes the numbers and the table of the README from the pages that they belong to: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "reference" / "benchmarks.md"
COMPARISON = ROOT / "docs" / "comparison.md"
_NUMBERS = (
    "<!-- Written by `make docs` from docs/reference/benchmarks.md. Do not edit. -->\n",
    "<!-- End of the numbers. -->\n",
)
_TABLE = (
    "<!-- Written by `make docs` from docs/comparison.md. Do not edit. -->\n",
    "<!-- End of the table. -->\n",
)
_PEER = "Redis Streams, everysec"
#: Title of a section of the benchmarks -> the sentence after its figure.
_SENTENCES = {
    "Appends, batches of 1000, 16 connections (records/s)": "records a second in batches of 1000 over HTTP",
    "Single appends, 64 connections (records/s)": "records a second if each is a request of its own",
    "From an append to a reader that waits, p50 (ms)": "ms from an append to a reader that waits, median",
}


def _row(section: str, name: str) -> list[str]:
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)$", section, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def numbers() -> str:
    """One line for each figure, with the ratio to Redis Streams with the same durability."""
    sections = dict(part.split("\n", 1) for part in BENCHMARKS.read_text().split("\n### ")[1:])
    lines = []
    for title, sentence in _SENTENCES.items():
        figure, ratio = _row(sections[title], "streams, disk")[1], _row(sections[title], _PEER)[3]
        factor = float(ratio.rstrip("×"))
        beside = (
            f"{factor:.1f} times what Redis Streams does with the same durability"
            if factor > 1
            else f"Redis Streams is {1 / factor:.1f} times faster"
        )
        lines.append(f"- **{figure}** {sentence}: {beside}.")
    return "\n".join(lines) + "\n"


def table() -> str:
    """The table of the comparison."""
    (found,) = re.findall(
        r"<!-- The table of the README. -->\n(.*?)<!-- End", COMPARISON.read_text(), re.DOTALL
    )
    return str(found)


def page(text: str) -> str:
    """The text of the README with its numbers and its table as they are now."""
    for (begin, end), content in ((_NUMBERS, numbers()), (_TABLE, table())):
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(page(README.read_text()))
