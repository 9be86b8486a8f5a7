"""Parses server-sent events from bytes that arrive in pieces of any size. Pure."""

from __future__ import annotations

from typing import NamedTuple

#: The largest event of a server is one line with 8 MiB of records; a much longer line is no event stream.
EVENT_BYTES_MAX = 64 << 20


class Event(NamedTuple):
    name: str
    data: bytes
    id: str


class EventReader:
    """`feed` takes bytes and returns the events that they complete. Comments and `retry` are skipped."""

    __slots__ = ("_data", "_id", "_name", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._name = "message"
        self._data: list[bytes] = []
        self._id = ""

    def __repr__(self) -> str:
        return f"<EventReader after {self._id!r}, {len(self._rest)} B of the next line>"

    def feed(self, piece: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"a line of over {EVENT_BYTES_MAX} bytes is not an event of a streams server")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._end()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode()
        elif field == b"data":
            self._data.append(value)
        elif field == b"id":
            self._id = value.decode()
        return None

    def _end(self) -> Event | None:
        event = Event(self._name, b"\n".join(self._data), self._id) if self._data else None
        self._name, self._data = "message", []
        return event
