"""A channel of the Kombu transport: queues, exchanges, deliveries and acks.

A queue is a box of type queue, a message one of its jobs. The server keeps times and priorities: a task with
an ETA is a delayed job, which no worker holds while it waits.

Exchanges of type direct and topic route by a table that all processes share (`bindings.py`). An exchange of
type fanout is a box of its own, and each queue bound to it reads that box: a broadcast is stored once.
"""

from __future__ import annotations

import time
from datetime import datetime
from queue import Empty
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from streams.brokers.connections import box_name, job_priority_of
from streams.brokers.job_readers import BroadcastReader, InboxMessage, QueueReader, Room
from streams.brokers.task_messages import entry_of
from streams.client.answers import Job
from streams.protocol.errors import BoxNotFound

if TYPE_CHECKING:
    from streams.brokers.kombu import KombuTransport

#: Jobs that a consumer without a prefetch limit holds at most.
_PREFETCH_MAX = 256
#: How long the queue of a consumer that left without deleting it is kept, and broadcasts.
_IDLE_MS = 3_600_000
_BROADCASTS_MAX = 10_000


class QoS(virtual.QoS):
    """Acks and rejects of delivered messages, sent to the server."""

    def ack(self, delivery_tag: str) -> None:
        self.channel.ack_job(delivery_tag)
        super().ack(delivery_tag)
        self.channel.room.ring()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self.channel.give_back_jobs([delivery_tag])
        else:
            self.channel.bury_job(delivery_tag)
        super().ack(delivery_tag)
        self.channel.room.ring()

    def restore_unacked(self) -> list[Any]:
        """Give back all messages that were delivered and not acked."""
        self._flush()
        self.channel.give_back_jobs(list(self._delivered))
        self._delivered.clear()
        self.channel.room.ring()
        return []


