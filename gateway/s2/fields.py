"""Parses and checks names, numbers and tokens of S2 requests (s2 §3, §6). Pure.

The error code names the place of a bad value: `bad_path`, `bad_query`, `bad_header` or `bad_json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote_to_bytes

from gateway.requests import request as http
from gateway.requests.request import SESSION_TYPE as SESSION_TYPE
from gateway.requests.s2_errors import S2Error
from streams.protocol.model.names import quote

LIST_LIMIT_MAX = 1000
U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1
#: The latest time that can be stored: times are signed in the log.
TIME_MAX = 2**63 - 1

_basin_name = re.compile(r"[a-z0-9][a-z0-9-]{6,46}[a-z0-9]").fullmatch
_basin_prefix = re.compile(r"(?:[a-z0-9][a-z0-9-]{0,47})?").fullmatch
_STREAM_BYTES_MAX = 512
_REQUEST_TOKEN_BYTES_MAX = 36


def basin_name(name: str, where: str) -> str:
    if _basin_name(name) is None:
        raise S2Error(
            where,
            f"{quote(name)} is not a basin name: 8 to 48 lower-case letters, digits and hyphens, with no "
            "hyphen at either end",
        )
    return name


def is_basin_part(text: str) -> bool:
    """Return True if a basin name can begin with this."""
    return _basin_prefix(text) is not None


def is_stream_part(text: str) -> bool:
    """Return True if a stream name can begin with this."""
    return len(text.encode(errors="replace")) <= _STREAM_BYTES_MAX and "\0" not in text


def stream_name(name: str, where: str) -> str:
    size = len(name.encode(errors="replace"))
    if not 1 <= size <= _STREAM_BYTES_MAX or name in (".", "..") or "\0" in name:
        raise S2Error(
            where, f"{quote(name)} is not a stream name: 1 to {_STREAM_BYTES_MAX} bytes, and not . or .."
        )
    return name


def path_segments(path: str) -> list[str]:
    """Split a path and decode its segments, in this order: `%2F` is part of a name."""
    try:
        return [str(unquote_to_bytes(segment), "utf-8") for segment in path.split("/")]
    except UnicodeDecodeError:
        raise S2Error("bad_path", f"{quote(path)} is not percent-encoded UTF-8") from None


class QueryParameters:
    """The query parameters of a request. Unknown ones are ignored."""

    def __init__(self, query: str) -> None:
        self._values: dict[str, str] = {}
        try:
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=64, errors="strict")
        except ValueError:
            raise S2Error("bad_query", f"{quote(query)} is not a list of name=value pairs") from None
        for name, value in pairs:
            if name in self._values:
                raise S2Error("bad_query", f"{quote(name)} appears more than once")
            self._values[name] = value

    def number(self, name: str, high: int = U64_MAX) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= 20) or int(value) > high:
            raise S2Error("bad_query", f"{name}: {quote(value)} is not a number from 0 to {high}")
        return int(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name, "false")
        if value not in ("true", "false"):
            raise S2Error("bad_query", f"{name}: {quote(value)} is neither true nor false")
        return value == "true"

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def limit(self) -> int:
        limit = self.number("limit") or LIST_LIMIT_MAX
        return min(limit, LIST_LIMIT_MAX)

    def basin_part(self, name: str) -> str:
        value = self._values.get(name, "")
        if not is_basin_part(value):
            raise S2Error("bad_query", f"{name}: {quote(value)} is not a prefix of a basin name")
        return value

    def stream_part(self, name: str) -> str:
        value = self._values.get(name, "")
        if not is_stream_part(value):
            raise S2Error("bad_query", f"{name}: is longer than {_STREAM_BYTES_MAX} bytes, or has a NUL byte")
        return value


_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_type_name = re.compile(r"`(str|int|float|bool)`")


def bad_json(error: Exception) -> S2Error:
    """Build the error for a decoder failure, with JSON names for Python types."""
    return S2Error("bad_json", "body: " + _type_name.sub(lambda match: _JSON_NAMES[match[1]], str(error)))


def request_token(headers: Mapping[str, str]) -> str:
    try:
        token = headers.get("s2-request-token", "").encode("latin-1").decode()
    except UnicodeDecodeError:
        raise S2Error("bad_header", "s2-request-token: is not UTF-8") from None
    if len(token.encode()) > _REQUEST_TOKEN_BYTES_MAX:
        raise S2Error("bad_header", f"s2-request-token: is longer than {_REQUEST_TOKEN_BYTES_MAX} bytes")
    return token


def basin_of(headers: Mapping[str, str]) -> str:
    name = headers.get("s2-basin")
    if name is None:
        raise S2Error("bad_header", "s2-basin: the header is missing; it must name the basin")
    return basin_name(name, "bad_header")


def is_base64(headers: Mapping[str, str]) -> bool:
    format_name = headers.get("s2-format", "raw").strip().lower()
    if format_name in ("raw", "json"):
        return False
    if format_name in ("base64", "json-binsafe"):
        return True
    raise S2Error("bad_header", f"s2-format: {quote(format_name)} is neither raw nor base64")


def media_type(headers: Mapping[str, str], name: str) -> str:
    """Return the first media type of a header, without its parameters."""
    return http.media_type(headers.get(name))


def is_json(kind: str) -> bool:
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def is_protobuf(kind: str) -> bool:
    return kind in ("application/protobuf", "application/x-protobuf")
