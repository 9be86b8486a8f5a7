"""Handlers of `/v0`: parse the request, call the dispatch, shape the response. No semantics live here.

routes            `Api.handle`, which the fronts call for each request, `/v1` included
route_table       every route and its handler
boxes, records, queues, groups, routers, schedules     one file per resource, one method per route
acks              acks with outputs, whose boxes may be on other shards
watch, websockets, job_streams              live responses: server-sent events, WebSocket, streams of jobs
server_info, reports                        health, readiness, placement; metrics, status and history
console, guide, openapi_pages               static pages; `/v0/openapi.json` and `/docs`
openapi, openapi_operations                 the OpenAPI document, and the table of routes it is built from
responses         turns a shard's reply into a response
long_polls        requests that may wait in the shard, and the memory of their replies
unknown_fields    unknown fields of reads: ignored and reported
"""
