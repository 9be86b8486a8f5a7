"""The engine of a running shard: one loop that hands commands to the core, and the work beside it.

engine            the loop: commands in, replies out when the log says that they may go
committer         writes the log in groups, in threads of its own
fetcher, cache    payloads that are not in memory
waiting, waiting_reads   claims that wait for a job, reads that wait for a record
upkeep            seals, compacts, drops files; compaction says which records are superseded
uploads           what object boxes need in the object store
disk_space        what a shard still does on a full disk
timekeeper        the clocks of a shard
"""
