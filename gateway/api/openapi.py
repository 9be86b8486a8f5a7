"""The OpenAPI 3.1 document (v0 §13), made of the protocol's own types and the tables of addresses. Pure.

Complete means: every address that is answered, every parameter, body and answer with its schema, every
status with the error codes that come with it, and what is asked of a key.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.access.rules import RULES, Rule
from gateway.api.operations import (
    BODY_CODES,
    COMMON_CODES,
    EVENT_STREAM,
    NDJSON,
    OPERATIONS,
    Operation,
)
from gateway.requests.errors import RETRY_AFTER_S, STATUS_OF
from streams.protocol.access.grants import READ, words
from streams.protocol.messages import bodies, replies, server_replies
from streams.protocol.model.names import BOX_NAME_PATTERN, ROUTER_NAME_PATTERN
from streams.protocol.payloads.appends import SEQ_MAX

_JSON = "application/json"
_REF = "#/components/schemas/{name}"

_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "box": {"type": "string", "pattern": f"^{BOX_NAME_PATTERN}$"},
    "group": {"type": "string", "pattern": f"^{BOX_NAME_PATTERN}$"},
    "router": {"type": "string", "pattern": f"^{ROUTER_NAME_PATTERN}$"},
    "seq": {"type": "integer", "minimum": 0, "maximum": SEQ_MAX},
    "wid": {"type": "string", "pattern": "^wid_[A-Za-z0-9_-]{1,60}$"},
}
_WORDS = {
    200: "Done.",
    201: "Done, and made something new.",
    101: "The socket is open.",
    304: "It is still the same.",
}
_parameter = re.compile(r"\{([^}]*)\}")


def document(version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in OPERATIONS.items():
        method, _, path = route.partition(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(route, operation, RULES[route])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "streams",
            "version": version,
            "description": "A persistent event engine: named append-only logs behind JSON over HTTP.",
        },
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "token": {"type": "apiKey", "in": "query", "name": "token"},
            },
        },
    }


def _operation(route: str, operation: Operation, rule: Rule) -> dict[str, Any]:
    method, _, path = route.partition(" ")
    shown: dict[str, Any] = {
        "operationId": _id_of(method, path),
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": _asks(rule),
        "parameters": _parameters(path, operation),
        "responses": _responses(path, operation, rule),
        "security": _security(rule),
    }
    if operation.body is not None:
        content = {_JSON: {"schema": _ref(operation.body)}}
        if operation.other_body:
            lines = f"One {bodies.NewRecord.__name__} a line, the other fields in the query."
            content[operation.other_body] = {"schema": {"type": "string", "description": lines}}
        shown["requestBody"] = {"required": operation.is_body_required, "content": content}
    return shown


def _id_of(method: str, path: str) -> str:
    words_of = [part.strip("{}") for part in re.split(r"[/.]", path.removeprefix("/v0")) if part]
    return "_".join([method.lower(), *(["probe"] if not path.startswith("/v0") else []), *words_of])


def _asks(rule: Rule) -> str:
    if rule.is_open:
        return "Asks for no key."
    if rule.is_probe:
        return "Asks for a key only if the server was told so."
    asked = " and ".join(words(rule.scopes)) or "any scope"
    more = [f"`{field}` in it takes {' and '.join(words(scopes))} too" for field, scopes in rule.scopes_body]
    if rule.names_path or rule.names_body:
        named = ", ".join(
            (*(["the path"] if rule.names_path else []), *(f"`{name}`" for name in rule.names_body))
        )
        more.append(f"names in {named} must be within the key's prefixes")
    if rule.is_filtered:
        more.append("shows what is within the key's prefixes")
    if rule.is_bound:
        more.append("opens for the key that made it")
    return "; ".join([f"With keys on, asks for {asked}", *more]) + "."


def _security(rule: Rule) -> list[dict[str, list[str]]]:
    if rule.is_open:
        return []
    found: list[dict[str, list[str]]] = [{"bearer": []}]
    if rule.takes_token:
        found.append({"token": []})
    return [*found, {}]  # none, where the server asks for no keys


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in _parameter.findall(path)
    ]
    for name, schema in operation.query.items():
        found.append({"name": name, "in": "query", "required": name in operation.required, "schema": schema})
    for name in operation.headers:
        found.append({"name": name, "in": "header", "required": False, "schema": {"type": "string"}})
    return found


def codes_of(path: str, operation: Operation, rule: Rule) -> list[str]:
    """Every code that this address can answer with, in the order of their statuses."""
    codes = {*COMMON_CODES, *operation.codes}
    if rule.scopes & ~READ:
        codes |= {"disk_full"}
    if rule.is_open:
        codes -= {"unauthorized", "forbidden"}
    if operation.body is not None:
        codes |= {*BODY_CODES}
    if operation.answer_type == EVENT_STREAM:
        codes |= {"not_acceptable"}
    return sorted(codes, key=lambda code: (STATUS_OF[code], code))


def _responses(path: str, operation: Operation, rule: Rule) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, answer in operation.answers.items():
        shown: dict[str, Any] = {"description": _WORDS[status]}
        if status not in (101, 304):
            schema = (
                {"type": "string"}
                if answer is None
                else {"type": "object"}
                if answer is dict
                else _ref(answer)
            )
            shown["content"] = {operation.answer_type: {"schema": schema}}
            if operation.other_answer:
                shown["content"][operation.other_answer] = {"schema": {"type": "string"}}
        found[str(status)] = shown
    by_status: dict[int, list[str]] = {}
    for code in codes_of(path, operation, rule):
        by_status.setdefault(STATUS_OF[code], []).append(code)
    for status, codes in by_status.items():
        found[str(status)] = _refusal(codes)
    return found


def _refusal(codes: list[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "description": ", ".join(f"`{code}`" for code in codes),
        "content": {_JSON: {"schema": {"allOf": [{"$ref": _REF.format(name="Error")}, _with_codes(codes)]}}},
    }
    if any(code in RETRY_AFTER_S for code in codes):
        seconds = {"type": "integer", "minimum": 1}
        shown["headers"] = {"Retry-After": {"required": True, "schema": seconds, "description": "Seconds."}}
    return shown


def _with_codes(codes: list[str]) -> dict[str, Any]:
    return {"properties": {"error": {"properties": {"code": {"enum": codes}}}}}


def _ref(kind: type[Any]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}


_REPLIES = frozenset(
    name
    for module in (replies, server_replies)
    for name, kind in vars(module).items()
    if getattr(kind, "__module__", "") == module.__name__
)


def _components() -> dict[str, Any]:
    asked: set[type[Any]] = {bodies.NewRecord}
    answered: set[type[Any]] = set()
    for operation in OPERATIONS.values():
        asked |= {operation.body} if operation.body is not None else set()
        answered |= {kind for kind in operation.answers.values() if kind is not None and kind is not dict}
    kinds = {*asked, *answered, server_replies.Performance}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for name in bodies.TOLERANT:
        del schemas[name]["additionalProperties"]
    for name, schema in schemas.items():
        if name in _REPLIES:
            _describe_absent_fields(schema)
    for kind in answered:
        _add_field(schemas[kind.__name__], "performance", _ref(server_replies.Performance))
    _add_field(schemas["BoxConfig"], "durable", {"type": "boolean"})  # as `BoxConfig.shown` does
    return {**dict(sorted(schemas.items())), "Error": _ERROR}


def _describe_absent_fields(schema: dict[str, Any]) -> None:
    """Describe that a field of a reply which has a default is absent or has a value, and is never null."""
    for shape in schema["properties"].values():
        if "default" in shape:
            del shape["default"]
            present = [each for each in shape.get("anyOf", ()) if each != {"type": "null"}]
            if len(present) == 1:
                del shape["anyOf"]
                shape.update(present[0])


def _add_field(schema: dict[str, Any], name: str, shape: dict[str, Any]) -> None:
    schema["properties"][name] = shape
    schema["required"].append(name)


_ERROR: dict[str, Any] = {
    "type": "object",
    "title": "Error",
    "description": "What went wrong: `code` is stable, `message` is for people.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "detail": {"type": "object"},
            },
        },
        "performance": {"$ref": _REF.format(name="Performance")},
    },
}

__all__ = ["NDJSON", "codes_of", "document"]
