"""Routers: the registry, the outbox at a source box and the origin at a destination box.

forwarding      handles the commands: collect, report (source), forward (destination), attach, detach (both)
outbox          the outbox of a source box: its position, its batches in flight, its retries
local_copies    copies between two boxes of this shard, without the relay
router_outbox   selects the records that a router copies next
copy_sources    the position of each origin at a destination box, and the effect of a copy batch
registry        the registered routers, on shard 0: put, settle, drop, get, list

`streams/protocol/messages/forwards.py` has the whole picture. The gateway's part is
`gateway/shards/router_relay.py` (relays copy batches) and `gateway/shards/router_reconciler.py` (attaches
both endpoints).
"""
