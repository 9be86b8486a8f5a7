"""Serves the OpenAPI document: `/v0/openapi.json` (v0 §13). `/docs` shows it (`console.py`)."""

from __future__ import annotations

from functools import cached_property
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

    async def document(self, request: Request) -> Response:
        Query(request.query).reject_unknown()
        return Response(200, self._json)
