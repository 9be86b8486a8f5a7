"""The heads of messages on the page about formats have the fields that the code has, in their order."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from streams.protocol.messages.s2 import AppendHead, ReadHead
from streams.protocol.wire import FollowHead, ReplyHead, RequestHead

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "formats.md").read_text()
HEADS: dict[str, type[msgspec.Struct]] = {
    "A request's head is": RequestHead,
    "a reply's is": ReplyHead,
    "An append's head is": AppendHead,
    "a read's head is": ReadHead,
    "A follow (op 40) has no body, and its head is": FollowHead,
}


@pytest.mark.parametrize("phrase", HEADS)
def test_a_head_is_listed_as_it_is_sent(phrase: str) -> None:
    listed = re.search(rf"{re.escape(phrase)}\s+`\[([^\]]+)\]`", PAGE)
    assert listed is not None, f"{phrase!r} is not on the page"
    fields = [re.split(r" (?:or|u32|i64)\b", each.strip())[0] for each in listed[1].split(",")]
    assert [field.replace(" ", "_") for field in fields] == list(HEADS[phrase].__struct_fields__)
