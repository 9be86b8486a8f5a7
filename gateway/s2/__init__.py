"""The S2 API (`/v1`) over the same dispatch: basins, streams, records, sessions.

endpoints       every address of `/v1` and what answers there; errors, CORS. `S2.handle` is called by
                `gateway/api/routes.py`
control         basins and streams: list, create, ensure, configure, delete
records         append, read, check tail: one request, one answer
append_session  inputs in, acks out, in their order: three tasks a session
sessions        read sessions, as s2s frames or server-sent events; what all sessions share
inflight        the bytes of appends that are on their way to shards, all sessions together
housekeeping    empties basins that are being deleted, deletes remnants
counting, history   what was done, by basin and minute (pure), and the box that keeps it
tokens, access, usage, locations   access tokens, who may do what, metrics, the one location
calls           what shards are asked, and making streams that are not there
messages, configs, frames, fields, ciphers   pure: bytes and JSON to facts and back
"""
