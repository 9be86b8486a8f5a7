"""Routers: the registry, the outbox at a source box and the origin at a destination box.

forwarding      commands enter here: collect and carried (source), forward (destination), tie and untie (both)
outbox          what a source has to send: its position, what is on the way, when to try again
router_outbox   which records a router copies next
copy_sources    what a destination knows of each origin, and what a parcel becomes
registry        which routers there are, on shard 0: put, settle, drop, get, list

`streams/protocol/messages/forwards.py` has the whole picture. The gateway's part is
`gateway/shards/router_relay.py` (brings parcels) and `gateway/shards/router_reconciler.py` (ties both ends).
"""
