"""The way from a gateway to the shards.

placement         which shard owns a box
dispatch          one command to its owner, or one to all and the answers merged
links             connections to shards
carrier           records and jobs that go from shard to shard; registrar makes routers true at both ends
pressure          how far each shard is behind
process_states    why a process serves or does not; unix_sockets are how they find each other
"""
