"""The S2 API (`/v1`) over the same dispatch: basins, streams, records, sessions.

endpoints     every address of /v1 and what answers there; errors, CORS
control       basins and streams: list, create, ensure, configure, delete
records       append, read, check tail: one request, one answer
sessions      the same as sessions: s2s frames both ways, server-sent events
housekeeping  empties basins that are being deleted, deletes remnants
counting, history   what was done, by basin and minute (pure), and the box that keeps it
tokens, access, usage, locations   access tokens, who may do what, metrics, the one location
calls         what shards are asked, and making streams that are not there
messages, configs, frames, fields, ciphers, errors   pure: bytes and JSON to facts and back
"""
