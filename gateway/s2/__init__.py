"""The S2 API (`/v1`) over the same dispatch: basins, streams, records, sessions.

endpoints       every route of `/v1` and its handler; errors, CORS. `gateway/api/routes.py` calls `S2.handle`
control         basins and streams: list, create, ensure, configure, delete
records         append, read, check tail: one request, one response
append_session  receives inputs and sends acks in the same order: three tasks per session
read_session    read sessions, as s2s frames or server-sent events; code that all sessions share
append_window   bounds the bytes of appends in flight to shards, over all sessions
housekeeping    empties basins that are being deleted, deletes orphan streams
usage_counters, usage_history   operations and bytes per basin and minute (pure), and the box that stores them
tokens, permits, usage_api, locations   access tokens, permissions, metrics, the one location
shard_calls     requests to shards; creates missing streams on demand
record_formats, session_frames, configs, fields, ciphers   pure: encoding and decoding of bytes and JSON
"""
