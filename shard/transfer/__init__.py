"""Boxes out of a shard and into one: what backups, resharding, repair and the object store have in common.

boxes         a folder as boxes, and boxes as a folder
exports       the state of a running shard, held still while it is read; move_hold keeps moves out of it
backup        taking a backup, listing and pruning them; backup_manifest is what one is made of
object_chains        the chains of an object store
transaction_marks    marks of transactions when boxes change their shard
"""
