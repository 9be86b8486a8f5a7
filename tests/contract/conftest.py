"""Fixtures of the HTTP contract suite: real servers, one thin client, four ways to reach them.

A test that takes `api` runs over HTTP/1.1 at both fronts and over h2c (prior knowledge) at the edge, and must
get the same answers from all. The edge hands an h2c connection to Hypercorn, so h2c at the Hypercorn front
differs only in that hand-over: the conventions and the comparisons of `every_api` cover it.
`@pytest.mark.exhaustive` marks the long tables, which run over (edge, HTTP/1.1) only. A test that takes
`limited` does the same against servers started with small limits.

The tests know `docs/spec/v0.md` and nothing of the code. Every test writes only to boxes named after `box`,
so one server serves them all.
"""

import contextlib
import json
import re
import ssl
import threading
import time
import uuid
from dataclasses import dataclass
from zipfile import ZipFile

import httpx2
import pytest

from tests.support.sse import Parser

SMALL_LIMITS = {
    "max_body_bytes": 65_536,
    "max_batch_records": 20,
    "max_record_bytes": 4096,
    "max_meta_bytes": 512,
    "max_tag_bytes": 16,
    "max_node_bytes": 8,
}
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; given because httpx2 would build one a client
PATIENCE_MS = 60_000  # a deadline no healthy run comes near


@dataclass(frozen=True)
class Combo:
    front: str
    protocol: str

    def __str__(self):
        return f"{self.front}-{self.protocol}"

    def client(self, url):
        return httpx2.Client(**self._options(url))

    def async_client(self, url):
        return httpx2.AsyncClient(**self._options(url))

    def _options(self, url):
        h2c = self.protocol == "h2c"  # without HTTP/1.1 on offer, httpx2 starts HTTP/2 by prior knowledge
        return {
            "base_url": url,
            "http1": not h2c,
            "http2": h2c,
            "timeout": 120,
            "trust_env": False,
            "verify": NO_TLS,
        }


#: Other tests keep the machine busy, and nothing is to be refused for that.
#: Files of the guide that every server has.
GUIDE = {
    "index.html": "<!doctype html><title>guide</title>",
    "howto/keys.html": "<!doctype html><title>keys</title>",
    "_static/a.css": "a { color: red }",
    "_static/a.js": "'use strict'",
    "_images/a.svg": "<svg xmlns='http://www.w3.org/2000/svg'/>",
    "notes.exe": "not served",
}
PATIENT = {"throttle_lag_ms": 60_000}

COMBOS = [Combo("edge", "h1"), Combo("edge", "h2c"), Combo("hypercorn", "h1"), Combo("hypercorn", "h2c")]
#: Files whose tests use all four; the others leave out the last.
IN_FULL = ("test_conventions.py",)


def pytest_configure(config):
    config.addinivalue_line("markers", "exhaustive: a long table, run over (edge, HTTP/1.1) only")


def pytest_generate_tests(metafunc):
    if "combo" in metafunc.fixturenames:
        once = metafunc.definition.get_closest_marker("exhaustive")
        is_full = metafunc.definition.path.name in IN_FULL
        combos = COMBOS[:1] if once else COMBOS if is_full else COMBOS[:3]
        metafunc.parametrize("combo", combos, ids=str, scope="session")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """`fleet(front, **settings)` is the running server with these settings, started at its first use."""
    from streams.testing import running_server  # late, so that the suite collects without a server

    running = {}
    guide = tmp_path_factory.mktemp("guide") / "site.zip"
    with ZipFile(guide, "w") as archive:
        for name, text in GUIDE.items():
            archive.writestr(name, text)
    with contextlib.ExitStack() as stack:

        def server(front, **settings):
            key = (front, *sorted(settings.items()))
            if key not in running:
                running[key] = None  # stays so when it does not start: once is enough to wait for that
                running[key] = stack.enter_context(
                    running_server(front=front, shards=2, guide=guide, **PATIENT | settings)
                )
            assert running[key] is not None, f"the server {key} did not start"
            return running[key]

        yield server


@pytest.fixture
def api(fleet, combo):
    server = fleet(combo.front)
    with combo.client(server.url) as client:
        yield Api(client, server, combo)


