"""Reads and writes the shard's files: log, snapshots, segments and the cold store. It makes no decisions.

files           disk calls, and `Corrupt`, the error for damaged bytes
frames          encodes changes and snapshot states, and decodes them
wal/            the write-ahead log: append, sync, rotate, scan, release
snapshot        the state up to an lsn as one file
retention       which log files and segments the two newest snapshots still need
segments/       sealed segments: index, tags, writer, reader; `store` manages all segments of a shard
sources         verified reads of immutable files, local or remote
cold/           the cold store: a folder or an object store
object_log      names and bytes of the objects that hold changes of object boxes
salvage         reads a damaged log, for repair
faults          damaged files and failed cold store calls, for metrics and `streams doctor`

Assertions check only data that this process produced. Each has a name, which the head of its file explains.
Damaged bytes raise `Corrupt`; they never fail an assertion.
"""
