"""Tools for folders that no shard serves: restore, repair, verify, inspect, reshard.

restore, restore_objects    a backup, or what the object store has, into folders of new shards
reconcile                   makes the shards of a restore agree about what names two boxes
lost_ranges                 which seqs of a box are missing
repair, verify, inspect     makes a damaged folder whole; looks at every byte; shows what is in a file
reshard                     boxes into another number of shards
claim_cold                  the owner's mark in the cold store
clock                       the system clock

Commands of `streams/cli` call restore, repair, verify and inspect. The supervisor starts reshard and
claim_cold as processes of their own (`python -m shard.offline.reshard`).
"""
