"""API keys: how they are written down, and the ring that a presented one is looked for in (v0 §11). Pure.

    secret[:scopes[:prefixes]] [name=value …]

    s3cret    s3cret:rw    s3cret:read+write:orders.|audit. id=orders boxes=1000 stored_bytes=10GiB

Rules of the file
- The id of a key is its identity: limits are counted, and sessions and transactions are owned, by id. Two
  secrets may share an id, so that one can take the place of the other; everything else of them is the same.
- A secret is turned into its SHA-256 digest where it is read, and only the digest is kept.
- An error names the entry that is wrong and never shows a part of it: if a secret contains a colon, its end
  stands where scopes belong.
- A presented secret is compared with every key, in constant time each, so that the response time
  does not reveal how close it came.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

import msgspec

from streams.protocol.access.grants import ALL, LETTERS, SCOPES, Grant
from streams.protocol.access.key_limits import NAMES, STORED, Limits
from streams.protocol.model.units import UNITS, parse_number

#: Each request is compared with every key, at about 0.2 µs a key.
KEYS_MAX = 1000
SECRET_CHARS_MAX = 512
PREFIXES_MAX = 64
#: Shorter secrets are taken, with a warning: they can be guessed.
SECRET_CHARS_GOOD = 16

#: No limit may be larger: the largest number that a JSON reader takes as it is.
LIMIT_MAX = 2**53 - 1

_secret = re.compile(r"[!-~]+").fullmatch
_id = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}").fullmatch
#: Of a box, or of a stream of the S2 API, whose name begins with that of its basin and a slash.
_prefix = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}|[a-z0-9-]{8,48}/[^,|\s]{0,512}").fullmatch


class MalformedKey(ValueError):
    """An entry that is not a valid key. The message does not contain the entry."""


class Key(msgspec.Struct, frozen=True):
    """A key without its secret. The digest stays out of logs and answers; the id may be in both."""

    digest: str
    grant: Grant = Grant()
    id: str = ""
    limits: Limits = Limits()
    #: The id if shards have to look at the limits of this key, else nothing.
    account: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            msgspec.structs.force_setattr(self, "id", default_id(self.digest))
        if not self.account and any(getattr(self.limits, name) for name in STORED):
            msgspec.structs.force_setattr(self, "account", self.id)

    @property
    def shard_grant(self) -> Grant | None:
        """The grant that a shard must check for this key; None when the key allows everything."""
        return None if self.grant.is_whole else self.grant

    def __repr__(self) -> str:
        return f"<Key {self.id} {self.grant}>"


def default_id(digest: str) -> str:
    """Return the id of a key without one. It reveals less of the secret than the digest does."""
    return f"key-{hashlib.sha256(b'id of a key ' + digest.encode()).hexdigest()[:10]}"


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class KeyRing(msgspec.Struct, frozen=True):
    keys: tuple[Key, ...] = ()

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self.keys)}>"

    def find(self, secret: str) -> Key | None:
        digest = digest_of(secret)
        match: Key | None = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match

    def holds(self, key: Key) -> bool:
        """Return True if the key is still present with the same grant. Its limits may differ."""
        identity = (key.digest, key.grant, key.id)
        return any((each.digest, each.grant, each.id) == identity for each in self.keys)

    def accounts(self) -> dict[str, Key]:
        """The keys whose limits shards enforce, by id."""
        return {key.account: key for key in self.keys if key.account}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> KeyRing:
        return msgspec.json.decode(text, type=cls)


def bearer_of(header: str | None) -> str | None:
    """Return the secret of an `Authorization` header; None if it has none."""
    if header is None:
        return None
    scheme, _, secret = header.partition(" ")
    return secret.strip(" ") or None if scheme.lower() == "bearer" else None


def entries_of_list(text: str) -> list[tuple[str, str]]:
    """Return the entries of a comma-separated list, each with its name for errors."""
    return [(f"entry {number}", entry.strip()) for number, entry in enumerate(text.split(","), 1)]


def entries_of_lines(text: str) -> list[tuple[str, str]]:
    """Return the entries of a file: one per line, without empty lines and lines that start with #."""
    lines = [(f"line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(name, line) for name, line in lines if line and not line.startswith("#")]


def parse_ring(
    entries: Iterable[tuple[str, str]], defaults: Limits | None = None
) -> tuple[KeyRing, list[str]]:
    """Parse the key ring. Also return a warning for each weak key. Raises `MalformedKey`.

    `defaults` are the limits of keys with prefixes. A key without prefixes has only the limits of its entry:
    it may use all boxes, so the data of other keys would count against default limits.
    """
    keys: dict[str, Key] = {}
    by_id: dict[str, Key] = {}
    warnings: list[str] = []
    for name, entry in entries:
        main, *options = entry.split() or [""]
        secret, _, rest = main.partition(":")
        scopes, _, prefixes = rest.partition(":")
        if _secret(secret) is None or "," in secret:
            raise MalformedKey(f"{name}: the secret must be visible ASCII without a colon or comma")
        if len(secret) > SECRET_CHARS_MAX:
            raise MalformedKey(f"{name}: the secret is longer than {SECRET_CHARS_MAX} characters")
        grant = Grant(_scopes(name, scopes), _prefixes(name, prefixes))
        id, limits = _options(name, options, defaults if defaults and grant.prefixes else Limits())
        key = Key(digest_of(secret), grant, id, limits)
        if key.digest in keys:
            raise MalformedKey(f"{name}: an earlier entry has the same secret; remove one")
        twin = by_id.setdefault(key.id, key)
        if (twin.grant, twin.limits) != (key.grant, key.limits):
            raise MalformedKey(
                f"{name}: an earlier entry has the same id; give both the same scopes, prefixes and "
                "limits, or one of them another id"
            )
        keys[key.digest] = key
        if len(secret) < SECRET_CHARS_GOOD:
            warnings.append(f"{name}: the secret has fewer than {SECRET_CHARS_GOOD} characters")
    if len(keys) > KEYS_MAX:
        raise MalformedKey(f"there are {len(keys)} keys; at most {KEYS_MAX} are allowed")
    return KeyRing(tuple(keys.values())), warnings


def _options(name: str, options: list[str], defaults: Limits) -> tuple[str, Limits]:
    """Parse the id and the limits of an entry."""
    values: dict[str, str] = {}
    for option in options:
        field, _, value = option.partition("=")
        if field not in ("id", *NAMES):
            raise MalformedKey(
                f"{name}: only name=value may follow a space, with one of these names: id, "
                + ", ".join(NAMES)
            )
        if field in values:
            raise MalformedKey(f"{name}: {field} is given twice")
        values[field] = value
    id = values.pop("id", None)
    if id is not None and _id(id) is None:
        raise MalformedKey(
            f"{name}: id must be 1 to 63 letters, digits, dots, dashes and underscores, beginning with a "
            "letter or digit"
        )
    limits = {field: _limit(name, field, value) for field, value in values.items()}
    return id or "", msgspec.structs.replace(defaults, **limits)


def _limit(name: str, field: str, text: str) -> int:
    kind = "bytes" if field.endswith("_bytes") else "count"
    try:
        value = parse_number(text, UNITS[kind])
        if value > LIMIT_MAX:
            raise ValueError
    except ValueError:
        legal = "a size such as 4096, 64MiB or 10GiB" if kind == "bytes" else "a whole number"
        raise MalformedKey(f"{name}: {field} must be {legal}; 0 is no limit") from None
    return value


def _scopes(name: str, text: str) -> int:
    if not text:
        return ALL
    scopes = 0
    for part in text.split("+"):
        if part in SCOPES:
            scopes |= SCOPES[part]
        elif part and all(letter in LETTERS for letter in part):
            for letter in part:
                scopes |= LETTERS[letter]
        else:
            raise MalformedKey(
                f"{name}: only scopes joined with + may follow the secret: read, write, delete, admin, "
                "or their letters r, w, d, a (a secret itself cannot have a colon in it)"
            )
    return scopes


def _prefixes(name: str, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    parts = text.split("|")
    if len(parts) > PREFIXES_MAX or not all(map(_prefix, parts)):
        raise MalformedKey(
            f"{name}: only prefixes of box names may follow the scopes, at most {PREFIXES_MAX}, joined with |"
        )
    return tuple(dict.fromkeys(parts))
