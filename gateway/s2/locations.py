"""Handlers for locations (s2 §17): this server is the only location and the default."""

from __future__ import annotations

from gateway.requests.request import Request, Response
from gateway.requests.s2_errors import S2Error
from gateway.s2 import configs
from gateway.s2.control import json_body, json_response
from gateway.s2.permits import Permit

_LOCAL_LOCATION = {
    "name": configs.LOCATION,
    "is_private": True,
    "storage_classes": ["standard", "express"],
    "default_storage_class": "express",
}


class Locations:
    async def list(self, permit: Permit) -> Response:
        permit.check("list-locations")
        return json_response([_LOCAL_LOCATION])

    async def get_default(self, permit: Permit) -> Response:
        permit.check("get-default-location")
        return json_response(_LOCAL_LOCATION)

    async def set_default(self, request: Request, permit: Permit) -> Response:
        name = configs.decode_body(await json_body(request), str)
        permit.check("set-default-location")
        if name != configs.LOCATION:
            raise S2Error("invalid", f"this server has only the location {configs.LOCATION}")
        return json_response(_LOCAL_LOCATION)
