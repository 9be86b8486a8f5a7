"""The HTTP fronts of a gateway: they read requests from sockets and call handlers.

    client ──► edge ──► edge_connection ──► handler         HTTP/1.1: all but a few requests
                 └────► hypercorn ──► app ──► handler       HTTP/2, WebSockets, upgrades

Theory of operation
-------------------

*Why the edge exists.* Hypercorn and Quart use 30 times as much CPU per request as the edge: a task for each
request, a queue for each body and answer, a head that is parsed again each time. So the edge serves HTTP/1.1,
and hands every other connection to Hypercorn with the bytes that it has read.

*The life of a request*

    accept (edge) ──► pending_connections: no task yet ──first byte──► edge_connection: runs inline
        read the head (edge_input, h1) ──► its body (body_memory) ──► handler(Request) ──► Response
            ──► its parts (edge_output): sent at once, and the rest as the client takes it
            ──► a live answer (SSE, sessions): runs with a sink (edge_sink) until it ends
        an HTTP/2 preface or an Upgrade ──► the socket and the bytes read so far go to hypercorn

*Inline and in a task.* A connection runs inline, in the functions that report its input and its answer
(`gateway/admission/inline.py`). It has a task too, which takes over whenever it waits for anything else.

*Turns, deadlines, memory.* Turns are those of `RequestScheduler` (`gateway/admission/request_scheduler.py`),
deadlines those of `Front._sweep`. Memory is charged as `gateway/admission/memory.py` says. A full-duplex
request is handled while its body comes (edge_incoming). h1 is heads and chunks as bytes, without sockets.

*A client that leaves* cancels no handler: the outcome of a write would be unknown. Its answer is dropped.
Only a streamed answer, and a handler that only waits, watches its client.

*The end.* A draining front closes its listener, ends idle connections, and lets each busy one answer the
request that it has (`Front._drain`).

*The handler* of every request, whichever front it came through, is `Api.handle` in `gateway/api/routes.py`.
`gateway/__main__.py` passes it in. WebSockets go to `WebSockets.serve` in `gateway/api/websockets.py`.

*Changes to Hypercorn, h2 and wsproto* that have no setting are in `hypercorn/adjustments.py` and
`hypercorn/h2_data.py`. `pyproject.toml` bounds the versions, and tests fail when an upgrade changes one of
these members: `tests/gateway/test_app.py`, `tests/gateway/test_floods.py` and
`tests/gateway/test_h2_data.py`.

edge, pending_connections, edge_connection    HTTP/1.1; h1 is its bytes
edge_socket, edge_input, edge_output, edge_incoming, edge_sink    the parts of one connection
body_memory                                               the memory of a body that comes in several reads
hypercorn                                                 HTTP/2, WebSockets, upgrades
edge_rules                                                the limits and checks of both fronts
"""
