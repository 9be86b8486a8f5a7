"""The engine of a running shard: hands commands to the core, its changes to the log, and replies to servers.

engine            the loop: commands in, replies out when the log says that they may go. Begin there
execution         one command through the machine: handle, stage, fetch
staging           frames of one turn, on their way to the log
replies           replies that wait for the log, answers that wait for room
delivery          commands that are held back, and what serves them again:
  refetch           commands that need something from disk
  waiting_reads     reads that wait for a record
  waiting_claims    claims that wait for a job
ticker            calls the engine when something is due; timekeeper has the clocks
pressure          backpressure, and the disk's space; disk_space says what a full disk still does
committer         writes the log in groups, in threads of its own; log_files makes and drops its files
fetcher, cache    payloads that are not in memory
background        the tasks beside the commands:
  snapshots         state on disk, old log released
  upkeep            seals, compacts, drops files; compaction says which records are superseded
  object_uploader   copies changes of object boxes to the object store
durable_waits     tasks that wait for the log
settings          the settings that an engine is given
"""
