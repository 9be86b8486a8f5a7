"""Bytes on disk: files, frames, the write-ahead log, snapshots, segments. Knows positions, never a policy.

files           the disk as the shard sees it, and `Corrupt`, the error that says stored bytes are wrong
frames          a change to bytes and back; the state of a snapshot too
wal/            the log: append, sync, rotate, scan, release
snapshot        the state up to an lsn as one file
retention       what the two newest snapshots still need of log and segments
segments/       sealed segments: index, tags, writer, reader; store has all segments of a shard
sources         bytes of a file that never changes, wherever it is
cold/           the cold store: a folder or an object store
object_log      names and bytes of what object boxes have in the object store
salvage         reads a damaged log, for repair
faults          damage and failed calls that were met, for metrics and `streams doctor`

Assertions are about what this process has made, and each has a name that the head of its file explains. What
is wrong with stored bytes is `Corrupt`, never an assertion.
"""
