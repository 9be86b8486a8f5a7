"""The tag filter of v0 §5, as reads, deletes and routers use it."""

from __future__ import annotations

import msgspec

from streams.protocol.errors import InvalidRequest
from streams.protocol.model.names import quote


class Match(msgspec.Struct, frozen=True):
    """A tag filter (v0 §5): one exact tag, or every tag with a prefix."""

    text: str
    is_prefix: bool = False

    def accepts(self, tag: str) -> bool:
        if not tag:
            return False
        return tag.startswith(self.text) if self.is_prefix else tag == self.text

    def to_list(self) -> list[str]:
        return ["tag", "Glob", self.text + "*"] if self.is_prefix else ["tag", "Eq", self.text]


def parse_match(value: str | list[str], field: str = "match") -> Match:
    """The tag filter grammar of §5: "X", ["tag","Eq","X"] or ["tag","Glob","X*"]."""
    if isinstance(value, str):
        value = ["tag", "Eq", value]
    if len(value) != 3 or value[0] != "tag" or value[1] not in ("Eq", "Glob"):
        raise InvalidRequest(
            f'{field}: must be a tag, ["tag","Eq","X"] or ["tag","Glob","X*"], got {quote(str(value))}',
            field=field,
        )
    text = value[2]
    if value[1] == "Eq":
        if not text:
            raise InvalidRequest(f"{field}: an empty tag matches nothing", field=field)
        return Match(text)
    if text.count("*") != 1 or not text.endswith("*"):
        raise InvalidRequest(
            f"{field}: {quote(text)} must end in its only star, as in user-* (use Eq for an exact tag)",
            field=field,
        )
    return Match(text[:-1], is_prefix=True)
