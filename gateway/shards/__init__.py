"""Routes requests from a gateway to the shards.

placement          which shard owns a box
dispatch           one command to its owner, or one to every shard with the replies merged
box_lists          lists of the boxes of all shards, by name or sorted
links              connections to shards
router_relay       copies records and jobs from shard to shard
router_reconciler  attaches both ends of a registered router and detaches the ends of deleted ones
pressure           measures how far each shard is behind
process_states     why a process serves or does not
unix_sockets       listening sockets, and Unix socket paths of any length
"""
