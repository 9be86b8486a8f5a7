"""The table of exchanges and queues, which all processes share.

It is a box with one record for each binding. A process reads what is new before it routes a message, so a
binding counts as soon as it is made. When a queue is deleted its records are deleted too; other processes
notice when the queue is gone.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from typing import Any

from streams.client._sync.client import Client
from streams.protocol.errors import BoxNotFound

#: Routing key, pattern of it or None, queue: as exchanges of Kombu have them in their tables.
Binding = tuple[str, str | None, str]


class Bindings:
    def __init__(self, client: Client, box: str) -> None:
        self._box = client.box(box)
        self._lock = threading.Lock()
        self._from_seq = 0
        self._generation: int | None = None
        self._tables: dict[str, dict[Binding, None]] = defaultdict(dict)

    def __repr__(self) -> str:
        return f"<Bindings in {self._box.name}>"

    def table(self, exchange: str) -> list[Binding]:
        """All bindings of an exchange, those of other processes too."""
        with self._lock:
            self._refresh()
            return list(self._tables[exchange])

    def add(self, exchange: str, binding: Binding) -> None:
        with self._lock:
            self._refresh()
            if binding in self._tables[exchange]:
                return
            key, pattern, queue = binding
            fact = {"exchange": exchange, "routing_key": key, "pattern": pattern, "queue": queue}
            self._box.append(fact, tag=_tag_of(exchange, binding), create=False)

    def remove(self, exchange: str, binding: Binding) -> None:
        """The queue stays: a record tells the other processes."""
        key, pattern, queue = binding
        fact = {"exchange": exchange, "routing_key": key, "pattern": pattern, "queue": queue, "removed": True}
        with self._lock:
            self._tables[exchange].pop(binding, None)
            self._box.append(fact, tag=_tag_of(exchange, binding), create=False)

    def forget_queue(self, exchange: str, queue: str) -> None:
        """The queue is gone: delete its records."""
        with self._lock:
            table = self._tables[exchange]
            for binding in [each for each in table if each[2] == queue]:
                del table[binding]
                self._box.delete(_tag_of(exchange, binding))

    def declare(self) -> None:
        if not self._box.exists():
            self._box.create(compact="tag")

    def _refresh(self) -> None:
        while True:
            fields: dict[str, Any] = {"limit": 1000}
            if self._generation is not None:
                fields["generation"] = self._generation
            try:
                page = self._box.page(self._from_seq, **fields)
            except BoxNotFound:
                self._tables.clear()
                self._from_seq, self._generation = 0, None
                return
            if page.tombstone is not None:
                self._tables.clear()
            for record in page.records:
                self._apply(record.data)
            self._from_seq, self._generation = page.next_from_seq, page.generation
            if page.caught_up:
                return

    def _apply(self, fact: dict[str, Any]) -> None:
        binding = (fact["routing_key"], fact["pattern"], fact["queue"])
        if fact.get("removed"):
            self._tables[fact["exchange"]].pop(binding, None)
        else:
            self._tables[fact["exchange"]][binding] = None


def _tag_of(exchange: str, binding: Binding) -> str:
    key, _, queue = binding
    return hashlib.blake2b("\0".join((exchange, key, queue)).encode(), digest_size=16).hexdigest()
