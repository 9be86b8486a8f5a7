"""The tag filter of v0 §5, as reads, deletes and routers use it."""

from __future__ import annotations

import msgspec


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
