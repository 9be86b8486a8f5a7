"""The supervisor of a server: its data directory, its keys, and its processes.

supervisor    starts, watches, restarts and drains the processes
data_dir      who may use the data directory, and which folders of it are shards; manifest says which
resharding    another number of shards, before anything serves
key_file      the keys, read here alone
reports       what children tell the supervisor
backup_note   when the last backup was
"""
