"""The OpenAPI document is complete, and a server does what it says (§13).

Method: the document is held against the addresses that a gateway answers, its rules and its errors; then
`schemathesis` makes requests out of it, good and bad, and every answer must have a status, a type, headers
and a shape that the document declares, and never be a 500. The run is bounded: `EXAMPLES` for each address,
more with `STREAMS_SWEEP=full`.
"""

import json
import os
import re
import zlib

import httpx2
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.access.rules import RULES
from gateway.api.openapi import document
from gateway.api.openapi_operations import _LINES, EVENT_STREAM, OPERATIONS
from gateway.requests.errors import NOT_IN_V0, STATUS_OF
from streams.protocol.messages.bodies import NewRecord
from streams.protocol.payloads.appends import _FullRecord
from tests.contract.conftest import NO_TLS
from tests.contract.test_auth import routes

EXAMPLES = 200 if os.environ.get("STREAMS_SWEEP") == "full" else 8
DOCUMENT = document("test")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
#: What names in a path become, so that most requests meet something.
NAMES = {
    "box": ("fuzz.log", "fuzz.queue", "fuzz.made", "fuzz.none"),
    "schedule": ("fuzz.schedule", "fuzz.made-schedule", "fuzz.none"),
    "router": ("fuzz.router", "fuzz.made-router", "fuzz.none"),
    "group": ("fuzz.group", "fuzz.made-group"),
    "seq": (1, 7),
}
#: Names in bodies, as above for paths.
MEMBERS = {
    "source": ("fuzz.log",),
    "dest": ("fuzz.copy", "fuzz.made"),
    "from": ("fuzz.log", "fuzz.copy"),
    "boxes": ({"fuzz.log": {}}, {"fuzz.log": {"tail": True}, "fuzz.queue": {}}),
    "match": ("t", ["tag", "Glob", "t*"], ["tag", "Lt", "t"]),
    "filter": ("t", None),
    "group": ("fuzz.group",),
}

described = schemathesis.openapi.from_dict(DOCUMENT)
described.config.phases.coverage.enabled = False
described.config.phases.examples.enabled = False


# -- complete -------------------------------------------------------------------------------------------


