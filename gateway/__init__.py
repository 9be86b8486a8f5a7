"""The gateway process: HTTP in front, shards behind, no data of its own.

edge.py      HTTP/1.1 on httptools          app.py      the same handlers on Quart-Trio (Hypercorn, h2c)
http.py      Request and Response           errors.py   error code -> HTTP status, the one table
api/         handlers, one file a resource  dispatch.py a command to its owner, or to all and merged
links.py     connections to shards          placement.py name -> slot -> shard
supervisor.py the process tree: spawn, watch, restart, drain
datadir.py   lock, manifest, folders         resharding.py another number of shards, on start
"""

from streams.lean import load_structlog

load_structlog()
