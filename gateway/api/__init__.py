"""Handlers of `/v0`: parse, call dispatch, shape the answer. No semantics live here.

routes          `Api.handle`, which the fronts call for each request, those of `/v1` too
addresses       every address and its handler
boxes, records, queues, groups, routers     one file a resource, one method an address
watch, sockets, work      live answers: server-sent events, WebSocket, streams of jobs
ops, reports              health, readiness, placement; metrics and status
console, described        static pages; `/v0/openapi.json` and `/docs`
openapi, operations       the OpenAPI document, and the table of addresses that it is made of
answers         a shard's answer as a response
waiting         questions that may wait in the shard, and the memory of their answers
tolerance       unknown fields of reads: ignored and reported
"""
