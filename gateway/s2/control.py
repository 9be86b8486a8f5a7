"""Handlers for basins and streams: list, create, ensure, configure, delete (s2 §8, §9)."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.requests.content import decompress_body
from gateway.requests.request import Request, Response
from gateway.requests.s2_errors import S2Error
from gateway.s2 import configs, fields
from gateway.s2.permits import Permit
from gateway.s2.shard_calls import ShardCalls
from streams.protocol.errors import InvalidRequest, PayloadTooLarge
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import box_of

BODY_BYTES_MAX = 2 * 1024 * 1024


async def json_body(request: Request) -> bytes:
    """Return the body of a request. Raises `bad_json` if its content type is not JSON."""
    if not fields.is_json(fields.media_type(request.headers, "content-type")):
        raise S2Error("bad_json", "content-type: must be application/json")
    return await plain_body(request, "bad_json")


async def plain_body(request: Request, code: str) -> bytes:
    try:
        body = bytes(await decompress_body(request, BODY_BYTES_MAX))
    except (PayloadTooLarge, InvalidRequest) as error:
        raise S2Error(code, error.message) from None
    if len(body) > BODY_BYTES_MAX:
        raise S2Error(code, f"body: has more than {BODY_BYTES_MAX} bytes")
    return body


def json_response(facts: Any, status: int = 200, result: str = "") -> Response:
    response = Response(status, orjson.dumps(facts))
    if result:
        response.headers.append((b"s2-provision-result", result.encode()))
    return response


def _provision_response(description: dict[str, Any], result: s2.Result, *, ensures: bool) -> Response:
    """Build the response to a create or ensure request. A repeated create gets 201 like the first one."""
    return json_response(description, 200 if ensures and result != "created" else 201, result)


class BasinApi:
    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    async def list(self, request: Request, permit: Permit) -> Response:
        query = fields.QueryParameters(request.query)
        prefix, after, limit = query.basin_part("prefix"), query.basin_part("start_after"), query.limit()
        permit.check("list-basins")
        names = permit.basins.narrow(prefix)
        if names.is_empty:
            return json_response({"basins": [], "has_more": False})
        command = s2.ListBasins(names.common_prefix, after, limit)
        page = await self._calls.call_register(command, s2.BasinPage)
        descriptions = [
            configs.describe_basin(each)
            for each in page.basins
            if names.holds(each.name) and permit.sees_basin(each.name)
        ]
        return json_response({"basins": descriptions, "has_more": page.more and not names.exact})

    async def create(self, request: Request, permit: Permit) -> Response:
        token = fields.request_token(request.headers)
        body = configs.decode_body(await json_body(request), configs.CreateBasin)
        name = fields.basin_name(body.basin, "bad_json")
        permit.check("create-basin", name)
        return await self._put(name, body.config, permit, token=token, ensures=False, account=request.account)

    async def ensure(self, request: Request, permit: Permit, basin: str) -> Response:
        fields.basin_name(basin, "bad_path")
        body = configs.EnsureBasin()
        if request.body:
            body = configs.decode_body(await json_body(request), configs.EnsureBasin)
        permit.check("create-basin", basin)
        return await self._put(basin, body.config, permit, token="", ensures=True, account=request.account)

    async def _put(
        self,
        name: str,
        body: configs.BasinBody | None,
        permit: Permit,
        *,
        token: str,
        ensures: bool,
        account: str,
    ) -> Response:
        config = (body or configs.BasinBody()).config()
        may_update = permit.allows("reconfigure-basin", name)
        command = s2.PutBasin(
            name=name,
            config=config,
            token=token,
            ensures=ensures,
            may_update=may_update,
            account=account,
        )
        put = await self._calls.call_register(command, s2.PutBasinReply)
        return _provision_response(configs.describe_basin(put.basin), put.result, ensures=ensures)

    async def get(self, request: Request, permit: Permit, basin: str) -> Response:
        fields.basin_name(basin, "bad_path")
        permit.check("get-basin-config", basin)
        state = await self._calls.basin(basin)
        return json_response(configs.describe_basin_config(state.config))

    async def reconfigure(self, request: Request, permit: Permit, basin: str) -> Response:
        fields.basin_name(basin, "bad_path")
        patch = configs.decode_body(await json_body(request), configs.BasinBody).patch()
        permit.check("reconfigure-basin", basin)
        reply = await self._calls.call_register(s2.PatchBasin(basin, patch), s2.GetBasinReply)
        assert reply.basin is not None
        return json_response(configs.describe_basin_config(reply.basin.config))

    async def delete(self, request: Request, permit: Permit, basin: str) -> Response:
        fields.basin_name(basin, "bad_path")
        permit.check("delete-basin", basin)
        await self._calls.call_register(s2.DeleteBasin(basin), s2.GetBasinReply)
        self._calls.has_deleted_basin.set()
        return Response(202)


class StreamApi:
    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    async def list(self, request: Request, permit: Permit) -> Response:
        """List one page of streams over all shards. A missing basin has an empty list."""
        basin = fields.basin_of(request.headers)
        query = fields.QueryParameters(request.query)
        prefix, after, limit = query.stream_part("prefix"), query.stream_part("start_after"), query.limit()
        permit.check("list-streams", basin)
        names = permit.streams.narrow(permit.prefix + prefix)
        if names.is_empty:
            return json_response({"streams": [], "has_more": False})
        prefix = names.common_prefix
        after = permit.prefix + after if after else ""
        streams_by_box: dict[str, s2.Stream] = {}
        more = False
        for shard in range(self._calls.shards):
            part, part_more = await self._list_shard(
                shard, box_of(basin, prefix), box_of(basin, after), limit
            )
            streams_by_box.update(part)
            more = more or part_more
        boxes = sorted(streams_by_box)
        descriptions: list[dict[str, Any]] = []
        for box in boxes[:limit]:
            name = box.partition("/")[2]
            if names.holds(name) and permit.sees_stream(basin, name):
                descriptions.append(
                    configs.describe_stream(name.removeprefix(permit.prefix), streams_by_box[box])
                )
        return json_response(
            {"streams": descriptions, "has_more": (more or len(boxes) > limit) and not names.exact}
        )

    async def _list_shard(
        self, shard: int, prefix: str, after: str, limit: int
    ) -> tuple[dict[str, s2.Stream], bool]:
        """Return up to `limit` streams of one shard, and True if it has more."""
        streams_by_box: dict[str, s2.Stream] = {}
        while True:
            command = s2.ListStreams(prefix, after, limit - len(streams_by_box))
            page = await self._calls.call_shard(shard, command, s2.StreamPage)
            streams_by_box.update(page.streams)
            after = page.after
            if not after or len(streams_by_box) >= limit:
                return streams_by_box, bool(after)

    async def create(self, request: Request, permit: Permit) -> Response:
        basin = fields.basin_of(request.headers)
        token = fields.request_token(request.headers)
        body = configs.decode_body(await json_body(request), configs.CreateStream)
        name = fields.stream_name(permit.prefix + body.stream if body.stream else "", "bad_json")
        permit.check("create-stream", basin, name)
        return await self._put(
            basin, name, body.config, permit, token=token, ensures=False, account=request.account
        )

    async def ensure(self, request: Request, permit: Permit, stream: str) -> Response:
        basin = fields.basin_of(request.headers)
        stream = fields.stream_name(permit.prefix + stream if stream else "", "bad_path")
        body = configs.StreamBody()
        if request.body:
            body = configs.decode_body(await json_body(request), configs.StreamBody)
        permit.check("create-stream", basin, stream)
        return await self._put(basin, stream, body, permit, token="", ensures=True, account=request.account)

    async def _put(
        self,
        basin: str,
        stream: str,
        body: configs.StreamBody | None,
        permit: Permit,
        *,
        token: str,
        ensures: bool,
        account: str,
    ) -> Response:
        spec = (body or configs.StreamBody()).spec()
        basin_state = await self._calls.basin(basin)
        may_update = permit.allows("reconfigure-stream", basin, stream)
        put = await self._calls.put_stream(
            basin_state,
            stream,
            spec,
            token=token,
            ensures=ensures,
            may_update=may_update,
            account=account,
        )
        description = configs.describe_stream(stream.removeprefix(permit.prefix), put.stream)
        return _provision_response(description, put.result, ensures=ensures)

    async def get(self, request: Request, permit: Permit, stream: str) -> Response:
        box = self._box(request, permit, "get-stream-config", stream)
        reply = await self._calls.call_owner(box, s2.GetStream(box), s2.GetStreamReply)
        return json_response(configs.describe_stream_config(reply.stream.spec))

    async def reconfigure(self, request: Request, permit: Permit, stream: str) -> Response:
        box = self._box(request, permit, "reconfigure-stream", stream)
        patch = configs.decode_body(await json_body(request), configs.StreamBody).patch()
        basin = await self._calls.basin(fields.basin_of(request.headers))
        command = s2.PatchStream(box, patch, basin.config.defaults)
        reply = await self._calls.call_owner(box, command, s2.GetStreamReply)
        return json_response(configs.describe_stream_config(reply.stream.spec))

    async def delete(self, request: Request, permit: Permit, stream: str) -> Response:
        box = self._box(request, permit, "delete-stream", stream)
        await self._calls.call_owner(box, s2.DeleteStream(box), s2.GetStreamReply)
        return Response(202)

    @staticmethod
    def _box(request: Request, permit: Permit, operation: str, stream: str) -> str:
        basin = fields.basin_of(request.headers)
        stream = fields.stream_name(permit.prefix + stream if stream else "", "bad_path")
        permit.check(operation, basin, stream)
        return box_of(basin, stream)
