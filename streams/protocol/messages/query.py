"""Reads the query parameters of a request. A parameter that is not read is an error (v0 §0.9)."""

from __future__ import annotations

from urllib.parse import parse_qsl

from streams.protocol.errors import InvalidRequest
from streams.protocol.model.names import quote
from streams.protocol.payloads.appends import SEQ_MAX


class Query:
    """The query parameters of a request. Each is read once; `reject_unknown` raises for the rest."""

    __slots__ = ("_values",)

    def __init__(self, query: str) -> None:
        self._values: dict[str, str] = {}
        if not query:
            return
        try:
            pairs = parse_qsl(
                query, keep_blank_values=True, strict_parsing=True, max_num_fields=64, errors="strict"
            )
        except ValueError:
            raise InvalidRequest("query: is not a list of name=value", field="query") from None
        for name, value in pairs:
            if name in self._values:
                raise InvalidRequest(f"{name}: given twice in the query", field=name)
            self._values[name] = value

    def text(self, name: str) -> str | None:
        return self._values.pop(name, None)

    def flag(self, name: str, default: bool | None) -> bool | None:
        value = self._values.pop(name, None)
        if value is None:
            return default
        if value in ("true", "1"):
            return True
        if value in ("false", "0"):
            return False
        raise InvalidRequest(f"{name}: {quote(value)} is neither true nor false", field=name)

    def number(self, name: str, *, low: int = 0, high: int = SEQ_MAX) -> int | None:
        value = self._values.pop(name, None)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= 20) or not low <= int(value) <= high:
            raise InvalidRequest(f"{name}: {quote(value)} is not a number from {low} to {high}", field=name)
        return int(value)

    def reject_unknown(self) -> None:
        for name in self._values:
            raise InvalidRequest(f"{name[:64]}: unknown query parameter", field=name[:64])
