"""Users that load a server and check it while they do.

    make load                                                       # a server of its own, half a minute
    locust -f loadtests/locustfile.py --host http://127.0.0.1:4000  # any server, with locust's web page
    locust -f loadtests/locustfile.py --headless -u 20 -t 60s --host … BulkProducer TailReader

Producers number what they write and repeat a write, under its idempotency key, until it is answered. Readers
check that every number comes once and in order, while it is loaded; when all have stopped, everything
that is there is compared with everything that was acked. What is wrong is a failed request of type CHECK,
and the run ends with exit code 3.

A request that a killed shard left unanswered and that succeeded later is no failure; it counts as retried.
See `docs/howto/load-test.md`.
"""

from __future__ import annotations

import http.client
import itertools
import os
import random
import socket
import sys
import time
from typing import Any, ClassVar
from urllib.parse import urlsplit

import gevent
import orjson
from locust import FastHttpUser, User, events, task
from locust.exception import StopUser
from locust.rpc import Message
from locust.runners import MasterRunner, WorkerRunner

from loadtests.audit import PATIENCE_S, PAUSE_S, Audit, Unanswered, once
from streams import progress

JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
PAGE = 1000
CLAIM = 16
WAIT_MS = 1000
#: How much more than all have seen a keeper lets be before it deletes.
KEEP_RECORDS = 10_000
EXIT_FAULTS = 3

_numbers = itertools.count(1)
#: The one load of this process; a new one each time a test is started.
_audit: Audit | None = None


def audit() -> Audit:
    assert _audit is not None, "no test has been started"
    return _audit


# ---------------------------------------------------------------------------------------------------
# The run as a whole


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    add = parser.add_argument
    add("--boxes", type=int, default=4, help="boxes that producers write to")
    add("--durability", default="disk", choices=["memory", "disk", "fsync"], help="of all boxes")
    add(
        "--calibrate",
        type=float,
        default=0.0,
        help="seconds at full speed, to learn what that is; then --share",
    )
    add("--share", type=float, default=0.7, help="of what each producer has reached while calibrating")
    add("--faults", action="store_true", help="shards are killed meanwhile: leases may be void")
    add("--trim", action="store_true", help="keepers delete what all readers of this process have seen")
    add("--verdict", default="", help="file for what was checked and found, as JSON", include_in_web_ui=False)
    add("--load-name", default="", help="begin of the names of all boxes; a new one each time by default")


@events.init.add_listener
def _init(environment: Any, **_: Any) -> None:
    """As many keepers as there are boxes and copies, or none; and an ear for what workers say last."""
    asked = environment.parsed_options
    Keeper.fixed_count = asked.boxes + (asked.boxes + 1) // 2
    if not asked.trim:
        environment.user_classes = [each for each in environment.user_classes if each is not Keeper]
    if isinstance(environment.runner, MasterRunner):
        environment.runner.register_message("audit", _hear_last)


@events.test_start.add_listener
def _start(environment: Any, **_: Any) -> None:
    global _audit
    asked = environment.parsed_options
    if not isinstance(environment.runner, WorkerRunner):
        # Workers are sent the options with the order to begin, this name among them.
        asked.load_name = f"load-{os.urandom(4).hex()}"
        if asked.trim and isinstance(environment.runner, MasterRunner):
            raise SystemExit("--trim needs all readers in one process, and there are workers")
    _audit = Audit(environment.host, asked.load_name, boxes=asked.boxes, queues=2, may_return=asked.faults)
    if not isinstance(environment.runner, WorkerRunner):
        _audit.prepare(asked.durability)


def _stop_workers(runner: MasterRunner) -> None:
    """At the end of `--run-time` locust asks its workers to stop only after it has told us that the test is
    over. What they saw last is needed for the check, so they are asked here and waited for."""
    for client in runner.clients.all:
        runner.server.send_to_client(Message("stop", None, client.id))
    with gevent.Timeout(PATIENCE_S, False):
        while runner.clients.running or runner.clients.spawning:
            gevent.sleep(PAUSE_S)


@events.quitting.add_listener
def _quit(environment: Any, **_: Any) -> None:
    """After Ctrl-C, too, the check comes before the exit code is decided."""
    if not isinstance(environment.runner, WorkerRunner):
        environment.runner.stop()