@pytest.fixture
def limited(fleet, combo):
    server = fleet(combo.front, **SMALL_LIMITS)
    with combo.client(server.url) as client:
        yield Api(client, server, combo)


@pytest.fixture
def box(request):
    """A legal box name nobody else uses, which says in a server log which test it was."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.originalname.removeprefix("test_").lower())
    return f"{words[:60].strip('-')}.{uuid.uuid4().hex[:12]}"


@pytest.fixture
def every_api(fleet):
    """All four at once, for tests that compare them with each other."""
    with contextlib.ExitStack() as stack:
        apis = []
        for combo in COMBOS:
            server = fleet(combo.front)
            apis.append(Api(stack.enter_context(combo.client(server.url)), server, combo))
        yield apis


class Api:
    """The contract's calls. Each one asserts what every answer promises (§0.6, §0.7) and returns the JSON."""

    def __init__(self, client, server, combo):
        self.client = client
        self.server = server
        self.combo = combo

    @contextlib.contextmanager
    def another(self):
        """A client of the same kind with a connection of its own."""
        with self.combo.client(self.server.url) as client:
            yield Api(client, self.server, self.combo)

    # -- requests ---------------------------------------------------------------------------------------

    def send(self, method, path, body=None, *, params=None, headers=None, content_type="application/json"):
        """One request. `body` is sent as it is when it is text or bytes, as JSON otherwise."""
        headers = dict(headers or {})
        if body is not None and content_type is not None:
            headers.setdefault("Content-Type", content_type)
        if body is not None and not isinstance(body, str | bytes) and not hasattr(body, "__next__"):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        return self.client.request(method, path, content=body, params=params, headers=headers)

    def ok(self, response, *statuses):
        assert response.status_code in (statuses or (200,)), f"{response.status_code}: {response.text[:2000]}"
        self._check_headers(response)
        answer = json.loads(response.text)
        total = answer["performance"]["server_total_ms"]
        assert isinstance(total, int | float) and not isinstance(total, bool) and total >= 0
        return answer

    @staticmethod
    def _check_headers(response):
        """Every answer is JSON, is taken for nothing else by a browser, and is kept by no cache."""
        assert response.headers["content-type"].split(";")[0] == "application/json"
        assert response.headers.get_list("x-content-type-options") == ["nosniff"]
        assert response.headers.get_list("cache-control") == ["no-store"]

    def refused(self, response, status, code, *mentions):
        """Assert the error answer of §0.6; `mentions` must be in its message. Returns the `error` object."""
        assert response.status_code == status, f"{response.status_code}: {response.text[:2000]}"
        self._check_headers(response)
        answer = json.loads(response.text)
        assert set(answer) <= {"error", "performance"}
        if "performance" in answer:
            assert answer["performance"]["server_total_ms"] >= 0
        error = answer["error"]
        assert set(error) <= {"code", "message", "detail"}
        assert error["code"] == code, error
        assert isinstance(error["message"], str) and error["message"]
        for mention in mentions:
            assert mention in error["message"]
        assert isinstance(error.get("detail", {}), dict)
        return error

    # -- the calls of the contract ----------------------------------------------------------------------

    def put(self, box, **config):
        return self.ok(self.send("PUT", f"/v0/boxes/{box}", config), 200, 201)

    def state(self, box, **params):
        return self.ok(self.send("GET", f"/v0/boxes/{box}", params={"touch": "false", **params}))

    def exists(self, box):
        response = self.send("GET", f"/v0/boxes/{box}", params={"touch": "false"})
        assert response.status_code in (200, 404), response.text
        return response.status_code == 200

    def drop(self, box, **params):
        return self.ok(self.send("DELETE", f"/v0/boxes/{box}", params=params))

    def boxes(self, **params):
        return self.ok(self.send("GET", "/v0/boxes", params=params))

    def post(self, box, body, **kw):
        return self.send("POST", f"/v0/boxes/{box}", body, **kw)

    def append(self, box, *datas, params=None, headers=None, **fields):
        """Append `datas`, or `records=[...]` when the records need more than data."""
        fields.setdefault("records", [{"data": data} for data in datas])
        return self.ok(self.post(box, fields, params=params, headers=headers), 200, 201)

    def post_diff(self, box, body, **kw):
        return self.send("POST", f"/v0/boxes/{box}/diff", body, **kw)

    def diff(self, box, **options):
        return self.ok(self.post_diff(box, options))

    def post_delete(self, box, body, **kw):
        return self.send("POST", f"/v0/boxes/{box}/delete", body, **kw)

    def delete(self, box, **options):
        return self.ok(self.post_delete(box, options))

    def put_fence(self, box, body, **kw):
        return self.send("PUT", f"/v0/boxes/{box}/fence", body, **kw)

    def fence(self, box, token, **options):
        return self.ok(self.put_fence(box, {"token": token, **options}))

    def call_queue(self, box, action, **body):
        return self.send("POST", f"/v0/boxes/{box}/{action}", body)

    def claim(self, box, node="w", **options):
        return self.ok(self.call_queue(box, "claim", node=node, **options))

    def ack(self, box, *seqs, node="w", **options):
        return self.ok(self.call_queue(box, "ack", node=node, seqs=list(seqs), **options))

    def nack(self, box, *seqs, node="w", **options):
        return self.ok(self.call_queue(box, "nack", node=node, seqs=list(seqs), **options))

    def extend(self, box, *seqs, node="w", **options):
        return self.ok(self.call_queue(box, "extend", node=node, seqs=list(seqs), **options))

    def put_group(self, box, group, **body):
        return self.send("PUT", f"/v0/boxes/{box}/groups/{group}", body)

    def commit(self, box, group, cursor, **options):
        return self.ok(self.put_group(box, group, cursor=cursor, **options), 200, 201)

    def group(self, box, group):
        return self.ok(self.send("GET", f"/v0/boxes/{box}/groups/{group}"))

    def groups(self, box, **params):
        return self.ok(self.send("GET", f"/v0/boxes/{box}/groups", params=params))

    def tail(self, box):
        return self.ok(self.send("GET", f"/v0/boxes/{box}/tail"))

    def get_record(self, box, seq):
        return self.send("GET", f"/v0/boxes/{box}/records/{seq}")

    def record(self, box, seq):
        answer = self.ok(self.get_record(box, seq))
        return answer.get("record", answer)

    # -- what tests ask again and again -----------------------------------------------------------------

    def data(self, box, **options):
        return [record["data"] for record in self.diff(box, **options)["records"]]

    def seqs(self, box, **options):
        return [record["$seq"] for record in self.diff(box, **options)["records"]]

    def read_all(self, box, **options):
        """Follow the cursor to the head. Returns the records, and the tombstones met."""
        records, tombstones, from_seq = [], [], 0
        for _ in range(10_000):
            answer = self.diff(box, from_seq=from_seq, **options)
            records += answer["records"]
            if answer.get("tombstone"):
                tombstones.append(answer["tombstone"])
            if answer["caught_up"]:
                return records, tombstones
            assert answer["next_from_seq"] > from_seq, "a read that is not caught up must move its cursor"
            from_seq = answer["next_from_seq"]
        raise AssertionError("never caught up")

    def raw_records(self, box, **options):
        """The exact text of each record of a diff answer, for what parsing would hide."""
        response = self.post_diff(box, options)
        self.ok(response)
        text = response.text
        opening = re.search(r'"records"\s*:\s*\[', text)
        at, raws, decoder = opening.end(), [], json.JSONDecoder(parse_int=str, parse_float=str)
        while True:
            at = re.compile(r"[\s,]*").match(text, at).end()
            if text[at] == "]":
                return raws
            _, end = decoder.raw_decode(text, at)
            raws.append(text[at:end])
            at = end

    def raw_data(self, box, **options):
        """The exact text of `data` in each record: the last member, or found by walking the members."""
        return [_member(raw, "data") for raw in self.raw_records(box, **options)]

    def unchanged(self, box):
        """A context manager: the box is the same after the block as before it."""
        return _Unchanged(self, box)

    def let_time_pass(self, ms, quiet_box):
        """Wait in the server: a long poll on a box nobody writes to."""
        if not self.exists(quiet_box):
            self.put(quiet_box, durability="memory")
        started = time.monotonic()
        while (time.monotonic() - started) * 1000 < ms:
            self.diff(quiet_box, wait_ms=ms)

    def until(self, condition, quiet_box):
        """Ask again, a short long poll between the questions, until the answer is true."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while True:
            answer = condition()
            if answer:
                return answer
            assert time.monotonic() < deadline, "it never came true"
            self.let_time_pass(5, quiet_box)

    # -- watching ---------------------------------------------------------------------------------------

    def watch(self, boxes, *, params=None, **options):
        """§7.1"""
        return self.ok(self.send("POST", "/v0/watch", {"boxes": boxes, **options}, params=params))

    @contextlib.contextmanager
    def events(self, path, *, params=None, last_event_id=None):
        """The events of a stream, over a connection of its own."""
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        with (
            self.combo.client(self.server.url) as client,
            client.stream("GET", path, params=params, headers=headers) as answer,
        ):
            yield Events(answer)

    def in_background(self, call):
        """Start `call(another api)` in a thread. Calling the result waits for it: (answer, seconds)."""
        outcome = {}

        def run():
            started = time.monotonic()
            try:
                with self.another() as other:
                    outcome["answer"] = call(other)
            except BaseException as error:
                outcome["error"] = error
            outcome["seconds"] = time.monotonic() - started

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def result():
            thread.join(PATIENCE_MS * 2 / 1000)
            assert not thread.is_alive(), "the call hangs"
            if "error" in outcome:
                raise outcome["error"]
            return outcome["answer"], outcome["seconds"]

        return result


class Events:
    """An open event stream, read as far as asked."""

    def __init__(self, answer):
        self.answer = answer
        self._chunks = answer.iter_raw()
        self._parser = Parser()
        self._ready = []

    def next(self):
        while not self._ready:
            self._ready += self._parser.feed(next(self._chunks))
        return self._ready.pop(0)

    def take(self, *names):
        """The next events, which must be these; their data."""
        found = [self.next() for _ in names]
        assert [event.name for event in found] == list(names), found
        return [event.json for event in found]

    def until(self, name, **fields):
        """All events up to the first of this name that has these fields, which is the last of them."""
        found = [self.next()]
        while found[-1].name != name or any(found[-1].json[key] != value for key, value in fields.items()):
            found.append(self.next())
        return found

    def records(self, count, box=None):
        """Records until there are so many, across events; other events are passed over."""
        found = []
        while len(found) < count:
            event = self.next()
            if event.name == "record" and box in (None, event.json["box"]):
                found += event.json["records"]
        assert len(found) == count
        return found

    def comment(self):
        while not self._parser.comments:
            self._ready += self._parser.feed(next(self._chunks))
        return self._parser.comments.pop(0)

    @property
    def retry_ms(self):
        return self._parser.retry_ms

    def end(self):
        """What comes until the server ends the stream."""
        with contextlib.suppress(StopIteration):
            while True:
                self._ready += self._parser.feed(next(self._chunks))
        return self._ready


class _Unchanged:
    def __init__(self, api, box):
        self.api, self.box = api, box

    def look(self):
        response = self.api.send("GET", f"/v0/boxes/{self.box}", params={"touch": "false"})
        if response.status_code == 404:
            return None
        state = self.api.ok(response)
        for moving in ("performance", "effective_priority", "last_read_ts"):
            state.pop(moving)
        answer = self.api.diff(self.box, limit=1000, include_tags=True)
        answer.pop("performance")
        return state, answer

    def __enter__(self):
        self.before = self.look()

    def __exit__(self, kind, error, traceback):
        if kind is None:
            assert self.look() == self.before


def _member(raw_object, name):
    """The text of the value of the top-level member `name`, exactly as it stands."""
    decoder, at, space = json.JSONDecoder(parse_int=str, parse_float=str), 1, re.compile(r"[\s,:]*")
    while True:
        at = space.match(raw_object, at).end()
        assert raw_object[at] != "}", f"no member {name}"
        key, at = decoder.raw_decode(raw_object, at)
        at = space.match(raw_object, at).end()
        _, end = decoder.raw_decode(raw_object, at)
        if key == name:
            return raw_object[at:end]
        at = end
