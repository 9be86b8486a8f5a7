"""Routes every request of `/v1` to its handler (s2 §2). Both fronts call `S2.handle`.

Paths are split before they are decoded. All errors have the format of the S2 API.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from gateway.access.origins import Origins
from gateway.admission.limits import InFlight
from gateway.admission.memory import STRANGERS
from gateway.http.edge_rules import request_id_of
from gateway.requests.request import EarlyRejection, Live, Request, Response
from gateway.requests.s2_errors import S2Error, to_s2_error
from gateway.s2 import ciphers, fields, session_frames
from gateway.s2.append_session import AppendSession
from gateway.s2.append_window import AppendWindow
from gateway.s2.control import BasinApi, StreamApi
from gateway.s2.housekeeping import Housekeeping
from gateway.s2.locations import Locations
from gateway.s2.permits import OPERATIONS, Admit, Authenticator, KeyPermit, Permit
from gateway.s2.read_session import AuthorizedSession, Draining, FrameEncoder, ReadSession, S2EventEncoder
from gateway.s2.record_formats import Input
from gateway.s2.records import ReadQuery, StreamRecordApi, check_commands, first_page, stream_config
from gateway.s2.shard_calls import ShardCalls
from gateway.s2.tokens import TokenApi
from gateway.s2.usage_api import UsageApi
from gateway.s2.usage_counters import ACCOUNT
from gateway.s2.usage_history import UsageHistory
from gateway.shards.dispatch import Dispatch
from gateway.watch.service import Watch
from streams.protocol.errors import StreamsError
from streams.protocol.messages import s2
from streams.protocol.messages.s2 import box_of

_REVOKED = S2Error("authn", "the key or token of this session is no longer valid")

_Handlers = dict[str, Callable[[], Awaitable[Response]]]


class S2:
    def __init__(
        self,
        dispatch: Dispatch,
        draining: trio.Event,
        *,
        drain_s: float,
        watch: Watch,
        admit: Admit | None = None,
        in_flight: InFlight | None = None,
        origins: Origins | None = None,
    ) -> None:
        """`admit` and `in_flight` come from the guard of a server with keys; `watch` counts open streams."""
        self._origins = origins or Origins(has_keys=admit is not None)
        self._watch = watch
        self._in_flight = in_flight or InFlight()
        self._calls = ShardCalls(dispatch)
        self._authenticator = Authenticator(self._calls, admit)
        self._tokens = TokenApi(self._calls)
        self._usage = UsageApi(self._calls)
        self._locations = Locations()
        self._basins = BasinApi(self._calls)
        self._streams = StreamApi(self._calls)
        self._records = StreamRecordApi(self._calls)
        self._draining = Draining(draining, drain_s)

    def __repr__(self) -> str:
        return f"<S2 {self._calls!r}>"

    @property
    def append_window(self) -> AppendWindow:
        return self._calls.append_window

    @property
    def history(self) -> UsageHistory:
        return self._calls.history

    @property
    def housekeeping(self) -> Housekeeping:
        return Housekeeping(self._calls)

    async def admit_body(self, path: str, headers: dict[str, str], query: str) -> str:
        """Authenticate a request before its body is read, and return the owner to charge the body to.

        The owner is a key of the server or a token. Raises `EarlyRejection`.
        """
        request = Request("", path, query, headers)
        try:
            await self._authenticator.permit(request)
        except (S2Error, StreamsError) as error:
            failure = error if isinstance(error, S2Error) else to_s2_error(error)
            response = failure.response
            response.headers.append((b"x-request-id", request_id_of(headers).encode("latin-1")))
            raise EarlyRejection(response) from None
        return STRANGERS if request.key is None else request.key.id

    async def handle(self, request: Request) -> Response:
        try:
            self._origins.check_host(request.headers)
            self._origins.check_site(request.headers, allow_loopback=True)
            response = await self._answer(request)
        except S2Error as error:
            response = error.response
        except StreamsError as error:
            response = to_s2_error(error).response
        self._allow_origin(request, response)
        return response

    def _allow_origin(self, request: Request, response: Response) -> None:
        origin = request.headers.get("origin")
        if origin is not None and self._origins.allows_over_s2(origin):
            _allow_origin(request, response, origin)

    async def _answer(self, request: Request) -> Response:
        _, _, *segments = fields.path_segments(request.path)
        permit = Permit() if request.method == "OPTIONS" else await self._authenticator.permit(request)
        handlers = self._handlers(request, permit, segments)
        if not handlers:
            return Response(404)
        if request.method == "OPTIONS":
            return Response(204)
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            response = Response(405)
            response.headers.append((b"allow", ", ".join(sorted(handlers)).encode()))
            return response
        if request.key is None:
            response = await handler()
        else:
            if request.charge is not None:
                request.charge.assign(request.key.id)
            self._in_flight.take(request.key)
            try:
                response = await handler()
            finally:
                self._in_flight.give(request.key)
        assert permit.checked_operation is not None, "every handler must check the permissions of its caller"
        self._count(*permit.checked_operation)
        return response

    def _count(self, operation: str, basin: str) -> None:
        """Count a successful operation. Appends and reads are counted per batch elsewhere."""
        if operation not in ("append", "read"):
            is_of_account = OPERATIONS[operation][0] == "account"
            self._calls.history.counters.count_operation(operation, ACCOUNT if is_of_account else basin)

    def _handlers(self, request: Request, permit: Permit, segments: list[str]) -> _Handlers:
        """Return the handlers of a path by method; an empty dict if there is no such route."""
        basins, streams_, tokens = self._basins, self._streams, self._tokens
        match segments:
            case ["basins"]:
                return {
                    "GET": partial(basins.list, request, permit),
                    "POST": partial(basins.create, request, permit),
                }
            case ["basins", basin] if basin:
                return {
                    "GET": partial(basins.get, request, permit, basin),
                    "PUT": partial(basins.ensure, request, permit, basin),
                    "PATCH": partial(basins.reconfigure, request, permit, basin),
                    "DELETE": partial(basins.delete, request, permit, basin),
                }
            case ["streams"]:
                return {
                    "GET": partial(streams_.list, request, permit),
                    "POST": partial(streams_.create, request, permit),
                }
            case ["streams", stream] if stream:
                return {
                    "GET": partial(streams_.get, request, permit, stream),
                    "PUT": partial(streams_.ensure, request, permit, stream),
                    "PATCH": partial(streams_.reconfigure, request, permit, stream),
                    "DELETE": partial(streams_.delete, request, permit, stream),
                }
            case ["streams", stream, "records"]:
                return {
                    "GET": partial(self._read, request, permit, stream),
                    "POST": partial(self._append, request, permit, stream),
                }
            case ["streams", stream, "records", "tail"]:
                return {"GET": partial(self._tail, request, permit, stream)}
            case ["access-tokens"]:
                return {
                    "GET": partial(tokens.list, request, permit),
                    "POST": partial(tokens.issue, request, permit),
                }
            case ["access-tokens", id] if id:
                return {"DELETE": partial(tokens.revoke, request, permit, id)}
            case ["metrics"]:
                return {"GET": partial(self._usage.account, request, permit)}
            case ["metrics", basin] if basin:
                return {"GET": partial(self._usage.basin, request, permit, basin)}
            case ["metrics", basin, stream] if stream:
                return {"GET": partial(self._usage.stream, request, permit, basin, stream)}
            case ["locations"]:
                return {"GET": partial(self._locations.list, permit)}
            case ["locations", "default"]:
                return {
                    "GET": partial(self._locations.get_default, permit),
                    "PUT": partial(self._locations.set_default, request, permit),
                }
        return {}

    # -- records

    @staticmethod
    def _check_stream(request: Request, permit: Permit, operation: str, stream: str) -> tuple[str, str]:
        basin = fields.basin_of(request.headers)
        stream = fields.stream_name(permit.prefix + stream if stream else "", "bad_path")
        permit.check(operation, basin, stream)
        return basin, stream

    async def _tail(self, request: Request, permit: Permit, stream: str) -> Response:
        return await self._records.tail(request, *self._check_stream(request, permit, "check-tail", stream))

    async def _append(self, request: Request, permit: Permit, stream: str) -> Response:
        basin, stream = self._check_stream(request, permit, "append", stream)
        if fields.media_type(request.headers, "content-type") == fields.SESSION_TYPE:
            return await self._append_session(request, permit, basin, stream)
        return await self._records.append(request, permit, basin, stream)

    async def _append_session(self, request: Request, permit: Permit, basin: str, stream: str) -> Response:
        key = ciphers.check_header(request.headers)
        spec = stream_config(request.headers)
        box = box_of(basin, stream)
        get_stream = partial(self._calls.call_owner, box, s2.GetStream(box), s2.GetStreamReply)
        account = request.account
        reply = await self._calls.call_or_create(
            basin, stream, spec, is_append=True, call=get_stream, account=account
        )
        cipher = reply.stream.cipher
        if cipher is not None:
            ciphers.RecordCipher(cipher, key, box)
        charge = None if request.memory is None else request.memory.open(request.owner)
        incoming = request.incoming
        assert incoming is not None, "the front must pass the body of a session as it arrives"

        def check(batch: Input) -> None:
            check_commands(permit, batch, basin, stream)
            batch.account = account

        async def pace() -> None:
            if request.key is not None:
                await trio.sleep(self._in_flight.rates.reserve(request.key, time.monotonic()))

        session = AppendSession(self._calls, box, cipher, key, incoming, check, pace, self._draining, charge)
        return _session_response(
            self._authorize_session(session, request, permit, session_frames.terminal(_REVOKED))
        )

    async def _read(self, request: Request, permit: Permit, stream: str) -> Response:
        headers = request.headers
        basin, stream = self._check_stream(request, permit, "read", stream)
        is_session = fields.media_type(headers, "content-type") == fields.SESSION_TYPE
        if not is_session and fields.media_type(headers, "accept") != "text/event-stream":
            return await self._records.read(request, basin, stream)
        query = ReadQuery.from_query(request.query, None if is_session else headers.get("last-event-id"))
        key = ciphers.check_header(headers)
        spec = stream_config(headers)
        encoder: FrameEncoder | S2EventEncoder = FrameEncoder(
            session_frames.codec_for(headers.get("accept-encoding"))
        )
        if not is_session:
            encoder = S2EventEncoder(
                is_base64=fields.is_base64(headers), already_delivered=query.already_delivered
            )
        query.check()
        head = query.head(box_of(basin, stream), may_follow=query.may_follow)
        first = await first_page(self._calls, basin, stream, spec, head, key, request.account)
        session = ReadSession(self._calls, query, head, first, key, encoder, self._draining, request.owner)
        live = self._authorize_session(session, request, permit, encoder.failure(_REVOKED))
        return _session_response(live) if is_session else _event_response(live)

    def _authorize_session(
        self, session: Live, request: Request, permit: Permit, ending: bytes
    ) -> AuthorizedSession:
        """Take a slot for a session, which counts as an open stream (v0 §12)."""
        is_of_ring = isinstance(permit, KeyPermit)
        try:
            slot = self._watch.take_slot(request.key, is_of_ring=is_of_ring, is_session=True)
        except StreamsError:
            session.close()
            raise
        return AuthorizedSession(session, slot, permit, ending)


def _session_response(live: Live) -> Response:
    return _live_response(live, fields.SESSION_TYPE.encode())


def _event_response(live: Live) -> Response:
    return _live_response(live, b"text/event-stream")


def _live_response(live: Live, content_type: bytes) -> Response:
    response = Response(200, content_type=content_type, live=live)
    response.headers.append((b"cache-control", b"no-cache, no-transform"))
    response.headers.append((b"x-accel-buffering", b"no"))
    return response


def _allow_origin(request: Request, response: Response, origin: str) -> None:
    response.headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
    response.headers.append((b"access-control-allow-credentials", b"true"))
    response.headers.append((b"access-control-expose-headers", b"s2-provision-result, retry-after-ms"))
    response.headers.append((b"vary", b"origin"))
    if request.method == "OPTIONS":
        method = request.headers.get("access-control-request-method", "*")
        headers = request.headers.get("access-control-request-headers", "*")
        response.headers.append((b"access-control-allow-methods", method.encode("latin-1")))
        response.headers.append((b"access-control-allow-headers", headers.encode("latin-1")))
        response.headers.append((b"access-control-max-age", b"600"))
