"""Serves the OpenAPI document: `/v0/openapi.json` for programs and `/docs` for people (v0 §13).

The page is rendered here completely: it loads nothing, runs no script and needs no network.
"""

from __future__ import annotations

from functools import cached_property
from html import escape
from typing import Any

import orjson

from gateway.api.openapi import document
from gateway.requests.request import Request, Response
from streams.protocol.messages.query import Query


class OpenApiPages:
    def __init__(self, version: str) -> None:
        self._version = version

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._version)

    @cached_property
    def _json(self) -> bytes:
        return orjson.dumps(self._document)

    @cached_property
    def _html(self) -> bytes:
        return render_page(self._document).encode()

    async def document(self, request: Request) -> Response:
        Query(request.query).reject_unknown()
        return Response(200, self._json)

    async def page(self, request: Request) -> Response:
        Query(request.query).reject_unknown()
        response = Response(200, self._html, content_type=b"text/html; charset=utf-8")
        response.headers.append(
            (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")
        )
        return response


_STYLE = """
:root{color-scheme:light dark;--line:#8884;--dim:#888}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:13px/1.45 ui-monospace,monospace}
details{border:1px solid var(--line);border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}summary b{display:inline-block;width:4.5rem}
table{border-collapse:collapse;margin:.5rem 0}
td,th{border-bottom:1px solid var(--line);padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}
p{margin:.4rem 0}.dim{color:var(--dim)}
"""


def render_page(document: dict[str, Any]) -> str:
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])} {escape(info['version'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} <span class=dim>{escape(info['version'])}</span></h1>",
        f"<p>{escape(info['description'])} For programs: "
        "<a href=/v0/openapi.json><code>/v0/openapi.json</code></a>.</p>",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            section = _operation(method.upper(), path, operation)
            by_tag.setdefault(operation["tags"][0], []).append(section)
    for tag, operations in by_tag.items():
        parts.append(f"<h2>{escape(tag)}</h2>{''.join(operations)}")
    parts.append("<h2>Shapes</h2>")
    for name, schema in document["components"]["schemas"].items():
        about = escape(schema.get("description", ""))
        parts.append(f"<details id='{escape(name)}'><summary><code>{escape(name)}</code> {about}</summary>")
        parts.append(f"{_fields(schema)}</details>")
    return "".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [
        f"<details id='{escape(operation['operationId'])}'><summary><b>{method}</b>"
        f"<code>{escape(path)}</code> {escape(operation['summary'])}</summary>",
        f"<p class=dim>{_code(operation['description'])}</p>",
    ]
    parameters = operation["parameters"]
    if parameters:
        rows = [
            f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}"
            f"{', required' if each['required'] else ''}<td>{_shape(each['schema'])}"
            for each in parameters
        ]
        parts.append(f"<table>{''.join(rows)}</table>")
    if "requestBody" in operation:
        content = operation["requestBody"]["content"].items()
        parts += [
            f"<p>Body <code>{escape(kind)}</code>: {_shape(each['schema'])}</p>" for kind, each in content
        ]
    rows = []
    for status, answer in operation["responses"].items():
        kinds = ", ".join(
            _shape(each["schema"])
            for each in answer.get("content", {}).values()
            if "allOf" not in each["schema"]
        )
        rows.append(f"<tr><td><b>{status}</b><td>{_code(answer['description'])}<td>{kinds}")
    parts.append(f"<table>{''.join(rows)}</table></details>")
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required_names = schema.get("required", [])
    rows = []
    for name, each in schema.get("properties", {}).items():
        default = (
            f" = <code>{escape(orjson.dumps(each['default']).decode())}</code>" if "default" in each else ""
        )
        must = " (always)" if name in required_names else ""
        rows.append(f"<tr><td><code>{escape(name)}</code>{must}<td>{_shape(each)}{default}")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _shape(schema: dict[str, Any]) -> str:
    """Render a schema as a short phrase, such as "integer ≥ 0"."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href='#{escape(name)}'>{escape(name)}</a>"
    if "anyOf" in schema:
        return " or ".join(_shape(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {_shape(schema.get('items') or {})}"
    bounds = [
        f"{sign} {schema[word]}" for word, sign in (("minimum", "≥"), ("maximum", "≤")) if word in schema
    ]
    return escape(" ".join([str(kind), ", ".join(bounds)]).strip())


def _code(text: str) -> str:
    """Render text with `backticked` parts as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))
