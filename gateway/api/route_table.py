"""The route table of `/v0`: path, method, handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import trio

from gateway.api.boxes import BoxApi
from gateway.api.console import FILES, Console
from gateway.api.groups import GroupApi
from gateway.api.guide import PREFIX as GUIDE_PREFIX
from gateway.api.guide import Guide
from gateway.api.job_streams import JobStreams
from gateway.api.openapi_pages import OpenApiPages
from gateway.api.queues import QueueApi
from gateway.api.records import RecordApi
from gateway.api.reports import ReportPages
from gateway.api.routers import RouterApi
from gateway.api.schedules import ScheduleApi
from gateway.api.server_info import ServerInfo
from gateway.api.watch import WatchApi
from gateway.requests.request import Request, Response
from gateway.shards.dispatch import Dispatch
from gateway.shards.router_reconciler import RouterReconciler
from gateway.watch.service import Watch

#: A handler of a route under a box: (request, box, rest of the path after the action).
BoxHandler = Callable[[Request, str, str], Awaitable[Response]]
#: A handler of a route with one name, of a router, a schedule or a watch session: (request, name).
NamedHandler = Callable[[Request, str], Awaitable[Response]]
PlainHandler = Callable[[Request], Awaitable[Response]]


#: Routes whose handlers need no task (`gateway/admission/inline.py`): they wait for one answer of a shard,
#: and call `need_task` before any other wait. The handlers of all other routes get a task.
INLINE_ROUTES: Final = frozenset(
    (
        "POST /v0/boxes/{box}",
        "POST /v0/boxes/{box}/diff",
        "POST /v0/boxes/{box}/delete",
        "GET /v0/boxes/{box}/tail",
        "GET /v0/boxes/{box}/records/{seq}",
        "POST /v0/boxes/{box}/claim",
        "POST /v0/boxes/{box}/ack",
        "POST /v0/boxes/{box}/nack",
        "POST /v0/boxes/{box}/extend",
    )
)


class RouteTable(NamedTuple):
    #: Action after the box name, with a trailing slash if a parameter follows -> method -> handler.
    box_routes: dict[str, dict[str, BoxHandler]]
    router_routes: dict[str, NamedHandler]
    #: Action after the name of the schedule -> method -> handler.
    schedule_routes: dict[str, dict[str, NamedHandler]]
    watch_routes: dict[str, NamedHandler]
    guide_routes: dict[str, NamedHandler]
    #: Whole path -> method -> handler.
    fixed_routes: dict[str, dict[str, PlainHandler]]


def build_route_table(
    dispatch: Dispatch,
    server_info: ServerInfo,
    *,
    body_bytes_max: int,
    version: str,
    draining: trio.Event,
    watch: Watch,
    reports: ReportPages | None,
    guide: str,
) -> RouteTable:
    reconciler = RouterReconciler(dispatch)
    boxes = BoxApi(dispatch, reconciler, body_bytes_max)
    records = RecordApi(dispatch, body_bytes_max)
    routers = RouterApi(reconciler, body_bytes_max)
    schedules = ScheduleApi(dispatch, body_bytes_max)
    queues = QueueApi(dispatch, body_bytes_max, JobStreams(dispatch, draining, watch))
    groups, watches = GroupApi(dispatch, body_bytes_max), WatchApi(watch, body_bytes_max)
    openapi_pages, console, guide_pages = OpenApiPages(version), Console(), Guide(guide)
    fixed_routes: dict[str, dict[str, PlainHandler]] = {
        "/v0/boxes": {"GET": boxes.list},
        "/v0/routers": {"GET": routers.list},
        "/v0/schedules": {"GET": schedules.list},
        "/v0/placement": {"GET": server_info.placement},
        "/v0/whoami": {"GET": server_info.whoami},
        "/v0/settings": {"GET": server_info.settings},
        "/v0/openapi.json": {"GET": openapi_pages.document},
        **{path: {"GET": console.file} for path in FILES},
        GUIDE_PREFIX.rstrip("/"): {"GET": guide_pages.redirect},
        GUIDE_PREFIX: {"GET": guide_pages.file},
        "/v0/watch": {"POST": watches.create},
        "/v0/ws": {"GET": watches.require_upgrade},
        **{path: {"GET": server_info.health} for path in ("/v0/health", "/health", "/healthz", "/ping")},
        **{path: {"GET": server_info.ready} for path in ("/v0/ready", "/readyz")},
    }
    if reports is not None:
        fixed_routes |= _report_routes(reports)
    return RouteTable(
        box_routes={
            "": {"PUT": boxes.put, "GET": boxes.state, "DELETE": boxes.delete, "POST": records.append},
            "diff": {"POST": records.diff},
            "delete": {"POST": records.delete},
            "tail": {"GET": records.tail},
            "fence": {"PUT": boxes.fence},
            "records/": {"GET": records.one},
            "claim": {"POST": queues.claim},
            "ack": {"POST": queues.ack},
            "nack": {"POST": queues.nack},
            "extend": {"POST": queues.extend},
            "reschedule": {"POST": queues.reschedule},
            "reprioritize": {"POST": queues.reprioritize},
            "pause": {"POST": queues.pause},
            "resume": {"POST": queues.resume},
            "leases": {"GET": queues.leases},
            "work": {"GET": queues.work},
            "requeue": {"POST": queues.requeue},
            "groups": {"GET": groups.list},
            "groups/": {"PUT": groups.commit, "GET": groups.state, "DELETE": groups.delete},
            "watch": {"GET": watches.box},
        },
        router_routes={"PUT": routers.put, "GET": routers.get, "DELETE": routers.delete},
        schedule_routes={
            "": {"PUT": schedules.put, "GET": schedules.get, "DELETE": schedules.delete},
            "run": {"POST": schedules.run},
        },
        watch_routes={"GET": watches.open},
        guide_routes={"GET": guide_pages.file},
        fixed_routes=fixed_routes,
    )


def _report_routes(reports: ReportPages) -> dict[str, dict[str, PlainHandler]]:
    return {
        "/v0/metrics": {"GET": reports.metrics},
        "/metrics": {"GET": reports.metrics},
        "/v0/status": {"GET": reports.status},
        "/v0/history": {"GET": reports.history},
    }
