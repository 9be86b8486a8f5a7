"""Requests of the S2 API and the answers that they must get, as data.

The cases are written from the contract (docs/spec/s2.md). They hold for this server (`test_corpus.py`), and
for any other server of the API:

    python -m tests.s2.corpus http://127.0.0.1:8080

sends all of them there and prints the answers that differ. A case starts with a basin and a stream `s` of its
own. Cases marked `is_ours` are answered by this server alone: `s2 lite` has no access tokens, for one.
"""

from __future__ import annotations

import itertools
import json
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx2

#: Stands for anything in an expected answer.
ANY: Any = object()

RECORDS = "/v1/streams/s/records"
PROTO = {"content-type": "application/protobuf"}
EVENTS = {"accept": "text/event-stream"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One request, and what its answer must be."""

    method: str
    path: str
    #: Bytes as they are, text as UTF-8, anything else as JSON.
    body: Any = None
    headers: dict[str, str | bytes] = field(default_factory=dict)
    status: int = 200
    #: The code of an error.
    code: str = ""
    #: What the JSON of the answer must contain.
    has: Any = None
    #: What the text of the answer must be, or must contain.
    text: str = ""


@dataclass(frozen=True)
class Case:
    name: str
    steps: tuple[Step, ...]
    is_ours: bool = False


CASES: list[Case] = []


def case(name: str, *steps: Step, is_ours: bool = False) -> None:
    CASES.append(Case(name, steps, is_ours))


def append(body: Any, code: str = "", *, status: int = 0, has: Any = None, **headers: str) -> Step:
    status = status or ({"": 200, "invalid": 422}.get(code, 400))
    given: dict[str, str | bytes] = {name.replace("_", "-"): value for name, value in headers.items()}
    return Step(method="POST", path=RECORDS, body=body, status=status, code=code, has=has, headers=given)


def proto(hexed: str, code: str = "", *, status: int = 0, has: Any = None) -> Step:
    status = status or ({"": 200, "invalid": 422}.get(code, 400))
    headers: dict[str, str | bytes] = {**PROTO}
    return Step(
        method="POST",
        path=RECORDS,
        body=bytes.fromhex(hexed),
        status=status,
        code=code,
        has=has,
        headers=headers,
    )


def read(query: str, *, status: int = 200, code: str = "", has: Any = None, **headers: str) -> Step:
    given: dict[str, str | bytes] = {name.replace("_", "-"): value for name, value in headers.items()}
    return Step(method="GET", path=f"{RECORDS}?{query}", status=status, code=code, has=has, headers=given)


def one(body: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"records": [{"body": body}], **fields}


# -- timestamps

U63, U64 = 2**63, 2**64
case(
    "a client's timestamp of 2^63 or more is capped",
    append({"records": [{"timestamp": U63, "body": "a"}]}),
    append({"records": [{"timestamp": U64 - 1, "body": "b"}]}),
    proto("0a0e08ffffffffffffffffff011a0163"),
    read("seq_num=0", has={"records": [{"body": "a"}, {"body": "b"}, {"body": "c"}]}),
)
case(
    "a timestamp over 64 bits is no number",
    append({"records": [{"timestamp": U64, "body": "a"}]}, "bad_json"),
    append({"records": [{"timestamp": -1, "body": "a"}]}, "bad_json"),
)

# -- configs


def put(config: Any, code: str = "", status: int = 0, has: Any = None) -> Step:
    return Step(
        method="PUT",
        path="/v1/streams/s",
        body=config,
        status=status or (400 if code else 200),
        code=code,
        has=has,
    )


def patch(config: Any, code: str = "", status: int = 0, has: Any = None) -> Step:
    return Step(
        method="PATCH",
        path="/v1/streams/s",
        body=config,
        status=status or (400 if code else 200),
        code=code,
        has=has,
    )


def config_of_stream(has: Any) -> Step:
    return Step(method="GET", path="/v1/streams/s", has=has)


case(
    "an age over 64 bits, below 0 or of another type is no JSON of a config",
    put({"retention_policy": {"age": U64}}, "bad_json"),
    put({"retention_policy": {"age": -1}}, "bad_json"),
    put({"retention_policy": {"age": "1"}}, "bad_json"),
    put({"retention_policy": {"age": 0}}, "invalid", 422),
    patch({"retention_policy": {"age": U64}}, "bad_json"),
    patch({"retention_policy": {"age": 0}}, "invalid", 422),
)
case(
    "durations go up to 64 bits",
    patch({"retention_policy": {"age": U64 - 1}}, has={"retention_policy": {"age": U64 - 1}}),
    patch({"delete_on_empty": {"min_age_secs": U64 - 1}}, has={"delete_on_empty": {"min_age_secs": U64 - 1}}),
    append(one("a")),
    read("seq_num=0", has={"records": [{"body": "a"}]}),
    config_of_stream({"retention_policy": {"age": U64 - 1}}),
)
case(
    "a min_age_secs below 0, over 64 bits or null is no JSON of a config that creates",
    put({"delete_on_empty": {"min_age_secs": -1}}, "bad_json"),
    put({"delete_on_empty": {"min_age_secs": U64}}, "bad_json"),
    put({"delete_on_empty": {"min_age_secs": None}}, "bad_json"),
    patch({"delete_on_empty": {"min_age_secs": -1}}, "bad_json"),
    put({"delete_on_empty": {}}, has={"name": "s"}),
    put({"delete_on_empty": None}, has={"name": "s"}),
)
case(
    "an empty delete_on_empty in a patch keeps the value, null clears it",
    patch({"delete_on_empty": {"min_age_secs": 77}}, has={"delete_on_empty": {"min_age_secs": 77}}),
    patch({"delete_on_empty": {}}, has={"delete_on_empty": {"min_age_secs": 77}}),
    config_of_stream({"delete_on_empty": {"min_age_secs": 77}}),
    patch({"delete_on_empty": {"min_age_secs": None}}, has={"delete_on_empty": {"min_age_secs": 0}}),
    patch({"delete_on_empty": {"min_age_secs": 5}}),
    patch({"delete_on_empty": None}, has={"delete_on_empty": {"min_age_secs": 0}}),
    patch(
        {"timestamping": {"mode": "arrival"}}, has={"timestamping": {"mode": "arrival", "uncapped": False}}
    ),
    patch({"timestamping": {}}, has={"timestamping": {"mode": "arrival", "uncapped": False}}),
)


def patch_basin(config: Any, has: Any = None) -> Step:
    return Step(method="PATCH", path="/v1/basins/{basin}", body=config, has=has)


case(
    "an empty delete_on_empty in the defaults of a basin is unset, and keeps what is set",
    patch_basin({"default_stream_config": {"delete_on_empty": {}}}, has={"default_stream_config": None}),
    patch_basin(
        {"default_stream_config": {"delete_on_empty": {"min_age_secs": 9}}},
        has={"default_stream_config": {"delete_on_empty": {"min_age_secs": 9}}},
    ),
    patch_basin(
        {"default_stream_config": {"delete_on_empty": {}}},
        has={"default_stream_config": {"delete_on_empty": {"min_age_secs": 9}}},
    ),
    patch_basin(
        {"default_stream_config": {"delete_on_empty": {"min_age_secs": 0}}},
        has={"default_stream_config": {"delete_on_empty": {"min_age_secs": 0}}},
    ),
    patch_basin({"default_stream_config": None}, has={"default_stream_config": None}),
)

# -- JSON of records

case(
    "null is no body and no headers of a record, but no timestamp and no condition",
    append(one(None), "bad_json"),
    append({"records": [{"headers": None, "body": "x"}]}, "bad_json"),
    append({"records": [{"timestamp": None, "body": "x"}], "match_seq_num": None, "fencing_token": None}),
    append({"records": None}, "bad_json"),
    append({}, "bad_json"),
    append("[1", "bad_json"),
    append("", "bad_json"),
)
case(
    "a fencing token over 36 bytes is no JSON, and an illegal input in protobuf",
    append(one(fencing_token="x" * 37), "bad_json"),
    append(one(fencing_token="é" * 19), "bad_json"),
    append(one(fencing_token="x" * 36), status=412),
    proto("0a031a01781a25" + "78" * 37, "invalid"),
    append({"records": [{"headers": [["", "fence"]], "body": "x" * 37}]}, "invalid"),
)
case(
    "what is not base64, and a command that is none",
    append(one("?"), "invalid", s2_format="base64"),
    append({"records": [{"headers": [["", "eA=="]], "body": ""}]}, "invalid"),
    append({"records": [{"headers": [["", "eA=="]], "body": ""}]}, "invalid", s2_format="base64"),
    append({"records": [{"headers": [["", "trim"]], "body": "short"}]}, "invalid"),
    append({"records": [{"headers": [["", "a"], ["b", "c"]], "body": ""}]}, "invalid"),
    append({"records": []}, "invalid"),
)

# -- headers come before bodies

case(
    "a bad header is reported before a bad body",
    append("[1", "bad_header", s2_format="hex"),
    append("[1", "bad_header", s2_encryption_key="x" * 99),
    append("[1", "bad_header", s2_stream_config="{"),
    append(one(), "bad_header", s2_basin="NO"),
    Step(
        method="POST",
        path="/v1/streams",
        body="[1",
        headers={"s2-request-token": "x" * 37},
        status=400,
        code="bad_header",
    ),
    Step(
        method="POST",
        path="/v1/basins",
        body="[1",
        headers={"s2-request-token": "x" * 37},
        status=400,
        code="bad_header",
    ),
    read("seq_num=0&timestamp=0", status=400, code="bad_header", s2_format="hex"),
    read("timestamp=5&until=5", status=400, code="bad_header", s2_stream_config="{"),
    read("seq_num=x", status=400, code="bad_query", s2_format="hex"),
    read("seq_num=0&timestamp=0", status=422, code="invalid"),
    read("timestamp=5&until=5", status=422, code="invalid"),
)
case(
    "a request token that is not UTF-8 is a bad header",
    Step(
        method="POST",
        path="/v1/streams",
        body={"stream": "t"},
        headers={"s2-request-token": b"\xff\xfe"},
        status=400,
        code="bad_header",
    ),
    Step(
        method="POST",
        path="/v1/basins",
        body={"basin": "{basin}-2"},
        headers={"s2-request-token": b"\xff\xfe"},
        status=400,
        code="bad_header",
    ),
)

# -- reading

case(
    "last-event-id wins over timestamp, until and the start",
    append({"records": [{"body": "a"}, {"body": "b"}, {"body": "c"}]}),
    Step(
        method="GET",
        path=f"{RECORDS}?timestamp=7&until=7&wait=0",
        headers={**EVENTS, "last-event-id": "0,1,9"},
        text="data: [DONE]",
    ),
    Step(
        method="GET",
        path=f"{RECORDS}?seq_num=0&count=2",
        headers={**EVENTS, "last-event-id": "0,1,9"},
        text="id: 1,2,18\n",
    ),
    Step(
        method="GET",
        path=f"{RECORDS}?seq_num=0&count=2",
        headers={**EVENTS, "last-event-id": "x"},
        status=400,
        code="bad_header",
    ),
)
case(
    "a read of no records is answered at once, wherever it starts",
    append(one("a")),
    read("seq_num=0&count=0", has={"records": []}),
    read("seq_num=1&count=0", has={"records": []}),
    read("seq_num=9&bytes=0&wait=1", has={"records": []}),
    read("timestamp=99999999999999&bytes=0", has={"records": []}),
    read("seq_num=9", status=416),
    Step(method="GET", path=f"{RECORDS}?seq_num=9&count=0", headers=EVENTS, text="data: [DONE]"),
)
case(
    "count=0 with a wait is a heartbeat and the end",
    append(one("a")),
    Step(method="GET", path=f"{RECORDS}?seq_num=0&count=0&wait=1", headers=EVENTS, text="data: [DONE]"),
    Step(method="GET", path=f"{RECORDS}?seq_num=1&count=0&wait=1", headers=EVENTS, text="event: ping"),
    is_ours=True,  # so s2 lite 0.42; 0.43 sends the end alone
)

# -- protobuf

case(
    "a number of more than 64 bits is no protobuf",
    proto("0a031a017810ffffffffffffffffff02", "bad_proto"),
    proto("0a031a017810ffffffffffffffffffff01", "bad_proto"),
    proto("0a041a81000078", "bad_proto"),
    proto("0a031a017810ffffffffffffffffff01", status=412),
)
case(
    "a field of another wire type is no protobuf: a garbled condition is never no condition",
    proto("0a031a01781801", "bad_proto"),
    proto("0a031a01781a01611801", "bad_proto"),
    proto("0a031a0178120100", "bad_proto"),
    proto("0a031a01781100000000000000ff", "bad_proto"),
    proto("0801", "bad_proto"),
    proto("0a021801", "bad_proto"),
    proto("0a030a0100", "bad_proto"),
    proto("0a0412020801", "bad_proto"),
    proto("0a031a01781a01ff", "bad_proto"),
    proto("0a031a01780001", "bad_proto"),
    proto("0a031a017898010a", has=ANY),
    proto("0a09", "bad_proto"),
)

# -- addresses

case(
    "an address that is none",
    Step(method="GET", path="/v1/streams//records", status=400, code="bad_path"),
    Step(method="POST", path="/v1/streams//records", body=one(), status=400, code="bad_path"),
    Step(method="GET", path="/v1/streams//records/tail", status=400, code="bad_path"),
    Step(method="GET", path="/v1/streams/%ff/records", status=400, code="bad_path"),
    Step(method="GET", path="/v1/streams/a%00b/records", status=400, code="bad_path"),
    Step(method="GET", path="/v1/basins/NO", status=400, code="bad_path"),
    Step(method="GET", path="/v1/nothing", status=404),
    Step(method="PUT", path=RECORDS, status=405),
)

# -- access tokens


def issue(name: str, status: int = 201, code: str = "", has: Any = None, **fields: Any) -> Step:
    body = {"id": "{basin}-" + name, "scope": {"ops": ["read"]}, **fields}
    return Step(method="POST", path="/v1/access-tokens", body=body, status=status, code=code, has=has)


def issue_refused(code: str, **fields: Any) -> Step:
    return issue("no", 422 if code == "invalid" else 400, code, **fields)


case(
    "access tokens: null is valid where a value is optional",
    issue("a", auto_prefix_streams=None, has={"access_token": ANY}),
    issue("b", expires_at=None),
    issue("d", expires_at="2100-01-01T02:00:00.809461576+02:00"),
    Step(
        method="GET",
        path="/v1/access-tokens?prefix={basin}-d",
        has={"access_tokens": [{"expires_at": "2100-01-01T00:00:00.809461576Z"}]},
    ),
    issue_refused("bad_json", expires_at="2100-01-01"),
    issue_refused("bad_json", expires_at="2100-01-01T00:00:00"),
    issue_refused("bad_json", expires_at=5),
    issue("c", scope={"basins": None, "op_groups": {"stream": {"read": True, "write": None}}, "ops": None}),
    issue_refused("bad_json", scope={"basins": {"exact": "some-basin", "prefix": None}, "ops": ["read"]}),
    issue_refused("bad_json", scope={"basins": {}, "ops": ["read"]}),
    issue_refused("bad_json", scope={"basins": {"exact": None}, "ops": ["read"]}),
    issue_refused("bad_json", scope={"basins": {"exact": "NO"}, "ops": ["read"]}),
    issue_refused("bad_json", scope={"streams": {"prefix": "x" * 513}, "ops": ["read"]}),
    issue_refused("bad_json", auto_prefix_streams=1),
    is_ours=True,
)
case(
    "access tokens: the messages that clients assert",
    issue_refused(
        "invalid",
        auto_prefix_streams=True,
        has={"message": "Auto prefixing is only allowed for streams with prefix matching"},
    ),
    issue_refused("invalid", scope={}, has={"message": "Access token permissions cannot be empty"}),
    issue_refused("invalid", scope={"ops": []}, has={"message": "Access token permissions cannot be empty"}),
    is_ours=True,
)
_NOTHING = {"read": False, "write": False}
case(
    "access tokens: a list shows each scope with exactly one key",
    issue(
        "a",
        scope={
            "basins": {"prefix": ""},
            "streams": {"exact": "s"},
            "access_tokens": {"exact": ""},
            "op_groups": {"stream": {"read": True}},
            "ops": ["append"],
        },
    ),
    Step(
        method="GET",
        path="/v1/access-tokens?prefix={basin}-",
        has={
            "access_tokens": [
                {
                    "id": "{basin}-a",
                    "auto_prefix_streams": False,
                    "expires_at": None,
                    "scope": {
                        "basins": {"prefix": ""},
                        "streams": {"exact": "s"},
                        "access_tokens": None,
                        "op_groups": {
                            "account": _NOTHING,
                            "basin": _NOTHING,
                            "stream": {"read": True, "write": False},
                        },
                        "ops": ["append"],
                    },
                }
            ],
            "has_more": False,
        },
    ),
    is_ours=True,
)

#: What no message of this API may show: addresses of the other API, and how this server is written.
FORBIDDEN = ("/v0", " b'", ' b"', "this box", "`str`", "`int`", "msgspec", "Traceback", "<class")

_numbers = itertools.count(1)


def run(http: httpx2.Client, case: Case, prefix: str) -> list[str]:
    """Send one case; returns what differs from what it must be."""
    basin = f"{prefix}-{next(_numbers):06}"
    http.put(f"/v1/basins/{basin}").raise_for_status()
    http.put("/v1/streams/s", headers={"s2-basin": basin}).raise_for_status()
    found: list[str] = []
    for number, step in enumerate(case.steps):
        answer = _send(http, step, basin)
        found += [
            f"step {number} ({step.method} {step.path}): {each}" for each in _judge(step, answer, basin)
        ]
    return found


def _send(http: httpx2.Client, step: Step, basin: str) -> httpx2.Response:
    headers: dict[bytes, bytes] = {b"s2-basin": basin.encode()}
    content: bytes | None = None
    if step.body is not None:
        headers[b"content-type"] = b"application/json"
        body = step.body
        content = (
            body
            if isinstance(body, bytes)
            else body.encode()
            if isinstance(body, str)
            else _json(body, basin)
        )
    for name, value in step.headers.items():
        headers[name.encode()] = value if isinstance(value, bytes) else value.encode()
    path = step.path.replace("{basin}", basin)
    return http.request(step.method, path, content=content, headers=list(headers.items()))


def _json(value: Any, basin: str) -> bytes:
    return json.dumps(value).replace("{basin}", basin).encode()


def _judge(step: Step, answer: httpx2.Response, basin: str) -> list[str]:
    found: list[str] = []
    if answer.status_code != step.status:
        found.append(f"status {answer.status_code}, not {step.status}: {answer.text[:300]}")
    elif step.code or step.has is not None:
        facts = answer.json() if answer.content and "json" in answer.headers["content-type"] else None
        if step.code and (not isinstance(facts, dict) or set(facts) != {"code", "message"}):
            found.append(f"not the shape of an error: {answer.text[:300]}")
        elif step.code and facts["code"] != step.code:
            found.append(f"code {facts['code']}, not {step.code}")
        if step.has is not ANY and step.has is not None:
            wanted = json.loads(_json_or_any(step.has, basin))
            if not _contains(facts, wanted):
                found.append(f"{answer.text[:600]} has no {wanted}")
    if step.text and step.text not in answer.text:
        found.append(f"{answer.text[:300]!r} has no {step.text!r}")
    if answer.status_code >= 400:
        found += [f"shows {each}: {answer.text[:300]}" for each in FORBIDDEN if each in answer.text]
    return found


_ANY_TEXT = "\0any"


def _json_or_any(value: Any, basin: str) -> str:
    return json.dumps(value, default=lambda _: _ANY_TEXT).replace("{basin}", basin)


def _contains(found: Any, wanted: Any) -> bool:
    if wanted == _ANY_TEXT:
        return found is not None
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            name in found and _contains(found[name], value) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(_contains(each, value) for each, value in zip(found, wanted, strict=True))
        )
    return bool(found == wanted)


def main() -> int:
    [url] = sys.argv[1:]
    differing = 0
    with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
        for each in CASES:
            if not each.is_ours:
                differences = run(http, each, f"corpus-{uuid.uuid4().hex[:8]}")
                differing += bool(differences)
                print("differs" if differences else "agrees ", each.name, *differences, sep="\n    ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
