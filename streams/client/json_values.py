"""Values to JSON, without changing what they are. Pure.

JSON has no NaN, bytes or sets. Encoders write `null`, base64 and a list for them, and a reader gets
something else than was written. Here they are refused with their place.

A payload of plain values is encoded once by orjson, which refuses bytes and sets by itself. It writes `null`
for NaN, so a payload whose text has a `null` is looked through for one. Everything orjson does not know
(structs, dates, keys that are not text) is looked through and then encoded by msgspec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

import msgspec
import orjson

from streams.client.errors import NotJson

_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_BYTES = (bytes, bytearray, memoryview)
_PLAIN = (str, int, bool, type(None), msgspec.Raw)
_PLAIN_TYPES = frozenset((str, int, bool, type(None)))


def encode_json(value: Any, place: str = "data") -> bytes:
    """The JSON of `value`. `NotJson` names the place of a value that JSON cannot hold."""
    try:
        text = orjson.dumps(value, None, _OPTIONS)
    except TypeError:
        _check(value, place)
        return msgspec.json.encode(value)
    if b"null" in text and _may_hold_nan(value):
        _check(value, place)
    return text


def _may_hold_nan(value: Any) -> bool:
    """Whether there is a float that is not finite, or a value of a kind that is not looked into here."""
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        inner = (value,)
    for each in inner:
        kind = type(each)
        if kind in _PLAIN_TYPES:
            continue
        if kind is float:
            if not isfinite(each):
                return True
        elif (kind is not dict and kind is not list and kind is not tuple) or _may_hold_nan(each):
            return True
    return False


def _check(value: Any, place: str) -> None:
    for inner, where in _values_of(value, place):
        problem = _problem_with(inner)
        if problem:
            raise NotJson(f"{where}: {problem}", place=where)


def _problem_with(value: Any) -> str:
    if isinstance(value, float) and not isfinite(value):
        return f"{value!r} is not a JSON number; leave it out or use None"
    if isinstance(value, _BYTES):
        return "JSON has no bytes; decode them, or encode them as text yourself"
    if isinstance(value, set | frozenset):
        return "JSON has no sets; use a list"
    return ""


def _values_of(value: Any, place: str) -> Iterator[tuple[Any, str]]:
    """Every value in `value` with its place, itself included."""
    waiting: list[tuple[Any, str]] = [(value, place)]
    while waiting:
        value, place = waiting.pop()
        yield value, place
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, Mapping):
            waiting += [(inner, f"{place}.{key}") for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, f"{place}[{at}]") for at, inner in enumerate(value)]
        elif isinstance(value, msgspec.Struct):
            waiting += [(getattr(value, name), f"{place}.{name}") for name in value.__struct_fields__]
        elif dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            waiting += [(getattr(value, field.name), f"{place}.{field.name}") for field in fields]
