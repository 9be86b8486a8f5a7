"""Streams and basins of the S2 API: commands and replies between processes. Frozen, without behaviour.

A **stream** is a box of type `stream`, with binary records (`model/binary_records.py`), named
`basin/stream`: no other box has a slash in its name. A **basin** is an entry in the registry of the first
shard (`shard/core/s2/basins.py`): a config for its streams, and a number that no other basin has had.

`s2_requests.py` encodes and decodes them.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from streams.protocol.model.boxes import BoxConfig, Timestamping

Mode = Literal["client-prefer", "client-require", "arrival"]
StorageClass = Literal["standard", "express"]
Cipher = Literal["aegis-256", "aes-256-gcm"]
Result = Literal["created", "updated", "noop"]

#: Limits of one batch, for appends and reads (S2's own limits).
BATCH_RECORDS_MAX = 1000
BATCH_METERED_MAX = 1024 * 1024
STREAM_TOKEN_BYTES_MAX = 36

_AGE_SECS_DEFAULT = 7 * 24 * 3600


def box_of(basin: str, stream: str) -> str:
    """Return the qualified name of a stream, which is the name of its box."""
    return f"{basin}/{stream}"


#: A thousand years. A config may say more, up to 64 bits; times of the log are signed milliseconds.
_SECONDS_MAX = 1000 * 366 * 24 * 3600


def in_ms(seconds: int | None) -> int:
    """A duration of a config as the log counts it."""
    return 1000 * min(seconds or 0, _SECONDS_MAX)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The config of a stream. None means "not set"; an existing stream has every field set."""

    storage_class: StorageClass | None = None
    #: Seconds for which records are kept; 0 = for ever.
    age_secs: int | None = None
    mode: Mode | None = None
    uncapped: bool | None = None
    min_age_secs: int | None = None

    def over(self, other: Spec) -> Spec:
        """Return this config, with fields of `other` where this one has None."""
        fields = msgspec.structs.asdict(other)
        fields |= {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return Spec(**fields)

    @property
    def box_config(self) -> BoxConfig:
        """The config of the stream's box. Every field of the spec must be set."""
        return BoxConfig(
            type="stream",
            durability="fsync",
            timestamping=Timestamping(self.mode or "client-prefer", bool(self.uncapped)),
            delete_on_empty_ms=in_ms(self.min_age_secs),
        )


#: The values of fields that neither stream nor basin sets.
DEFAULTS = Spec(
    storage_class="express", age_secs=_AGE_SECS_DEFAULT, mode="client-prefer", uncapped=False, min_age_secs=0
)


class SpecPatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of a spec. An unset field stays as it is; None resets it."""

    storage_class: StorageClass | UnsetType | None = UNSET
    age_secs: int | UnsetType | None = UNSET
    mode: Mode | UnsetType | None = UNSET
    uncapped: bool | UnsetType | None = UNSET
    min_age_secs: int | UnsetType | None = UNSET

    def apply(self, spec: Spec) -> Spec:
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        return msgspec.structs.replace(spec, **fields)


class BasinConfig(msgspec.Struct, frozen=True, kw_only=True):
    defaults: Spec = Spec()
    cipher: Cipher | None = None
    create_on_append: bool = False
    create_on_read: bool = False


class BasinPatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of a basin's config. None in `defaults` resets all of them."""

    defaults: SpecPatch | UnsetType | None = UNSET
    cipher: Cipher | UnsetType | None = UNSET
    create_on_append: bool | UnsetType = UNSET
    create_on_read: bool | UnsetType = UNSET

    def apply(self, config: BasinConfig) -> BasinConfig:
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if "defaults" in fields:
            patch = fields["defaults"]
            fields["defaults"] = Spec() if patch is None else patch.apply(config.defaults)
        return msgspec.structs.replace(config, **fields)


class Basin(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    number: int
    config: BasinConfig
    created_ms: int
    #: 0 = it is not being deleted.
    deleted_ms: int = 0
    #: Request token and config of its creation, to recognise a repeat; "" = the creation cannot be repeated.
    token: str = ""
    asked: BasinConfig = BasinConfig()


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a stream besides those of its box."""

    #: Number of its basin. A stream whose basin has another number is left over from a deleted basin.
    basin_number: int
    spec: Spec
    created_ms: int
    cipher: Cipher | None = None
    deleted_ms: int = 0
    token: str = ""
    asked: Spec = Spec()


class NameSet(msgspec.Struct, frozen=True):
    """A set of names: one exact name, or all names with a prefix. Without either, or with an empty exact
    name, it is empty."""

    exact: str | None = None
    prefix: str | None = None

    def holds(self, name: str) -> bool:
        if self.prefix is not None:
            return name.startswith(self.prefix)
        return bool(self.exact) and name == self.exact

    def within(self, other: NameSet) -> bool:
        """Return True if this is a subset of `other`."""
        if self.prefix is not None:
            return other.prefix is not None and self.prefix.startswith(other.prefix)
        return not self.exact or other.holds(self.exact)

    @property
    def is_every_name(self) -> bool:
        return self.prefix == ""

    @property
    def is_empty(self) -> bool:
        return self.prefix is None and not self.exact

    @property
    def common_prefix(self) -> str:
        """The prefix by which to list these names. An exact name is the first one that begins with itself,
        so that only the first page of such a list can hold it."""
        return self.prefix or self.exact or ""

    def narrow(self, prefix: str) -> NameSet:
        """The names of this set that begin with `prefix`."""
        if self.prefix is None:
            return self if self.exact and self.exact.startswith(prefix) else NameSet()
        if self.prefix.startswith(prefix):
            return self
        return NameSet(prefix=prefix) if prefix.startswith(self.prefix) else NameSet()


#: The set of every name.
EVERY_NAME = NameSet(prefix="")


class AccessToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the S2 API without its secret."""

    id: str
    digest: str
    basins: NameSet = NameSet()
    streams: NameSet = NameSet()
    tokens: NameSet = NameSet()
    #: All operations that it allows.
    ops: tuple[str, ...] = ()
    #: The scope of the request that issued it, as JSON.
    scope: str = "{}"
    auto_prefix: bool = False
    #: 0 = it does not expire.
    expires_ms: int = 0


# ---------------------------------------------------------------------------------------------------
# Control commands (op 102)


class PutBasin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Makes a basin, or, with `ensures`, sees to it that there is one of this config."""

    name: str
    config: BasinConfig
    token: str = ""
    ensures: bool = False
    #: False: `ensures` refuses to change the config of a basin that exists.
    may_update: bool = True
    #: The key whose limits count, if it has some.
    account: str = ""


class PatchBasin(msgspec.Struct, frozen=True, tag=True):
    name: str
    patch: BasinPatch


class GetBasin(msgspec.Struct, frozen=True, tag=True):
    name: str


class ListBasins(msgspec.Struct, frozen=True, tag=True):
    prefix: str = ""
    after: str = ""
    limit: int = 1000
    #: True lists only basins that are being deleted.
    deleted: bool = False


class DeleteBasin(msgspec.Struct, frozen=True, tag=True):
    """Marks the basin as deleted: no stream is created in it any more. Its streams go next, then itself."""

    name: str


class DropBasin(msgspec.Struct, frozen=True, tag=True):
    """Forgets a basin that is being deleted and has no stream any more."""

    name: str
    number: int


class PutStream(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    box: str
    basin_number: int
    asked: Spec
    defaults: Spec
    cipher: Cipher | None = None
    token: str = ""
    ensures: bool = False
    #: False: `ensures` refuses to change the config of a stream that exists.
    may_update: bool = True
    #: As in `PutBasin`.
    account: str = ""


class PatchStream(msgspec.Struct, frozen=True, tag=True):
    box: str
    patch: SpecPatch
    defaults: Spec


class GetStream(msgspec.Struct, frozen=True, tag=True):
    box: str


class ListStreams(msgspec.Struct, frozen=True, tag=True):
    """Of this shard. `prefix` begins with the basin and a slash; without one all streams are listed."""

    prefix: str = ""
    after: str = ""
    limit: int = 1000


class DeleteStream(msgspec.Struct, frozen=True, tag=True):
    """`basin_number` is given to delete a remnant: a stream of that basin and no other."""

    box: str
    basin_number: int = 0


class GetStreamTail(msgspec.Struct, frozen=True, tag=True):
    box: str


class IssueToken(msgspec.Struct, frozen=True, tag=True):
    token: AccessToken


class RevokeToken(msgspec.Struct, frozen=True, tag=True):
    id: str


class ListTokens(msgspec.Struct, frozen=True, tag=True):
    prefix: str = ""
    after: str = ""
    limit: int = 1000


class FindToken(msgspec.Struct, frozen=True, tag=True):
    digest: str


TokenCommand = IssueToken | RevokeToken | ListTokens | FindToken
BasinCommand = PutBasin | PatchBasin | GetBasin | ListBasins | DeleteBasin | DropBasin


class GetUsage(msgspec.Struct, frozen=True, tag=True):
    """Counts records and bytes of this shard's streams whose names start with `prefix`, or equal it."""

    prefix: str
    after: str = ""
    is_exact: bool = False


StreamCommand = PutStream | PatchStream | GetStream | ListStreams | DeleteStream | GetStreamTail | GetUsage
ControlCommand = BasinCommand | StreamCommand | TokenCommand


# ---------------------------------------------------------------------------------------------------
# Appends and reads


class AppendStream(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Appends records, complete but for seq and time. The gateway has executed the commands in them."""

    box: str
    tails: list[bytes]
    times: list[int | None] | None = None
    #: The cipher that encrypted the records. It must be that of the stream.
    cipher: Cipher | None = None
    #: The number that the first record must get.
    match_seq_num: int | None = None
    #: The token that the stream must have; None skips the check.
    fencing_token: str | None = None
    #: The token that the stream has from now on.
    fence: str | None = None
    #: (which record says so, number before which everything may go).
    trims: tuple[tuple[int, int], ...] = ()
    #: Names the session that this is an input of: when one fails, those sent after it fail too.
    chain: str = ""
    #: As in `PutBasin`.
    account: str = ""

    @property
    def return_seqs(self) -> bool:
        return False


class AppendHead(msgspec.Struct, array_like=True, gc=False):
    """Of an append. The body is the tails of the records, one behind the other."""

    box: str
    #: Where each tail ends, u32.
    ends: bytes
    #: i64 for each record, -1 where it has none; empty when none has one.
    times: bytes = b""
    cipher: Cipher | None = None
    match_seq_num: int | None = None
    fencing_token: str | None = None
    fence: str | None = None
    trims: tuple[tuple[int, int], ...] = ()
    chain: str = ""
    account: str = ""


class ReadHead(msgspec.Struct, array_like=True, gc=False):
    """Of a read. There is no body."""

    box: str
    from_seq: int = 0
    from_ts: int | None = None
    tail_offset: int | None = None
    clamp: bool = False
    limit: int = BATCH_RECORDS_MAX
    max_bytes: int = BATCH_METERED_MAX
    until: int | None = None
    wait_ms: int = 0
    begins: bool = True
    may_follow: bool = False
    generation: int | None = None


# ---------------------------------------------------------------------------------------------------
# Answers


class PutBasinReply(msgspec.Struct, array_like=True, frozen=True):
    basin: Basin
    result: Result


class GetBasinReply(msgspec.Struct, array_like=True, frozen=True):
    basin: Basin | None


class BasinPage(msgspec.Struct, array_like=True, frozen=True):
    basins: list[Basin]
    more: bool


class FindTokenReply(msgspec.Struct, array_like=True, frozen=True):
    token: AccessToken | None
    #: True if the token exists, even if it has expired.
    is_known: bool = True


class TokenPage(msgspec.Struct, array_like=True, frozen=True):
    tokens: list[AccessToken]
    more: bool


class PutStreamReply(msgspec.Struct, array_like=True, frozen=True):
    stream: Stream
    result: Result


class GetStreamReply(msgspec.Struct, array_like=True, frozen=True):
    stream: Stream


class StreamPage(msgspec.Struct, array_like=True, frozen=True):
    """(box, stream), sorted by box. `after` is the last box examined, when there may be more."""

    streams: list[tuple[str, Stream]]
    after: str = ""


class StreamUsage(msgspec.Struct, array_like=True, frozen=True):
    """`after` is the last box examined, when there may be more."""

    streams: int
    records: int
    bytes: int
    after: str = ""


class StreamTail(msgspec.Struct, array_like=True, frozen=True):
    seq_num: int
    timestamp: int


class AppendStreamReply(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Number and time of the first record, and the number after the last with the last one's time."""

    start_seq_num: int
    start_ts: int
    end_seq_num: int
    end_ts: int


class StreamRecords(msgspec.Struct, frozen=True, kw_only=True):
    """A page of records and the position after it. `records` are entries with separators
    (`model/binary_records.py`)."""

    records: bytes | memoryview
    #: The number of records.
    count: int
    next_seq_num: int
    tail_seq_num: int
    tail_ts: int
    generation: int
    cipher: str | None
    #: True if the page ended at a limit or at `until`.
    is_full: bool


Reply = (
    PutBasinReply
    | GetBasinReply
    | BasinPage
    | FindTokenReply
    | TokenPage
    | PutStreamReply
    | GetStreamReply
    | StreamPage
    | StreamUsage
    | StreamTail
    | AppendStreamReply
    | StreamRecords
)
Command = AppendStream | ControlCommand
