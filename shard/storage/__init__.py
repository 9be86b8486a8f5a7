"""Bytes on disk: files, frames, the write-ahead log, snapshots, segments. Knows positions, never a policy.

files           the disk as the shard sees it, and `Corrupt`, the error that says stored bytes are wrong
frames          a change to bytes and back; the state of a snapshot too
wal/            the log: append, sync, rotate, scan, release
snapshot        the state up to an lsn as one file
retention       what the two newest snapshots still need of log and segments
store           all segments of a shard: where each is, reading from it; the fetcher and upkeep call it
segments        one segment file: write, read, copy, verify
segmentindex    the index of a segment; tagindex is its tags
sources         bytes of a file that never changes, wherever it is
cold/           the cold store: a folder or an object store
objectlog       names and bytes of what object boxes have in the object store
salvage         reads a damaged log, for repair
faults          damage and failed calls that were met, for metrics and `streams doctor`
"""
