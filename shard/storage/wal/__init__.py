"""The write-ahead log of one shard: append, sync, rotate, scan, release. It knows only files and positions.

    wal/000000000007.wal      oldest file still needed
    wal/000000000008.wal      newest: the only one that is written
    wal/000000000003.spare    allocated, or an old file, waiting to become 000000000009.wal
    wal/000000000002.held     released, and retained for single frames in it that are still needed

format    names and bytes of a file: header, frame, marker
scan      reads a log back, and distinguishes a torn tail from damage
spares    files that wait to become the next log file
log       `Wal`: appends, syncs, rotates, releases
"""

from shard.storage.wal.format import (
    CHECKSUM_BYTES,
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    MARKER_KIND,
    MARKER_MAGIC,
    U64,
    Frame,
    FrameParts,
    first_lsn_of,
    number_of,
    path_of,
)
from shard.storage.wal.log import FILE_BYTES, PendingSync, Wal, WalFile

__all__ = [
    "CHECKSUM_BYTES",
    "FILE_BYTES",
    "FRAME_HEAD",
    "FRAME_HEAD_BYTES",
    "HEADER_BYTES",
    "MARKER_KIND",
    "MARKER_MAGIC",
    "U64",
    "Frame",
    "FrameParts",
    "PendingSync",
    "Wal",
    "WalFile",
    "first_lsn_of",
    "number_of",
    "path_of",
]