class Channel(virtual.Channel):
    QoS = QoS
    supports_fanout = True

    def __init__(self, connection: KombuTransport, **options: Any) -> None:
        super().__init__(connection, **options)
        #: Kombu drops `connection` when the channel is closed; tasks that end later still ack.
        self.transport = connection
        #: By delivery tag; broadcasts are not among them.
        self._jobs: dict[str, tuple[str, Job]] = {}
        self._readers: dict[str, QueueReader | BroadcastReader] = {}
        self._no_ack_queues: set[str] = set()
        #: Arguments of queues that were declared here, to declare them again when they were deleted
        #: meanwhile.
        self._declarations: dict[str, dict[str, Any]] = {}
        self.room = Room(self._free_room)

    def _free_room(self) -> int:
        if self.closed:
            return 0
        if not self.qos.prefetch_count:
            return _PREFETCH_MAX
        return int(self.qos.can_consume_max_estimate())

    def _box(self, queue: str) -> str:
        return box_name(self.transport.prefix, queue)

    # -- queues

    def _new_queue(self, queue: str, **declaration: Any) -> None:
        self._declarations[queue] = declaration
        if queue not in self.transport.broadcasts and not self._has_queue(queue):
            self._create_queue(queue)

    def _create_queue(self, queue: str) -> None:
        declaration = self._declarations.get(queue, {})
        arguments = declaration.get("arguments") or {}
        settings: dict[str, Any] = dict(self.transport.queue_settings)
        if declaration.get("auto_delete") or declaration.get("exclusive"):
            settings |= {"durability": "memory", "delete_on_empty_ms": arguments.get("x-expires", _IDLE_MS)}
        for argument, setting in (("x-message-ttl", "ttl_ms"), ("x-max-length", "cap_records")):
            if arguments.get(argument):
                settings[setting] = int(arguments[argument])
        self.transport.streams.queue(self._box(queue)).create(**settings)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return self.transport.streams.box(self._box(queue)).exists()

    def _size(self, queue: str) -> int:
        try:
            counts = self.transport.streams.queue(self._box(queue)).state().queue
        except BoxNotFound:
            return 0
        return counts.ready if counts is not None else 0

    def _purge(self, queue: str) -> int:
        """Delete all jobs, delayed ones and those that workers hold too."""
        box = self.transport.streams.queue(self._box(queue))
        try:
            return box.delete(before_seq=box.position().head_seq + 1).deleted
        except BoxNotFound:
            return 0

    def _delete(self, queue: str, *_: Any, **__: Any) -> None:
        self._declarations.pop(queue, None)
        if self.transport.broadcasts.pop(queue, None) is None:
            self.transport.streams.box(self._box(queue)).drop()

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **options: Any
    ) -> None:
        if if_empty and self._size(queue):
            return
        for exchange in {binding.exchange for binding in list(self.state.queue_bindings(queue))}:
            if self.state.exchanges.get(exchange, {}).get("type") != "fanout":
                self.transport.bindings.forget_queue(exchange, queue)
        self.state.queue_bindings_delete(queue)
        self._delete(queue)

    # -- exchanges

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        if self.typeof(exchange).type == "fanout":
            self._bind_broadcasts(exchange, queue)
            return
        self.transport.bindings.declare()
        self.transport.bindings.add(exchange, (routing_key, pattern or None, queue))

    def _bind_broadcasts(self, exchange: str, queue: str) -> None:
        """The queue reads the box of the exchange from now on; it needs no box of its own."""
        box = self.transport.streams.box(self.transport.fanout_box(exchange))
        if not box.exists():
            box.create(durability="memory", ttl_ms=_IDLE_MS, cap_records=_BROADCASTS_MAX)
        self.transport.broadcasts[queue] = (exchange, box.position().head_seq)
        self.transport.streams.box(self._box(queue)).drop(if_empty=True)

    def queue_unbind(self, queue: str, exchange: str = "", routing_key: str = "", **options: Any) -> None:
        exchange_type = self.typeof(exchange)
        meta = exchange_type.prepare_bind(queue, exchange, routing_key, options.get("arguments"))
        super().queue_unbind(queue, exchange, routing_key, **options)
        if exchange_type.type == "fanout":
            self.transport.broadcasts.pop(queue, None)
        else:
            self.transport.bindings.remove(exchange, meta)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        if self.typeof(exchange).type == "fanout":
            self.transport.streams.box(self.transport.fanout_box(exchange)).drop()
        else:
            for binding in self.transport.bindings.table(exchange):
                self.transport.bindings.forget_queue(exchange, binding[2])
        self.state.exchanges.pop(exchange, None)

    def get_table(self, exchange: str) -> list[Any]:
        if self.typeof(exchange).type == "fanout":
            return list(self.state.exchanges[exchange]["table"])
        return self.transport.bindings.table(exchange)

    # -- publishing

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Text stays text, so that it can be read in the queue; bytes become base64."""
        if isinstance(body, str):
            return body, "utf-8"
        text, name = super().encode_body(body, encoding or "base64")
        return text, name

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        headers, properties = message.get("headers") or {}, message["properties"]
        deliver_at = _eta_ms_of(headers)
        delay = headers.get("x-delay")
        entry = entry_of(
            dumps(message).encode(),
            tag=headers.get("task"),
            job_priority=job_priority_of(properties.get("priority")),
            ordering_key=headers.get("ordering_key"),
            deliver_at=deliver_at,
            delay_ms=int(delay) if delay is not None and deliver_at is None else None,
        )
        box = self.transport.streams.queue(self._box(queue))
        key = f"{properties['delivery_tag']}:{queue}"[:256]
        try:
            box.append_batch([entry], idempotency_key=key, create=False)
        except BoxNotFound:
            exchange = properties["delivery_info"].get("exchange")
            if exchange and queue not in self._declarations:
                self.transport.bindings.forget_queue(exchange, queue)
                return
            self._create_queue(queue)
            box.append_batch([entry], idempotency_key=key, create=False)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **_: Any) -> None:
        box = self.transport.streams.box(self.transport.fanout_box(exchange))
        try:
            box.append_batch([entry_of(dumps(message).encode())], create=False)
        except BoxNotFound:
            pass  # nobody has ever listened

    # -- consuming

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        if no_ack:
            self._no_ack_queues.add(queue)
        if queue not in self._readers:
            self._readers[queue] = reader = self._new_reader(queue)
            reader.start()

    def _new_reader(self, queue: str) -> QueueReader | BroadcastReader:
        connection = self.transport
        if queue in connection.broadcasts:
            exchange, from_seq = connection.broadcasts[queue]
            box = connection.fanout_box(exchange)
            return BroadcastReader(queue, box, from_seq, connection.streams, connection.inbox)
        return QueueReader(
            queue, self._box(queue), connection.held_jobs, connection.inbox, self.room, self._create_queue
        )

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None or queue in self._active_queues:
            return
        self._no_ack_queues.discard(queue)
        reader = self._readers.pop(queue, None)
        if reader is not None:
            reader.stop()
            self.room.ring()
            self.transport.retire(reader)
        self.drop_deliveries(queue, self.transport.inbox.take_queue(queue))
        if self._declarations.get(queue, {}).get("auto_delete"):
            self.queue_delete(queue)

    def owns(self, queue: str) -> bool:
        return queue in self._readers

    def drop_deliveries(self, queue: str, deliveries: list[InboxMessage]) -> None:
        """Give back what nobody consumes any more."""
        jobs = [each.job for each in deliveries if each.job is not None]
        if jobs:
            self.transport.held_jobs.give_back(self._box(queue), jobs)
            self.room.settle(len(jobs))

    def receive(self, delivery: InboxMessage) -> dict[str, Any] | None:
        """Return the message of a delivery for the consumer; None if it has expired."""
        message: dict[str, Any] = loads(delivery.message.decode())
        properties = message["properties"]
        if delivery.job is None:
            properties["delivery_tag"] = self._next_delivery_tag()
            return message
        box, job = self._box(delivery.queue), delivery.job
        # A tag of this delivery: the same message may be delivered here again.
        properties["delivery_tag"] = tag = f"{job.seq}.{job.lease_id}"
        properties["delivery_info"]["redelivered"] = job.deliveries > 1
        if delivery.queue in self._no_ack_queues or _is_expired(job, properties):
            self.transport.held_jobs.ack(box, job)
        else:
            self._jobs[tag] = (box, job)
        return None if _is_expired(job, properties) else message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """Claim one message for `basic_get`."""
        while True:
            try:
                jobs = self.transport.held_jobs.claim(self._box(queue), max=1)
            except BoxNotFound:
                raise Empty from None
            if not jobs:
                raise Empty
            message = self.receive(InboxMessage(queue, bytes(jobs[0].data), jobs[0]))
            if message is not None:
                return message

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        message = super().basic_get(queue, no_ack, **options)
        if message is not None and no_ack:
            self.ack_job(message.delivery_tag)
        return message

    def basic_qos(self, *arguments: Any, **options: Any) -> None:
        super().basic_qos(*arguments, **options)
        self.room.ring()

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        self.transport.drain_events(self.transport, timeout=timeout)

    # -- acks

    def ack_job(self, delivery_tag: str) -> None:
        box_and_job = self._jobs.pop(delivery_tag, None)
        if box_and_job is not None:
            self.transport.held_jobs.ack(*box_and_job)

    def bury_job(self, delivery_tag: str) -> None:
        """A rejected message is a dead letter, or deleted if the connection has no box for them."""
        box_and_job = self._jobs.pop(delivery_tag, None)
        if box_and_job is None:
            return
        dead_letter = self.transport.dead_letter
        if dead_letter is None:
            self.transport.held_jobs.ack(*box_and_job)
        else:
            self.transport.held_jobs.bury(*box_and_job, dead_letter)

    def give_back_jobs(self, delivery_tags: list[str]) -> None:
        jobs_by_box: dict[str, list[Job]] = {}
        for delivery_tag in delivery_tags:
            box_and_job = self._jobs.pop(delivery_tag, None)
            if box_and_job is not None:
                jobs_by_box.setdefault(box_and_job[0], []).append(box_and_job[1])
        for box, jobs in jobs_by_box.items():
            self.transport.held_jobs.give_back(box, jobs)

    def close(self) -> None:
        super().close()
        self.room.ring()


def _eta_ms_of(headers: dict[str, Any]) -> int | None:
    """When a Celery task may start, in epoch milliseconds; None for at once. Without a time zone the worker
    decides."""
    eta = headers.get("eta") if "task" in headers else None
    if not isinstance(eta, str):
        return None
    time_of_eta = datetime.fromisoformat(eta)
    return round(time_of_eta.timestamp() * 1000) if time_of_eta.tzinfo is not None else None


def _is_expired(job: Job, properties: dict[str, Any]) -> bool:
    expiration_ms = properties.get("expiration")
    return expiration_ms is not None and time.time() * 1000 >= job.ts + float(expiration_ms)
