"""One shard process: the only owner of its boxes.

__main__      the shard process: recovers, serves, stops cleanly
server/       its sockets: messages in, replies out
engine/       the loop that hands commands to the core; beside it log, fetcher, upkeep, object uploader
core/         the pure state machine; knows none of the others
recovery/     rebuilds the state from files, on start
storage/      bytes on disk and in the cold store: log, snapshots, segments
transfer/     moves boxes out of a shard and into one: exports, backups, chains of the object store
offline/      tools for folders that no shard serves: restore, repair, verify, inspect, reshard

A message enters at `server/server.py`, becomes a command in `streams/protocol/messages`, and is handled by
`engine/engine.py` and `core/kernel.py`. `docs/explanation/paths.md` follows it line by line.
"""

from streams.startup_imports import load_structlog

load_structlog()
