"""Locust users that load a server and check it.

    make load                                                       # starts a server, half a minute
    locust -f loadtests/locustfile.py --host http://127.0.0.1:4000  # any server, with locust's web page
    locust -f loadtests/locustfile.py --headless -u 20 -t 60s --host … BulkProducer TailReader

Producers number their records and repeat a write, with its idempotency key, until it succeeds. During the
load, readers check that every number arrives once and in order. After the load, all stored records are
compared with all acked records. Each fault is a failed request of type CHECK, and the run ends with exit code
3.

A request that failed because a shard was killed and succeeded later is not a failure; it counts as retried.
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

from loadtests.audit import PATIENCE_S, PAUSE_S, Audit, NoAnswer, once
from streams import progress

JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
PAGE = 1000
CLAIM = 16
WAIT_MS = 1000
#: Records that all readers have seen and a keeper retains.
KEEP_RECORDS = 10_000
EXIT_FAULTS = 3

_numbers = itertools.count(1)
#: The load of this process; a new one for each test run.
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
    add("--durability", default="disk", choices=["memory", "disk", "fsync"], help="durability of all boxes")
    add(
        "--calibrate",
        type=float,
        default=0.0,
        help="seconds at full speed to measure the rate; then --share of it",
    )
    add("--share", type=float, default=0.7, help="share of the calibrated rate of each producer")
    add("--faults", action="store_true", help="shards are killed during the load, so leases may end early")
    add(
        "--trim",
        action="store_true",
        help="keepers delete records that all readers of this process have seen",
    )
    add("--verdict", default="", help="file for the verdict, as JSON", include_in_web_ui=False)
    add("--load-name", default="", help="prefix of the names of all boxes (default: a new one)")


@events.init.add_listener
def _init(environment: Any, **_: Any) -> None:
    """Set the number of keepers (one for each box and copy, or none), and listen for reports of workers."""
    options = environment.parsed_options
    Keeper.fixed_count = options.boxes + (options.boxes + 1) // 2
    if not options.trim:
        environment.user_classes = [each for each in environment.user_classes if each is not Keeper]
    if isinstance(environment.runner, MasterRunner):
        environment.runner.register_message("audit", _absorb_last_report)


@events.test_start.add_listener
def _start(environment: Any, **_: Any) -> None:
    global _audit
    options = environment.parsed_options
    if not isinstance(environment.runner, WorkerRunner):
        # Workers get the options, including this name, with the start message.
        options.load_name = f"load-{os.urandom(4).hex()}"
        if options.trim and isinstance(environment.runner, MasterRunner):
            raise SystemExit("--trim needs all readers in one process, and there are workers")
    _audit = Audit(
        environment.host, options.load_name, boxes=options.boxes, queues=2, may_return=options.faults
    )
    if not isinstance(environment.runner, WorkerRunner):
        _audit.prepare(options.durability)


def _stop_workers(runner: MasterRunner) -> None:
    """Stop all workers and wait for them: the final check needs their last reports.

    At the end of `--run-time`, locust would stop its workers only after this event.
    """
    for client in runner.clients.all:
        runner.server.send_to_client(Message("stop", None, client.id))
    with gevent.Timeout(PATIENCE_S, False):
        while runner.clients.running or runner.clients.spawning:
            gevent.sleep(PAUSE_S)


@events.quitting.add_listener
def _quit(environment: Any, **_: Any) -> None:
    """Run the final check before the exit code is set, also after Ctrl-C."""
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
        with progress.show_progress("checking", line=_print_progress) as report:
            audit().finish(report)
        audit().clean_up()
    except NoAnswer as error:
        audit().faults.add("lost", f"the final check could not read the server: {error}")
    verdict = audit().verdict()
    for text in verdict["descriptions"]:
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


def _print_progress(percent: int) -> None:
    print(f"checking the stored records: {percent} %", file=sys.stderr, flush=True)


@events.report_to_master.add_listener
def _send_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    if _audit is not None:
        data["audit"] = _audit.report()


@events.worker_report.add_listener
def _absorb_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    if _audit is not None and "audit" in data:
        _audit.absorb(data["audit"])


def _absorb_last_report(environment: Any, msg: Any) -> None:
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
# All users


class Caller(FastHttpUser):
    """Repeats calls until they succeed. All calls are idempotent."""

    abstract = True
    network_timeout = connection_timeout = PATIENCE_S
    #: True if the last call was sent more than once.
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
                    reply: dict[str, Any] = orjson.loads(answer.content)
                    return reply
                if answer.status_code not in (0, 429, 503) or time.monotonic() > deadline:
                    answer.failure(f"{answer.status_code}: {answer.text}")
                    raise StopUser
                # Not a failure: the call is retried, and no request includes the time of the failed attempt.
                answer.request_meta["name"] = f"{name}, tried again later"
                answer.success()
            self.was_repeated = True
            audit().retries += 1
            gevent.sleep(PAUSE_S)


# ---------------------------------------------------------------------------------------------------
# Producers


class Producer(Caller):
    """Writes batches to its boxes in turn, and numbers the records of each box."""

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
        """Return 0 while calibrating, or without calibration; then the interval for a share of that rate."""
        options, now = self.environment.parsed_options, time.monotonic()
        if not options.calibrate or now - self.began < options.calibrate:
            return 0.0
        if not self.interval_s:
            self.interval_s = (now - self.began) / max(1, self.writes) / options.share
            self.due = now + random.random() * self.interval_s
        self.due = max(now, self.due + self.interval_s)
        return self.due - now

    @task
    def produce(self) -> None:
        box = next(self.targets)
        counts = audit().ledger.of(box, self.producer)
        first = counts.acked_count
        counts.sent_count = first + self.batch
        answer = self.call(f"/v0/boxes/{box}?return_seqs=false", self.body(first), f"append {self.batch}")
        if answer["count"] != self.batch:
            audit().faults.add("lost", f"{box}: {answer['count']} of {self.batch} records were taken")
        counts.acked_count = counts.sent_count
        self.writes += 1

    def body(self, first: int) -> bytes:
        """Return a request with records of about 110 bytes and a key that a retry repeats."""
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
    """Fills the queues, and waits while more than `WAITING_MAX` jobs are ready."""

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
    """Follows one box from its start with diff, and long-polls at the end."""

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
            reader.add_gap(answer["tombstone"])
        reader.page(answer["records"])
        return answer


class Keeper(DiffPoller):
    """Reads a whole box, and deletes records that all readers have seen. One for each box, with `--trim`."""

    def on_start(self) -> None:
        reader = audit().keep()
        if reader is None:
            raise StopUser
        self.reader = reader

    def on_stop(self) -> None:
        """Keep the cursor: the final check continues from there."""

    @task
    def poll(self) -> None:
        super().poll()
        box = self.reader.box
        seen_seq = audit().seen_by_all(box)
        if seen_seq - audit().trim_seqs.get(box, 0) > 2 * KEEP_RECORDS:
            audit().trim_seqs[box] = seen_seq - KEEP_RECORDS
            self.call(f"/v0/boxes/{box}/delete", b'{"before_seq":%d}' % audit().trim_seqs[box], "delete")


class TailReader(User):
    """Follows one box from its start over server-sent events.

    Once it is live, its latency runs from the creation of a record to its arrival, so the clocks of all
    machines must agree. During replay, its latency is the time between two events.
    """

    weight = 3

    def on_start(self) -> None:
        self.reader = audit().open(random.choice(audit().readable))

    def on_stop(self) -> None:
        audit().close(self.reader)

    @task
    def follow(self) -> None:
        """Follow the box on one connection until it breaks, from the last checked record on."""
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
            pass  # a kill; the checks detect missing records
        finally:
            connection.close()
        audit().retries += 1
        gevent.sleep(PAUSE_S)

    def _events(self, answer: http.client.HTTPResponse) -> None:
        name = b""
        self.is_live, self.last_event_s = False, time.monotonic()
        while line := answer.readline():
            if line.startswith(b"event: "):
                name = line[7:-1]
            elif line.startswith(b"data: "):
                self._event(name, line[6:])

    def _event(self, name: bytes, text: bytes) -> None:
        if name == b"record":
            records = orjson.loads(text)["records"]
            self.reader.page(records)
            before, self.last_event_s = self.last_event_s, time.monotonic()
            if self.is_live:
                took_ms = max(0.0, time.time() * 1000 - records[-1]["data"]["at"])
                _fire(self.environment, "SSE", "append to event", took_ms, size=len(text))
            else:
                took_ms = 1000 * (self.last_event_s - before)
                _fire(self.environment, "SSE", "event to event, replayed", took_ms, size=len(text))
        elif name == b"caught-up":
            self.is_live = True
        elif name == b"tombstone":
            self.reader.add_gap(orjson.loads(text))


# ---------------------------------------------------------------------------------------------------
# Workers


class QueueWorker(Caller):
    """Claims jobs of one queue and acks them."""

    weight = 2

    def on_start(self) -> None:
        self.node = f"{os.getpid()}-{next(_numbers)}"
        self.jobs = audit().jobs[random.choice(audit().queues)]

    @task
    def work(self) -> None:
        path, jobs, node = f"/v0/boxes/{self.jobs.box}", self.jobs, self.node
        claim = {"node": node, "max": CLAIM, "wait_ms": WAIT_MS, "lease_ms": 120_000}
        claimed_jobs = self.call(f"{path}/claim", orjson.dumps(claim), f"claim {CLAIM}")["claimed"]
        if not claimed_jobs:
            return
        names = {job["$seq"]: (job["data"]["p"], job["data"]["n"]) for job in claimed_jobs}
        for producer, number in names.values():
            jobs.on_claim(node, producer, number)
            jobs.on_ack_sent(producer, number)
        ack = {"node": node, "seqs": list(names), "lease_ids": [job["lease_id"] for job in claimed_jobs]}
        answer = self.call(f"{path}/ack", orjson.dumps(ack), f"ack {CLAIM}")
        skipped_seqs = set(answer["skipped"])
        for seq, (producer, number) in names.items():
            if seq in skipped_seqs:
                jobs.on_skip(node, producer, number, was_repeated=self.was_repeated)
            else:
                jobs.on_ack(producer, number)
