"""A reader of server-sent events, by the rules of the format and nothing else."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    name: str
    data: str
    id: str | None

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def cursors(self) -> dict[str, int]:
        """The map that the id encodes."""
        assert self.id is not None
        found: dict[str, int] = json.loads(base64.urlsafe_b64decode(self.id + "=" * (-len(self.id) % 4)))
        return found


class Parser:
    """Bytes in, whole events out, however the bytes are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, list[str]] = {}
        self.comments: list[str] = []
        self.retry_ms: int | None = None
        #: Of the last block that had one, event or not: what a browser comes back with.
        self.last_id: str | None = None

    def feed(self, data: bytes) -> list[Event]:
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        events: list[Event] = []
        for line in lines:
            assert b"\r" not in line
            if not line:
                if "id" in self._fields:
                    self.last_id = self._fields["id"][-1]
                if "data" in self._fields:
                    events.append(self._take())
                self._fields = {}
                continue
            name, _, value = line.decode().partition(":")
            value = value.removeprefix(" ")
            if not name:
                self.comments.append(value)
            elif name == "retry":
                self.retry_ms = int(value)
            else:
                self._fields.setdefault(name, []).append(value)
        return events

    def _take(self) -> Event:
        fields = self._fields
        assert fields.keys() <= {"event", "data", "id"}
        return Event(fields["event"][-1], "\n".join(fields["data"]), fields.get("id", [None])[-1])