def test_every_address_is_described_and_nothing_else():
    """§13"""
    assert sorted(OPERATIONS) == sorted(RULES) == sorted(routes())
    told = {f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == OPERATIONS.keys()
    ids = [each["operationId"] for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert len(set(ids)) == len(ids)


def test_every_error_code_is_told_with_its_status():
    """§0.6. 405 is for methods that are not here; it has no place in a list of those that are."""
    told = {}
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                told |= dict.fromkeys(re.findall(r"`([a-z_]+)`", answer["description"]), int(status))
    assert STATUS_OF.keys() >= NOT_IN_V0
    untold = NOT_IN_V0 | {"method_not_allowed"}
    assert told == {code: status for code, status in STATUS_OF.items() if code not in untold}


def test_every_reference_leads_somewhere():
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert names == DOCUMENT["components"]["schemas"].keys()


def test_bodies_that_are_described_twice_are_described_alike():
    def facts(kind):
        return {(field.encode_name, field.required) for field in msgspec.structs.fields(kind)}

    assert facts(NewRecord) == facts(_FullRecord)


# -- served ---------------------------------------------------------------------------------------------


def test_the_document_is_served(api):
    """§13"""
    response = api.send("GET", "/v0/openapi.json")
    assert response.headers["content-type"] == "application/json"
    served = response.json()
    assert served["paths"] == DOCUMENT["paths"] and served["openapi"] == "3.1.0"


# -- true -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fuzzed(fleet):
    server = fleet("edge")
    with httpx2.Client(base_url=server.url, trust_env=False, verify=NO_TLS, timeout=30) as client:
        client.put("/v0/boxes/fuzz.log", json={})
        client.put("/v0/boxes/fuzz.queue", json={"type": "queue"})
        for box in ("fuzz.log", "fuzz.queue"):
            client.post(f"/v0/boxes/{box}", json={"records": [{"data": n, "tag": "t"} for n in range(20)]})
        client.put("/v0/boxes/fuzz.log/groups/fuzz.group", json={"cursor": 3})
        schedule = {"box": "fuzz.log", "record": {"data": 1}, "cron": "@monthly"}
        client.put("/v0/schedules/fuzz.schedule", json=schedule)
        client.put("/v0/routers/fuzz.router", json={"source": "fuzz.log", "dest": "fuzz.copy"})
        yield client


LOG, QUEUE, GROUP, ROUTER = {"box": "ok.log"}, {"box": "ok.queue"}, {"group": "g"}, {"router": "ok.router"}
SCHEDULE = {"schedule": "ok.schedule"}
ONE = {"records": [{"data": {"n": 1.0}, "tag": "t", "node": "n", "meta": {"k": "v"}}]}
JOB = {"node": "w", "seqs": [1]}
#: One good request for each address that is no stream, in an order in which all of them work.
STORY = [
    ("PUT /v0/boxes/{box}", LOG, {"cap_records": 100, "timestamping": {"mode": "client-prefer"}}, {}),
    ("PUT /v0/boxes/{box}", LOG, {"priority": 3}, {}),
    ("PUT /v0/boxes/{box}", QUEUE, {"type": "queue", "dead_letter": "ok.dead"}, {}),
    ("POST /v0/boxes/{box}", LOG, ONE, {}),
    ("POST /v0/boxes/{box}", LOG, ONE, {"return_seqs": "false"}),
    ("POST /v0/boxes/{box}", QUEUE, ONE, {}),
    ("PUT /v0/boxes/{box}/fence", LOG, {"token": "f"}, {}),
    ("GET /v0/boxes/{box}", LOG, None, {"touch": "false"}),
    ("POST /v0/boxes/{box}/diff", LOG, {"include_tags": True}, {}),
    ("POST /v0/boxes/{box}/diff", LOG, {"from_seq": 99, "include_data": False}, {}),
    ("GET /v0/boxes/{box}/records/{seq}", {**LOG, "seq": 1}, None, {}),
    ("GET /v0/boxes/{box}/tail", LOG, None, {}),
    ("POST /v0/boxes/{box}/claim", QUEUE, {"node": "w"}, {}),
    ("GET /v0/boxes/{box}", QUEUE, None, {}),
    ("POST /v0/boxes/{box}/extend", QUEUE, {**JOB, "lease_ms": 60_000}, {}),
    ("POST /v0/boxes/{box}/pause", QUEUE, None, {}),
    ("POST /v0/boxes/{box}/claim", QUEUE, {"node": "w"}, {}),
    ("POST /v0/boxes/{box}/resume", QUEUE, {}, {}),
    ("POST /v0/boxes/{box}/nack", QUEUE, JOB, {}),
    ("POST /v0/boxes/{box}/reschedule", QUEUE, {"seqs": [1, 99], "delay_ms": 0}, {}),
    ("POST /v0/boxes/{box}/reprioritize", QUEUE, {"match": "t", "job_priority": 1}, {}),
    ("POST /v0/boxes/{box}/ack", QUEUE, JOB, {}),
    ("GET /v0/boxes/{box}/leases", QUEUE, None, {"state": "ready"}),
    ("POST /v0/boxes/{box}/requeue", QUEUE, {"from": "ok.log"}, {}),
    ("PUT /v0/boxes/{box}/groups/{group}", {**LOG, **GROUP}, {"cursor": 1}, {}),
    ("PUT /v0/boxes/{box}/groups/{group}", {**LOG, **GROUP}, {"cursor": 2, "if_cursor": 1}, {}),
    ("GET /v0/boxes/{box}/groups/{group}", {**LOG, **GROUP}, None, {}),
    ("GET /v0/boxes/{box}/groups", LOG, None, {"page_size": 1}),
    ("DELETE /v0/boxes/{box}/groups/{group}", {**LOG, **GROUP}, None, {}),
    ("PUT /v0/routers/{router}", ROUTER, {"source": "ok.log", "dest": "ok.copy", "filter": "t"}, {}),
    ("PUT /v0/routers/{router}", ROUTER, {"source": "ok.log", "dest": "ok.copy"}, {}),
    ("GET /v0/routers/{router}", ROUTER, None, {}),
    ("GET /v0/routers", {}, None, {"source": "ok.log"}),
    ("DELETE /v0/routers/{router}", ROUTER, None, {}),
    (
        "PUT /v0/schedules/{schedule}",
        SCHEDULE,
        {"box": "ok.log", "record": ONE["records"][0], "cron": "@daily"},
        {},
    ),
    (
        "PUT /v0/schedules/{schedule}",
        SCHEDULE,
        {"box": "ok.log", "record": {"data": 1}, "every_ms": 60_000},
        {},
    ),
    ("GET /v0/schedules/{schedule}", SCHEDULE, None, {}),
    ("GET /v0/schedules", {}, None, {"box": "ok.log"}),
    ("PUT /v0/boxes/{box}/fence", LOG, {"token": ""}, {}),
    ("POST /v0/schedules/{schedule}/run", SCHEDULE, None, {}),
    ("DELETE /v0/schedules/{schedule}", SCHEDULE, None, {}),
    ("POST /v0/watch", {}, {"boxes": {"ok.log": {}, "ok.none": {"tail": True}}}, {"lenient": "true"}),
    ("GET /v0/boxes", {}, None, {"prefix": "ok.", "page_size": 1}),
    ("POST /v0/boxes/{box}/delete", LOG, {"match": ["tag", "Glob", "t*"]}, {}),
    ("DELETE /v0/boxes/{box}", LOG, None, {"if_empty": "false"}),
    ("GET /console/{file}", {"file": "app.js"}, None, {}),
    ("GET /docs/guide/{file}", {"file": "index.html"}, None, {}),
    *[
        (f"GET {path}", {}, None, {})
        for path in (
            "/v0/health",
            "/health",
            "/healthz",
            "/ping",
            "/v0/ready",
            "/readyz",
            "/v0/status",
            "/v0/history",
            "/v0/settings",
        )
    ],
    *[
        (f"GET {path}", {}, None, {})
        for path in (
            *("/v0/metrics", "/metrics", "/v0/placement", "/v0/whoami", "/v0/openapi.json"),
            *("/", "/docs"),
        )
    ],
]


def test_a_good_request_to_each_address_is_answered_as_declared(fuzzed):
    """§13: statuses, types and shapes of what goes well."""
    streams = {route for route, each in OPERATIONS.items() if each.answer_type == EVENT_STREAM} | {
        "GET /v0/ws"
    }
    assert {route for route, *_ in STORY} == OPERATIONS.keys() - streams
    for route, path_parameters, body, query in STORY:
        method, _, path = route.partition(" ")
        case = described[path][method].Case(
            path_parameters=path_parameters,
            query=query,
            **({} if body is None else {"body": body, "media_type": "application/json"}),
        )
        response = case.call(base_url=str(fuzzed.base_url).rstrip("/"), timeout=30)
        assert response.status_code in (200, 201), (route, response.text)
        case.validate_response(response, checks=CHECKS)


@described.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_meets_an_answer_that_is_not_declared(case, fuzzed):
    """§13"""
    nudge(case)
    operation = OPERATIONS[f"{case.method.upper()} {case.operation.path}"]
    if operation.answer_type == EVENT_STREAM:
        answer_of_stream(case, fuzzed)
        return
    if case.operation.path == "/v0/ws":
        return_without_socket(case, fuzzed)
        return
    response = case.call(base_url=str(fuzzed.base_url).rstrip("/"), timeout=30)
    case.validate_response(response, checks=CHECKS)


def nudge(case):
    """Made-up requests mostly fail at the first thing that is looked at; most of these get further."""
    luck = zlib.crc32(repr((case.path_parameters, case.query, case.body)).encode())
    if luck % 4 == 0:
        return
    for name, known in NAMES.items():
        if name in (case.path_parameters or {}):
            case.path_parameters[name] = known[luck // 4 % len(known)]
    if case.method == "DELETE" and case.path_parameters.get("box") in ("fuzz.log", "fuzz.queue"):
        case.path_parameters["box"] = "fuzz.made"  # the others are still needed
    for name in ("cursor", *_LINES):
        if case.query and not (name == "node" and "work" in case.operation.path):
            case.query.pop(name, None)
    if isinstance(case.body, dict):
        for name, known in MEMBERS.items():
            if name in case.body:
                case.body[name] = known[luck // 4 % len(known)]
        for name in (
            "create",
            "match_seq",
            "trim_before_seq",
            "fencing_token",
            "if_token",
            "if_cursor",
            "cursor",
        ):
            if luck % 3 and name in case.body and case.operation.path != "/v0/boxes/{box}/groups/{group}":
                del case.body[name]
        if isinstance(case.body.get("wait_ms"), int):
            case.body["wait_ms"] = min(case.body["wait_ms"], 1)


def answer_of_stream(case, client):
    """A stream has no end to wait for: its head is looked at."""
    sent = case.as_transport_kwargs(base_url="http://server")
    url = sent["url"].removeprefix("http://server")
    with client.stream("GET", url, params=sent["params"], headers=sent["headers"]) as answer:
        declared = case.operation.definition.raw["responses"]
        assert str(answer.status_code) in declared, answer.status_code
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in declared[str(answer.status_code)]["content"]


def return_without_socket(case, client):
    assert client.get("/v0/ws").status_code == 400
