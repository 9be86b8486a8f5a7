"""Who may do what (v0 §11): scopes, name prefixes and the grant of a key. Pure.

Rules of the file
- A grant is what one key allows. No grant at all means that nobody is asked: keys are off, or the peer is
  trusted by other means (a Unix socket of ours).
- A refusal names the field and the scope that is missing, and never the key.
"""

from __future__ import annotations

import msgspec

from streams.protocol.errors import Forbidden
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.names import shown

READ, WRITE, DELETE, ADMIN = 1, 2, 4, 8
ALL = READ | WRITE | DELETE | ADMIN
#: Word and letter of each scope.
SCOPES = {"read": READ, "write": WRITE, "delete": DELETE, "admin": ADMIN}
LETTERS = {word[0]: scope for word, scope in SCOPES.items()}


def words(scopes: int) -> list[str]:
    return [word for word, scope in SCOPES.items() if scopes & scope]


class Grant(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a key allows: these scopes, on names that start with one of these; no prefix is every name."""

    scopes: int = ALL
    prefixes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing that it does not allow."""
        return self.scopes == ALL and not self.prefixes

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    def allows(self, scope: str, name: str) -> bool:
        """Whether this scope, by its word, is given on this name; no name stands for all of them."""
        return bool(self.scopes & SCOPES[scope]) and self.covers(name)

    def require(self, scopes: int) -> None:
        missing = scopes & ~self.scopes
        if missing:
            needed = " and ".join(words(missing))
            raise Forbidden(f"scope: this key lacks {needed}", field="scope", missing=words(missing))

    def require_name(self, name: str, field: str = "box") -> None:
        if self.prefixes and not name.startswith(self.prefixes):
            raise Forbidden(f"{field}: {shown(name)} is outside the names that this key may use", field=field)

    def within(self, prefix: str) -> tuple[str, ...]:
        """The prefixes, none of which covers another, that say what of `prefix` may be seen."""
        if not self.prefixes or prefix.startswith(self.prefixes):
            return (prefix,)
        inside = sorted({own for own in self.prefixes if own.startswith(prefix)})
        found: list[str] = []
        for own in inside:  # sorted, so what covers another comes before it
            if not found or not own.startswith(found[-1]):
                found.append(own)
        return tuple(found)


def check_patch(grant: Grant, patch: BoxPatch, field: str = "dead_letter") -> None:
    """The names that a config brings along."""
    if isinstance(patch.dead_letter, str):
        grant.require_name(patch.dead_letter, field)


def check_append(grant: Grant, config: BoxPatch | None, trim_before_seq: int | None) -> None:
    """What an append may do beyond writing."""
    if config is not None:
        grant.require(ADMIN)
        check_patch(grant, config, "config.dead_letter")
    if trim_before_seq is not None:
        grant.require(DELETE)
