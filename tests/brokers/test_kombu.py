"""The Kombu transport by itself: acks, rejects, exchanges, names."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest

import streams
import streams.brokers.kombu
from streams.brokers.connections import box_name
from streams.brokers.task_messages import entry_of, message_of
from streams.client.answers import RawJob
from streams.testing import Server, running_server

Open = Callable[..., kombu.Connection]


@pytest.fixture
def prefix() -> str:
    return f"k{uuid.uuid4().hex[:8]}"


@pytest.fixture
def connect(server: Server, prefix: str) -> Iterator[Open]:
    """Open connections that are closed at the end."""
    opened: list[kombu.Connection] = []

    def connect(**options: Any) -> kombu.Connection:
        url = f"streams://127.0.0.1:{server.port}/{prefix}"
        opened.append(kombu.Connection(url, transport_options=options))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.release()


def test_a_message_is_json_in_the_queue_and_comes_back(
    connect: Open, client: streams.Client, prefix: str
) -> None:
    channel = connect().default_channel
    kombu.Queue("mail", channel=channel).declare()
    with kombu.Producer(channel) as producer:
        producer.publish(
            {"to": "é"}, routing_key="mail", headers={"task": "send", "ordering_key": "k"}, priority=3
        )
    (record,) = client.box(f"{prefix}.mail").tail()
    assert isinstance(record, streams.Record)
    assert (record.data["body"], record.tag) == ('{"to": "\\u00e9"}', "send")
    message = channel.basic_get("mail")
    assert (message.payload, message.delivery_info["redelivered"]) == ({"to": "é"}, False)
    (job,) = (client.get(f"/v0/boxes/{prefix}.mail/records/1", dict[str, Any])["record"],)
    assert (job["$ordering_key"], job["$job_priority"]) == ("k", 3)
    message.ack()


def test_a_rejected_message_is_a_dead_letter_and_a_requeued_one_is_delivered_again(
    connect: Open, client: streams.Client
) -> None:
    dead = f"dead.{uuid.uuid4().hex[:8]}"
    connection = connect(dead_letter=dead)
    queue = kombu.Queue("jobs", channel=connection.default_channel)
    queue.declare()
    with connection.Producer() as producer:
        producer.publish({"n": 1}, routing_key="jobs")
    first = queue.get()
    first.requeue()
    second = queue.get()
    assert second is not None and second.delivery_info["redelivered"] is True
    assert queue.get() is None
    second.reject()
    assert queue.get() is None
    (letter,) = client.box(dead).tail()
    assert isinstance(letter, streams.Record)
    assert letter.meta["$dead_letter_from"].endswith(".jobs") and letter.meta["$dead_letter_deliveries"] == 2


def test_messages_that_were_not_acked_go_back_when_the_connection_closes(connect: Open) -> None:
    connection = connect()
    with connection.Producer() as producer:
        for number in range(3):
            producer.publish({"n": number}, routing_key="jobs")
    found: list[Any] = []
    consumer = connection.Consumer(
        [kombu.Queue("jobs")], callbacks=[lambda body, message: found.append(message)]
    )
    consumer.consume()
    while len(found) < 3:
        connection.drain_events(timeout=10)
    found[0].ack()
    connection.release()
    other = connect().default_channel
    left = [other.basic_get("jobs") for _ in range(3)]
    assert sorted(message.payload["n"] for message in left if message is not None) == [1, 2]


def test_a_prefetch_limit_bounds_what_a_consumer_of_two_queues_holds(
    connect: Open, client: streams.Client, prefix: str
) -> None:
    connection = connect()
    with connection.Producer() as producer:
        for queue in ("a", "b"):
            for number in range(3):
                producer.publish(number, routing_key=queue)
    found: list[Any] = []
    queues = [kombu.Queue("a"), kombu.Queue("b")]
    consumer = connection.Consumer(queues, callbacks=[lambda body, message: found.append(message)])
    consumer.qos(prefetch_count=2)
    with consumer:
        while len(found) < 2:
            connection.drain_events(timeout=10)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)
        for _ in range(4):
            found[-1].ack()
            count = len(found)
            while len(found) == count:
                connection.drain_events(timeout=10)
    assert len(found) == 6


def test_bindings_are_shared_by_all_connections(connect: Open) -> None:
    exchange = kombu.Exchange("orders", type="topic")
    for name, pattern in (("all", "order.#"), ("paid", "order.*.paid")):
        queue = kombu.Queue(name, exchange, routing_key=pattern)
        queue.bind(connect().default_channel).declare()
    connection = connect()
    with connection.Producer(exchange=exchange) as producer:
        producer.publish(1, routing_key="order.7.paid")
        producer.publish(2, routing_key="order.7.sent")
    channel = connection.default_channel
    found = {name: [channel.basic_get(name) for _ in range(3)] for name in ("all", "paid")}
    bodies = {
        name: [each.payload for each in messages if each is not None] for name, messages in found.items()
    }
    assert bodies == {"all": [1, 2], "paid": [1]}


def test_a_broadcast_reaches_every_bound_queue(connect: Open) -> None:
    exchange = kombu.Exchange("news", type="fanout")
    found: list[tuple[str, Any]] = []
    listeners = []
    for name in ("one", "two"):
        connection = connect()
        queue = kombu.Queue(name, exchange, auto_delete=True)
        consumer = connection.Consumer(
            [queue], callbacks=[lambda body, message, name=name: found.append((name, body))], no_ack=True
        )
        consumer.consume()
        listeners.append(connection)
    with connect().Producer(exchange=exchange) as producer:
        producer.publish("hello")
    for connection in listeners:
        connection.drain_events(timeout=10)
    assert sorted(found) == [("one", "hello"), ("two", "hello")]


def test_a_wrong_key_and_a_missing_server_are_connection_errors_of_kombu(connect: Open) -> None:
    missing = kombu.Connection("streams://127.0.0.1:1")
    with pytest.raises(missing.recoverable_connection_errors):
        missing.connect()
    with running_server(shards=1, api_keys="secret") as server:
        for url, is_right in ((f"streams://:secret@127.0.0.1:{server.port}", True), (server.url, False)):
            with kombu.Connection(url.replace("http://", "streams://")) as connection:
                if is_right:
                    connection.SimpleQueue("q").put(1)
                else:
                    with pytest.raises(streams.Unauthorized):
                        connection.SimpleQueue("q").put(1)


@pytest.mark.parametrize("message", [b'{"a": [1.0, 1e400]}', b"\x80\x04K\x01.", b'"text"', b""])
def test_any_bytes_come_back_from_a_record(message: bytes) -> None:
    entry = entry_of(message)
    import msgspec

    from streams.client.answers import encode_entry

    fields = msgspec.json.decode(encode_entry(entry), type=dict[str, msgspec.Raw])
    meta = msgspec.json.decode(fields["meta"], type=dict[str, msgspec.Raw]) if "meta" in fields else {}
    assert message_of(RawJob(1, 1, "l", 1, 1, data=fields["data"], meta=meta)) == message


def test_names_of_queues_become_names_of_boxes() -> None:
    assert box_name("celery.", "emails") == "celery.emails"
    assert box_name("celery.", "w@host:1") == "celery.w:40host:3a1"
    assert box_name("celery.", "é") == "celery.:c3:a9"
