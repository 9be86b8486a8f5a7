"""Writes `streams/client/_sync/` from `streams/client/_async/`: the same text with the waiting taken out.

    python -m tests.support.twin            write it
    python -m tests.support.twin --check    exit with 1 when it is not what would be written

The table below is all that differs. A line of it that matches nothing is an error: it would lie about the
code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "streams" / "client" / "_async"
TWIN = ROOT / "streams" / "client" / "_sync"
HEADER = "# Written by `make twin` from ../_async/{name}. Do not edit.\n"

SUBSTITUTIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\bThe client, for trio and asyncio\. `_sync/` is made from these files by `make twin`\.",
         "The client, for plain code and threads."),
        (r"\basync def\b", "def"),
        (r"\basync with\b", "with"),
        (r"\basync for\b", "for"),
        (r"\bawait ", ""),
        (r"\bAsync(?=[A-Z])", ""),
        (r"\b__aenter__\b", "__enter__"),
        (r"\b__aexit__\b", "__exit__"),
        (r"\b__aiter__\b", "__iter__"),
        (r"\b__anext__\b", "__next__"),
        (r"\bStopAsyncIteration\b", "StopIteration"),
        (r"\baiter\(", "iter("),
        (r"\banext\(", "next("),
        (r"\baclose\b", "close"),
        (r"\basleep\b", "sleep"),
        (r"\bashield\b", "shield"),
        (r"\bain_thread\b", "in_thread"),
        (r"\bclient\._async\b", "client._sync"),
        (r"\bclient\.async_(?=[a-z])", "client."),
        (r"\btasks may use\b", "threads may use"),
        (r"\bwhen the task was cancelled\b", "when the thread ends early"),
    )
]  # fmt: skip


def twin_of(text: str, used: set[int]) -> str:
    for number, (pattern, replacement) in enumerate(SUBSTITUTIONS):
        text, count = pattern.subn(replacement, text)
        if count:
            used.add(number)
    return text


def twins() -> dict[str, str]:
    """File name -> what it must hold."""
    used: set[int] = set()
    found = {}
    for source in sorted(SOURCE.glob("*.py")):
        text = HEADER.format(name=source.name) + twin_of(source.read_text(), used)
        found[source.name] = _formatted(text, source.name)
    unused = [SUBSTITUTIONS[number][0].pattern for number in range(len(SUBSTITUTIONS)) if number not in used]
    if unused:
        raise SystemExit(f"these substitutions match nothing: {unused}")
    return found


def _formatted(text: str, name: str) -> str:
    """As the checks want it: names of another length sort and wrap elsewhere."""
    ruff = str(Path(sys.executable).with_name("ruff"))
    for arguments in (["check", "--select", "I", "--fix"], ["format"]):
        command = [ruff, *arguments, "--quiet", "--stdin-filename", str(TWIN / name), "-"]
        text = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text


def stale() -> list[str]:
    """Names of twins that are not what they must be."""
    wanted = twins()
    there = {path.name: path.read_text() for path in TWIN.glob("*.py")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main() -> int:
    if "--check" in sys.argv[1:]:
        names = stale()
        if names:
            print(f"stale, run `make twin`: {', '.join(names)}", file=sys.stderr)
        return 1 if names else 0
    TWIN.mkdir(exist_ok=True)
    for name in stale():
        (TWIN / name).write_text(twins()[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