@events.test_stop.add_listener
def _stop(environment: Any, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message("audit", audit().report())
        return
    if isinstance(environment.runner, MasterRunner):
        _stop_workers(environment.runner)
    try:
        with progress.show_progress("checking", line=_tell_checking) as report:
            audit().finish(report)
        audit().clean_up()
    except Unanswered as error:
        audit().faults.add("lost", f"the server could not be asked at the end: {error}")
    verdict = audit().verdict()
    for text in verdict["told"]:
        print(text)
        _fire(environment, "CHECK", text.partition(":")[0], 0.0, error=AssertionError(text))
    print(
        f"checked {verdict['acked']} records and {verdict['jobs_done']} jobs: {audit().faults} "
        f"({verdict['retried']} requests were retried)"
    )
    if environment.parsed_options.verdict:
        with open(environment.parsed_options.verdict, "wb") as file:
            file.write(orjson.dumps(verdict))
    if not verdict["is_good"]:
        environment.process_exit_code = EXIT_FAULTS


def _tell_checking(percent: int) -> None:
    print(f"checking what is there: {percent} %", file=sys.stderr, flush=True)


@events.report_to_master.add_listener
def _tell(client_id: str, data: dict[str, Any], **_: Any) -> None:
    if _audit is not None:
        data["audit"] = _audit.report()


@events.worker_report.add_listener
def _hear(client_id: str, data: dict[str, Any], **_: Any) -> None:
    if _audit is not None and "audit" in data:
        _audit.absorb(data["audit"])


def _hear_last(environment: Any, msg: Any) -> None:
    audit().absorb(msg.data)


def _fire(
    environment: Any, kind: str, name: str, took_ms: float, *, size: int = 0, error: Any = None
) -> None:
    environment.events.request.fire(
        request_type=kind,
        name=name,
        response_time=took_ms,
        response_length=size,
        exception=error,
        context={},
    )


# ---------------------------------------------------------------------------------------------------
# What all users do


class Caller(FastHttpUser):
    """Calls until it is answered well. Whatever is called here may be called twice."""

    abstract = True
    network_timeout = connection_timeout = PATIENCE_S
    #: Whether the last call was made more than once.
    was_repeated = False

    def call(self, path: str, body: bytes, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        self.was_repeated = False
        while True:
            with self.client.request(
                "POST", path, data=body, headers=JSON, name=name, catch_response=True
            ) as answer:
                if 200 <= answer.status_code < 300:
                    answer.success()
                    found: dict[str, Any] = orjson.loads(answer.content)
                    return found
                if answer.status_code not in (0, 429, 503) or time.monotonic() > deadline:
                    answer.failure(f"{answer.status_code}: {answer.text}")
                    raise StopUser
                # Not a failure: it is tried again, and what it cost shows in the time of no request.
                answer.request_meta["name"] = f"{name}, tried again later"
                answer.success()
            self.was_repeated = True
            audit().retries += 1
            gevent.sleep(PAUSE_S)


# ---------------------------------------------------------------------------------------------------
# Producers


class Producer(Caller):
    """Writes batches to one box after the other, numbered in each."""

    abstract = True
    batch: ClassVar[int]

    def on_start(self) -> None:
        self.producer = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        names = self._targets()
        self.targets = itertools.cycle(random.sample(names, len(names)))
        self.began = self.due = time.monotonic()
        self.writes = 0
        self.interval_s = 0.0

    def _targets(self) -> list[str]:
        return audit().boxes

    def wait_time(self) -> float:
        """As fast as it goes while calibrating, or for ever; then at a share of that, evenly."""
        asked, now = self.environment.parsed_options, time.monotonic()
        if not asked.calibrate or now - self.began < asked.calibrate:
            return 0.0
        if not self.interval_s:
            self.interval_s = (now - self.began) / max(1, self.writes) / asked.share
            self.due = now + random.random() * self.interval_s
        self.due = max(now, self.due + self.interval_s)
        return self.due - now

    @task
    def produce(self) -> None:
        box = next(self.targets)
        sent = audit().ledger.of(box, self.producer)
        first = sent.acked
        sent.sent = first + self.batch
        answer = self.call(f"/v0/boxes/{box}?return_seqs=false", self.body(first), f"append {self.batch}")
        if answer["count"] != self.batch:
            audit().faults.add("lost", f"{box}: {answer['count']} of {self.batch} records were taken")
        sent.acked = sent.sent
        self.writes += 1

    def body(self, first: int) -> bytes:
        """Records of about 110 bytes, under a key that is the same when they are sent again."""
        begin = f'{{"data":{{"p":"{self.producer}","n":'
        end = f',"at":{time.time() * 1000:.1f},"pad":"0123456789abcdef"}},"tag":"{self.producer}"}}'
        records = ",".join([f"{begin}{number}{end}" for number in range(first, first + self.batch)])
        return f'{{"idempotency_key":"{self.producer}-{first}","records":[{records}]}}'.encode()


class SingleProducer(Producer):
    batch = 1
    weight = 3


class BatchProducer(Producer):
    batch = 100
    weight = 2


class BulkProducer(Producer):
    batch = 1000
    weight = 1


class JobProducer(Producer):
    """Fills the queues, and no faster than they are emptied: what waits there is bounded."""

    batch = 16
    weight = 1
    WAITING_MAX = 2000
    ASK_EVERY = 8

    def _targets(self) -> list[str]:
        return audit().queues

    @task
    def produce(self) -> None:
        if self.writes % self.ASK_EVERY == 0 and self._waiting() > self.WAITING_MAX:
            gevent.sleep(PAUSE_S)
        else:
            super().produce()

    def _waiting(self) -> int:
        states = [once(self.host or "", "GET", f"/v0/boxes/{box}") for box in audit().queues]
        return max(orjson.loads(text)["queue"]["ready"] if status == 200 else 0 for status, text in states)


# ---------------------------------------------------------------------------------------------------
# Readers


class DiffPoller(Caller):
    """Follows one box from its start with diff, and waits when it has it all."""

    weight = 2
    is_behind = True

    def on_start(self) -> None:
        self.reader = audit().open(random.choice(audit().readable))

    def on_stop(self) -> None:
        audit().close(self.reader)

    @task
    def poll(self) -> None:
        self.is_behind = not self._read(0 if self.is_behind else WAIT_MS)["caught_up"]

    def _read(self, wait_ms: int) -> dict[str, Any]:
        reader = self.reader
        body = b'{"from_seq":%d,"limit":%d,"wait_ms":%d}' % (reader.seq, PAGE, wait_ms)
        answer = self.call(f"/v0/boxes/{reader.box}/diff", body, "diff, waits" if wait_ms else "diff")
        if answer["tombstone"]:
            reader.told_of_a_gap(answer["tombstone"])
        reader.page(answer["records"])
        return answer


class Keeper(DiffPoller):
    """One a box, with `--trim`: goes through all of it, and deletes what everyone has seen."""

    def on_start(self) -> None:
        reader = audit().keep()
        if reader is None:
            raise StopUser
        self.reader = reader

    def on_stop(self) -> None:
        """Its cursor stays: the last check goes on from there."""

    @task
    def poll(self) -> None:
        super().poll()
        box = self.reader.box
        seen = audit().seen_by_all(box)
        if seen - audit().deleted.get(box, 0) > 2 * KEEP_RECORDS:
            audit().deleted[box] = seen - KEEP_RECORDS
            self.call(f"/v0/boxes/{box}/delete", b'{"before_seq":%d}' % audit().deleted[box], "delete")


class TailReader(User):
    """Follows one box from its start over server-sent events.

    Once it is live, its time is that from a record's making to its arrival here, so the clocks of all
    machines must agree. For what it replays before, the time is that from one event to the next.
    """

    weight = 3

    def on_start(self) -> None:
        self.reader = audit().open(random.choice(audit().readable))

    def on_stop(self) -> None:
        audit().close(self.reader)

    @task
    def follow(self) -> None:
        """One connection, until it breaks. What was checked is never asked for again."""
        parts = urlsplit(self.host or "")
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
        try:
            path = f"/v0/boxes/{self.reader.box}/watch?from_seq={self.reader.seq}"
            connection.request("GET", path, headers={"Accept": "text/event-stream"})
            answer = connection.getresponse()
            if answer.status == 200:
                self._events(answer)
            elif answer.status not in (429, 503):
                _fire(self.environment, "SSE", "watch", 0.0, error=OSError(f"answered {answer.status}"))
                raise StopUser
        except (OSError, http.client.HTTPException):
            pass  # a kill; the checks tell whether anything is missing
        finally:
            connection.close()
        audit().retries += 1
        gevent.sleep(PAUSE_S)

    def _events(self, answer: http.client.HTTPResponse) -> None:
        name = b""
        self.is_live, self.arrived = False, time.monotonic()
        while line := answer.readline():
            if line.startswith(b"event: "):
                name = line[7:-1]
            elif line.startswith(b"data: "):
                self._event(name, line[6:])

    def _event(self, name: bytes, text: bytes) -> None:
        if name == b"record":
            records = orjson.loads(text)["records"]
            self.reader.page(records)
            before, self.arrived = self.arrived, time.monotonic()
            if self.is_live:
                took_ms = max(0.0, time.time() * 1000 - records[-1]["data"]["at"])
                _fire(self.environment, "SSE", "append to event", took_ms, size=len(text))
            else:
                took_ms = 1000 * (self.arrived - before)
                _fire(self.environment, "SSE", "event to event, replayed", took_ms, size=len(text))
        elif name == b"caught-up":
            self.is_live = True
        elif name == b"tombstone":
            self.reader.told_of_a_gap(orjson.loads(text))


# ---------------------------------------------------------------------------------------------------
# Workers


class QueueWorker(Caller):
    """Claims jobs of one queue, and acks them."""

    weight = 2

    def on_start(self) -> None:
        self.node = f"{os.getpid()}-{next(_numbers)}"
        self.jobs = audit().jobs[random.choice(audit().queues)]

    @task
    def work(self) -> None:
        path, jobs, node = f"/v0/boxes/{self.jobs.box}", self.jobs, self.node
        claim = {"node": node, "max": CLAIM, "wait_ms": WAIT_MS, "lease_ms": 120_000}
        claimed = self.call(f"{path}/claim", orjson.dumps(claim), f"claim {CLAIM}")["claimed"]
        if not claimed:
            return
        names = {job["$seq"]: (job["data"]["p"], job["data"]["n"]) for job in claimed}
        for producer, number in names.values():
            jobs.claimed(node, producer, number)
            jobs.acking(producer, number)
        ack = {"node": node, "seqs": list(names), "lease_ids": [job["lease_id"] for job in claimed]}
        answer = self.call(f"{path}/ack", orjson.dumps(ack), f"ack {CLAIM}")
        skipped = set(answer["skipped"])
        for seq, (producer, number) in names.items():
            if seq in skipped:
                jobs.skipped(node, producer, number, was_repeated=self.was_repeated)
            else:
                jobs.acked(producer, number)
