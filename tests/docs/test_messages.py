"""One file lists every message that a user can see, so that a reviewer can read them in one go.

Method: the list is collected from the source (`tests/support/messages.py`) and compared with the golden file.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from tests.support.messages import page

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"


def test_the_list_of_messages_is_current() -> None:
    golden, current = GOLDEN.read_text(), page()
    if golden != current:
        lines = difflib.unified_diff(
            golden.splitlines(), current.splitlines(), "listed", "in the source", n=0, lineterm=""
        )
        changes = "\n".join(line for line in lines if not line.startswith("@@"))
        raise AssertionError(
            "messages to users differ from tests/docs/golden/messages.txt; read the changes as a user "
            f"would, then update the list with `make docs`:\n{changes}"
        )


def test_the_list_has_messages_of_every_kind() -> None:
    """The collector finds a message of each kind that is in the source today."""
    lines = page().splitlines()
    for line in (
        "  error NotAQueue: ",
        "  log warning: ",
        "  help --",
        "  help: ",
        "  print: ",
        "  question: ",
        "  check: ",
        "  setting: ",
        "  next_steps box_not_found: ",
    ):
        assert any(each.startswith(line) for each in lines), line
