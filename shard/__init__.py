"""One shard process: the only owner of its boxes.

server.py    sockets in, replies out         engine.py    the only caller of the machine
committer.py the thread that writes and syncs recovery.py  snapshot + log -> machine.apply
core/        the pure machine                storage/     bytes on disk
transfer.py  boxes out of folders, into new ones  reshard.py   a process that moves them all
exports.py   its state held still for a reader    backup.py, restore.py  copies elsewhere, and back
verify.py    every byte looked at                 repair.py    what is damaged left out, and told
"""

from streams.lean import load_structlog

load_structlog()
