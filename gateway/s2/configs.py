"""Decodes and describes configs of streams and basins as JSON (s2 §7). Pure.

In a config that creates, null equals an absent field. In a config that changes, an absent field keeps its
value and null resets it to the default.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.requests.s2_errors import S2Error
from gateway.s2.fields import U64_MAX, bad_json
from streams.protocol.messages.s2 import (
    Basin,
    BasinConfig,
    BasinPatch,
    Cipher,
    Mode,
    Spec,
    SpecPatch,
    StorageClass,
    Stream,
)

_T = TypeVar("_T")


class _Retention(msgspec.Struct, frozen=True):
    age: int | UnsetType = UNSET
    infinite: dict[str, Any] | UnsetType = UNSET


class _Timestamping(msgspec.Struct, frozen=True):
    mode: Mode | UnsetType | None = UNSET
    uncapped: bool | UnsetType | None = UNSET


class _DeleteOnEmpty(msgspec.Struct, frozen=True):
    min_age_secs: int | UnsetType | None = UNSET


class StreamBody(msgspec.Struct, frozen=True):
    storage_class: StorageClass | UnsetType | None = UNSET
    retention_policy: _Retention | UnsetType | None = UNSET
    timestamping: _Timestamping | UnsetType | None = UNSET
    delete_on_empty: _DeleteOnEmpty | UnsetType | None = UNSET

    def patch(self) -> SpecPatch:
        fields: dict[str, Any] = {"storage_class": self.storage_class}
        retention, times, empty = self.retention_policy, self.timestamping, self.delete_on_empty
        fields["age_secs"] = _age_secs(retention) if isinstance(retention, _Retention) else retention
        whole = times if times is None or times is UNSET else None
        fields["mode"] = times.mode if isinstance(times, _Timestamping) else whole
        fields["uncapped"] = times.uncapped if isinstance(times, _Timestamping) else whole
        fields["min_age_secs"] = _min_age(empty) if isinstance(empty, _DeleteOnEmpty) else empty
        return SpecPatch(**fields)

    def spec(self) -> Spec:
        """Return the config of a new stream. An empty `delete_on_empty` object means 0 seconds."""
        spec = self.patch().apply(Spec())
        if isinstance(self.delete_on_empty, _DeleteOnEmpty):
            if self.delete_on_empty.min_age_secs is None:
                raise S2Error("bad_json", "delete_on_empty.min_age_secs: is not a number")
            return msgspec.structs.replace(spec, min_age_secs=spec.min_age_secs or 0)
        return spec


class BasinBody(msgspec.Struct, frozen=True):
    default_stream_config: StreamBody | UnsetType | None = UNSET
    stream_cipher: Cipher | UnsetType | None = UNSET
    create_stream_on_append: bool | UnsetType = UNSET
    create_stream_on_read: bool | UnsetType = UNSET

    def patch(self) -> BasinPatch:
        defaults = self.default_stream_config
        return BasinPatch(
            defaults=defaults.patch() if isinstance(defaults, StreamBody) else defaults,
            cipher=self.stream_cipher,
            create_on_append=self.create_stream_on_append,
            create_on_read=self.create_stream_on_read,
        )

    def config(self) -> BasinConfig:
        """Return the config of a new basin."""
        config = self.patch().apply(BasinConfig())
        if isinstance(self.default_stream_config, StreamBody):
            return msgspec.structs.replace(config, defaults=self.default_stream_config.spec())
        return config


#: The only location. Every basin is in it, whatever location its client requests.
LOCATION = "local"
_Location = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9:.-]{1,64}$")]


class CreateBasin(msgspec.Struct, frozen=True):
    basin: str
    config: BasinBody | None = None
    location: _Location | None = None


class EnsureBasin(msgspec.Struct, frozen=True):
    config: BasinBody | None = None
    location: _Location | None = None


class CreateStream(msgspec.Struct, frozen=True):
    stream: str
    config: StreamBody | None = None


def _age_secs(retention: _Retention) -> int:
    """Return the retention in seconds; 0 means forever. An age of 0 in the request is rejected."""
    if (retention.age is UNSET) == (retention.infinite is UNSET):
        raise S2Error("bad_json", "retention_policy: must be either an age or infinite")
    if retention.age is UNSET:
        return 0
    _check_u64(retention.age, "retention_policy.age")
    if not retention.age:
        raise S2Error("invalid", "retention_policy.age: must be greater than 0 seconds")
    return retention.age


def _min_age(empty: _DeleteOnEmpty) -> int | UnsetType | None:
    age_secs = empty.min_age_secs
    if isinstance(age_secs, int):
        _check_u64(age_secs, "delete_on_empty.min_age_secs")
    return age_secs


def _check_u64(number: int, field: str) -> None:
    if not 0 <= number <= U64_MAX:
        raise S2Error("bad_json", f"{field}: is not an unsigned 64-bit integer")


def decode_body(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(error) from None


# ---------------------------------------------------------------------------------------------------
# Descriptions for responses


def describe_stream_config(spec: Spec) -> dict[str, Any]:
    """Describe a stream config. Fields that a basin's defaults do not set are null."""
    age = spec.age_secs
    timestamping = None
    if spec.mode is not None or spec.uncapped is not None:
        timestamping = {"mode": spec.mode, "uncapped": spec.uncapped}
    return {
        "storage_class": spec.storage_class,
        "retention_policy": None if age is None else {"age": age} if age else {"infinite": {}},
        "timestamping": timestamping,
        "delete_on_empty": None if spec.min_age_secs is None else {"min_age_secs": spec.min_age_secs},
    }


def describe_basin_config(config: BasinConfig) -> dict[str, Any]:
    return {
        "default_stream_config": None
        if config.defaults == Spec()
        else describe_stream_config(config.defaults),
        "stream_cipher": config.cipher,
        "create_stream_on_append": config.create_on_append,
        "create_stream_on_read": config.create_on_read,
    }


def describe_basin(basin: Basin) -> dict[str, Any]:
    return {
        "name": basin.name,
        "location": LOCATION,
        "created_at": format_time(basin.created_ms),
        "deleted_at": format_time(basin.deleted_ms) if basin.deleted_ms else None,
        "state": "deleting" if basin.deleted_ms else "active",
    }


def describe_stream(name: str, stream: Stream) -> dict[str, Any]:
    return {
        "name": name,
        "created_at": format_time(stream.created_ms),
        "deleted_at": format_time(stream.deleted_ms) if stream.deleted_ms else None,
        "cipher": stream.cipher,
    }


def format_time(ms: int) -> str:
    moment = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}000Z"
