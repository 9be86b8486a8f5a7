"""The OpenAPI document is complete, and a server does what it says (§13).

Method: the document is held against the addresses that a gateway answers, its rules and its errors; then
`schemathesis` makes requests out of it, good and bad, and every answer must have a status, a type, headers
and a shape that the document declares, and never be a 500. The run is bounded: `EXAMPLES` for each address,
more with `STREAMS_SWEEP=full`.
"""

import json
import os
import re

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

from gateway.access import RULES
from gateway.errors import STATUS_OF
from gateway.openapi import document
from gateway.operations import EVENT_STREAM, OPERATIONS
from gateway.watch.plan import _WatchBody
from streams.protocol import schemas
from streams.protocol.appends import _FullRecord
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
#: What names in requests become, so that most of them meet something.
NAMES = {
    "box": ("fuzz.log", "fuzz.queue", "fuzz.none", "fuzz.made"),
    "router": ("fuzz.router", "fuzz.no-router"),
    "group": ("fuzz.group", "fuzz.no-group"),
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
    assert told == {code: status for code, status in STATUS_OF.items() if code != "method_not_allowed"}


def test_every_reference_leads_somewhere():
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert names == DOCUMENT["components"]["schemas"].keys()


@pytest.mark.parametrize(
    ("told", "read"),
    [(schemas.WatchBody, _WatchBody), (schemas.NewRecord, _FullRecord)],
    ids=["watch", "record"],
)
def test_bodies_that_are_described_twice_are_described_alike(told, read):
    def facts(kind):
        return {(field.encode_name, field.required) for field in msgspec.structs.fields(kind)}

    assert facts(told) == facts(read)


# -- served ---------------------------------------------------------------------------------------------


def test_the_document_is_served(api):
    """§13"""
    response = api.send("GET", "/v0/openapi.json")
    assert response.headers["content-type"] == "application/json"
    served = response.json()
    assert served["paths"] == DOCUMENT["paths"] and served["openapi"] == "3.1.0"


def test_the_page_for_people_needs_nothing_from_elsewhere(api):
    """§13"""
    response = api.send("GET", "/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for path in DOCUMENT["paths"]:
        assert f"<code>{path}</code>" in response.text
    assert not re.search(r"<script|<link|<img|src=|url\(|@import|https?://", response.text)
    anchors = set(re.findall(r"href='#([^']+)'", response.text))
    assert anchors <= set(re.findall(r"id='([^']+)'", response.text))


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
        client.put("/v0/routers/fuzz.router", json={"source": "fuzz.log", "dest": "fuzz.copy"})
        yield client


@described.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_meets_an_answer_that_is_not_declared(case, fuzzed):
    """§13"""
    for name, known in NAMES.items():
        value = (case.path_parameters or {}).get(name)
        if isinstance(value, str) and len(value) % 5:  # now and then, whatever was made up
            case.path_parameters[name] = known[len(value) % len(known)]
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_ms"), int):
        case.body["wait_ms"] = min(case.body["wait_ms"], 1)
    operation = OPERATIONS[f"{case.method.upper()} {case.operation.path}"]
    if operation.answer_type == EVENT_STREAM:
        answer_of_stream(case, fuzzed)
        return
    if case.operation.path == "/v0/ws":
        return_without_socket(case, fuzzed)
        return
    response = case.call(base_url=str(fuzzed.base_url).rstrip("/"), timeout=30)
    case.validate_response(response, checks=CHECKS)


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
