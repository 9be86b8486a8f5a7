"""What the tests that kill real servers share: a client that says what it knows, writers, one bounded wait.

Plain `http.client` on keep-alive connections, so that nothing retries or reconnects behind a test's back.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from gateway.shards.placement import even

#: No healthy run comes near it.
PATIENCE_S = 120.0

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], *, within_s: float = PATIENCE_S) -> T:
    """What `probe` returns once that is neither None nor False. For what tells nobody when it happens."""
    deadline = time.monotonic() + within_s
    turn = threading.Event()
    while True:
        found = probe()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline, f"{probe} was not so within {within_s:g} s"
        turn.wait(0.01)


class Lost(Exception):
    """The connection ended before the answer: the request may or may not have taken effect."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"]) if "error" in self.body else ""


class Client:
    """One connection, made when it is needed and again after it was lost."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection: http.client.HTTPConnection | None = None

    def send(self, method: str, path: str, body: object = None) -> Answer:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        text = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, text, {"content-type": "application/json"})
            response = self._connection.getresponse()
            answer = Answer(response.status, response.headers, json.loads(response.read()))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Lost(repr(error)) from error
        if response.will_close:
            self.close()
        return answer

    def ok(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        answer = self.send(method, path, body)
        assert answer.status in (200, 201), answer
        return answer.body

    def put(self, box: str, **config: object) -> None:
        self.ok("PUT", f"/v0/boxes/{box}", config)

    def append(self, box: str, *data: object, **more: object) -> dict[str, Any]:
        return self.ok("POST", f"/v0/boxes/{box}", {"records": [{"data": d} for d in data], **more})

    def read_all(self, box: str) -> tuple[dict[int, Any], list[dict[str, Any]], int]:
        """(seq -> data, tombstones, head) as a reader gets them who begins at the start."""
        records: dict[int, Any] = {}
        tombstones: list[dict[str, Any]] = []
        at = 0
        while True:
            page = self.ok("POST", f"/v0/boxes/{box}/diff", {"from_seq": at, "limit": 1000})
            for record in page["records"]:
                assert record["$seq"] not in records, "a record was shown twice"
                records[record["$seq"]] = record["data"]
            if page["tombstone"] is not None:
                tombstones.append(page["tombstone"])
            if page["caught_up"]:
                return records, tombstones, page["head_seq"]
            at = page["next_from_seq"]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Writer(threading.Thread):
    """Writes 0, 1, 2, … into a box, each once: what is not acked is repeated with the same key.

    An answer that is neither an ack nor a 503 is a failure, kept in `failure` for the test to look at.
    """

    def __init__(self, name: str, port: int, box: str) -> None:
        super().__init__(name=name, daemon=True)
        self.box = box
        #: number -> the seq it was acked with.
        self.acked: dict[int, int] = {}
        self.repeated = 0
        self.failure: BaseException | None = None
        self._client = Client(port)
        self._ended = threading.Event()
        self._progress = threading.Condition()

    def run(self) -> None:
        try:
            for number in itertools.count():
                eventually(lambda number=number: self._ended.is_set() or self._write(number))
                if self._ended.is_set():
                    break
        except BaseException as failure:
            self.failure = failure
        finally:
            self._client.close()
            with self._progress:
                self._ended.set()
                self._progress.notify_all()

    def _body(self, number: int) -> dict[str, Any]:
        return {
            "records": [{"data": {"writer": self.name, "number": number}}],
            "idempotency_key": f"{self.name}-{number}",
        }

    def _write(self, number: int) -> bool:
        try:
            answer = self._client.send("POST", f"/v0/boxes/{self.box}", self._body(number))
        except Lost:
            self.repeated += 1
            return False
        if answer.status == 503:
            assert answer.headers["retry-after"], answer
            self.repeated += 1
            return False
        assert answer.status in (200, 201), answer
        with self._progress:
            self.acked[number] = answer.body["first_seq"]
            self._progress.notify_all()
        return True

    def wait_for_acks(self, more: int) -> None:
        """Block until so many more writes were acked."""
        with self._progress:
            wanted = len(self.acked) + more
            done = self._progress.wait_for(
                lambda: len(self.acked) >= wanted or self._ended.is_set(), timeout=PATIENCE_S
            )
        assert done and self.failure is None, f"{self.name} was not acked: {self.failure}"

    def stop(self) -> None:
        self._ended.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


@contextmanager
def at_work(new: Iterable[Writer]) -> Iterator[list[Writer]]:
    """Starts these writers. They are stopped at the end, and must not have failed."""
    writers = list(new)
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stop()


def check_box(client: Client, box: str, writers: list[Writer]) -> None:
    """All that was acked is there, once, in order, under the seq it was acked with; and there is no gap."""
    records, tombstones, head_seq = client.read_all(box)
    assert tombstones == []
    assert list(records) == list(range(1, head_seq + 1))
    for writer in writers:
        written = [(data["number"], seq) for seq, data in records.items() if data["writer"] == writer.name]
        # In order and without a gap says: nothing lost and nothing twice. The last may never have been acked.
        assert [number for number, _ in written] == list(range(len(written)))
        assert len(writer.acked) <= len(written) <= len(writer.acked) + 1
        assert dict(written[: len(writer.acked)]) == writer.acked


def box_on(shard: int, shards: int, prefix: str) -> str:
    """A name that this shard owns."""
    placement = even(shards)
    return next(
        name for name in (f"{prefix}-{at}" for at in itertools.count()) if placement.shard_of(name) == shard
    )
