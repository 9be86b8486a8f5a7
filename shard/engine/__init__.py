"""Runs a shard: hands commands to the core, its changes to the log, and its replies to the servers.

engine            the loop: commands in, replies out when the log has reached their stage. Begin there
execution         passes one command through the machine: handle, stage, fetch
staging           collects the frames of one turn for the log
replies           parks replies that wait for the log, and defers answers that wait for room
delivery          handles waiting commands again:
  refetch           commands that need something from disk
  waiting_reads     reads that wait for a record
  waiting_claims    claims that wait for a job
local_copies      copies records between two boxes of this shard
ticker            calls the engine when something is due; timekeeper has the clocks, time_zones the zones
pressure          backpressure, and the disk's space; disk_space decides which commands a full disk accepts
committer         group commit, in threads of its own; log_files creates and drops log files
fetcher, cache    fetch payloads that are not in memory, and keep a bounded number of them
background        the tasks beside the commands:
  snapshots         writes the state to disk, and releases old log
  upkeep            seals, compacts, drops files; compaction finds superseded records
  object_uploader   copies changes of object boxes to the object store
durable_waits     tasks that wait for the log
settings          the settings of an engine
"""
