"""Authorization (v0 §11): scopes, name prefixes and the grant of a key. Pure.

Rules of the file
- A grant holds the permissions of one key. No grant means no check: keys are off, or the peer is trusted by
  other means (a Unix socket of the server).
- A refusal names the field and the scope that is missing, and never the key.
"""

from __future__ import annotations

import msgspec

from streams.protocol.errors import Forbidden
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.names import quote

READ, WRITE, DELETE, ADMIN = 1, 2, 4, 8
ALL = READ | WRITE | DELETE | ADMIN
#: Word and letter of each scope.
SCOPES = {"read": READ, "write": WRITE, "delete": DELETE, "admin": ADMIN}
LETTERS = {word[0]: scope for word, scope in SCOPES.items()}


def words(scopes: int) -> list[str]:
    return [word for word, scope in SCOPES.items() if scopes & scope]


class Grant(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The permissions of a key: its scopes, on names with one of `prefixes`; none means every name."""

    scopes: int = ALL
    prefixes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return True if the grant allows everything."""
        return self.scopes == ALL and not self.prefixes

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    def allows(self, scope: str, name: str) -> bool:
        """Return True if the grant has this scope, by its word, on this name. An empty name means all."""
        return bool(self.scopes & SCOPES[scope]) and self.covers(name)

    def require(self, scopes: int) -> None:
        missing = scopes & ~self.scopes
        if missing:
            scopes_text = " and ".join(words(missing))
            raise Forbidden(f"scope: this key lacks {scopes_text}", field="scope", missing=words(missing))

    def require_name(self, name: str, field: str = "box") -> None:
        if self.prefixes and not name.startswith(self.prefixes):
            raise Forbidden(f"{field}: {quote(name)} is outside the names that this key may use", field=field)

    def within(self, prefix: str) -> tuple[str, ...]:
        """Return the visible prefixes under `prefix`. None of them covers another."""
        if not self.prefixes or prefix.startswith(self.prefixes):
            return (prefix,)
        inside = sorted({own for own in self.prefixes if own.startswith(prefix)})
        outermost: list[str] = []
        for own in inside:  # sorted, so a prefix comes before those that it covers
            if not outermost or not own.startswith(outermost[-1]):
                outermost.append(own)
        return tuple(outermost)


def check_patch(grant: Grant, patch: BoxPatch, field: str = "dead_letter") -> None:
    """Check the names that a config refers to."""
    if isinstance(patch.dead_letter, str):
        grant.require_name(patch.dead_letter, field)


def check_append(grant: Grant, config: BoxPatch | None, trim_before_seq: int | None) -> None:
    """Check the permissions for the effects of an append besides writing: config and trim."""
    if config is not None:
        grant.require(ADMIN)
        check_patch(grant, config, "config.dead_letter")
    if trim_before_seq is not None:
        grant.require(DELETE)
