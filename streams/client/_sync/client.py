# Written by `make twin` from ../_async/client.py. Do not edit.
"""A server as its clients see it: boxes, queues, routers, and how it is."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from streams.client import answers
from streams.client._sync.box import Box
from streams.client._sync.queue import Queue
from streams.client.attempts import Attempts
from streams.client.concurrency import sleep
from streams.client.errors import NotAnAnswer, error_of
from streams.client.retry import Retry
from streams.client.transport import ANSWER_S, Transport
from streams.protocol.errors import BoxNotFound, InvalidRequest, StreamsError
from streams.protocol.messages import replies, server_replies
from streams.protocol.model.names import check_router_name

if TYPE_CHECKING:
    from streams.client._sync.schedules import Schedules
    from streams.client._sync.watch import Watch

DEFAULT_URL = "http://127.0.0.1:4000"

T = TypeVar("T")


class Client:
    """A streams server.

        with Client("http://127.0.0.1:4000") as client:
            client.box("orders").append({"item": "tea"})

    Connections are made when they are needed and kept; one client is enough for a whole program, and all its
    threads may use it. Without `url` and `key` it is the server that STREAMS_URL and STREAMS_KEY name.
    `retry` says how long requests are repeated that can be. `timeout` is how many seconds one attempt waits
    for its answer; a long poll (`wait_ms`) waits for as much longer as it asked for. `node` names this
    program: it is the node of the records that it appends and of the jobs that it claims. Without one,
    records have none, and jobs are claimed under a name that is made up.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: float = ANSWER_S,
        node: str | None = None,
    ) -> None:
        if not timeout > 0:
            raise InvalidRequest(f"timeout: {timeout!r} is not a positive number of seconds", field="timeout")
        self.timeout = timeout
        self.node = node
        #: The node of workers and claims that name none.
        self.worker_node = node or f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.url = (url or os.environ.get("STREAMS_URL") or DEFAULT_URL).rstrip("/")
        self.retry = retry or Retry()
        self._transport = Transport(self.url, key or os.environ.get("STREAMS_KEY"))

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Leaving the `with` block does this."""
        self._transport.close()

    # -- boxes and routers

    def box(self, name: str, *, node: str | None = None) -> Box:
        """The box of this name, whether it exists or not; nothing is sent. `node` takes the place of the
        client's."""
        return Box(self, name, node=node)

    def queue(self, name: str, *, node: str | None = None) -> Queue:
        """The queue of this name, whether it exists or not; nothing is sent. `node` takes the place of the
        client's."""
        return Queue(self, name, node=node)

    def boxes(
        self, prefix: str = "", *, page_size: int = 1000, sort: str = "name", kind: str = "", text: str = ""
    ) -> Iterator[replies.ListedBox]:
        """Yield all boxes whose name begins with `prefix`, sorted by name, or by a number with the
        largest first (v0 §26). `kind` is log, queue or stream; `text` is a part of the name."""
        filters = {"sort": "" if sort == "name" else sort, "kind": kind, "q": text}
        params = {"prefix": prefix, "page_size": page_size, **{k: v for k, v in filters.items() if v}}
        cursor: str | None = ""
        while cursor is not None:
            page = self.get("/v0/boxes", replies.BoxPage, {**params, "cursor": cursor})
            for box in page.boxes:
                yield box
            cursor = page.next_cursor

    def put_router(
        self,
        name: str,
        source: str,
        dest: str,
        *,
        match: str | list[str] | None = None,
        from_seq: int | None = None,
        preserve_node: bool = True,
        preserve_tag: bool = True,
        create_dest: bool = True,
        allow_cycle: bool = False,
    ) -> replies.PutRouterReply:
        """Create a router, or change one: copy records of `source` into `dest`, each once and in order.
        A new router copies records appended from now on, or after `from_seq` (0: all of them). `match`
        limits it to records with a tag."""
        body: dict[str, Any] = {
            "source": source,
            "dest": dest,
            "filter": match,
            "preserve_node": preserve_node,
            "preserve_tag": preserve_tag,
            "create_dest": create_dest,
            "allow_cycle": allow_cycle,
        }
        if from_seq is not None:
            body["from_seq"] = from_seq
        return self.call("PUT", _router_path(name), replies.PutRouterReply, body)

    def router(self, name: str) -> replies.RouterState:
        """Return the definition and progress of a router."""
        return self.get(_router_path(name), replies.RouterState)

    def routers(self, prefix: str = "", *, source: str = "", dest: str = "") -> Iterator[replies.Router]:
        """Yield all routers whose name begins with `prefix`, by name; `source` and `dest` limit them to
        these boxes."""
        params = {"prefix": prefix, "source": source, "dest": dest, "page_size": 1000}
        cursor: str | None = ""
        while cursor is not None:
            page = self.get("/v0/routers", replies.RouterPage, {**params, "cursor": cursor})
            for router in page.routers:
                yield router
            cursor = page.next_cursor

    def drop_router(self, name: str) -> bool:
        """Delete a router; return True if it existed. Existing copies stay."""
        return (self.call("DELETE", _router_path(name), replies.DeleteRouterReply)).deleted

    @property
    def schedules(self) -> Schedules:
        """The schedules of the server."""
        from streams.client._sync.schedules import Schedules

        return Schedules(self)

    def watch(
        self,
        boxes: Mapping[str, int | None],
        *,
        node: str | None = None,
        include_tags: bool = True,
        strong: bool = False,
        raw_data: bool = False,
    ) -> Watch:
        """Watch these boxes, as (box, item), over one connection that is made again when it is lost. Each box
        starts after its seq in `boxes`; None starts at its head. With
        `raw_data` the data of a record is a `msgspec.Raw`, the JSON text as it was appended."""
        from streams.client._sync.watch import Watch

        return Watch(self, boxes, node=node, include_tags=include_tags, strong=strong, raw_data=raw_data)

    # -- the server

    def health(self) -> server_replies.Health:
        """Return the version and the uptime. It succeeds as soon as a gateway answers."""
        return self.get("/v0/health", server_replies.Health)

    def ready(self) -> server_replies.Ready:
        """Wait until all shards serve, for at most the retry time of the client."""
        return self.get("/v0/ready", server_replies.Ready)

    def status(self) -> server_replies.Status:
        """Return the state of the server, of each process, and how much it holds."""
        return self.get("/v0/status", server_replies.Status)

    def whoami(self) -> server_replies.WhoAmI:
        """Return what the key of this client allows, its limits, and how much of them is used."""
        return self.get("/v0/whoami", server_replies.WhoAmI)

    def placement(self) -> server_replies.Placement:
        """Return which shard owns which box, and the addresses of the shards."""
        return self.get("/v0/placement", server_replies.Placement)

    # -- requests

    def get(
        self,
        path: str,
        kind: type[T],
        params: Mapping[str, object] | None = None,
        *,
        retry: Retry | None = None,
    ) -> T:
        """Send a GET request and decode its answer. Empty `params` are left out."""
        query = urlencode({name: value for name, value in (params or {}).items() if value != ""})
        return self.call("GET", f"{path}?{query}" if query else path, kind, retry=retry)

    def find(self, path: str, kind: type[T]) -> T | None:
        """As `get`, but return None if the box does not exist."""
        try:
            return self.call("GET", path, kind)
        except BoxNotFound:
            return None

    def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: object = None,
        *,
        is_repeatable: bool = True,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Send one request, with a JSON body or without one, and decode its answer."""
        content = None if body is None else msgspec.json.encode(body)
        wait_s = body.get("wait_ms", 0) / 1000 if isinstance(body, dict) else 0.0
        raw = self.send(
            method, path, content, is_repeatable=is_repeatable, retry=retry, wait_s=wait_s, headers=headers
        )
        try:
            return answers.decode(raw, kind)
        except msgspec.DecodeError as error:
            raise NotAnAnswer(f"{self.url}{path} sent a reply that cannot be decoded: {error}") from error

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        is_repeatable: bool = True,
        is_urgent: bool = False,
        retry: Retry | None = None,
        wait_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """As `call`, with bytes. Repeats a request that may be repeated; the error it raises is true of all
        attempts. The server may hold its answer back for `wait_s`."""
        attempts = Attempts(retry or self.retry, is_repeatable=is_repeatable)
        while True:
            try:
                return self._attempt(
                    method, path, body, headers or {}, is_urgent=is_urgent, answer_s=self.timeout + wait_s
                )
            except StreamsError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
            sleep(pause_s)

    def _attempt(
        self,
        method: str,
        path: str,
        body: bytes | None,
        more_headers: Mapping[str, str],
        *,
        is_urgent: bool,
        answer_s: float,
    ) -> bytes:
        headers = {"content-type": "application/json"} if body is not None else {}
        headers.update(more_headers)
        if is_urgent:
            headers["x-streams-urgent"] = "1"
        answer = self._transport.send(method, path, body, headers=headers, answer_s=answer_s)
        if 200 <= answer.status < 300:
            return answer.body
        raise error_of(
            answer.status,
            answer.body,
            retry_after=answer.headers.get("retry-after", ""),
            url=self.url,
        )

    @property
    def transport(self) -> Transport:
        """For streams, which reconnect by themselves."""
        return self._transport


def _router_path(name: str) -> str:
    return f"/v0/routers/{quote(check_router_name(name), safe='')}"
