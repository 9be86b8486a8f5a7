"""The Python client: `streams.Client` for plain code, `streams.AsyncClient` for trio and asyncio.

    answers      what the server says, as types; what you append, as `Entry`
    json_values  your values as JSON, or why they are none; pure
    errors       what can go wrong between a client and a server, beside the server's own errors
    options      what can be given by name, as types
    retry        whether and when to repeat a request; pure
    attempts     the attempts at one request, and what is raised after the last
    working      what a worker's handler may say; pure
    framing      a state as records of its box, and back; pure
    stores       snapshots outside of a box: a folder or an object store
    batching     when a batch is full or due; pure
    job_times    delays and times of jobs in milliseconds; pure
    events       server-sent events out of bytes; pure
    transport, async_transport        one request over HTTP, for threads and for tasks
    concurrency, async_concurrency    waiting and running side by side, for threads and for tasks
    _async/      the client itself
    _sync/       its twin for threads, written by `make twin` from `_async/` and never edited

It imports `streams.protocol` and nothing else of ours.
"""
