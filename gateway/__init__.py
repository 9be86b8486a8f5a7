"""The gateway process and the supervisor: HTTP in front, shards behind, no data of its own.

__main__      one gateway, put together
http/         the fronts: bytes of clients in, calls of the handler out
api/          handlers of `/v0`; `api/routes.py` has the one handler that the fronts call
s2/           handlers of `/v1`, the S2 API
watch/        live answers: many watchers of one append
access/       the key of a request, and what it may do
admission/    the limits that a request passes
requests/     a request and its response, as handlers see them
shards/       the way to the shards: placement, dispatch, links, router copies from shard to shard
telemetry/    metrics, status, checks
supervise/    the process tree, the data directory, the key file; a process of its own
reporting     what a gateway says about itself
"""

from streams.startup_imports import load_structlog

load_structlog()
