"""Tools for data folders that no shard serves: restore, repair, verify, inspect, reshard.

restore, restore_objects    restores a backup, or the object store's data, into folders of new shards
box_cuts                    records what a restore to a point in time cuts off a box
reconcile                   makes restored shards agree about state that two boxes share
payload_loading             loads the payloads that a read of sealed records is missing
repair                      builds a new folder from a damaged one: log_repair recovers the state,
                            segment_repair rewrites segments, repair_findings holds losses and notes
lost_ranges                 finds the seqs of a box that are missing
verify, inspect             checks every byte; shows the contents of a file
reshard                     moves boxes into another number of shards
claim_cold                  claims the cold store for a server that starts
system_clock                the system clock

Commands of `streams/cli` call restore, repair, verify and inspect. The supervisor starts reshard and
claim_cold as processes of their own (`python -m shard.offline.reshard`).
"""
