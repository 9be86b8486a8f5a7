"""The transport `streams://` of Kombu, and so of Celery.

    import streams.brokers.kombu  # registers the transport
    app = Celery("shop", broker="streams://127.0.0.1:4000")

Without the import, name the class: `Connection(…, transport="streams.brokers.kombu:KombuTransport")`. The
password of a URL is the API key, its path the prefix of the boxes: `streams://:KEY@host:4000/shop` uses
`shop.celery`, `shop.emails` and so on; without a path it is `celery.`. `ssl` means https.

One connection of Kombu is one client with its node, threads and held jobs. A process that is forked leaves
the connections of its parent alone.
"""

from __future__ import annotations

import os
import time
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, virtual

from streams import __version__
from streams.brokers.bindings import Bindings
from streams.brokers.connections import LEASE_S, box_name, lease_ms_of, quiet_http_log
from streams.brokers.held_jobs import HeldJobs
from streams.brokers.job_readers import BroadcastReader, Inbox, InboxMessage, QueueReader
from streams.brokers.kombu_channel import Channel
from streams.client._sync.client import Client
from streams.client.retry import NEVER, Retry
from streams.protocol.errors import Busy, Refused, Uncertain

TRANSPORT_ALIASES["streams"] = "streams.brokers.kombu:KombuTransport"

#: How long requests are repeated here; Kombu has a policy of its own for what comes after.
_RETRY_S = 10.0


class KombuTransport(virtual.Transport):
    Channel = Channel
    default_port = 4000
    driver_type = "streams"
    driver_name = "streams"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset({"direct", "topic", "fanout"})
    )
    connection_errors = (*virtual.Transport.connection_errors, Busy, Uncertain)
    channel_errors = (*virtual.Transport.channel_errors, Refused)

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        settings = client.transport_options or {}
        host, port = client.hostname or "127.0.0.1", client.port or self.default_port
        self._url = f"{'https' if client.ssl else 'http'}://{host}:{port}"
        self._key = settings.get("key") or client.password
        folder = (client.virtual_host or "/").strip("/")
        self.prefix: str = settings.get("prefix", f"{folder}." if folder else "celery.")
        self._lease_ms = lease_ms_of(settings.get("lease_s", LEASE_S))
        self.dead_letter: str | None = settings.get("dead_letter")
        self.queue_settings: dict[str, Any] = dict(settings.get("queue_settings") or {})
        if self.dead_letter and self.queue_settings.get("max_deliveries"):
            self.queue_settings.setdefault("dead_letter", self.dead_letter)
        self._pid = os.getpid()
        #: Queues bound to a fanout exchange: the exchange, and the seq after which they read its box.
        self.broadcasts: dict[str, tuple[str, int]] = {}
        self._stopping_readers: list[QueueReader | BroadcastReader] = []

    def driver_version(self) -> str:
        return __version__

    def fanout_box(self, exchange: str) -> str:
        return box_name(f"{self.prefix}fanout:", exchange)

    def establish_connection(self) -> KombuTransport:
        quiet_http_log()
        self.streams = Client(self._url, key=self._key, retry=Retry(total_s=_RETRY_S))
        try:
            Client.get(self.streams, "/v0/health", dict[str, Any], retry=NEVER)
        except BaseException:
            self.streams.close()
            raise
        self.held_jobs = HeldJobs(self.streams, lease_ms=self._lease_ms)
        self.inbox = Inbox()
        self.bindings = Bindings(self.streams, f"{self.prefix}exchanges:bindings")
        super().establish_connection()
        return self

    def close_connection(self, connection: KombuTransport) -> None:
        if os.getpid() != self._pid:
            # A child of a fork: sockets, threads and jobs belong to the parent.
            self.channels.clear()
            self._avail_channels.clear()
            return
        super().close_connection(connection)
        for reader in self._stopping_readers:
            reader.join()
        self._stopping_readers.clear()
        self.held_jobs.close()
        self.inbox.close()
        self.streams.close()

    def retire(self, reader: QueueReader | BroadcastReader) -> None:
        """A reader that was asked to stop ends on its own; the end of the connection waits for it."""
        self._stopping_readers.append(reader)

    # -- deliveries

    def drain_events(self, connection: KombuTransport, timeout: float | None = None) -> None:
        """Deliver what has come; wait up to `timeout` for it, or raise `TimeoutError`."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            deliveries = self.inbox.take(left_s)
            if self._deliver_all(deliveries):
                return
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError

    def _deliver_all(self, deliveries: list[InboxMessage]) -> int:
        """Return how many were delivered; the others had expired, or nobody consumes their queue any more."""
        count = 0
        for delivery in deliveries:
            channel = next((each for each in self.channels if each.owns(delivery.queue)), None)
            if channel is None:
                if delivery.job is not None:
                    self.held_jobs.give_back(box_name(self.prefix, delivery.queue), [delivery.job])
                continue
            message = channel.receive(delivery)
            if message is not None:
                self._deliver(message, delivery.queue)
                count += 1
            if delivery.job is not None:
                channel.room.settle(1)
        return count

    def register_with_event_loop(self, connection: KombuTransport, loop: Any) -> None:
        loop.add_reader(self.inbox.fileno(), self.on_readable)

    def on_readable(self) -> None:
        self._deliver_all(self.inbox.take(0))
