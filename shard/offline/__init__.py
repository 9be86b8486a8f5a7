"""Tools for folders that no shard serves: restore, repair, verify, inspect, reshard.

restore, restore_objects    a backup, or what the object store has, into folders of new shards
box_cuts                    what a restore to a point in time cuts off a box, for other boxes
reconcile                   makes the shards of a restore agree about what names two boxes
payload_loading             loads the payloads that a read of sealed records is missing
repair                      builds a new folder from a damaged one: log_repair recovers the state,
                            segment_repair rewrites segments, repair_findings holds losses and notes
lost_ranges                 which seqs of a box are missing
verify, inspect             looks at every byte; shows what is in a file
reshard                     boxes into another number of shards
claim_cold                  the owner's mark in the cold store
clock                       the system clock

Commands of `streams/cli` call restore, repair, verify and inspect. The supervisor starts reshard and
claim_cold as processes of their own (`python -m shard.offline.reshard`).
"""
