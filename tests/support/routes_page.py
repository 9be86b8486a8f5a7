"""Writes `docs/reference/routes.md` to standard output, from the OpenAPI document: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.api.openapi import document

_HEAD = """# HTTP routes and types

<!-- Written by `make docs` from the OpenAPI document. Do not edit. -->

Every route with its parameters, its body and its answer, as `GET /v0/openapi.json` has them. [The HTTP
API](http.md) explains how they are used, and [errors](errors.md) lists the codes. `*` marks a required field.
Types are linked to their fields [below](#types).
"""
_TITLES = {
    "boxes": "Boxes",
    "records": "Records",
    "queues": "Queues",
    "groups": "Groups",
    "routers": "Routers",
    "schedules": "Schedules",
    "watch": "Watching",
    "operation": "The server",
}


def _type(schema: dict[str, Any] | bool) -> str:
    if isinstance(schema, bool):
        return "any JSON"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema.get("anyOf", schema.get("oneOf"))))
    if "enum" in schema:
        return " or ".join(f"`{'null' if each is None else each}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    return {"any": "any JSON", "null": "null"}.get(kind, str(kind))


def _bounds(schema: dict[str, Any]) -> str:
    facts = [
        f"{word} {schema[name]}"
        for name, word in (("minimum", "at least"), ("maximum", "at most"), ("maxLength", "longest"))
        if name in schema
    ]
    default = schema.get("default")
    if default not in (None, {}, [], ""):
        facts.append(f"default `{default}`".replace("True", "true").replace("False", "false"))
    return ", ".join(facts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _notes(schema: dict[str, Any]) -> str:
    return _cell(". ".join(filter(None, (schema.get("description", "").rstrip("."), _bounds(schema)))))


def _answer(response: dict[str, Any]) -> str:
    """The type of an answer, after a space; nothing if it has no body."""
    kinds = list(response.get("content", {}).items())
    if not kinds:
        return ""
    kind, media = kinds[0]
    return " " + (_type(media["schema"]) if kind == "application/json" and "schema" in media else f"`{kind}`")


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        mark = " *" if name in required else ""
        notes = _notes(field) if isinstance(field, dict) else ""
        yield f"| `{name}`{mark} | {_cell(_type(field))} | {notes} |"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    yield _cell(f"{operation['summary']} {operation.get('description', '')}") + "\n"
    rows = []
    for each in operation.get("parameters", ()):
        mark = " *" if each.get("required") else ""
        schema = each["schema"]
        rows.append(f"| `{each['name']}`{mark} | {each['in']} | {_cell(_type(schema))} | {_notes(schema)} |")
    if rows:
        yield "\n".join(["| parameter | in | type | |", "|---|---|---|---|", *rows, ""])
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body:
        yield f"Body: {_type(body['schema'])}.\n"
    responses = operation["responses"]
    answers = [f"`{status}`{_answer(each)}" for status, each in responses.items() if status < "4"]
    errors = [f"`{status}` ({each['description']})" for status, each in responses.items() if status >= "4"]
    yield f"Answer: {', '.join(answers)}. Errors: {', '.join(errors) or 'none'}.\n"


def page() -> str:
    openapi = document("0")
    parts = [_HEAD]
    operations = [
        (method, path, operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    tags = dict.fromkeys(operation["tags"][0] for _, _, operation in operations)
    assert set(tags) <= set(_TITLES), f"no title for {set(tags) - set(_TITLES)}"
    for tag, title in _TITLES.items():
        parts.append(f"## {title}\n")
        for method, path, operation in operations:
            if operation["tags"][0] == tag:
                parts.extend(_operation(method, path, operation))
    parts.append("## Types\n")
    for name, schema in sorted(openapi["components"]["schemas"].items()):
        parts.append(f"### {name}\n")
        if schema.get("description"):
            parts.append(_cell(schema["description"]) + "\n")
        if rows := list(_fields(schema)):
            parts.append("\n".join(["| field | type | |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
