"""Streams and basins of the S2 API: what is said of them between processes. Frozen, without behaviour.

A **stream** is a box of type `stream`, with binary records (`model/sequenced.py`), named
`basin/stream`: a slash stands in no other box's name. A **basin** is an entry in the register of the first
shard (`shard/core/s2/basins.py`): a config for its streams, and a number that no other basin has had.

How it travels is in `s2_requests.py`.
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

#: What one batch may hold, of a write and of a read (S2's own limits).
BATCH_RECORDS_MAX = 1000
BATCH_METERED_MAX = 1024 * 1024
STREAM_TOKEN_BYTES_MAX = 36

_AGE_SECS_DEFAULT = 7 * 24 * 3600


def box_of(basin: str, stream: str) -> str:
    """The qualified name of a stream: what its box is called."""
    return f"{basin}/{stream}"


#: A thousand years. A config may say more, up to 64 bits; times of the log are signed milliseconds.
_SECONDS_MAX = 1000 * 366 * 24 * 3600


def in_ms(seconds: int | None) -> int:
    """A duration of a config as the log counts it."""
    return 1000 * min(seconds or 0, _SECONDS_MAX)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a stream's config. None is "not said"; of a stream that exists everything is said."""

    storage_class: StorageClass | None = None
    #: Seconds for which records are kept; 0 = for ever.
    age_secs: int | None = None
    mode: Mode | None = None
    uncapped: bool | None = None
    min_age_secs: int | None = None

    def over(self, other: Spec) -> Spec:
        """This, and where it says nothing the other."""
        fields = msgspec.structs.asdict(other)
        fields |= {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return Spec(**fields)

    @property
    def box_config(self) -> BoxConfig:
        """What the box of such a stream is like. The spec has been resolved."""
        return BoxConfig(
            type="stream",
            durability="fsync",
            timestamping=Timestamping(self.mode or "client-prefer", bool(self.uncapped)),
            delete_on_empty_ms=in_ms(self.min_age_secs),
        )


#: What is so where nobody has said anything.
DEFAULTS = Spec(
    storage_class="express", age_secs=_AGE_SECS_DEFAULT, mode="client-prefer", uncapped=False, min_age_secs=0
)


class SpecPatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of a spec. What is unset stays, None takes back what was said."""

    storage_class: StorageClass | UnsetType | None = UNSET
    age_secs: int | UnsetType | None = UNSET
    mode: Mode | UnsetType | None = UNSET
    uncapped: bool | UnsetType | None = UNSET
    min_age_secs: int | UnsetType | None = UNSET

    def applied(self, spec: Spec) -> Spec:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        return msgspec.structs.replace(spec, **given)


class BasinConfig(msgspec.Struct, frozen=True, kw_only=True):
    defaults: Spec = Spec()
    cipher: Cipher | None = None
    create_on_append: bool = False
    create_on_read: bool = False


class BasinPatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`defaults` None takes back all of it."""

    defaults: SpecPatch | UnsetType | None = UNSET
    cipher: Cipher | UnsetType | None = UNSET
    create_on_append: bool | UnsetType = UNSET
    create_on_read: bool | UnsetType = UNSET

    def applied(self, config: BasinConfig) -> BasinConfig:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if "defaults" in given:
            patch = given["defaults"]
            given["defaults"] = Spec() if patch is None else patch.applied(config.defaults)
        return msgspec.structs.replace(config, **given)


class Basin(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    number: int
    config: BasinConfig
    created_ms: int
    #: 0 = it is not being deleted.
    deleted_ms: int = 0
    #: What it was made with, to recognise a repeat; "" = nothing that could be repeated.
    token: str = ""
    asked: BasinConfig = BasinConfig()


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream is beside its box."""

    #: Of its basin. A stream whose basin has another number is a remnant.
    basin_number: int
    spec: Spec
    created_ms: int
    cipher: Cipher | None = None
    deleted_ms: int = 0
    token: str = ""
    asked: Spec = Spec()


class NameSet(msgspec.Struct, frozen=True):
    """Names that are exactly this, or begin with this. Neither is none; so is an exact name of nothing."""

    exact: str | None = None
    prefix: str | None = None

    def holds(self, name: str) -> bool:
        if self.prefix is not None:
            return name.startswith(self.prefix)
        return bool(self.exact) and name == self.exact

    def within(self, other: NameSet) -> bool:
        """Whether it has no name that the other has not."""
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
    #: Operations that it allows, all told.
    ops: tuple[str, ...] = ()
    #: What was asked for, as it was: the scope as JSON.
    scope: str = "{}"
    auto_prefix: bool = False
    #: 0 = it does not expire.
    expires_ms: int = 0


# ---------------------------------------------------------------------------------------------------
# Asked with op 102


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
    #: Only those that are being deleted.
    deleted: bool = False


class DeleteBasin(msgspec.Struct, frozen=True, tag=True):
    """Marks it: nothing is made in it any more. Its streams are deleted next, and then it is dropped."""

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
    """What the streams of this shard hold whose boxes' names begin so, or are just this."""

    prefix: str
    after: str = ""
    is_exact: bool = False


StreamCommand = PutStream | PatchStream | GetStream | ListStreams | DeleteStream | GetStreamTail | GetUsage
ControlCommand = BasinCommand | StreamCommand | TokenCommand


# ---------------------------------------------------------------------------------------------------
# Appends and reads


class AppendStream(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Records as they are to be kept but for seq and time. Commands in them have been understood already."""

    box: str
    tails: list[bytes]
    times: list[int | None] | None = None
    #: What has closed the records. It must be what the stream says.
    cipher: Cipher | None = None
    #: The number that the first record must get.
    match_seq_num: int | None = None
    #: The token that the stream must have; None does not ask.
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
    #: Whether there is one at all, though it may have expired.
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
    """(box, stream), sorted by box. `after` is how far was looked, when there may be more."""

    streams: list[tuple[str, Stream]]
    after: str = ""


class StreamUsage(msgspec.Struct, array_like=True, frozen=True):
    """`after` is how far was looked, when there may be more."""

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
    """What a read gets, and where it has got to. `records` are entries with separators
    (`model/sequenced.py`)."""

    records: bytes | memoryview
    #: How many records these are.
    count: int
    next_seq_num: int
    tail_seq_num: int
    tail_ts: int
    generation: int
    cipher: str | None
    #: Whether a limit, or `until`, is what it stopped at.
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
