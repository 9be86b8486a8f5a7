"""Builds the OpenAPI 3.1 document (v0 §13) from the protocol's types and the route tables. Pure.

The document is complete: every route, every parameter, body and response with its schema, every status with
its error codes, and the access that each route requires.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.access.rules import RULES, Rule
from gateway.api.openapi_operations import (
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
    "schedule": {"type": "string", "pattern": f"^{BOX_NAME_PATTERN}$"},
    "router": {"type": "string", "pattern": f"^{ROUTER_NAME_PATTERN}$"},
    "file": {"type": "string", "pattern": "^[a-z]+\\.(js|css|txt)$"},
    "seq": {"type": "integer", "minimum": 0, "maximum": SEQ_MAX},
    "wid": {"type": "string", "pattern": "^wid_[A-Za-z0-9_-]{1,60}$"},
}
_STATUS_DESCRIPTIONS = {
    200: "Success.",
    201: "Created.",
    101: "The WebSocket is open.",
    304: "Not modified.",
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
    description: dict[str, Any] = {
        "operationId": _id_of(method, path),
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": _describe_access(rule),
        "parameters": _parameters(path, operation),
        "responses": _responses(path, operation, rule),
        "security": _security(rule),
    }
    if operation.body is not None:
        content = {_JSON: {"schema": _ref(operation.body)}}
        if operation.other_body:
            lines = f"One {bodies.NewRecord.__name__} a line, the other fields in the query."
            content[operation.other_body] = {"schema": {"type": "string", "description": lines}}
        description["requestBody"] = {"required": operation.is_body_required, "content": content}
    return description


def _id_of(method: str, path: str) -> str:
    words_of = [part.strip("{}") for part in re.split(r"[/.]", path.removeprefix("/v0")) if part]
    return "_".join([method.lower(), *(["probe"] if not path.startswith("/v0") else []), *words_of])


def _describe_access(rule: Rule) -> str:
    if rule.is_open:
        return "Needs no key."
    if rule.is_probe:
        return "Needs a key only if STREAMS_PROBE_AUTH is set."
    scope_names = " and ".join(words(rule.scopes)) or "any scope"
    more = [f"`{field}` also needs {' and '.join(words(scopes))}" for field, scopes in rule.scopes_body]
    if rule.has_name_in_path or rule.names_body:
        places = ", ".join(
            (*(["the path"] if rule.has_name_in_path else []), *(f"`{name}`" for name in rule.names_body))
        )
        more.append(f"names in {places} must be within the key's prefixes")
    if rule.is_filtered:
        more.append("shows only names within the key's prefixes")
    if rule.is_bound_to_key:
        more.append("opens only for the key that created it")
    return "; ".join([f"If the server has keys, needs {scope_names}", *more]) + "."


def _security(rule: Rule) -> list[dict[str, list[str]]]:
    if rule.is_open:
        return []
    schemes: list[dict[str, list[str]]] = [{"bearer": []}]
    if rule.takes_token:
        schemes.append({"token": []})
    return [*schemes, {}]  # {}: no key, for servers without keys


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in _parameter.findall(path)
    ]
    for name, schema in operation.query.items():
        parameters.append(
            {"name": name, "in": "query", "required": name in operation.required_query, "schema": schema}
        )
    for name in operation.headers:
        parameters.append({"name": name, "in": "header", "required": False, "schema": {"type": "string"}})
    return parameters


def codes_of(path: str, operation: Operation, rule: Rule) -> list[str]:
    """Return every error code that a route can return, ordered by status."""
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
    responses: dict[str, Any] = {}
    for status, reply_type in operation.answers.items():
        response: dict[str, Any] = {"description": _STATUS_DESCRIPTIONS[status]}
        if status not in (101, 304):
            schema = (
                {"type": "string"}
                if reply_type is None
                else {"type": "object"}
                if reply_type is dict
                else _ref(reply_type)
            )
            response["content"] = {operation.answer_type: {"schema": schema}}
            if operation.other_answer:
                response["content"][operation.other_answer] = {"schema": {"type": "string"}}
        responses[str(status)] = response
    by_status: dict[int, list[str]] = {}
    for code in codes_of(path, operation, rule):
        by_status.setdefault(STATUS_OF[code], []).append(code)
    for status, codes in by_status.items():
        responses[str(status)] = _error_response(codes)
    return responses


def _error_response(codes: list[str]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": ", ".join(f"`{code}`" for code in codes),
        "content": {_JSON: {"schema": {"allOf": [{"$ref": _REF.format(name="Error")}, _with_codes(codes)]}}},
    }
    if any(code in RETRY_AFTER_S for code in codes):
        seconds = {"type": "integer", "minimum": 1}
        response["headers"] = {
            "Retry-After": {"required": True, "schema": seconds, "description": "Seconds."}
        }
    return response


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
    body_types: set[type[Any]] = {bodies.NewRecord}
    reply_types: set[type[Any]] = set()
    for operation in OPERATIONS.values():
        body_types |= {operation.body} if operation.body is not None else set()
        reply_types |= {kind for kind in operation.answers.values() if kind is not None and kind is not dict}
    kinds = {*body_types, *reply_types, server_replies.Performance}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for name in bodies.TOLERANT:
        del schemas[name]["additionalProperties"]
    for name, schema in schemas.items():
        if name in _REPLIES:
            _describe_absent_fields(schema)
    for kind in reply_types:
        _add_field(schemas[kind.__name__], "performance", _ref(server_replies.Performance))
    _add_field(schemas["BoxConfig"], "durable", {"type": "boolean"})  # as `BoxConfig.to_fields` does
    return {**dict(sorted(schemas.items())), "Error": _ERROR}


def _describe_absent_fields(schema: dict[str, Any]) -> None:
    """Remove defaults and nulls from a reply schema: an optional field is absent or has a value."""
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
    "description": "An error: `code` is stable, `message` is for people.",
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
