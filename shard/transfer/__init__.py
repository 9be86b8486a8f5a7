"""Moves boxes out of shards and into shards: for backups, resharding, repair and the object store.

shard_folders        reads the boxes of a folder, and builds a folder from boxes
exports              captures the state of a running shard for a reader; move_hold stops moves meanwhile
backup               takes, lists and prunes backups; backup_manifest describes one
object_chains        lists the chains of an object store, and removes superseded ones
transaction_marks    merges marks of transactions when boxes change their shard
"""
